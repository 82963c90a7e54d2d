"""Milliseconds an image: our preprocessing beside torchvision, OpenCV and plain Pillow, one thread each.

    python -m benchmarks.preprocessing [--rounds 60]

Two photographs that ship inside scikit-learn, from JPEG to 224 pixels. All ways take turns, so that what else runs on
the machine slows each of them alike; what counts is the median. Exits with 1 when a ratio is above its target.
"""

import argparse
import io
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median

import cv2
import numpy as np
import numpy.typing as npt
import simplejpeg
import sklearn.datasets
import torch
from PIL import Image
from torchvision.io import decode_jpeg
from torchvision.transforms import v2

from benchmarks import results
from benchmarks.results import Ratio
from slipway.contract import Preprocessing
from slipway.preprocessing import centre_square, crop_and_resize, decode, preprocess, to_array

RULES = Preprocessing(image_size=224, resize_size=256)

Pixels = npt.NDArray[np.uint8]
Way = Callable[[bytes], Pixels]

OURS = "slipway"
# Our time divided by theirs; at most this. Only for ways that give the same pixels; the others resample otherwise, and
# are shown for what they would save.
TARGETS = {"Pillow, resize then crop": 1.0, "torchvision v2, PIL": 1.0}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.preprocessing", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60, help="turns of each way (default: 60)")
    results.add_option(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    warnings.filterwarnings("ignore", category=UserWarning)  # torchvision's decoding is deprecated
    photos = photographs()
    spent, parts = measure(photos, options.rounds)
    print(f"{len(photos)} photographs, {options.rounds} rounds; median milliseconds an image")
    show_ways(spent, photos)
    show_parts(parts)
    results.append(options.json, "preprocessing", ratios(spent))
    return 0 if meets_targets(spent) else 1


def photographs() -> list[bytes]:
    """600 x 400, so that all sides stay whole when they are scaled, and all ways can give the same pixels."""
    photos = []
    for path in sorted((Path(sklearn.datasets.__file__).parent / "images").glob("*.jpg")):
        file = io.BytesIO()
        Image.open(path).crop((0, 0, 600, 400)).save(file, "JPEG", quality=90)
        photos.append(file.getvalue())
    return photos


def plain_pillow(data: bytes) -> Pixels:
    image = Image.open(io.BytesIO(data)).convert("RGB")
    scale = RULES.resize_size / min(image.size)
    width, height = (int(side * scale) for side in image.size)
    scaled = image.resize((width, height), Image.Resampling.BILINEAR)
    left, upper = (width - RULES.image_size) // 2, (height - RULES.image_size) // 2
    cut = scaled.crop((left, upper, left + RULES.image_size, upper + RULES.image_size))
    return to_array(cut)


_SCALE_AND_CUT = v2.Compose([v2.Resize(RULES.resize_size, antialias=True), v2.CenterCrop(RULES.image_size)])


def torchvision_pil(data: bytes) -> Pixels:
    return to_array(_SCALE_AND_CUT(Image.open(io.BytesIO(data)).convert("RGB")))


def torchvision_tensor(data: bytes) -> Pixels:
    pixels = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return _SCALE_AND_CUT(pixels).contiguous().numpy()


def opencv(data: bytes) -> Pixels:
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    assert pixels is not None
    height, width, _ = pixels.shape
    scale = RULES.resize_size / min(width, height)
    scaled = cv2.resize(pixels, (int(width * scale), int(height * scale)), interpolation=cv2.INTER_LINEAR)
    top, left = ((side - RULES.image_size) // 2 for side in scaled.shape[:2])
    cut = scaled[top : top + RULES.image_size, left : left + RULES.image_size, ::-1]
    return np.ascontiguousarray(cut.transpose(2, 0, 1))


def simplejpeg_and_box(data: bytes) -> Pixels:
    image = Image.fromarray(simplejpeg.decode_jpeg(data))
    return to_array(crop_and_resize(image, centre_square(image.size, RULES), RULES))


WAYS: dict[str, Way] = {
    OURS: lambda data: preprocess(data, RULES),
    "Pillow, resize then crop": plain_pillow,
    "torchvision v2, PIL": torchvision_pil,
    "torchvision v2, tensor": torchvision_tensor,
    "OpenCV, linear": opencv,
    "simplejpeg, then ours": simplejpeg_and_box,
}


def in_parts(data: bytes) -> dict[str, float]:
    """Seconds of each part of our way."""
    times = [time.perf_counter()]
    image = decode(data, RULES)
    times.append(time.perf_counter())
    image = crop_and_resize(image, centre_square(image.size, RULES), RULES)
    times.append(time.perf_counter())
    to_array(image)
    times.append(time.perf_counter())
    return dict(zip(PARTS, np.diff(times).tolist(), strict=True))


PARTS = ("decode", "resize", "copy")


def measure(photos: list[bytes], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median milliseconds an image, of each way and of each part of ours."""
    spent: dict[str, list[float]] = {name: [] for name in (*WAYS, *PARTS)}
    shuffled = Random(0)
    for _ in range(rounds + 1):
        # In another order each time: what one way leaves in the caches is another's luck.
        for name, way in shuffled.sample(list(WAYS.items()), len(WAYS)):
            started = time.perf_counter()
            for data in photos:
                way(data)
            spent[name].append(time.perf_counter() - started)
        parts = [in_parts(data) for data in photos]
        for part in PARTS:
            spent[part].append(sum(each[part] for each in parts))
    # The first round warms up.
    medians = {name: 1000 * median(seconds[1:]) / len(photos) for name, seconds in spent.items()}
    return {name: medians[name] for name in WAYS}, {part: medians[part] for part in PARTS}


def show_ways(spent: dict[str, float], photos: list[bytes]) -> None:
    ours = [preprocess(data, RULES).astype(int) for data in photos]
    for name, way in WAYS.items():
        furthest = max(
            int(np.abs(way(data) - pixels).max()) for data, pixels in zip(photos, ours, strict=True)
        )
        ratio, target = spent[OURS] / spent[name], TARGETS.get(name)
        aim = f"target {target:.2f}" if target else "no target"
        print(
            f"  {name:26} {spent[name]:6.2f} ms   ours/theirs {ratio:4.2f} ({aim}); "
            f"at most {furthest} levels from ours"
        )


def show_parts(parts: dict[str, float]) -> None:
    whole = sum(parts.values())
    for part, milliseconds in parts.items():
        print(f"  {OURS}: {part:17} {milliseconds:6.2f} ms   {milliseconds / whole:4.0%}")
    print(f"  ours / decode alone, the limit: {whole / parts['decode']:.2f}")


def ratios(spent: dict[str, float]) -> list[Ratio]:
    return [
        Ratio(
            name=f"milliseconds, ours / {name}",
            value=spent[OURS] / spent[name],
            better="lower",
            target=TARGETS.get(name),
        )
        for name in spent
        if name != OURS
    ]


def meets_targets(spent: dict[str, float]) -> bool:
    missed = [name for name, target in TARGETS.items() if spent[OURS] / spent[name] > target]
    for name in missed:
        print(f"missed: {OURS} takes {spent[OURS] / spent[name]:.2f} of {name}", file=sys.stderr)
    return not missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
