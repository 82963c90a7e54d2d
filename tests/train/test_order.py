import pytest

from train.order import Draw, Order

SIZES = [1, 2, 7, 8, 9, 16, 17, 145]


def order(
    samples: int = 12, batch_size: int = 4, epochs: int = 3, seed: int = 0, fingerprint: str = "f"
) -> Order:
    return Order(samples=samples, batch_size=batch_size, epochs=epochs, seed=seed, fingerprint=fingerprint)


def indices(of: Order, cursor: int = 0) -> list[int]:
    return [index for window in of.windows(cursor) for index in window.indices]


@pytest.mark.parametrize("samples", SIZES)
def test_every_sample_once_an_epoch(samples: int) -> None:
    seen = indices(order(samples=samples, batch_size=8))
    for epoch in range(3):
        assert sorted(seen[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


def test_order_differs_between_epochs_seeds_and_data_sets() -> None:
    """Case B17."""
    seen = indices(order(samples=50, epochs=2))
    assert seen[:50] != seen[50:]
    assert seen != indices(order(samples=50, epochs=2, seed=1))
    assert seen != indices(order(samples=50, epochs=2, fingerprint="g"))
    assert seen == indices(order(samples=50, epochs=2))


def test_order_is_pinned() -> None:
    """A release that reorders the data would silently change every resumed run."""
    assert indices(order(samples=8, epochs=1)) == [7, 3, 1, 4, 0, 5, 2, 6]


@pytest.mark.parametrize("steps", range(10))
def test_any_step_continues_as_if_never_stopped(steps: int) -> None:
    """Case B02: in the middle of an epoch, at its last step, and at step 0 of the next."""
    whole = order(samples=10, batch_size=4)
    windows = list(whole.windows(0))
    cursor = windows[steps - 1].end if steps else 0
    assert list(whole.windows(cursor)) == windows[steps:]


def test_small_last_window_is_dealt_out_evenly() -> None:
    """Batch normalisation cannot train on one sample: 5 in micro-batches of 4 are 3 and 2, not 4 and 1."""
    whole = order(samples=5, batch_size=8, epochs=1)
    window = next(whole.windows(0))
    assert [len(batch) for batch in whole.micro_batches(window, 2, 0, 1)] == [3, 2]


@pytest.mark.parametrize("samples", SIZES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_all_ranks_take_the_same_steps_and_each_sample_counts_once(
    samples: int, world_size: int, accumulate: int
) -> None:
    """Cases B09 and B11: the last window is neither dropped nor padded with weight, and nobody waits forever."""
    whole = order(samples=samples, batch_size=12 * world_size * accumulate // 4 * 4, epochs=2)
    for window in whole.windows(0):
        parts = [whole.micro_batches(window, accumulate, rank, world_size) for rank in range(world_size)]
        assert len({len(part) for part in parts}) == 1
        counted = [draw for part in parts for batch in part for draw in batch if draw.weight]
        assert sorted(draw.index for draw in counted) == sorted(window.indices)
        assert all(batch for part in parts for batch in part)


def test_global_order_does_not_depend_on_the_number_of_ranks() -> None:
    whole = order(samples=30, batch_size=12)
    window = next(whole.windows(0))
    for world_size in (1, 2, 3):
        parts = [whole.micro_batches(window, 2, rank, world_size) for rank in range(world_size)]
        joined = [draw.index for batches in zip(*parts, strict=True) for batch in batches for draw in batch]
        assert joined == list(window.indices)


def test_steps_counts_the_windows() -> None:
    for samples in SIZES:
        whole = order(samples=samples, batch_size=8)
        assert whole.steps == len(list(whole.windows(0)))


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 8])
@pytest.mark.parametrize("accumulate", [1, 3, 4])
def test_no_micro_batch_is_left_with_a_single_sample(
    micro_batch: int, world_size: int, accumulate: int
) -> None:
    """Batch normalisation raises on one; what stands beside it is another image, and counts for nothing."""
    batch_size = micro_batch * world_size * accumulate
    for samples in {2, 3, 9, batch_size + 1, 2 * batch_size + 3}:
        whole = order(samples=samples, batch_size=batch_size, epochs=2)
        for window in whole.windows(0):
            parts = [whole.micro_batches(window, accumulate, rank, world_size) for rank in range(world_size)]
            batches = [batch for dealt in zip(*parts, strict=True) for batch in dealt]
            assert [d.index for batch in batches for d in batch if d.weight] == list(window.indices)
            for batch in batches:
                assert len(batch) >= min(2, micro_batch)
                assert len({draw.index for draw in batch}) == len(batch)
                assert len(batch) <= 2 or all(draw.weight for draw in batch)


def test_idle_rank_gets_a_sample_without_weight() -> None:
    whole = order(samples=1, batch_size=4, epochs=1)
    window = next(whole.windows(0))
    assert whole.micro_batches(window, 1, 1, 2) == [[Draw(0, 0, 0.0)]]
