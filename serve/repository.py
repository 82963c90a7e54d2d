"""Make a release of a bundle in the model repository. Which release is served, serve/releases.py decides.

model_repository/
  releases/digits-3/     sealed: preprocessing, model, labels and the code that runs them
    release.json
    models/{preprocess,classifier,classify}/{config.pbtxt,3/...}
"""

import logging
import shutil
import struct
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tritonclient.grpc.model_config_pb2 import ModelConfig

from serve import linter, model_config, onnx_header
from serve.model_config import Description, Target
from serve.release import ABOUT, FORMAT, KIND, MODELS, RELEASES
from slipway import artefact as artefacts
from slipway import bundle, compatibility, hashing, input_statistics, sealed, signing
from slipway.artefact import Artefact
from slipway.bundle import Bundle, Golden
from slipway.errors import SlipwayError, UsageError

SERVE = Path(__file__).parent
SLIPWAY = Path(bundle.__file__).parent
# What a release carries of this code, for each model: exactly what that model runs.
SHARED_BY_MODELS = ("__init__.py", "models/__init__.py", "models/counters.py", "models/environment.py")
DECODES, ANSWERS = ("models/preprocess.py",), ("models/classifier.py", "models/runtime.py")
FUSED = "models/fused.py"
# What Triton loads of a model.
ENTRY = '''"""A model in Python. Beside it lies all its code, as it was when the release was published."""

import sys
from pathlib import Path

# Before anything that is installed. Not resolved: serve.server links these files into a folder of its own.
sys.path.insert(0, str(Path(__file__).parent))

from {module} import TritonPythonModel
'''
PREPROCESSING = (
    "__init__.py",
    "bundle.py",
    "contract.py",
    "errors.py",
    "hashing.py",
    "input_statistics.py",
    "preprocessing.py",
    "sealed.py",
)

logger = logging.getLogger(__name__)


class PublishError(SlipwayError):
    """A bundle that must not be served as it is."""


@dataclass(frozen=True, kw_only=True)
class Pins:
    """The versions that the models insist on when they are loaded."""

    python: str
    packages: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class _Content:
    """Everything a release is made from.

    artefact: the one of the bundle's that is served. golden: the golden inputs, with its answers to them.
    pixels: the golden images as model input, uint8 [golden, 3, S, S].
    """

    bundle: Bundle
    artefact: Artefact
    golden: tuple[Golden, ...]
    description: Description
    pixels: npt.NDArray[np.uint8]
    pins: Pins

    @property
    def version(self) -> str:
        return str(self.description.version)


def publish(
    bundle_directory: Path,
    repository: Path,
    target: Target,
    cpus: int,
    *,
    fused: bool = False,
    public_key: Path | None = None,
    sign_key: Path | None = None,
) -> Path:
    """Make a release of a bundle; return its directory.

    Args:
        fused: as one model, instead of an ensemble of two.
        public_key: whose owner must have signed the bundle; of one who has not, nothing else is read.
        sign_key: private key to sign the release with, for those who get it from somewhere else.

    A release made from the same bundle, code and settings is found again, not made again. One that is already
    there is never changed: what differs is published beside it, under a name that ends in a hash.

    Raises:
        SignatureError: the bundle is not as the owner of the key signed it, or the release cannot be signed.
        SealError, BundleError, ContractError, ArtefactError: the bundle is damaged or was not proven.
        PublishError: the target cannot run the model, or this environment decodes images differently.
        UsageError: fused is not for this target.
    """
    if public_key is not None:
        signing.require_signed(bundle_directory, public_key)
        logger.info("signed by the owner of %s", public_key)
    opened = bundle.open_bundle(bundle_directory)
    content = _content(opened, target, cpus, fused=fused)
    inputs = _inputs(content, sign_key)
    with sealed.only_one(repository / RELEASES, f"{repository}"):
        release = sealed.made_from(repository / RELEASES, KIND, inputs)
        if release is None:
            release = _free_name(repository / RELEASES, opened, inputs)
            with sealed.stage(release, kind=KIND, inputs=inputs) as staging:
                _fill(staging, release.name, content)
                _lint(staging / MODELS)
                if sign_key is not None:
                    signing.sign(staging, sign_key)
            logger.info("published %s (%s) as %s", opened.release, content.artefact.name, release)
        else:
            logger.info("%s is already published as %s", opened.release, release)
    return release


def _content(opened: Bundle, target: Target, cpus: int, *, fused: bool) -> _Content:
    """What a release of this bundle is made from. Raises what `publish` says of bundles and targets."""
    artefact = _served(opened, target)
    _check_runtime(opened, artefact, target, fused=fused)
    return _Content(
        bundle=opened,
        artefact=artefact,
        golden=_golden_answers(opened, artefact),
        description=Description(
            signature=opened.signature,
            version=opened.version,
            target=target,
            runtime=artefact.runtime,
            precision=artefact.precision,
            cpus=cpus,
            fused=fused,
        ),
        pixels=_golden_pixels(opened),
        pins=_pins(target),
    )


def _served(opened: Bundle, target: Target) -> Artefact:
    """The bundle's default; on GPUs, the artefact that it has for them, if it has one."""
    default = artefacts.read_default(opened.directory)
    for_gpus = [each for each in artefacts.read_artefacts(opened.directory) if each.for_gpus]
    if not for_gpus:
        return default
    if target in model_config.ON_GPUS:
        return for_gpus[0]
    logger.info(
        "%s is for GPUs (--target container-gpu); this release serves %s", for_gpus[0].name, default.name
    )
    return default


def _check_runtime(opened: Bundle, artefact: Artefact, target: Target, *, fused: bool) -> None:
    """Refuse what the target cannot run, or would answer otherwise than was proven."""
    if fused and target != "embedded":
        raise UsageError(
            f"command line: --fused is for the target embedded; with {target} it was never tried"
        )
    if target in model_config.ON_GPUS and artefact.name != artefacts.DEFAULT and not artefact.for_gpus:
        raise PublishError(
            f"{opened.directory}: serves {artefact.name}, whose answers were proven on a CPU; publish it for the "
            f"container, or export a bundle that has onnx-fp16, or serves {artefacts.DEFAULT}"
        )
    if artefact.runtime == "onnxruntime":
        _check_onnx(opened.directory / artefact.file, target)


def _check_onnx(model: Path, target: Target) -> None:
    """Refuse what the target's ONNX Runtime would refuse later, when Triton loads it."""
    triton = compatibility.load().triton
    runtime = triton.embedded if target == "embedded" else triton.container
    header = onnx_header.read(model)
    for what, found, limit in (
        ("IR version", header.ir_version, runtime.max_ir_version),
        ("opset", header.opset, runtime.max_opset),
    ):
        if found > limit:
            raise PublishError(
                f"{model}: has ONNX {what} {found}, but Triton {runtime.release} ({target}) reads at most {limit}; "
                "export with the versions in src/slipway/compatibility.toml, or serve with a newer Triton"
            )


def _golden_answers(opened: Bundle, artefact: Artefact) -> tuple[Golden, ...]:
    """What the served artefact answers to the golden inputs. Raises PublishError if the bundle does not say."""
    if artefact.name == artefacts.DEFAULT:
        return opened.golden
    answers = bundle.SERVED_ON_GPUS_ANSWERS if artefact.for_gpus else bundle.SERVED_ANSWERS
    if not (opened.directory / answers).is_file():
        raise PublishError(
            f"{opened.directory}: does not say what {artefact.name} answers to its golden inputs (no {answers}); "
            "export it again"
        )
    return bundle.read_golden(opened.directory, answers)


def _golden_pixels(opened: Bundle) -> npt.NDArray[np.uint8]:
    """uint8 [golden, 3, S, S]. Raises PublishError where nothing could tell a good server from bad by them."""
    if not opened.golden:
        raise PublishError(
            f"{opened.directory}: holds no golden inputs, so nothing could tell a good server from bad"
        )
    try:
        return bundle.golden_pixels(opened)
    except bundle.BundleError as error:
        raise PublishError(str(error)) from error


def _pins(target: Target) -> Pins:
    table = compatibility.load()
    return Pins(
        python=table.python if target == "embedded" else table.triton.container.python,
        packages={name: table.serve[name] for name in ("numpy", "pillow", *artefacts.SERVABLE)},
    )


def _inputs(content: _Content, sign_key: Path | None) -> str:
    """A hash over everything that a release is made from."""
    return hashing.of_data(
        {
            "bundle": content.bundle.seal,
            "target": content.description.target,
            "cpus": content.description.cpus,
            "fused": content.description.fused,
            "pins": asdict(content.pins),
            "code": _code(),
            "signer": None if sign_key is None else signing.signer(sign_key),
        }
    )


def _code() -> dict[str, str]:
    """Hash of each file that decides what a release holds."""
    files = [SLIPWAY / name for name in PREPROCESSING]
    files += [SLIPWAY / "artefact.py", SERVE / "release.py"]
    files += [SERVE / "repository.py", SERVE / "model_config.py", *sorted((SERVE / "models").glob("*.py"))]
    return {f"{file.parent.name}/{file.name}": hashing.of_file(file) for file in files}


def _free_name(releases: Path, opened: Bundle, inputs: str) -> Path:
    plain = releases / f"{opened.signature.name}-{opened.version}"
    return plain.with_name(f"{plain.name}-{inputs[:8]}") if plain.exists() else plain


def _fill(release: Path, name: str, content: _Content) -> None:
    about = {
        "format": FORMAT,
        "name": name,
        "identity": content.bundle.release,
        "version": content.description.version,
        "target": content.description.target,
        "fused": content.description.fused,
        "artefact": content.artefact.name,
        "tolerance": content.artefact.tolerance,
        "bundle": content.bundle.seal,
    }
    sealed.write_json(release / ABOUT, about)
    models = release / MODELS
    if content.description.fused:
        _write_fused(models / model_config.ENSEMBLE, content)
    else:
        _write_preprocess(models / model_config.PREPROCESS, content)
        _write_classifier(models / model_config.CLASSIFIER, content)
        _write_ensemble(models / model_config.ENSEMBLE, content)


def _lint(models: Path) -> None:
    """Our own configurations have no mistakes; what a fork makes of them may."""
    if mistakes := list(linter.problems(models)):
        raise PublishError(f"Triton would not serve this: {'; '.join(mistakes)}")


def _write_preprocess(model: Path, content: _Content) -> None:
    version = _start_model(model, model_config.preprocess(content.description), content)
    _copy_code(version, *DECODES)
    _write_serving(version, ("numpy", "pillow"), content)
    _add_decoding(version, content)


def _write_classifier(model: Path, content: _Content) -> None:
    source = content.bundle.directory
    version = _start_model(model, model_config.classifier(content.description), content)
    _copy(source / bundle.LABELS, model / model_config.LABELS_FILE)
    _write(model / "warmup" / model_config.WARMUP_PIXELS, content.pixels[0].tobytes())
    if content.description.backend != "python":
        _copy(source / content.artefact.file, version / "model.onnx")  # the name that this backend looks for
        return
    _copy_code(version, *ANSWERS)
    _write_serving(version, ("numpy", content.artefact.runtime), content)
    _add_answering(version, content)


def _write_fused(model: Path, content: _Content) -> None:
    version = _start_model(model, model_config.fused(content.description), content)
    _copy(content.bundle.directory / bundle.LABELS, model / model_config.LABELS_FILE)
    _copy_code(version, FUSED, *DECODES, *ANSWERS)
    _write_serving(version, ("numpy", "pillow", content.artefact.runtime), content)
    _add_decoding(version, content)
    _add_answering(version, content)


def _add_decoding(version: Path, content: _Content) -> None:
    """The rules of preprocessing, its code, and what it is held to when it is loaded."""
    for name in PREPROCESSING:
        _copy(SLIPWAY / name, version / "slipway" / name)
    _copy(content.bundle.directory / bundle.SIGNATURE, version / bundle.SIGNATURE)
    for golden in content.golden:
        _copy(golden.path, version / bundle.GOLDEN / golden.path.name)
    bundle.write_golden_answers(version, content.golden)
    # A warm-up string is its length as 4 bytes, little-endian, and its bytes.
    encoded = content.bundle.golden[0].path.read_bytes()
    _write(version.parent / "warmup" / model_config.WARMUP_IMAGE, struct.pack("<I", len(encoded)) + encoded)


def _add_answering(version: Path, content: _Content) -> None:
    """The artefact, and what it is held to when it is loaded."""
    for name in content.artefact.files:
        _copy(content.bundle.directory / name, version / name)
    np.save(version / "golden_pixels.npy", content.pixels)
    np.save(version / "golden_logits.npy", np.stack([golden.logits for golden in content.golden]))


def _write_ensemble(model: Path, content: _Content) -> None:
    version = _start_model(model, model_config.ensemble(content.description), content)
    _copy(content.bundle.directory / bundle.LABELS, model / model_config.LABELS_FILE)
    # Triton wants the directory of the version, and has no use for anything in it; a seal lists files only.
    _write(
        version / "README", b"An ensemble is its config.pbtxt; Triton only wants this directory to exist.\n"
    )


def _start_model(model: Path, config: ModelConfig, content: _Content) -> Path:
    """Write the configuration; return the directory of the version."""
    _write(model / model_config.CONFIGURATION, model_config.render(config).encode())
    version = model / content.version
    version.mkdir()
    return version


def _copy_code(version: Path, model: str, *beside: str) -> None:
    """Put in place what Triton loads, the module that it takes the model from, and the code that this one imports."""
    module = ".".join([SERVE.name, *Path(model).with_suffix("").parts])
    _write(version / "model.py", ENTRY.format(module=module).encode())
    for name in (*SHARED_BY_MODELS, model, *beside):
        _copy(SERVE / name, version / SERVE.name / name)


def _write_serving(version: Path, packages: tuple[str, ...], content: _Content) -> None:
    """What the models have to know and to insist on."""
    statistics = input_statistics.load(content.bundle.directory)
    artefact = {
        name: getattr(content.artefact, name) for name in ("file", "runtime", "settings", "tolerance")
    }
    serving = {
        "release": content.bundle.release,
        "python": content.pins.python,
        "packages": {name: content.pins.packages[name] for name in packages},
        "expected": {} if statistics is None else statistics.shares,
        "artefact": artefact,
    }
    sealed.write_json(version / "serving.json", serving)


def _copy(source: Path, destination: Path) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, destination)


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
