"""Images for tests: flat colours whose class is known, odd ones that photo collections are full of, and bad ones."""

import io

import numpy as np
import numpy.typing as npt
from PIL import Image

# tests/tiny_bundle.py: class k is the one whose colour is nearest to an image's mean.
COLOURS = tuple((40 + 85 * (k % 3), 30 + 60 * (k // 3 % 4), (k * 97) % 256) for k in range(12))
BAD = {
    "empty": b"",
    "html": b"<html>404</html>",
    "zeros": bytes(1000),
}


def encode(pixels: npt.NDArray[np.uint8] | Image.Image, encoding: str = "PNG", **options: object) -> bytes:
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    buffer = io.BytesIO()
    image.save(buffer, encoding, **options)
    return buffer.getvalue()


def flat(k: int, encoding: str = "PNG") -> bytes:
    """An image in the colour of class k."""
    return encode(np.full((40, 50, 3), COLOURS[k], np.uint8), encoding)


def large_flat(k: int) -> bytes:
    """The same in 12 megapixels, as a camera would send it."""
    return encode(np.full((3000, 4000, 3), COLOURS[k], np.uint8), "JPEG")


def noise(seed: int, height: int = 70, width: int = 90) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def normal(count: int) -> dict[str, bytes]:
    """Noise of many sizes, half of it JPEG: no two alike."""
    return {
        f"normal-{seed}": encode(noise(seed, 20 + seed, 30 + 2 * seed), "JPEG" if seed % 2 else "PNG")
        for seed in range(count)
    }


def odd() -> dict[str, bytes]:
    """One image of each kind that decoders disagree about."""
    rgb = Image.fromarray(noise(7, 60, 40))
    sideways = rgb.getexif()
    sideways[0x0112] = 6
    ramp = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    transparent = rgb.convert("RGBA")
    transparent.putalpha(Image.fromarray(noise(8, 60, 40)[..., 0]))
    frames = [Image.fromarray(noise(seed, 30, 30)) for seed in (1, 2)]
    return {
        "exif-sideways": encode(rgb, "JPEG", exif=sideways),
        "cmyk": encode(rgb.convert("CMYK"), "JPEG"),
        "grey": encode(rgb.convert("L"), "JPEG"),
        "16-bit": encode(Image.fromarray(ramp)),
        "transparent": encode(transparent),
        "grey-and-alpha": encode(transparent.convert("LA")),
        "palette": encode(rgb.quantize(16)),
        "palette-and-transparency": encode(transparent.quantize(16)),
        "1-bit": encode(rgb.convert("1")),
        "animated": encode(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "webp": encode(rgb, "WEBP"),
        "tiff": encode(rgb, "TIFF"),
        "one-pixel": encode(noise(9, 1, 1)),
        "elongated": encode(noise(10, 10, 400)),
        "large": encode(noise(11, 1500, 1100), "JPEG"),
    }


def bomb() -> bytes:
    """20000 x 20000 pixels in 49 kB."""
    return encode(Image.new("1", (20000, 20000)))


def truncated() -> bytes:
    data = encode(noise(3))
    return data[: len(data) // 2]
