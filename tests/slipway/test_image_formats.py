"""Nasty images, made by hand where Pillow cannot write them: every pixel is written down by rule."""

import io
import itertools
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageCms

from slipway.contract import Preprocessing
from slipway.preprocessing import ImageError, decode
from tests.images import encode
from tests.slipway import images

ROOT = Path(__file__).resolve().parents[2]
BACKGROUND = (10, 60, 210)
RULES = Preprocessing(image_size=16, resize_size=16, background=BACKGROUND)

Samples = npt.NDArray[np.int64]

# Colour type -> channels and depths: www.w3.org/TR/png-3/#3colourType
PNG = {0: (1, (1, 2, 4, 8, 16)), 2: (3, (8, 16)), 3: (1, (1, 2, 4, 8)), 4: (2, (8, 16)), 6: (4, (8, 16))}
PNG_KINDS = [(colour_type, bits) for colour_type, (_, depths) in PNG.items() for bits in depths]
SIZES = ((1, 1), (1, 5), (5, 1), (3, 2), (8, 8), (9, 7), (17, 5), (33, 34))


def pixels_of(data: bytes) -> npt.NDArray[np.uint8]:
    return np.asarray(decode(data, RULES))


def refusal(data: bytes) -> str:
    with pytest.raises(ImageError) as caught:
        decode(data, RULES)
    return caught.value.code


def draw(size: tuple[int, int], channels: int, bits: int) -> Samples:
    width, height = size
    return np.random.default_rng([width, height, channels, bits]).integers(
        0, 2**bits, (height, width, channels)
    )


def to_8_bits(samples: Samples, bits: int) -> Samples:
    """The rule: fewer bits are stretched over 0..255, of more the upper 8 are kept."""
    return samples >> (bits - 8) if bits > 8 else samples * 255 // (2**bits - 1)


def over_background(colour: Samples, alpha: Samples) -> Samples:
    """The rule for alpha: integers, rounded as Pillow's compositing rounds. float64 would be within 1 of it."""
    return np.rint((colour * alpha + np.array(BACKGROUND) * (255 - alpha)) / 255).astype(np.int64)


def assert_shows(data: bytes, colour: Samples, *, within: int = 0) -> None:
    shown = pixels_of(data).astype(np.int64)
    assert np.abs(shown - np.broadcast_to(colour, (*colour.shape[:2], 3))).max() <= within


# PNG


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize(("colour_type", "bits"), PNG_KINDS)
def test_every_png_there_can_be(colour_type: int, bits: int, *, interlaced: bool) -> None:
    """Cases A12, A15: each colour type at each depth, plain and interlaced, from one pixel on."""
    channels, _ = PNG[colour_type]
    palette = np.random.default_rng(bits).integers(0, 256, (2**bits, 3)) if colour_type == 3 else None
    before = () if palette is None else ((b"PLTE", palette.astype(np.uint8).tobytes()),)
    for size in SIZES:
        samples = draw(size, channels, bits)
        data = images.png_of(samples, bits, colour_type, interlaced=interlaced, before=before)
        if palette is not None:
            assert_shows(data, palette[samples[..., 0]])
        elif channels in (2, 4):
            scaled = to_8_bits(samples, bits)
            assert_shows(data, over_background(scaled[..., :-1], scaled[..., -1:]), within=1)
        else:
            assert_shows(data, to_8_bits(samples, bits))


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize(("colour_type", "bits"), [kind for kind in PNG_KINDS if kind[0] in (0, 2)])
def test_transparent_colour_of_a_png_has_the_depth_of_the_file(
    colour_type: int, bits: int, *, interlaced: bool
) -> None:
    """Pillow compares it with pixels of 8 bits as it stands, so that only 1 and 8 bits came out right."""
    samples = draw((9, 7), PNG[colour_type][0], bits)
    transparent = samples[3, 4]
    data = images.png_of(
        samples,
        bits,
        colour_type,
        interlaced=interlaced,
        before=((b"tRNS", transparent.astype(">u2").tobytes()),),
    )
    # Of 16 bits the upper 8 are compared.
    lower = max(bits - 8, 0)
    gone = (samples >> lower == transparent >> lower).all(axis=-1, keepdims=True)
    assert gone[3, 4]
    assert_shows(data, np.where(gone, BACKGROUND, to_8_bits(samples, bits)))


def test_default_image_of_an_animated_png_is_its_first_frame() -> None:
    """Also where the animation leaves it out: who knows nothing of animations sees this one, too."""
    frames = [Image.new("RGB", (20, 20), colour) for colour in (images.COLOUR, (1, 2, 3), (4, 5, 6))]
    data = encode(frames[0], "PNG", save_all=True, append_images=frames[1:], default_image=True)
    assert b"acTL" in data
    assert_shows(data, np.full((20, 20, 3), images.COLOUR))


# JPEG


def test_progressive_jpeg_is_the_same_picture() -> None:
    photo = images.photo(61, 47)
    for options in itertools.product((0, 1, 2), (75, 95)):
        subsampling, quality = options
        kinds = [
            encode(photo, "JPEG", quality=quality, subsampling=subsampling, progressive=progressive)
            for progressive in (False, True)
        ]
        assert kinds[0] != kinds[1]
        assert np.array_equal(pixels_of(kinds[0]), pixels_of(kinds[1]))


def test_jpeg_of_rgb_channels_needs_no_conversion() -> None:
    """Adobe's marker may say that the channels are red, green and blue, not luminance and colour differences."""
    flat = Image.new("RGB", (24, 16), images.COLOUR)
    data = encode(flat, "JPEG", keep_rgb=True, quality=100)
    assert_shows(data, np.full((16, 24, 3), images.COLOUR), within=1)


INKS = [(0, 255, 255, 0), (255, 0, 0, 0), (40, 90, 200, 30), (0, 0, 0, 0), (7, 7, 7, 255)]


@pytest.mark.parametrize("inks", INKS)
def test_inks_are_stored_inverted_with_or_without_adobes_marker(inks: tuple[int, ...]) -> None:
    """Case A15. Who writes CMYK without the marker inverts it as well, in practice."""
    data = encode(Image.new("CMYK", (16, 16), inks), "JPEG", quality=100)
    paper = 255 - np.array(inks)
    expected = np.full((16, 16, 3), paper[:3] * paper[3] / 255)
    assert_shows(data, expected, within=2)
    assert np.array_equal(pixels_of(images.without_adobe_marker(data)), pixels_of(data))


@pytest.mark.parametrize("inks", INKS)
def test_inks_as_luminance_and_colour_differences(inks: tuple[int, ...]) -> None:
    """YCCK: the first three channels are to be converted, by ITU-R 601, the fourth is black."""
    paper = 255 - np.array(inks, np.float64)
    # What such a file stores is the YCbCr of red, green and blue without black, and black inverted.
    red, green, blue = paper[:3]
    luminance = 0.299 * red + 0.587 * green + 0.114 * blue
    stored = [luminance, 128 + 0.564 * (blue - luminance), 128 + 0.713 * (red - luminance), paper[3]]
    channels = tuple(255 - round(value) for value in np.clip(stored, 0, 255))
    data = images.as_ycck(encode(Image.new("CMYK", (16, 16), channels), "JPEG", quality=100))
    # The conversion gives inks: 255 minus red, green and blue.
    expected = np.full((16, 16, 3), (255 - paper[:3]) * paper[3] / 255)
    assert_shows(data, expected, within=4)


# TIFF and BMP


# Bits, byte order, and whether white is zero, that Pillow does not read: better refused than wrong.
UNREAD = {(12, "<", True), (12, ">", True), (12, ">", False), (16, ">", True)}
GREY_TIFFS = set(itertools.product((1, 2, 4, 8, 12, 16), "<>", (False, True))) - UNREAD


@pytest.mark.parametrize(("bits", "order", "white_is_zero"), sorted(GREY_TIFFS))
def test_grey_tiff_of_every_depth(bits: int, order: str, white_is_zero: bool) -> None:
    """Case A12: white stays white, and 12 bits are no darker than 16."""
    for size in ((1, 1), (8, 8), (9, 7)):
        samples = draw(size, 1, bits)
        levels = to_8_bits(samples, bits)
        data = images.tiff(samples, bits, 1 - white_is_zero, order=order)
        assert_shows(data, 255 - levels if white_is_zero else levels)


@pytest.mark.parametrize(("bits", "order", "white_is_zero"), sorted(UNREAD))
def test_grey_tiff_that_is_not_understood_is_refused(bits: int, order: str, white_is_zero: bool) -> None:
    data = images.tiff(draw((9, 7), 1, bits), bits, 1 - white_is_zero, order=order)
    assert refusal(data) == "NOT_AN_IMAGE"


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("bits", [8, 16])
def test_colour_tiff_of_every_depth(bits: int, order: str) -> None:
    samples = draw((9, 7), 3, bits)
    assert_shows(images.tiff(samples, bits, 2, order=order), to_8_bits(samples, bits))


@pytest.mark.parametrize(("bits", "sample_format"), [(8, 2), (16, 2), (32, 1), (32, 2), (32, 3)])
def test_samples_without_a_defined_range_are_refused(bits: int, sample_format: int) -> None:
    samples = draw((8, 8), 1, bits)
    assert refusal(images.tiff(samples, bits, 1, sample_format=sample_format)) == "UNSUPPORTED_DEPTH"


@pytest.mark.parametrize("compression", ["raw", "packbits", "tiff_lzw", "tiff_adobe_deflate", "group4"])
def test_compression_of_a_tiff_changes_no_pixel(compression: str) -> None:
    picture = images.photo(37, 29).convert("1" if compression == "group4" else "RGB")
    data = encode(picture, "TIFF", compression=compression)
    assert_shows(data, np.asarray(picture.convert("RGB")).astype(np.int64))


def test_bmp_of_sixteen_bits_is_stretched() -> None:
    """5 or 6 bits a channel. Pillow stretches each to 0..255, rounding down."""
    levels = np.random.default_rng(0).integers(0, 32, (8, 8, 3))
    words = (levels << [10, 5, 0]).sum(axis=-1)[::-1].astype("<u2")
    assert_shows(images.bmp(8, 8, words.tobytes(), 16), levels * 255 // 31)
    levels[..., 1] += 32 * np.random.default_rng(1).integers(0, 2, (8, 8))
    words = (levels << [11, 5, 0]).sum(axis=-1)[::-1].astype("<u2")
    masks = struct.pack("<III", 0xF800, 0x07E0, 0x001F)
    assert_shows(
        images.bmp(8, 8, words.tobytes(), 16, compression=3, before=masks),
        levels * 255 // np.array([31, 63, 31]),
    )


@pytest.mark.parametrize("bits", [24, 32])
@pytest.mark.parametrize("from_top", [False, True])
def test_bmp_runs_from_the_bottom_or_from_the_top(bits: int, *, from_top: bool) -> None:
    """A fourth byte without a mask is no alpha."""
    colour = np.random.default_rng(bits).integers(0, 256, (4, 4, 3))
    rows = np.zeros((4, 4, bits // 8), np.uint8)
    rows[..., :3] = colour[..., ::-1]
    pixels = (rows if from_top else rows[::-1]).tobytes()
    assert_shows(images.bmp(4, -4 if from_top else 4, pixels, bits), colour)


@pytest.mark.parametrize(("bits", "compression", "run"), [(8, 1, 1), (4, 2, 0x11)])
def test_run_lengths_of_a_bmp(bits: int, compression: int, run: int) -> None:
    red, green, blue = images.COLOUR
    palette = bytes([0, 0, 0, 0, blue, green, red, 0])
    runs = bytes([8, run, 0, 0]) * 8 + b"\0\1"
    data = images.bmp(8, 8, runs, bits, compression=compression, before=palette)
    assert_shows(data, np.full((8, 8, 3), images.COLOUR))


# All formats


@pytest.mark.parametrize("encoding", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_colour_profiles_are_ignored(encoding: str) -> None:
    """The rule: pixels are taken as stored, in training as in serving."""
    photo = images.photo(40, 30)
    another_space = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    for profile in (another_space, b"no profile at all"):
        tagged = encode(photo, encoding, icc_profile=profile)
        assert "icc_profile" in Image.open(io.BytesIO(tagged)).info
        assert np.array_equal(pixels_of(tagged), pixels_of(encode(photo, encoding)))


@pytest.mark.parametrize("encoding", ["GIF", "WEBP", "PNG", "TIFF", "AVIF"])
def test_frames_behind_the_first_are_left_alone(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that their number needs no limit."""
    data = images.animation(encoding, tuple((10, 255 - number, 7) for number in range(50)))
    plugin = type(Image.open(io.BytesIO(data)))
    really_seek = plugin.seek

    def seek(image: Image.Image, frame: int) -> None:
        assert frame == 0, "looked for another frame"
        really_seek(image, frame)

    monkeypatch.setattr(plugin, "seek", seek)
    assert_shows(data, np.full((20, 24, 3), (10, 255, 7)), within=8)


def test_compressed_text_of_a_png_is_bounded() -> None:
    """A chunk of text that inflates to 100 MB beside a tiny picture."""
    text = b"zTXt", b"comment\0\0" + zlib.compress(bytes(100_000_000), 9)
    rows = b"".join(b"\0" + bytes(24) for _ in range(8))
    assert refusal(images.png(8, 8, rows, before=(text,))) == "DAMAGED"


# Fuzzing


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits its memory by what /proc says")
def test_damaged_images_cost_no_more_than_a_refusal() -> None:
    """Cases A07, A08, A11: in a process of its own, for its memory, its time, and what C writes to stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.slipway.fuzz", "800"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "800 images" in done.stdout
    for reached in ("read", "DAMAGED", "NOT_AN_IMAGE", "TOO_MANY_PIXELS"):
        assert reached in done.stdout
