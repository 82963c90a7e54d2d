"""A tiny image folder and a configuration that trains on it in a second."""

import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from slipway.config import load
from tests.s3 import s3_server
from tests.train.sources import s3_access
from train.config import Config, DataConfig

MakeFolder = Callable[..., Path]
MakeConfig = Callable[..., Config]


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """Write <root>/{train,val,test}/<class>/*.png: one colour a class, with noise so that no two are equal."""

    def make(
        classes: tuple[str, ...] = ("ant", "bee", "cat"), train: int = 7, val: int = 3, test: int = 3
    ) -> Path:
        root = tmp_path / "images"
        random = np.random.default_rng(0)
        for label, name in enumerate(classes):
            for split, count in (("train", train), ("val", val), ("test", test)):
                (root / split / name).mkdir(parents=True)
                for number in range(count):
                    save_image(root / split / name / f"{number}.png", colour_of(label), random)
        return root

    return make


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    """The smallest sensible configuration; overrides are given as `section__key="text"`."""

    def make(root: Path, **overrides: str) -> Config:
        settings = {
            "run.name": "tiny",
            "run.directory": str(tmp_path / "runs"),
            "run.bundles": str(tmp_path / "bundles"),
            "data.root": str(root),
            "data.workers": "0",
            "image.size": "16",
            "image.resize": "16",
            "model.name": "mobilenet_v3_small",  # small, with batch normalisation and with dropout
            "model.stem": "small",
            "training.epochs": "2",
            "training.batch_size": "8",
            "training.log_every": "1",
            "export.max_batch": "8",
        }
        settings |= {key.replace("__", "."): value for key, value in overrides.items()}
        return load(Config, None, settings)

    return make


@pytest.fixture(scope="session")
def s3_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as url:
        yield url


@pytest.fixture
def s3(s3_url: str) -> Iterator[None]:
    """A real S3 server, and the access to it in the environment."""
    with s3_access(s3_url):
        yield


@contextmanager
def full_disk() -> Iterator[None]:
    """Every file ends at 64 bytes in here. What is imported meanwhile would be cached, cut off there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    caches, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = caches


def colour_of(label: int) -> tuple[int, int, int]:
    return (40 * label % 256, (90 + 70 * label) % 256, (200 - 55 * label) % 256)


def save_image(path: Path, colour: tuple[int, int, int], random: np.random.Generator) -> None:
    pixels = np.clip(np.array(colour) + random.integers(-20, 21, (12, 12, 3)), 0, 255)
    Image.fromarray(pixels.astype(np.uint8)).save(path)


def data_config(root: Path) -> DataConfig:
    return DataConfig(root=root)


@pytest.fixture
def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    images = torch.randint(0, 256, (7, 3, 4, 4), dtype=torch.uint8, generator=generator)
    return images, torch.randint(0, 3, (7,), generator=generator)
