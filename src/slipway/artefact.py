"""The artefacts of a bundle: in which formats the model is there, which files each has, and where each may run.

`model.onnx` is always one of them. The `default` is the one that is served: `model.onnx`, unless another one was found
to be faster (train/recommend.py).
"""

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from slipway.errors import SlipwayError
from slipway.sealed import write_json

ARTEFACTS = "artefacts.json"
FORMAT = "slipway-artefacts/1"
DEFAULT = "onnx"
# What our servers can run; see serve/models/runtime.py.
SERVABLE = ("onnxruntime", "openvino")
# Of files of artefacts. No Python: a release puts them beside the code that runs them.
SUFFIXES = (".onnx", ".pt2", ".pt", ".xml", ".bin")
# How far an artefact may be, where it is served, from what it answered where it was proven: of a probability; of
# logits, relative to the largest. On one machine there is no difference at all, whatever the batch and the threads;
# a CPU with other instructions rounds at other places.
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-2, "int8": 1e-2}

# Instruction sets that a compiler may use where it finds them; the rest of /proc/cpuinfo is of no concern to it.
_INSTRUCTION_SETS = ("amx", "avx", "bmi", "f16c", "fma", "gfni", "sse4", "vaes", "vpclmul")


class ArtefactError(SlipwayError):
    """An artefact that is not there, or that must not be loaded on this machine."""


@dataclass(frozen=True, kw_only=True)
class Artefact:
    """One format of the exported model.

    name: as in `export.formats`, such as `openvino-int8`.
    runtime: what loads it: onnxruntime, openvino, torch.export, torchscript or aoti.
    precision: of the arithmetic: float32, float16, bfloat16 or int8. Outputs are float32 whatever it is.
    files: relative to the bundle; the first one is what the runtime is given.
    settings: options that the runtime must be given to compute in this precision.
    requires: what this machine must have. `machine`: such as x86_64. `instructions`: of the CPU, all of these. `gpu`:
        see `same_gpu`. Any other key is a package with its exact version. Empty for formats that run anywhere.
    """

    name: str
    runtime: str
    precision: str
    files: tuple[str, ...]
    settings: Mapping[str, str] = field(default_factory=dict)
    requires: Mapping[str, Any] = field(default_factory=dict)

    @property
    def file(self) -> str:
        return self.files[0]

    @property
    def tolerance(self) -> float:
        """See TOLERANCES."""
        return TOLERANCES[self.precision]

    @property
    def for_gpus(self) -> bool:
        """Whether only GPUs gain from it: on CPUs, ONNX Runtime computes float16 in float32, between casts."""
        return self.precision == "float16"


def write_artefacts(directory: Path, artefacts: list[Artefact], default: str = DEFAULT) -> None:
    """default: the name of the one that is to be served."""
    content = {
        "format": FORMAT,
        "default": default,
        "artefacts": [asdict(artefact) for artefact in artefacts],
    }
    write_json(directory / ARTEFACTS, content)


def read_artefacts(directory: Path) -> tuple[Artefact, ...]:
    """The artefacts of a bundle. Raises ArtefactError if the list is missing or makes no sense."""
    return _read(directory)[0]


def read_default(directory: Path) -> Artefact:
    """The artefact of a bundle that is to be served. Raises ArtefactError as `read_artefacts` does."""
    artefacts, default = _read(directory)
    return next(artefact for artefact in artefacts if artefact.name == default)


def _read(directory: Path) -> tuple[tuple[Artefact, ...], str]:
    path = directory / ARTEFACTS
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != FORMAT:
            raise ArtefactError(f"{path}: has format {content['format']!r}; this Slipway reads {FORMAT!r}")
        artefacts = tuple(
            Artefact(**{**entry, "files": tuple(entry["files"])}) for entry in content["artefacts"]
        )
        default = str(content["default"])
    except FileNotFoundError:
        raise ArtefactError(
            f"{path}: is not there; the bundle was exported before there was more than ONNX"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtefactError(f"{path}: cannot be read as a list of artefacts ({error!r})") from error
    for name in (name for each in artefacts for name in each.files):
        if Path(name).name != name or not (directory / name).is_file():
            raise ArtefactError(f"{path}: lists {name!r}, which is no file of this bundle")
        if Path(name).suffix not in SUFFIXES:
            raise ArtefactError(f"{path}: lists {name!r}; an artefact's files end in {', '.join(SUFFIXES)}")
    _check_default(path, {artefact.name: artefact for artefact in artefacts}, default)
    return artefacts, default


def _check_default(path: Path, artefacts: Mapping[str, Artefact], default: str) -> None:
    if DEFAULT not in artefacts:
        raise ArtefactError(f"{path}: lists no artefact {DEFAULT!r}, which every bundle has")
    if default not in artefacts or artefacts[default].runtime not in SERVABLE:
        raise ArtefactError(
            f"{path}: says that {default!r} is to be served, which is no artefact of {' or '.join(SERVABLE)} in it"
        )
    if artefacts[default].for_gpus:
        raise ArtefactError(
            f"{path}: says that {default!r} is to be served everywhere, but it is for GPUs only; they get it without "
            "that, by `serve publish --target container-gpu`"
        )


def require_runs_here(artefact: Artefact, gpu: Mapping[str, str] | None = None) -> None:
    """Raises ArtefactError if this machine lacks what the artefact was built for. Nothing is loaded to find out.

    Loading it would not fail in words: code for another CPU dies of an illegal instruction.

    gpu: the one that the artefact would run on, as `same_gpu` takes it; None where there is none.
    """
    for what, wanted in artefact.requires.items():
        if what == "instructions":
            missing = sorted(set(wanted) - set(instructions()))
            has, needs = f"has no {', '.join(missing)}", ", ".join(missing)
        elif what == "gpu":
            missing = [] if same_gpu(wanted, gpu) else [wanted]
            has, needs = f"has {_described(gpu)}", _described(wanted)
        else:
            found = platform.machine() if what == "machine" else _installed(what)
            missing = [] if found == wanted else [wanted]
            has, needs = f"has {found or 'none'}", f"{what} {wanted}"
        if missing:
            raise ArtefactError(
                f"{artefact.name} ({artefact.file}): was built for {needs}, and this machine {has}; export it again "
                "on a machine like the one it will run on"
            )


def same_gpu(recorded: Mapping[str, str], found: Mapping[str, str] | None) -> bool:
    """Whether what was compiled for one GPU may be loaded on another: `capability`, such as 9.0, and `cuda` agree.

    Not even a newer capability will do (pytorch/pytorch issue 153697: compiled for 8.6, it fails on 9.0). Their `name`
    is for people: GPUs of one capability run the same code.
    """
    return found is not None and all(recorded[key] == found[key] for key in ("capability", "cuda"))


def _described(gpu: Mapping[str, str] | None) -> str:
    if gpu is None:
        return "no GPU that PyTorch can use"
    return f"{gpu['name']} (compute capability {gpu['capability']}, CUDA {gpu['cuda']})"


def instructions() -> list[str]:
    """The instruction sets of this CPU that a compiler would make use of, by their names in /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:  # not Linux
        return []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return sorted(flag for flag in flags if flag.startswith(_INSTRUCTION_SETS))


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
