"""From the configuration to a data set, and to a folder of its test images where it has none of its own."""

import logging
from pathlib import Path

from slipway import sealed
from train.config import DataConfig
from train.dataset import Dataset
from train.folder import Files, read_folder
from train.huggingface import read_saved
from train.manifest import read_manifest
from train.shards import read_shards
from train.split import Split

KIND = "images"

logger = logging.getLogger(__name__)

_READERS = {
    "folder": read_folder,
    "manifest": read_manifest,
    "shards": read_shards,
    "huggingface": read_saved,
}


def read_dataset(config: DataConfig) -> Dataset:
    """List every image of the data set that `config` describes. Raises DataError."""
    return _READERS[config.source](config)


def folder_of(dataset: Dataset, split: Split, cache: Path) -> Path:
    """A folder in which every image of `split` lies under its `Sample.file`.

    The smoke test sends these files to a server, and the report shows some: neither reads manifests or buckets. Images
    that lie in no such folder are copied below `cache`, once.

    Raises:
        DataError: an image cannot be read.
        SealError: the copies cannot be written, or were changed.
    """
    if isinstance(dataset.storage, Files):
        return dataset.storage.root
    destination = cache / "images" / f"{split}-{dataset.fingerprint[:16]}"
    with sealed.only_one(destination, f"the {split} images"):
        if destination.exists():
            sealed.verify(destination, KIND)
            return destination
        with sealed.stage(destination, kind=KIND, inputs=dataset.fingerprint) as staging:
            for sample in dataset.splits[split]:
                path = staging / sample.file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(dataset.read(sample))
    logger.info("%d %s images copied to %s", len(dataset.splits[split]), split, destination)
    return destination
