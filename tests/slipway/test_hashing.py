"""One definition of "the same"."""

import hashlib
from pathlib import Path

import pytest

from slipway import hashing


def test_bytes_hash_as_everywhere_else() -> None:
    assert hashing.of_bytes(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize("size", [0, 1, 2**18, 2**18 + 1, 3_000_000])
def test_file_hashes_as_its_bytes(tmp_path: Path, size: int) -> None:
    content = bytes(range(251)) * (size // 251 + 1)
    (tmp_path / "file").write_bytes(content[:size])
    assert hashing.of_file(tmp_path / "file") == hashing.of_bytes(content[:size])


def test_data_hash_the_same_everywhere_and_for_ever() -> None:
    """Names of runs and the identity of contracts are made of this."""
    text = '{"a":[1,2.5,"ä",null,true],"b":{}}'
    assert (
        hashing.of_data({"b": {}, "a": [1, 2.5, "ä", None, True]})
        == hashlib.sha256(text.encode()).hexdigest()
    )


def test_order_of_keys_does_not_count_and_order_of_items_does() -> None:
    assert hashing.of_data({"a": 1, "b": 2}) == hashing.of_data({"b": 2, "a": 1})
    assert hashing.of_data([1, 2]) != hashing.of_data([2, 1])


def test_tuple_is_the_list_it_becomes_in_json() -> None:
    assert hashing.of_data((1, (2, 3))) == hashing.of_data([1, [2, 3]])


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, "1"), (1, 1.0), (1, True), (None, "null"), ("", None), (["ab"], ["a", "b"]), ({}, [])],
)
def test_different_data_hash_differently(one: object, other: object) -> None:
    assert hashing.of_data(one) != hashing.of_data(other)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [-float("inf")]])
def test_what_is_no_json_number_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        hashing.of_data(value)


@pytest.mark.parametrize("value", [Path("a"), {1, 2}, b"bytes", object()])
def test_what_is_no_json_is_refused(value: object) -> None:
    """Nothing is hashed by its repr, which may hold an address or an order of its own."""
    with pytest.raises(TypeError, match="not JSON serializable"):
        hashing.of_data(value)
