import numpy as np
import numpy.typing as npt

from train.duplicates import MOST_BITS, alike
from train.image_facts import Facts


def picture(look: int, thumb: npt.NDArray[np.uint8]) -> Facts:
    return Facts(
        format="PNG",
        mode="RGB",
        width=1,
        height=1,
        orientation=1,
        look=look,
        thumb=thumb.tobytes(),
        sums=(0, 0, 0),
        squares=(0, 0, 0),
    )


def thumbs(count: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 250, (count, 192), dtype=np.uint8)


def with_bits_flipped(look: int, bits: list[int]) -> int:
    for bit in bits:
        look ^= 1 << bit
    return look


def test_pair_is_found_wherever_its_bits_differ() -> None:
    random = np.random.default_rng(1)
    (thumb,) = thumbs(1)
    for _ in range(200):
        bits = random.permutation(64)[:MOST_BITS].tolist()
        look = int(random.integers(2**63))
        assert alike([picture(look, thumb), picture(with_bits_flipped(look, bits), thumb)]) == [
            (0, 1, MOST_BITS)
        ]


def test_further_apart_is_not_alike() -> None:
    (thumb,) = thumbs(1)
    assert not alike([picture(0, thumb), picture(0b11111, thumb)])


def test_same_shape_in_another_colour_is_not_alike() -> None:
    a, b = thumbs(2)
    assert not alike([picture(5, a), picture(5, b)])
    assert alike([picture(5, a), picture(5, a + np.uint8(3))]) == [(0, 1, 0)]


def test_a_hundred_thousand_hashes_are_searched_and_every_planted_pair_is_found() -> None:
    count, planted = 100_000, 500
    random = np.random.default_rng(2)
    looks = random.integers(2**63, size=count).tolist()
    small = thumbs(count)
    for pair in range(planted):
        bits = random.permutation(64)[: pair % (MOST_BITS + 1)].tolist()
        looks[count - 1 - pair] = with_bits_flipped(looks[pair], bits)
        small[count - 1 - pair] = small[pair]
    found = alike([picture(look, thumb) for look, thumb in zip(looks, small, strict=True)])
    assert {(a, b) for a, b, _ in found} == {(pair, count - 1 - pair) for pair in range(planted)}


def test_frames_of_a_film_hang_together_without_every_pair() -> None:
    """Three thousand pictures that all look alike: four and a half million pairs, of which few are needed."""
    (thumb,) = thumbs(1)
    found = alike([picture(number % 2, thumb) for number in range(3000)])
    assert len(found) == 2999
    assert {position for pair in found for position in pair[:2]} == set(range(3000))


def test_nothing_and_one_are_alike_to_nothing() -> None:
    (thumb,) = thumbs(1)
    assert alike([]) == alike([picture(0, thumb)]) == []
