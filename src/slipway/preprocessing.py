"""Encoded bytes -> uint8 RGB array: the only definition in the repository.

Training, evaluation, parity, golden inputs, the Triton model and the client all come through here, so an image
has one meaning. Rules, in order:

1.  Refuse by size: bytes, then pixels and aspect ratio as the header states them. Nothing is decoded before.
2.  Decode by content, never by file name. Of an animation, the first frame; the others are neither counted nor
    decoded, so their number needs no limit. Inks of a JPEG are taken to be stored inverted, as Adobe's are.
3.  Samples of 12 and 16 bits are scaled to their upper 8 bits, never clipped. 32-bit, signed and
    floating-point images are refused: their range is anybody's guess.
4.  EXIF orientation is applied. Embedded colour profiles are ignored: pixels are taken as stored.
5.  Transparent pixels are composited on `background`; every other mode is converted to RGB.
6.  The centre square is cut out and scaled in one step, antialiased. Scaling the shorter side to `resize_size`
    and cutting `image_size` from the middle is the same as cutting a square of
    `shorter side * image_size / resize_size` first; done in this order, memory stays bounded whatever the shape.
"""

import ctypes
import io
import logging
import warnings

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError, _imaging
from PIL.TiffImagePlugin import (
    BITSPERSAMPLE,
    PHOTOMETRIC_INTERPRETATION,
    SAMPLEFORMAT,
    TiffImageFile,
)

from slipway.contract import Preprocessing
from slipway.errors import SlipwayError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
# Why an image may be refused.
CODES = (
    "EMPTY",
    "TOO_MANY_BYTES",
    "NOT_AN_IMAGE",
    "TOO_MANY_PIXELS",
    "ASPECT_RATIO",
    "DAMAGED",
    "UNSUPPORTED_DEPTH",
)

# Our limit is the contract's, the same in training and serving, checked before decoding; Pillow's own would
# warn at one size and refuse at another.
Image.MAX_IMAGE_PIXELS = None
# Damaged metadata of an image that decodes is nobody's concern, least of all once a request.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
logging.getLogger("PIL").setLevel(logging.CRITICAL)

_RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
_ORIENTATION_TAG = 0x0112
_WHITE_IS_ZERO = 0  # values of TIFF tags
_SIGNED = 2
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def _silence_libtiff() -> None:
    """Of a damaged TIFF, libtiff writes a line a strip to stderr; what is wrong is in our ImageError."""
    loaded = ctypes.CDLL(_imaging.__file__)  # looks into what the decoders are linked with, too
    if hasattr(loaded, "TIFFSetErrorHandler"):
        loaded.TIFFSetErrorHandler(None)


_silence_libtiff()


class ImageError(SlipwayError):
    """An image that is refused. `code`, one of CODES, is stable for programs; `reason` is fit to show to a client."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.reason = message


def preprocess(data: bytes, rules: Preprocessing) -> npt.NDArray[np.uint8]:
    """Turn one encoded image into model input.

    Returns: uint8 [3, image_size, image_size], RGB, 0..255, C-contiguous.

    Raises:
        ImageError: the image is refused; see its codes.
    """
    pixels, _ = preprocess_sized(data, rules)
    return pixels


def preprocess_sized(data: bytes, rules: Preprocessing) -> tuple[npt.NDArray[np.uint8], tuple[int, int]]:
    """The same, and width and height of the upright image that it was cut from."""
    image = decode(data, rules)
    return to_array(crop_and_resize(image, centre_square(image.size, rules), rules)), image.size


def decode(data: bytes, rules: Preprocessing) -> Image.Image:
    """Rules 1 to 5: the whole image, upright, mode RGB. Raises ImageError."""
    image = _open_within_limits(data, rules)
    encoding = image.format
    try:
        if encoding == "PNG":  # load() checks no CRCs: one flipped bit may just make other pixels
            Image.open(io.BytesIO(data), formats=("PNG",)).verify()
            _scale_transparent_colour(image, depth=data[24])
        image.load()
        upright = _UPRIGHT.get(_orientation(image))
        if image.mode in ("I", "F") or _is_signed(image):
            raise ImageError(
                "UNSUPPORTED_DEPTH", "32-bit, signed and floating-point images have no defined range"
            )
        if image.mode.startswith("I;16"):
            image = _upper_8_bits(image)
        # `is None`: FLIP_LEFT_RIGHT is 0.
        return _to_rgb(image if upright is None else image.transpose(upright), rules.background)
    except (ImageError, MemoryError):
        raise
    # Decoders fed with damaged data raise whatever they stumble over: OSError, SyntaxError, ValueError,
    # struct.error, IndexError, zlib.error; a damaged palette is noticed only when it is converted. All of them
    # mean the same to whoever sent the image.
    except Exception as error:
        raise ImageError("DAMAGED", f"the {encoding} data is truncated or damaged") from error


def centre_square(size: tuple[int, int], rules: Preprocessing) -> tuple[float, float, float, float]:
    """Rule 6: the box (left, upper, right, lower) of an image of (width, height) that the model sees."""
    width, height = size
    side = min(size) * rules.image_size / rules.resize_size
    left, upper = (width - side) / 2, (height - side) / 2
    return left, upper, left + side, upper + side


def crop_and_resize(
    image: Image.Image, box: tuple[float, float, float, float], rules: Preprocessing
) -> Image.Image:
    """Cut `box` (pixels, may be fractional) and scale it to image_size x image_size, antialiased."""
    size = (rules.image_size, rules.image_size)
    return image.resize(size, _RESAMPLING[rules.interpolation], box=box)


def to_array(image: Image.Image) -> npt.NDArray[np.uint8]:
    """RGB image -> uint8 [3, height, width], C-contiguous."""
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


def _open_within_limits(data: bytes, rules: Preprocessing) -> Image.Image:
    if not data:
        raise ImageError("EMPTY", "there are no bytes to decode")
    if len(data) > rules.max_bytes:
        raise ImageError("TOO_MANY_BYTES", f"{len(data):,} bytes; the limit is {rules.max_bytes:,}")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except MemoryError:
        raise
    except UnidentifiedImageError as error:
        raise ImageError("NOT_AN_IMAGE", f"not a decodable image ({' '.join(FORMATS)})") from error
    except Exception as error:  # as in decode(): anything at all can come out of a damaged header
        raise ImageError("DAMAGED", "not a decodable image: its header is damaged") from error
    width, height = image.size
    if width * height > rules.max_pixels:
        raise ImageError(
            "TOO_MANY_PIXELS", f"{width} x {height} is over the limit of {rules.max_pixels:,} pixels"
        )
    if max(width, height) > rules.max_aspect_ratio * min(width, height):
        raise ImageError(
            "ASPECT_RATIO", f"{width} x {height} is more elongated than {rules.max_aspect_ratio:g}:1"
        )
    return image


def _orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 (upright) where there is none. Read after loading: PNG may keep it at its end."""
    try:
        return int(image.getexif().get(_ORIENTATION_TAG, 1))
    except Exception:  # noqa: BLE001 - damaged metadata is no reason to refuse pixels that decode
        return 1


def _scale_transparent_colour(image: Image.Image, depth: int) -> None:
    """Bring the colour that a PNG declares transparent to 8 bits, as its pixels will be.

    Pillow compares the two as they are, so that none matches. Of 16 bits the upper 8 decide: no more is left.
    """
    colour = image.info.get("transparency")
    if depth == 8 or image.mode not in ("L", "I;16", "RGB") or colour is None:
        return
    largest = 2**depth - 1
    samples = [
        (sample & largest) * 255 // largest if depth < 8 else sample >> 8
        for sample in (colour if image.mode == "RGB" else [colour])
    ]
    image.info["transparency"] = tuple(samples) if image.mode == "RGB" else samples[0]


def _is_signed(image: Image.Image) -> bool:
    return isinstance(image, TiffImageFile) and _SIGNED in image.tag_v2.get(SAMPLEFORMAT, ())


def _upper_8_bits(image: Image.Image) -> Image.Image:
    """Grey of 12 or 16 bits -> mode L. Pillow's own conversion clips everything above 255 to white."""
    depth, white_is_zero = 16, False
    if isinstance(image, TiffImageFile):
        (depth,) = image.tag_v2.get(BITSPERSAMPLE, (depth,))
        white_is_zero = image.tag_v2.get(PHOTOMETRIC_INTERPRETATION) == _WHITE_IS_ZERO
    levels = (np.asarray(image) >> (depth - 8)).astype(np.uint8)
    grey = Image.fromarray(255 - levels if white_is_zero else levels, "L")
    grey.info = image.info
    return grey


def _to_rgb(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    if not image.has_transparency_data:
        return image.convert("RGB")
    if image.mode == "La":  # premultiplied grey, which Pillow converts to nothing but LA
        image = image.convert("LA")
    canvas = Image.new("RGBA", image.size, (*background, 255))
    return Image.alpha_composite(canvas, image.convert("RGBA")).convert("RGB")
