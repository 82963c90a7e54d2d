from slipway import hashing
from train.split import split_of


def contents(count: int) -> list[str]:
    return [hashing.of_bytes(f"image {number}".encode()) for number in range(count)]


def test_split_depends_on_content_and_seed_alone() -> None:
    first = [split_of(content, 0.2, 0.1, 0) for content in contents(200)]
    assert first == [split_of(content, 0.2, 0.1, 0) for content in contents(200)]
    assert first != [split_of(content, 0.2, 0.1, 1) for content in contents(200)]


def test_adding_a_file_never_moves_another_and_equal_contents_stay_together() -> None:
    before = {content: split_of(content, 0.2, 0.1, 0) for content in contents(100)}
    after = {content: split_of(content, 0.2, 0.1, 0) for content in contents(101)}
    assert before.items() <= after.items()


def test_fractions_are_met() -> None:
    splits = [split_of(content, 0.2, 0.1, 0) for content in contents(5000)]
    assert abs(splits.count("val") / 5000 - 0.2) < 0.02
    assert abs(splits.count("test") / 5000 - 0.1) < 0.02
