"""The table of versions that work together, read from `compatibility.toml` beside this file.

Standard library only: locking, building images and CI read it before anything is installed.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

TABLE = Path(__file__).with_suffix(".toml")

Record = TypeVar("Record", bound="DataclassInstance")


@dataclass(frozen=True, kw_only=True)
class Export:
    """What every exported ONNX file must declare, so that every Triton release in the table loads it."""

    opset: int
    ir_version: int


@dataclass(frozen=True, kw_only=True)
class EmbeddedTriton:
    """Triton as a binary from a Python wheel; its models run in the Python backend.

    release, version: NVIDIA's monthly release and the version the server reports.
    package: the wheel as a pinned requirement.
    numpy: which numpy its Python backend reads correctly, as a version specifier.
    """

    release: str
    version: str
    package: str
    max_ir_version: int
    max_opset: int
    numpy: str


@dataclass(frozen=True, kw_only=True)
class ContainerTriton:
    """Triton as NVIDIA's container image, with the ONNX Runtime backend and the Python inside it."""

    release: str
    version: str
    image: str
    onnxruntime: str
    max_ir_version: int
    max_opset: int
    python: str


@dataclass(frozen=True, kw_only=True)
class Triton:
    embedded: EmbeddedTriton
    container: ContainerTriton


@dataclass(frozen=True, kw_only=True)
class Docker:
    """Base images that are not Triton's, pinned by tag."""

    python_image: str
    nginx_image: str


@dataclass(frozen=True, kw_only=True)
class Compatibility:
    """The whole table.

    python: minor version of both environments, such as "3.11".
    train, serve: package name -> exact version in that environment's lock.
    compose: what it is -> image, pinned by tag.
    """

    python: str
    train: Mapping[str, str]
    serve: Mapping[str, str]
    export: Export
    triton: Triton
    docker: Docker
    compose: Mapping[str, str]


@cache
def load() -> Compatibility:
    """The table of this checkout."""
    return read(TABLE)


def read(path: Path) -> Compatibility:
    """The table in `path`. Raises ValueError, naming the key, if one is missing, unknown or of another type."""
    with path.open("rb") as file:
        table = tomllib.load(file)
    try:
        return Compatibility(
            python=table["python"],
            train=MappingProxyType(table["train"]),
            serve=MappingProxyType(table["serve"]),
            export=_record(Export, table["export"], "export"),
            triton=Triton(
                embedded=_record(EmbeddedTriton, table["triton"]["embedded"], "triton.embedded"),
                container=_record(ContainerTriton, table["triton"]["container"], "triton.container"),
            ),
            docker=_record(Docker, table["docker"], "docker"),
            compose=MappingProxyType(table["compose"]),
        )
    except KeyError as error:
        raise ValueError(f"{path}: has no {error.args[0]!r}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _record(kind: type[Record], table: dict[str, Any], where: str) -> Record:
    wanted: dict[str, Any] = {field.name: field.type for field in fields(kind)}
    if odd := sorted(wanted.keys() ^ table.keys()):
        problem = "is missing" if odd[0] in wanted else "is not known"
        raise ValueError(f"{where}.{odd[0]} {problem}")
    for name, expected in wanted.items():
        if type(table[name]) is not expected:
            raise ValueError(f"{where}.{name} is {table[name]!r}, which is not of type {expected.__name__}")
    return kind(**table)
