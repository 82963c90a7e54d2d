"""Two models with the same contract hash can replace each other; a signature that was edited is refused."""

import json
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from slipway.contract import ContractError, Preprocessing, Signature

SIGNATURE = Signature(
    name="digits",
    classes=("0", "1", "10", "kla sse ä"),
    preprocessing=Preprocessing(image_size=16, resize_size=18),
    mean=(0.305, 0.305, 0.305),
    std=(0.376, 0.376, 0.376),
    max_batch=32,
)
OTHER_VALUES: dict[str, Any] = {
    "name": "letters",
    "classes": ("1", "0", "10", "kla sse ä"),
    "mean": (0.305, 0.305, 0.306),
    "std": (0.376, 0.377, 0.376),
    "max_batch": 33,
}
OTHER_PREPROCESSING: dict[str, Any] = {
    "image_size": 17,
    "resize_size": 19,
    "interpolation": "bicubic",
    "background": (0, 0, 1),
    "max_bytes": 1,
    "max_pixels": 1,
    "max_aspect_ratio": 99.0,
}


def test_contract_hash_is_the_same_everywhere_and_for_ever() -> None:
    """In both environments and in every release: a change here would part all bundles from their servers."""
    assert SIGNATURE.contract_hash() == "82073b01f95f1afbaf87ab98552f8df9ab57f85567b3f66eb64730984941b140"


@pytest.mark.parametrize("name", [field.name for field in fields(Signature) if field.name != "preprocessing"])
def test_every_promise_is_part_of_the_contract(name: str) -> None:
    other = replace(SIGNATURE, **{name: OTHER_VALUES[name]})
    assert other.contract_hash() != SIGNATURE.contract_hash()


@pytest.mark.parametrize("name", [field.name for field in fields(Preprocessing)])
def test_every_rule_of_preprocessing_is_part_of_the_contract(name: str) -> None:
    rules = replace(SIGNATURE.preprocessing, **{name: OTHER_PREPROCESSING[name]})
    assert replace(SIGNATURE, preprocessing=rules).contract_hash() != SIGNATURE.contract_hash()


def test_saved_signature_loads_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "signature.json"
    rules = Preprocessing(**{**asdict(SIGNATURE.preprocessing), **OTHER_PREPROCESSING})
    for signature in (SIGNATURE, replace(SIGNATURE, preprocessing=rules, **OTHER_VALUES)):
        signature.save(path)
        assert Signature.load(path) == signature
        assert Signature.load(path).contract_hash() == signature.contract_hash()


def test_signature_says_what_goes_in_and_what_comes_out(tmp_path: Path) -> None:
    """For readers in other languages: shapes, types, ranges and meanings are in the file."""
    SIGNATURE.save(tmp_path / "signature.json")
    content = json.loads((tmp_path / "signature.json").read_text(encoding="utf-8"))
    assert content["input"] == {
        "name": "image",
        "dtype": "uint8",
        "shape": ["batch", 3, 16, 16],
        "channels": "RGB",
        "range": [0, 255],
    }
    answer = {"dtype": "float32", "shape": ["batch", 4]}
    assert content["outputs"] == {"logits": answer, "probabilities": answer}
    assert content["classes"] == ["0", "1", "10", "kla sse ä"]
    assert content["contract"] == SIGNATURE.contract_hash()


def edited(path: Path, edit: Callable[[Any], None]) -> Path:
    SIGNATURE.save(path)
    content = json.loads(path.read_bytes())
    edit(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "edit",
    [
        lambda content: content["classes"].reverse(),
        lambda content: content.update(mean=[0, 0, 0]),
        lambda content: content["preprocessing"].update(image_size=32),
        lambda content: content["preprocessing"].update(image_size="16"),
        lambda content: content.update(contract="0" * 64),
        lambda content: content.pop("contract"),
    ],
)
def test_signature_that_was_edited_is_refused(tmp_path: Path, edit: Callable[[Any], None]) -> None:
    path = edited(tmp_path / "signature.json", edit)
    with pytest.raises(ContractError, match="does not hash to its own contract; it was edited after export"):
        Signature.load(path)


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (lambda content: content.update(format="slipway-signature/9"), "has format 'slipway-signature/9'"),
        (lambda content: content.pop("format"), "cannot be read as a signature"),
        (lambda content: content.pop("classes"), "cannot be read as a signature"),
        (lambda content: content.update(classes=3), "cannot be read as a signature"),
        (lambda content: content.update(preprocessing=[]), "cannot be read as a signature"),
        (lambda content: content.update(preprocessing=None), "cannot be read as a signature"),
        (lambda content: content["preprocessing"].pop("image_size"), "cannot be read as a signature"),
        (lambda content: content["preprocessing"].pop("background"), "cannot be read as a signature"),
        (lambda content: content.update(name=3), "cannot be read as a signature"),
        (lambda content: content.update(name="../../elsewhere"), "has the name '../../elsewhere', which no"),
        (
            lambda content: content["preprocessing"].update(gamma=2),
            r"unknown preprocessing parameters \['gamma'\]",
        ),
    ],
)
def test_signature_of_another_make_is_refused(
    tmp_path: Path, edit: Callable[[Any], None], complaint: str
) -> None:
    path = edited(tmp_path / "signature.json", edit)
    with pytest.raises(ContractError, match=rf"signature\.json: .*{complaint}"):
        Signature.load(path)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[]", b"null", b'"text"', b'{"format": ', None])
def test_file_that_is_no_signature_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "signature.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ContractError, match=r"signature\.json: cannot be read as a signature"):
        Signature.load(path)
