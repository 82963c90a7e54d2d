"""One meaning for an image: what is accepted, what is refused and why, and what the pixels are."""

import io
import json
import struct
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from slipway import preprocessing
from slipway.contract import Preprocessing
from slipway.preprocessing import FORMATS, ImageError, decode, preprocess
from tests.images import encode
from tests.slipway import images, preprocessed
from tests.slipway.fuzz import CODES, require_fit_for_a_client

RULES = Preprocessing(image_size=32, resize_size=36)
AS_STORED = Preprocessing(image_size=24, resize_size=24)  # a 24 x 24 image goes through pixel by pixel
LOSSLESS: dict[str, dict[str, Any]] = {
    "PNG": {},
    "WEBP": {"lossless": True},
    "TIFF": {},
    "BMP": {},
    "GIF": {},
}
LOSSY: dict[str, dict[str, Any]] = {
    "JPEG": {"quality": 95, "subsampling": 0},
    "AVIF": {"quality": 95, "subsampling": "4:4:4"},
}


@pytest.fixture(autouse=True)
def _warnings_as_in_production() -> Iterator[None]:
    """pytest makes errors of the warnings that `preprocessing` silences when it is imported."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
        yield


def refusal(data: bytes, rules: Preprocessing = RULES) -> ImageError:
    with pytest.raises(ImageError) as caught:
        preprocess(data, rules)
    return caught.value


def decoded(data: bytes) -> npt.NDArray[np.uint8]:
    return np.asarray(decode(data, RULES))


def distance(one: npt.ArrayLike, other: npt.ArrayLike) -> float:
    """Mean absolute difference, in levels."""
    assert np.shape(one) == np.shape(other)
    return float(np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64)).mean())


# What comes out


@pytest.mark.parametrize(("mode", "encoding"), images.MODES_AND_FORMATS)
def test_every_mode_of_every_format_becomes_rgb(mode: str, encoding: str) -> None:
    """Case A15."""
    image, colour = images.flat(mode)
    array = preprocess(encode(image, encoding), RULES)
    assert (array.dtype.name, array.shape, array.flags.c_contiguous) == ("uint8", (3, 32, 32), True)
    tolerance = 3 if encoding in ("JPEG", "WEBP", "AVIF") or mode in ("YCbCr", "LAB") else 0
    assert np.abs(array.astype(int) - np.array(colour).reshape(3, 1, 1)).max() <= tolerance


@pytest.mark.parametrize("encoding", ["JPEG", "TIFF"])
def test_ink_is_not_read_as_light(encoding: str) -> None:
    """Case A15: CMYK (0, 255, 255, 0) is red."""
    array = preprocess(encode(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), encoding), RULES)
    assert np.abs(array.astype(int) - np.array([255, 0, 0]).reshape(3, 1, 1)).max() <= 8


@pytest.mark.parametrize("big_endian", [False, True])
@pytest.mark.parametrize("encoding", ["PNG", "TIFF"])
def test_sixteen_bit_grey_keeps_its_256_levels(encoding: str, *, big_endian: bool) -> None:
    """Case A12: Pillow's own conversion clips everything above 255 to white."""
    ramp = images.ramp16()
    mode, dtype = ("I;16B", ">u2") if big_endian else ("I;16", "<u2")
    image = Image.frombytes(mode, (16, 16), ramp.astype(dtype).tobytes())
    array = preprocess(encode(image, encoding), Preprocessing(image_size=16, resize_size=16))
    assert np.array_equal(array, np.broadcast_to(ramp >> 8, (3, 16, 16)))


def test_sixteen_bit_rgb_keeps_its_256_levels() -> None:
    ramp = images.ramp16()
    pixels = np.stack([ramp, ramp.T, ramp[::-1]], axis=-1).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    array = preprocess(images.png(16, 16, rows, bits=16), Preprocessing(image_size=16, resize_size=16))
    assert np.array_equal(array, (pixels >> 8).transpose(2, 0, 1))


@pytest.mark.parametrize("mode", ["I", "F"])
def test_depth_without_a_defined_range_is_refused(mode: str) -> None:
    assert refusal(encode(Image.new(mode, (8, 8), 7), "TIFF")).code == "UNSUPPORTED_DEPTH"


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("encoding", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_photo_is_seen_as_it_was_held(encoding: str, orientation: int) -> None:
    """Case A05: as if the pixels had been turned and the tag left out."""
    stored = images.quadrants(64, 32)
    upright = np.ascontiguousarray(images.UPRIGHT[orientation](stored))
    options = {**LOSSLESS, **LOSSY}[encoding]
    tagged = images.oriented(Image.fromarray(stored), encoding, orientation, **options)
    expected = encode(Image.fromarray(upright), encoding, **options)
    assert decode(tagged, RULES).size == (upright.shape[1], upright.shape[0])
    tolerance = 1.0 if encoding in LOSSY else 0.0
    assert distance(decoded(tagged), upright) <= tolerance
    assert distance(preprocess(tagged, RULES), preprocess(expected, RULES)) <= tolerance


def test_orientation_at_the_end_of_a_png_counts() -> None:
    stored = images.quadrants(40, 20)
    exif = Image.Exif()
    exif[0x0112] = 6
    rows = b"".join(b"\0" + row.tobytes() for row in stored)
    data = images.png(40, 20, rows, after=((b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0")),))
    assert np.array_equal(decoded(data), images.UPRIGHT[6](stored))


def test_orientation_of_sixteen_bit_images_counts() -> None:
    ramp = images.ramp16()
    data = images.oriented(Image.fromarray(ramp), "PNG", 6)
    expected = np.rot90(ramp >> 8, -1)
    assert np.array_equal(decoded(data), np.stack([expected] * 3, axis=-1))


@pytest.mark.parametrize("orientation", [0, 9, 255, 65535])
def test_orientation_that_does_not_exist_means_upright(orientation: int) -> None:
    stored = images.quadrants(40, 20)
    data = images.oriented(Image.fromarray(stored), "PNG", orientation)
    assert np.array_equal(decoded(data), stored)


def test_orientation_that_is_no_number_means_upright() -> None:
    entry = struct.pack("<HHI4s", 0x0112, 2, 4, b"odd\0")
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 1) + entry + bytes(4)
    stored = images.quadrants(40, 20)
    assert Image.open(io.BytesIO(encode(stored, "JPEG", exif=exif))).getexif()[0x0112] == "odd"
    assert np.array_equal(decoded(encode(stored, "JPEG", exif=exif)), decoded(encode(stored, "JPEG")))


def test_damaged_metadata_is_passed_over_in_silence() -> None:
    """The pixels decode; and a warning for each request would fill the log."""
    data = encode(images.photo(24, 24), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + bytes(range(200)))
    script = (
        "import sys; from slipway.contract import Preprocessing; from slipway.preprocessing import preprocess\n"
        "print(preprocess(sys.stdin.buffer.read(), Preprocessing(image_size=8, resize_size=8)).shape)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", script], input=data, capture_output=True, check=True
    )
    assert (done.stdout, done.stderr) == (b"(3, 8, 8)\n", b"")


@pytest.mark.parametrize("alpha", [0, 51, 255])
@pytest.mark.parametrize("encoding", ["PNG", "WEBP", "TIFF"])
def test_transparent_pixels_show_the_background(encoding: str, alpha: int) -> None:
    rules = replace(RULES, background=(10, 60, 210))
    data = encode(Image.new("RGBA", (20, 20), (*images.COLOUR, alpha)), encoding, **LOSSLESS[encoding])
    expected = (np.array(images.COLOUR) * alpha + np.array(rules.background) * (255 - alpha)) / 255
    if alpha == 0 and encoding == "WEBP":
        expected = np.array(rules.background)
    assert np.abs(preprocess(data, rules) - expected.reshape(3, 1, 1)).max() <= 1


def transparent_in_every_way() -> dict[str, bytes]:
    """Wholly transparent images."""
    grey_rows, rgb_rows = (b"\0" + bytes([7] * 8)) * 8, (b"\0" + bytes([7, 8, 9] * 8)) * 8
    premultiplied = bytearray(encode(Image.new("LA", (8, 8), (0, 0)), "TIFF"))
    extra_samples = premultiplied.index(struct.pack("<HHI", 338, 3, 1)) + 8
    premultiplied[extra_samples] = 1
    palette = Image.new("RGB", (8, 8), images.COLOUR).quantize(2)
    return {
        "grey and alpha": encode(Image.new("LA", (8, 8), (200, 0)), "PNG"),
        "grey, premultiplied": bytes(premultiplied),
        "one grey value": images.png(8, 8, grey_rows, colour_type=0, before=((b"tRNS", b"\0\7"),)),
        "one colour": images.png(8, 8, rgb_rows, before=((b"tRNS", b"\0\7\0\x08\0\x09"),)),
        "one palette entry": encode(palette, "PNG", transparency=0),
        "alpha of each palette entry": encode(palette, "PNG", transparency=bytes([0, 0])),
        "GIF": encode(palette, "GIF", transparency=0),
        "AVIF": encode(Image.new("RGBA", (24, 24), (200, 200, 200, 0)), "AVIF", quality=100),
    }


@pytest.mark.parametrize("kind", transparent_in_every_way())
def test_every_kind_of_transparency_shows_the_background(kind: str) -> None:
    array = preprocess(transparent_in_every_way()[kind], replace(RULES, background=(10, 60, 210)))
    assert np.array_equal(array, np.broadcast_to(np.array([[[10]], [[60]], [[210]]]), (3, 32, 32)))


@pytest.mark.parametrize("encoding", ["GIF", "WEBP", "PNG", "TIFF", "AVIF"])
def test_first_frame_of_an_animation_counts(encoding: str) -> None:
    data = images.animation(encoding, ((250, 10, 10), (10, 10, 250), (10, 250, 10)))
    assert getattr(Image.open(io.BytesIO(data)), "n_frames", 1) == 3
    red, green, blue = preprocess(data, RULES).reshape(3, -1).mean(axis=1)
    assert (red, green, blue) == pytest.approx((250, 10, 10), abs=8)


def test_photos_that_carry_a_second_picture_are_read() -> None:
    """What many phones write: MPO, a JPEG with another one behind it."""
    photo = images.photo(40, 30)
    data = encode(photo, "MPO", save_all=True, append_images=[Image.new("RGB", (40, 30))])
    assert Image.open(io.BytesIO(data)).format == "MPO"
    assert np.array_equal(preprocess(data, RULES), preprocess(encode(photo, "JPEG"), RULES))


@pytest.mark.parametrize("size", [(1, 1), (1, 2), (2, 1), (3, 2), (1, 100), (100, 1), (99, 100)])
@pytest.mark.parametrize("resize", [32, 36, 4096])
def test_smallest_and_longest_images_are_read(size: tuple[int, int], resize: int) -> None:
    data = encode(Image.new("RGB", size, images.COLOUR), "PNG")
    array = preprocess(data, Preprocessing(image_size=32, resize_size=resize))
    assert np.array_equal(array, np.broadcast_to(np.array(images.COLOUR).reshape(3, 1, 1), (3, 32, 32)))


# Geometry


def resized_then_cropped(image: Image.Image, rules: Preprocessing) -> npt.NDArray[np.uint8]:
    """What torchvision's Resize and CenterCrop do with a PIL image: the longer side is rounded to whole pixels."""
    filters = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
    width, height = image.size
    scaled = [int(rules.resize_size * side / min(width, height)) for side in (width, height)]
    pixels = np.asarray(image.resize((scaled[0], scaled[1]), filters[rules.interpolation]))
    left, upper = (round((side - rules.image_size) / 2) for side in scaled)
    return pixels[upper : upper + rules.image_size, left : left + rules.image_size].transpose(2, 0, 1)


def resampling_matrix(length: int, shorter: int, rules: Preprocessing) -> npt.NDArray[np.float64]:
    """Row i: the weights of all `length` pixels in output pixel i. An antialiased triangle filter, from scratch.

    The whole side is scaled by resize_size / shorter, without rounding, and the middle image_size are kept.
    """
    scale = shorter / rules.resize_size
    first = (length / scale - rules.image_size) / 2
    centres = (first + np.arange(rules.image_size) + 0.5) * scale
    distances = np.abs(np.arange(length) + 0.5 - centres[:, None]) / max(scale, 1.0)
    weights = np.maximum(0.0, 1.0 - distances)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def reference(image: Image.Image, rules: Preprocessing) -> npt.NDArray[np.float64]:
    """float64 [3, image_size, image_size]: nothing is rounded anywhere."""
    width, height = image.size
    rows = resampling_matrix(height, min(image.size), rules)
    columns = resampling_matrix(width, min(image.size), rules)
    return np.asarray(rows @ np.asarray(image, np.float64).transpose(2, 0, 1) @ columns.T)


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(1).integers(0, 256, (height, width, 3), np.uint8))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(72, 72), (144, 72), (72, 108), (360, 180), (36, 36), (18, 18), (27, 9)])
def test_cutting_first_equals_scaling_first_where_nothing_is_rounded(
    size: tuple[int, int], interpolation: Any
) -> None:
    """Case A01, bit for bit, on noise, scaling down and up: these sizes are whole after scaling, too.

    Not for images much taller than wide: there Pillow scales columns first, and rounds to another level at times.
    """
    rules = replace(RULES, interpolation=interpolation)
    image = noise(*size)
    assert np.array_equal(preprocess(encode(image, "PNG"), rules), resized_then_cropped(image, rules))


def test_checkerboard_and_photo_equal_pil_at_imagenet_size() -> None:
    """Case A01's own images: 600 x 512 and a 512 x 512 checkerboard, to 224."""
    rules = Preprocessing(image_size=224, resize_size=256)
    checkerboard = Image.fromarray(np.uint8(255) * (np.indices((512, 512)).sum(axis=0) % 2).astype(np.uint8))
    for image in (images.photo(600, 512), checkerboard.convert("RGB")):
        assert np.array_equal(preprocess(encode(image, "PNG"), rules), resized_then_cropped(image, rules))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(601, 499), (333, 701), (1001, 999), (180, 360), (37, 53), (23, 11)])
def test_photo_of_any_size_is_within_a_level_of_scaling_first(
    size: tuple[int, int], interpolation: Any
) -> None:
    """Case A01: elsewhere only the rounding of the longer side to whole pixels makes a difference."""
    rules = Preprocessing(image_size=224, resize_size=256, interpolation=interpolation)
    image = images.photo(*size)
    assert distance(preprocess(encode(image, "PNG"), rules), resized_then_cropped(image, rules)) <= 1


@pytest.mark.parametrize("size", [(601, 499), (333, 701), (37, 53), (36, 36), (23, 11), (1, 7), (5, 5)])
@pytest.mark.parametrize("rules", [RULES, AS_STORED, Preprocessing(image_size=20, resize_size=71)])
def test_pixels_are_those_of_antialiased_resampling(size: tuple[int, int], rules: Preprocessing) -> None:
    """Against float64, on noise, the hardest image: Pillow rounds after each of two passes, half a level each."""
    image = noise(*size)
    difference = preprocess(encode(image, "PNG"), rules) - reference(image, rules)
    assert np.abs(difference).max() <= 1.01


def test_detail_too_fine_to_show_is_averaged() -> None:
    """Case A01: without antialiasing, one pixel in eight would stand for all."""
    stripes = np.zeros((256, 256, 3), np.uint8)
    stripes[:, ::8] = 255
    array = preprocess(encode(Image.fromarray(stripes), "PNG"), Preprocessing(image_size=32, resize_size=32))
    assert np.abs(array[..., 2:-2].astype(int) - 255 // 8).max() <= 1


@pytest.mark.parametrize("encoding", LOSSLESS)
def test_image_of_the_right_size_is_left_as_it_is(encoding: str) -> None:
    stored = images.quadrants(24, 24)
    array = preprocess(encode(Image.fromarray(stored), encoding, **LOSSLESS[encoding]), AS_STORED)
    assert np.array_equal(array, stored.transpose(2, 0, 1))


def test_preprocessed_bytes_are_the_same_in_both_environments() -> None:
    """Design contract 1: these hashes hold in training's and in serving's environment, bit for bit."""
    assert preprocessed.hashes() == json.loads(preprocessed.HASHES.read_text(encoding="utf-8"))


# Limits


@pytest.fixture
def never_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is opened must not be decoded."""
    really_open = Image.open

    def open_only(*arguments: Any, **options: Any) -> Image.Image:
        image: Any = really_open(*arguments, **options)
        image.load = lambda: pytest.fail("decoded before the limits were checked")
        opened: Image.Image = image
        return opened

    monkeypatch.setattr(Image, "open", open_only)


@pytest.mark.parametrize("side", [20000, 11000])
def test_bomb_is_refused_before_it_is_decoded(side: int, never_decoded: None) -> None:
    """Case A11. Pillow itself lets 11000 x 11000 through with a warning."""
    data = images.bomb(side)
    assert len(data) < 60_000
    error = refusal(data)
    assert error.code == "TOO_MANY_PIXELS"
    assert error.reason == f"{side} x {side} is over the limit of 64,000,000 pixels"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak of memory from /proc")
def test_bomb_costs_no_memory() -> None:
    """Case A11: 20000 x 20000 pixels would take 400 MB."""
    script = (
        "import sys; from slipway.contract import Preprocessing; from slipway.preprocessing import *\n"
        "def peak(): return int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        "data = sys.stdin.buffer.read(); before = peak()\n"
        "try: preprocess(data, Preprocessing(image_size=8, resize_size=8))\n"
        "except ImageError: print(peak() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=images.bomb(20000), capture_output=True, check=True
    )
    assert int(done.stdout) < 20_000  # kB


@pytest.mark.parametrize("encoding", FORMATS)
def test_pixel_limit_is_exact_and_read_from_the_header(
    encoding: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Case A11: the same limit for every format; at the limit an image works, one pixel over it does not."""
    data = encode(Image.new("RGB", (40, 20)), encoding)
    assert preprocess(data, replace(RULES, max_pixels=800)).shape == (3, 32, 32)
    request.getfixturevalue("never_decoded")
    error = refusal(data, replace(RULES, max_pixels=799))
    assert (error.code, error.reason) == ("TOO_MANY_PIXELS", "40 x 20 is over the limit of 799 pixels")


def test_large_photos_are_not_refused_by_accident() -> None:
    """Case A11: Pillow's own limit would warn from 89 megapixels; only the contract's counts."""
    data = images.bomb(9600)
    rules = replace(RULES, max_pixels=9600 * 9600)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert preprocess(data, rules).shape == (3, 32, 32)


def test_elongated_image_is_refused_before_it_is_decoded(request: pytest.FixtureRequest) -> None:
    for size in ((100, 1), (1, 100)):
        preprocess(encode(Image.new("RGB", size), "PNG"), RULES)
    request.getfixturevalue("never_decoded")
    for size in ((101, 1), (1, 101)):
        error = refusal(encode(Image.new("RGB", size), "PNG"))
        assert (error.code, error.reason) == (
            "ASPECT_RATIO",
            f"{size[0]} x {size[1]} is more elongated than 100:1",
        )


def test_too_many_bytes_are_refused_before_they_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(images.photo(24, 24), "PNG")
    preprocess(data, replace(RULES, max_bytes=len(data)))
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("was opened"))
    error = refusal(data, replace(RULES, max_bytes=len(data) - 1))
    assert error.code == "TOO_MANY_BYTES"
    assert f"{len(data):,} bytes" in error.reason


def test_size_is_judged_as_stored_and_as_held_alike() -> None:
    """An orientation swaps width and height; neither limit depends on it."""
    data = images.oriented(Image.new("RGB", (101, 1)), "PNG", 6)
    assert refusal(data).code == "ASPECT_RATIO"


# Damage


NO_IMAGE = {
    "html": b"<html>404</html>",
    "zeros": bytes(1000),
    "noise": np.random.default_rng(0).bytes(1000),
    "text": "Grüße".encode(),
    "one byte": b"\xff",
    "signature alone": b"\x89PNG\r\n\x1a\n",
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
    "no pixels": images.png(0, 0, b""),
    "ico": encode(Image.new("RGB", (16, 16)), "ICO"),  # a real image of a format nobody asked for
}


@pytest.mark.parametrize("kind", NO_IMAGE)
def test_what_is_no_image_is_refused_in_words(kind: str) -> None:
    """Case A08."""
    error = refusal(NO_IMAGE[kind])
    assert error.code in ("NOT_AN_IMAGE", "DAMAGED")
    assert error.reason.startswith("not a decodable image")


def test_empty_file_is_refused_in_words() -> None:
    """Case A08."""
    error = refusal(b"")
    assert (error.code, error.reason) == ("EMPTY", "there are no bytes to decode")


WHOLE = {
    "JPEG": encode(images.photo(200, 150), "JPEG"),
    "JPEG progressive": encode(images.photo(200, 150), "JPEG", progressive=True),
    "PNG": encode(images.photo(200, 150), "PNG"),
    "WEBP": encode(images.photo(200, 150), "WEBP"),
    "WEBP lossless": encode(images.photo(200, 150), "WEBP", lossless=True),
    "GIF": encode(images.photo(200, 150), "GIF"),
    "BMP": encode(images.photo(200, 150), "BMP"),
    "TIFF": encode(images.photo(200, 150), "TIFF"),
    "TIFF LZW": encode(images.photo(200, 150), "TIFF", compression="tiff_lzw"),
    "AVIF": encode(images.photo(200, 150), "AVIF"),
}


@pytest.mark.parametrize("percent", [1, 10, 50, 90, 99])
@pytest.mark.parametrize("kind", WHOLE)
def test_image_that_was_cut_short_is_refused(kind: str, percent: int) -> None:
    """Case A07: never filled up with grey. `Image.verify()` would let half a JPEG pass."""
    data = WHOLE[kind]
    preprocess(data, RULES)
    assert refusal(data[: len(data) * percent // 100]).code in ("DAMAGED", "NOT_AN_IMAGE")


def test_any_flipped_byte_in_the_pixels_of_a_png_is_refused() -> None:
    """Case A07. Pillow does not check CRCs when it decodes: one flip in twenty just made other pixels."""
    data = encode(images.photo(40, 30), "PNG")
    start = data.index(b"IDAT") + 4
    (length,) = struct.unpack(">I", data[start - 8 : start - 4])
    for position in range(start, start + length + 4):  # the CRC behind them too
        flipped = bytearray(data)
        flipped[position] ^= 0x10
        assert refusal(bytes(flipped)).code == "DAMAGED"


def damaged_palettes() -> dict[str, bytes]:
    rows = (b"\0" + bytes(range(8))) * 8
    colours = (b"PLTE", bytes(range(24)))
    return {
        "no palette": images.png(8, 8, rows, colour_type=3),
        "more alphas than colours": images.png(
            8, 8, rows, colour_type=3, before=(colours, (b"tRNS", bytes(300)))
        ),
    }


@pytest.mark.parametrize("kind", damaged_palettes())
def test_damaged_palette_is_refused(kind: str) -> None:
    assert refusal(damaged_palettes()[kind]).code == "DAMAGED"


@pytest.mark.parametrize("kind", WHOLE)
def test_zeros_behind_an_image_do_no_harm(kind: str) -> None:
    """Case D08: what a fixed-size buffer leaves behind."""
    expected = preprocess(WHOLE[kind], RULES)
    assert np.array_equal(preprocess(WHOLE[kind] + bytes(1000), RULES), expected)


SMALL = images.small()


@st.composite
def damaged_images(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(st.sampled_from(SMALL)))
    for _ in range(draw(st.integers(1, 4))):
        # Half of the damage in the first bytes, where the headers are; TIFF has its own at the end.
        place = draw(st.integers(0, min(len(data), 150)) | st.integers(0, len(data)))
        if draw(st.booleans()):
            place = len(data) - place
        kind = draw(st.sampled_from(["set", "set", "set", "cut", "insert", "delete"]))
        if kind == "cut":
            del data[place:]
        elif kind == "insert":
            data[place:place] = draw(st.binary(max_size=8))
        elif kind == "delete":
            del data[place : place + draw(st.integers(1, 8))]
        else:
            data[place : place + 1] = bytes([draw(st.sampled_from([0, 1, 127, 255]) | st.integers(0, 255))])
    if data.startswith(b"\x89PNG") and draw(st.booleans()):
        return images.with_right_crcs(bytes(data))
    return bytes(data)


@settings(max_examples=500)
@given(data=damaged_images())
def test_damaged_images_are_read_or_refused_and_nothing_else(data: bytes) -> None:
    """Cases A07, A08: whatever a decoder raises, the caller sees an ImageError that is fit for a client."""
    try:
        array = preprocess(data, replace(RULES, max_pixels=1_000_000))
    except ImageError as error:
        require_fit_for_a_client(error)
    else:
        assert (array.dtype.name, array.shape) == ("uint8", (3, 32, 32))


def one_of_each_refusal() -> Iterator[ImageError]:
    small = encode(images.photo(24, 20), "JPEG")
    yield refusal(b"")
    yield refusal(small, replace(RULES, max_bytes=10))
    yield refusal(b"<html>404</html>")
    yield refusal(small, replace(RULES, max_pixels=10))
    yield refusal(small, replace(RULES, max_aspect_ratio=1.0))
    yield refusal(small[: len(small) // 2])
    yield refusal(encode(Image.new("F", (8, 8)), "TIFF"))


def test_codes_are_stable_and_reasons_fit_for_a_client() -> None:
    """Programs compare codes; clients read reasons. Neither may hold a path, an address or a traceback."""
    errors = list(one_of_each_refusal())
    assert {error.code for error in errors} == CODES
    for error in errors:
        require_fit_for_a_client(error)
    assert set(preprocessing.CODES) == CODES


def test_out_of_memory_is_not_blamed_on_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(images.photo(24, 20), "BMP")

    def load(image: Image.Image) -> None:
        raise MemoryError

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    with pytest.raises(MemoryError):
        preprocess(data, RULES)
