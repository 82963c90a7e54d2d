"""Whatever a data set holds, the doctor finds what a comparison of everything with everything finds."""

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipway import hashing
from slipway.contract import Preprocessing
from tests.images import encode, noise
from train.config import DataConfig
from train.dataset import Dataset, Found, assemble
from train.doctor import diagnose
from train.duplicates import ENOUGH, MOST_BITS, MOST_LEVELS, alike
from train.examine import examine
from train.image_facts import Facts, Refusal
from train.split import SPLITS, Split

RULES = Preprocessing(image_size=8, resize_size=8)
GOOD = [encode(noise(number, 9, 9)) for number in range(5)]
BAD = [b"", b"<html>404</html>", GOOD[0][:40]]
CONTENTS = [*GOOD, *BAD]

Placed = tuple[int, Split, str]
"""Content, split, class."""

files = st.lists(
    st.tuples(st.integers(0, len(CONTENTS) - 1), st.sampled_from(SPLITS), st.sampled_from(["a", "b"])),
    max_size=12,
)
# What any data set needs: every split, and both classes to train on.
LEAST: list[Placed] = [(0, "train", "a"), (1, "train", "b"), (2, "val", "a"), (3, "test", "b")]


class InMemory:
    def __init__(self, contents: dict[str, bytes]) -> None:
        self.contents = contents

    def read(self, file: str) -> bytes:
        return self.contents[file]

    def where(self, file: str) -> str:
        return file


def dataset_of(placed: list[Placed]) -> Dataset:
    contents = {f"{split}/{name}/{n}": CONTENTS[content] for n, (content, split, name) in enumerate(placed)}
    found = [
        Found(name=name, file=file, sha256=hashing.of_bytes(data), split=split)
        for (file, data), (_, split, name) in zip(contents.items(), placed, strict=True)
    ]
    return assemble(found, InMemory(contents), DataConfig(), "memory")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(files)
def test_copies_leaks_contradictions_and_bad_files_are_those_that_are_there(
    tmp_path: Path, drawn: list[Placed]
) -> None:
    placed = [*LEAST, *drawn]
    dataset = dataset_of(placed)
    diagnosis = diagnose(dataset, examine(dataset, RULES, tmp_path), RULES.image_size)
    splits: dict[int, set[Split]] = defaultdict(set)
    names: dict[int, set[str]] = defaultdict(set)
    for content, split, name in placed:
        splits[content].add(split)
        names[content].add(name)
    times = Counter(content for content, _, _ in placed)
    good = range(len(GOOD))
    assert len(diagnosis.copies) == sum(times[content] > 1 for content in good)
    assert len(diagnosis.leaks()) == sum(len(splits[content]) > 1 for content in good)
    assert len(diagnosis.contradictions()) == sum(len(names[content]) > 1 for content in good)
    assert len(diagnosis.refused) == sum(content >= len(GOOD) for content, _, _ in placed)
    assert sum(diagnosis.formats.values()) + len(diagnosis.refused) == diagnosis.images == len(placed)


# Few different bits and levels, so that many pictures are alike and many are nearly so.
looks = st.lists(st.tuples(st.integers(0, 2**10 - 1), st.integers(0, 3)), min_size=2, max_size=ENOUGH + 1)


@settings(max_examples=300)
@given(looks)
def test_groups_are_those_of_comparing_each_with_each(drawn: list[tuple[int, int]]) -> None:
    pictures = [
        Facts(
            format="PNG",
            mode="RGB",
            width=1,
            height=1,
            orientation=1,
            look=spread(look),
            thumb=np.full(192, 5 * level, np.uint8).tobytes(),
            sums=(0, 0, 0),
            squares=(0, 0, 0),
        )
        for look, level in drawn
    ]
    close = [
        (a, b)
        for b, (look_b, level_b) in enumerate(drawn)
        for a, (look_a, level_a) in enumerate(drawn[:b])
        if (look_a ^ look_b).bit_count() <= MOST_BITS and 5 * abs(level_a - level_b) <= MOST_LEVELS
    ]
    found = alike(pictures)
    assert groups(len(drawn), [(a, b) for a, b, _ in found]) == groups(len(drawn), close)
    assert {(a, b) for a, b, _ in found} <= set(close)
    assert all(bits == (drawn[a][0] ^ drawn[b][0]).bit_count() for a, b, bits in found)


def spread(look: int) -> int:
    """Ten bits over all bands of a hash."""
    return sum(1 << (6 * place) for place in range(10) if look >> place & 1)


def groups(count: int, pairs: list[tuple[int, int]]) -> list[int]:
    """The smallest member of each one's group."""
    group = list(range(count))
    for _ in range(count):
        for a, b in pairs:
            group[a] = group[b] = min(group[a], group[b])
    return group


def test_refusals_are_told_from_facts(tmp_path: Path) -> None:
    dataset = dataset_of([*LEAST, *((content, "val", "a") for content in range(len(CONTENTS)))])
    found = examine(dataset, RULES, tmp_path)
    assert [isinstance(found[hashing.of_bytes(data)], Refusal) for data in CONTENTS] == [False] * 5 + [
        True
    ] * 3
