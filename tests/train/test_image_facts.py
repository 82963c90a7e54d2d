import json

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_image

from slipway.contract import Preprocessing
from slipway.preprocessing import preprocess
from tests.images import BAD, encode, noise, odd, truncated
from train.image_facts import Facts, Refusal, colour_statistics, facts_of, from_record, to_record

RULES = Preprocessing(image_size=16, resize_size=20)


def good(data: bytes) -> Facts:
    facts = facts_of(data, RULES)
    assert isinstance(facts, Facts), facts
    return facts


def bits_apart(a: bytes, b: bytes) -> int:
    return (good(a).look ^ good(b).look).bit_count()


def photo() -> Image.Image:
    return Image.fromarray(load_sample_image("china.jpg")).resize((320, 214))


def test_colours_are_those_of_the_preprocessed_pixels() -> None:
    images = [encode(noise(seed), "JPEG") for seed in range(3)]
    seen = np.stack([preprocess(data, RULES) for data in images]) / 255
    mean, std = colour_statistics([good(data) for data in images], RULES.image_size)
    assert mean == pytest.approx(seen.mean(axis=(0, 2, 3)), abs=1e-12)
    assert std == pytest.approx(seen.std(axis=(0, 2, 3)), abs=1e-9)


@pytest.mark.parametrize("name", odd())
def test_every_odd_image_has_facts(name: str) -> None:
    assert 0 <= good(odd()[name]).look < 2**64


def test_header_is_reported_as_stored_and_the_size_upright() -> None:
    facts = good(odd()["exif-sideways"])
    assert (facts.format, facts.mode, facts.orientation) == ("JPEG", "RGB", 6)
    assert (facts.width, facts.height) == (60, 40)
    assert good(odd()["cmyk"]).mode == "CMYK"
    assert good(odd()["palette"]).format == "PNG"


@pytest.mark.parametrize(
    ("data", "code"),
    [(BAD["empty"], "EMPTY"), (BAD["html"], "NOT_AN_IMAGE"), (truncated(), "DAMAGED")],
)
def test_bad_file_has_a_stable_code_and_a_reason(data: bytes, code: str) -> None:
    """Cases A07 and A08."""
    facts = facts_of(data, RULES)
    assert isinstance(facts, Refusal)
    assert facts.code == code
    assert facts.reason


def test_limits_are_those_of_serving() -> None:
    """Case A11: what the server would refuse is not trained on."""
    strict = Preprocessing(image_size=16, resize_size=16, max_pixels=100)
    facts = facts_of(encode(noise(1, 12, 12)), strict)
    assert facts == Refusal("TOO_MANY_PIXELS", "12 x 12 is over the limit of 100 pixels")


def test_hash_survives_scaling_compression_and_brightness_but_tells_pictures_apart() -> None:
    original = encode(photo(), "PNG")
    brighter = photo().point([min(255, level + 8) for level in range(256)] * 3)
    for changed in (
        encode(photo(), "JPEG", quality=40),
        encode(photo().resize((161, 107)), "PNG"),
        encode(brighter, "PNG"),
    ):
        assert bits_apart(original, changed) <= 2
    flower = Image.fromarray(load_sample_image("flower.jpg"))
    assert bits_apart(original, encode(flower)) > 16
    assert bits_apart(original, encode(photo().transpose(Image.Transpose.FLIP_LEFT_RIGHT))) > 16


def test_picture_of_one_colour_has_no_hash_of_rounding_errors() -> None:
    for level in (0, 77, 255):
        assert good(encode(np.full((30, 40, 3), level, np.uint8))).look == 0


def test_facts_survive_being_written_down() -> None:
    for facts in (good(encode(noise(5))), facts_of(b"", RULES)):
        assert from_record(json.loads(json.dumps(to_record(facts)))) == facts
