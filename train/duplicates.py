"""Which pictures of a data set look alike, among hundreds of thousands, without comparing each with each."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from scipy import sparse

from train.image_facts import THUMB, Facts

MOST_BITS = 4
"""Perceptual hashes of pictures that look alike differ in at most so many of 64 bits ..."""
MOST_LEVELS = 6.0
"""... and their thumbnails by at most so much on average, of 255. Hashes alone take one form in two colours for one."""

ENOUGH = 8
"""A picture that has found so many like it in one band looks no further: its group holds together by then."""
FURTHEST = 256
"""Nor does one that has looked at so many neighbours: thousands of almost empty pictures share their hash."""

_BANDS = MOST_BITS + 1

Pair = tuple[int, int, int]
"""(position, position, bits apart), the smaller position first."""


def alike(pictures: Sequence[Facts]) -> list[Pair]:
    """Pairs that connect every picture with those it looks like, closest first; positions are those in `pictures`.

    Not every pair of a group, which would be quadratic for a video's frames, but as many as connect it: a
    spanning tree of the shortest distances. So a group that reaches over two splits has a pair that does.
    """
    if not pictures:
        return []
    looks = np.array([each.look for each in pictures], dtype=np.uint64)
    thumbs = np.frombuffer(b"".join(each.thumb for each in pictures), dtype=np.uint8)
    blocks = _close_pairs(looks, thumbs.reshape(-1, 3 * THUMB**2))
    pairs = np.concatenate([np.empty((0, 3), np.int64), *blocks])
    pairs[:, :2].sort(axis=1)
    tree = _spanning_tree(pairs, len(pictures)).tolist()
    return sorted(((a, b, bits) for a, b, bits in tree), key=lambda pair: (pair[2], pair))


def _close_pairs(
    looks: npt.NDArray[np.uint64], thumbs: npt.NDArray[np.uint8]
) -> Iterator[npt.NDArray[np.int64]]:
    """Blocks of [pairs, 3]: position, position, bits apart; some pairs more than once.

    Of hashes that differ in at most 4 bits, at least one of 5 bands is equal. So only pictures that share a band
    are compared: after sorting by it, each with its next neighbour, then with the one after, as long as any shares.
    Work and memory grow with the number of pictures, whatever they are (ENOUGH, FURTHEST).
    """
    brightness = thumbs.mean(axis=1)
    for band in range(_BANDS):
        low, high = 64 * band // _BANDS, 64 * (band + 1) // _BANDS
        keys = (looks >> np.uint64(low)) & np.uint64(2 ** (high - low) - 1)
        order = np.lexsort((brightness, looks, keys))
        keys, sorted_looks = keys[order], looks[order]
        found, first = np.zeros(len(keys), dtype=np.int64), np.arange(len(keys))
        for ahead in range(1, FURTHEST):
            first = first[: np.searchsorted(first, len(keys) - ahead)]
            first = first[(keys[first] == keys[first + ahead]) & (found[first] < ENOUGH)]
            if not first.size:
                break
            bits = np.bitwise_count(sorted_looks[first] ^ sorted_looks[first + ahead])
            near = np.flatnonzero(bits <= MOST_BITS)
            a, b = order[first[near]], order[first[near] + ahead]
            similar = _difference(thumbs, a, b) <= MOST_LEVELS
            found[first[near][similar]] += 1
            yield np.column_stack([a, b, bits[near]])[similar].astype(np.int64)


def _difference(
    thumbs: npt.NDArray[np.uint8], a: npt.NDArray[np.intp], b: npt.NDArray[np.intp]
) -> npt.NDArray[np.float64]:
    """Mean absolute difference of each pair of thumbnails, in levels of 255."""
    return np.abs(thumbs[a].astype(np.int16) - thumbs[b]).mean(axis=1)


def _spanning_tree(pairs: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """Of pairs [n, 3], the closest ones that connect all that the pairs connect."""
    pairs = np.unique(pairs, axis=0)
    # One more than the distance: a weight of zero would mean "no edge".
    graph = sparse.coo_array((pairs[:, 2] + 1, (pairs[:, 0], pairs[:, 1])), shape=(count, count))
    tree = sparse.csgraph.minimum_spanning_tree(graph.tocsr()).tocoo()
    return np.column_stack([tree.row, tree.col, tree.data - 1]).astype(np.int64)
