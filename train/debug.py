"""One word on the command line makes training a quick check: `--debug.mode one-batch` or `overfit`."""

from dataclasses import replace

from slipway import hashing
from train.config import AugmentConfig, Config
from train.dataset import Dataset, Sample

OVERFIT_EPOCHS = 50


def simplified(config: Config, dataset: Dataset) -> tuple[Config, Dataset]:
    """What `debug.mode` makes of a configuration and a data set; the same ones without it.

    one-batch: one step, one validation batch: does every part work at all? overfit: a single batch again and again,
    which is validation as well, without augmentation: a network that cannot learn it by heart has a fault.
    """
    mode = config.debug.mode
    if mode is None:
        return config, dataset
    train = _spread(dataset.splits["train"], config.training.batch_size)
    val = train if mode == "overfit" else _spread(dataset.splits["val"], config.training.batch_size)
    fingerprint = hashing.of_data([dataset.fingerprint, mode])
    dataset = replace(dataset, splits={**dataset.splits, "train": train, "val": val}, fingerprint=fingerprint)
    if mode == "one-batch":
        return replace(config, training=replace(config.training, epochs=1)), dataset
    return replace(
        config,
        training=replace(config.training, epochs=OVERFIT_EPOCHS, label_smoothing=0.0),
        augment=AugmentConfig(min_scale=1.0, max_stretch=1.0, flip=0.0),
        optimizer=replace(config.optimizer, weight_decay=0.0),
        model=replace(config.model, dropout=0.0),
    ), dataset


def _spread(samples: tuple[Sample, ...], count: int) -> tuple[Sample, ...]:
    """So many samples, evenly over the list, which is in the order of classes."""
    count = min(count, len(samples))
    return tuple(samples[number * len(samples) // count] for number in range(count))
