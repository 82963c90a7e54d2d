"""Damaged images by the thousand, each read or refused in words: never a crash, a warning, or memory without bound.

    python -m tests.slipway.fuzz 100000 [--seed 7]    that many; `make fuzz-preprocessing` calls this

Image number i of a seed is the same in every run. What fails is written to a file, whose path is in the message.
The process limits itself, so that it is the decoders in C that are held to the limits, too.
"""

import argparse
import collections
import resource
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from random import Random

from slipway.contract import Preprocessing
from slipway.preprocessing import ImageError, preprocess
from tests.slipway import images

# An image of as many pixels takes 16 MB as RGBA, and there are a few copies at a time.
RULES = Preprocessing(image_size=32, resize_size=36, max_pixels=4_000_000)
MEMORY = 256 * 2**20
SECONDS = 60  # for one image, on a machine that is busy with other things

CODES = {
    "EMPTY",
    "TOO_MANY_BYTES",
    "NOT_AN_IMAGE",
    "TOO_MANY_PIXELS",
    "ASPECT_RATIO",
    "DAMAGED",
    "UNSUPPORTED_DEPTH",
}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="fuzz.py", description="Feed damaged images to preprocessing.")
    parser.add_argument("count", type=int, help="images to try")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other damage (default: 0)")
    options = parser.parse_args(arguments)
    whole = images.small()
    # In front of the filters that `preprocessing` has set for production go none of our own.
    warnings.filterwarnings("error", append=True)
    limit_memory()
    started, verdicts = time.monotonic(), collections.Counter[str]()
    for number in range(options.count):
        data = damaged(whole, Random(f"{options.seed}:{number}"))
        verdicts[verdict(data)] += 1
    for name, count in verdicts.most_common():
        print(f"{count:8d} {name}")
    print(f"{options.count} images in {time.monotonic() - started:.0f} s; nothing but these verdicts")


def limit_memory() -> None:
    """To MEMORY more than there is in use now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def verdict(data: bytes) -> str:
    """Either "read" or the code of the refusal. Anything else leaves `data` in a file and raises."""
    try:
        signal.alarm(SECONDS)  # ends the process, also from inside a decoder
        array = preprocess(data, RULES)
        signal.alarm(0)
    except ImageError as error:
        require_fit_for_a_client(error)
        return error.code
    except BaseException:
        with tempfile.NamedTemporaryFile(prefix="slipway-fuzz-", delete=False) as file:
            file.write(data)
        print(f"failed on {file.name}", file=sys.stderr)
        raise
    assert (array.dtype.name, array.shape) == ("uint8", (3, 32, 32))
    return "read"


def require_fit_for_a_client(error: ImageError) -> None:
    assert error.code in CODES
    assert str(error) == f"{error.code}: {error.reason}"
    assert "\n" not in error.reason
    assert len(error.reason) < 120
    for leak in ("/", "\\", "0x", "Traceback", "Error", "object", ".py"):
        assert leak not in error.reason


def damaged(whole: list[bytes], random: Random) -> bytes:
    """One of the images with one to six changes, most of them near its headers; or noise behind a signature."""
    data = bytearray(random.choice(whole))
    if random.random() < 0.02:
        return bytes(data[: random.randint(2, 16)]) + random.randbytes(random.randint(0, 400))
    for _ in range(random.choice([1, 1, 1, 2, 3, 6])):
        _change(data, random, whole)
    if data.startswith(b"\x89PNG") and random.random() < 0.6:
        return images.with_right_crcs(bytes(data))
    return bytes(data)


def _change(data: bytearray, random: Random, whole: list[bytes]) -> None:
    place = random.randrange(min(len(data), random.choice([64, 256, 100_000, 100_000])) + 1)
    kind = random.choice(["set", "set", "bit", "word", "cut", "insert", "delete", "splice"])
    if kind == "cut":
        del data[place:]
    elif kind == "delete":
        del data[place : place + random.randint(1, 8)]
    elif kind == "insert":
        data[place:place] = random.randbytes(random.randint(1, 8))
    elif kind == "splice":
        other = random.choice(whole)
        start = random.randrange(len(other))
        data[place : place + 32] = other[start : start + 32]
    elif kind == "word":
        value = random.choice([0, 1, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF])
        data[place : place + 4] = value.to_bytes(4, random.choice(["big", "little"]))
    elif kind == "bit" and place < len(data):
        data[place] ^= 1 << random.randrange(8)
    else:
        data[place : place + 1] = random.randbytes(1)


if __name__ == "__main__":
    main(sys.argv[1:])
