"""What Triton would choke on in a folder of models, found before Triton sees it.

Triton answers some of these mistakes with a crash (a warm-up that fails), some with loading for ever (a missing
model.py), some with a message about something else, and some not at all (a queue without an end, an input that never
forms a batch).
"""

import math
import struct
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInput, ModelOutput, ModelWarmup

from serve.model_config import CONFIGURATION

WARMUP = "warmup"
ENSEMBLE = "ensemble"
# What each backend looks for in the directory of a version.
MODEL_FILES = {"python": "model.py", "onnxruntime": "model.onnx"}
# What Triton lets an ensemble's configuration not say.
NOT_FOR_ENSEMBLES = ("instance_group", "model_warmup", "optimization", "dynamic_batching")
BYTES_PER_ELEMENT = {"TYPE_UINT8": 1, "TYPE_INT32": 4, "TYPE_FP16": 2, "TYPE_FP32": 4, "TYPE_INT64": 8}

DataType = model_config_pb2.DataType


def problems(models: Path) -> Iterator[str]:
    """A sentence for each mistake, beginning with the path of the file that is at fault."""
    configs: dict[str, ModelConfig] = {}
    directories = sorted(path for path in models.iterdir() if path.is_dir())
    if not directories:
        yield f"{models}: holds no model"
    for directory in directories:
        path = directory / CONFIGURATION
        try:
            config = text_format.Parse(path.read_text(), ModelConfig())
        except FileNotFoundError:
            yield f"{path}: is missing"
            continue
        except (text_format.ParseError, UnicodeDecodeError) as error:
            yield f"{path}: is not a model configuration ({error})"
            continue
        configs[directory.name] = config
        for problem in _of_model(directory, config):
            yield f"{path}: {problem}"
    for name, config in configs.items():
        if config.platform == ENSEMBLE:
            for problem in _of_ensemble(config, configs, models):
                yield f"{models / name / CONFIGURATION}: {problem}"


def _of_model(directory: Path, config: ModelConfig) -> Iterator[str]:
    if config.name != directory.name:
        yield f"name is {config.name!r}, but its folder is {directory.name!r}"
    yield from _of_versions(directory, config)
    yield from _of_labels(directory, config)
    if config.platform != ENSEMBLE:
        yield from _of_batching(config)
        for warm_up in config.model_warmup:
            yield from _of_warm_up(directory, warm_up, config)


def _of_versions(directory: Path, config: ModelConfig) -> Iterator[str]:
    wanted = [str(version) for version in config.version_policy.specific.versions]
    present = _versions(directory)
    if not present:
        yield "there is no directory of a version beside it, such as 1"
    yield from (
        f"serves version {version}, which is not there" for version in wanted if version not in present
    )
    file = MODEL_FILES.get(config.backend)
    if config.platform != ENSEMBLE and file is None:
        yield f"backend is {config.backend!r}; known are {', '.join(MODEL_FILES)}"
    for version in present:
        if file is not None and not (directory / version / file).is_file():
            yield f"{version}/{file} is missing"


def _versions(directory: Path) -> list[str]:
    """Triton passes over directories that are no number or begin with a zero."""
    names = [path.name for path in directory.iterdir() if path.is_dir()]
    return [name for name in names if name.isascii() and name.isdigit() and not name.startswith("0")]


def _of_labels(directory: Path, config: ModelConfig) -> Iterator[str]:
    for output in config.output:
        if not output.label_filename:
            continue
        path = directory / output.label_filename
        if not path.is_file():
            yield f"output {output.name}: its labels {output.label_filename} are missing"
        elif (lines := len(path.read_text().splitlines())) != math.prod(output.dims):
            yield f"output {output.name}: has {math.prod(output.dims)} values and {lines} labels"


def _of_batching(config: ModelConfig) -> Iterator[str]:
    if config.max_batch_size == 0:
        return
    policy = config.dynamic_batching.default_queue_policy
    if not config.HasField("dynamic_batching") or policy.max_queue_size == 0:
        yield "its queue has no end: dynamic_batching.default_queue_policy.max_queue_size is not set"
    if policy.default_timeout_microseconds == 0:
        yield "requests wait for ever: dynamic_batching.default_queue_policy.default_timeout_microseconds is not set"
    for one in config.input:
        if -1 in one.dims and not one.allow_ragged_batch:
            yield f"input {one.name}: has a variable size, so that requests never form a batch; make it a TYPE_STRING"


def _of_warm_up(directory: Path, warm_up: ModelWarmup, config: ModelConfig) -> Iterator[str]:
    inputs = {one.name for one in config.input}
    if warm_up.inputs.keys() != inputs:
        yield f"warm-up {warm_up.name}: gives {sorted(warm_up.inputs)}, the model takes {sorted(inputs)}"
    if not 0 < warm_up.batch_size <= max(1, config.max_batch_size):
        yield f"warm-up {warm_up.name}: has batch size {warm_up.batch_size}; the limit is {config.max_batch_size}"
    for name, one in warm_up.inputs.items():
        path = directory / WARMUP / one.input_data_file
        if not one.input_data_file or not path.is_file():
            yield f"warm-up {warm_up.name}: the data of {name} are not in {WARMUP}/{one.input_data_file}"
        elif problem := _of_data(path.read_bytes(), one):
            yield f"warm-up {warm_up.name}: {WARMUP}/{one.input_data_file} {problem}"


def _of_data(data: bytes, one: ModelWarmup.Input) -> str:
    data_type = DataType.Name(one.data_type)
    if data_type == "TYPE_STRING":
        if len(data) < 4 or struct.unpack("<I", data[:4])[0] != len(data) - 4:
            return "is not one string: its length as 4 bytes, little-endian, and its bytes"
    elif (expected := math.prod(one.dims) * BYTES_PER_ELEMENT.get(data_type, 0)) != len(data):
        return f"has {len(data)} bytes; {data_type} {list(one.dims)} are {expected}"
    return ""


def _of_ensemble(config: ModelConfig, configs: dict[str, ModelConfig], models: Path) -> Iterator[str]:
    said = {field.name for field, _ in config.ListFields()}
    yield from (f"{name} is not for ensembles" for name in NOT_FOR_ENSEMBLES if name in said)
    if not config.ensemble_scheduling.step:
        yield "has no steps"
    known: dict[str, ModelInput | ModelOutput] = {one.name: one for one in config.input}
    for step in config.ensemble_scheduling.step:
        model = configs.get(step.model_name)
        if model is None:
            yield f"step {step.model_name}: there is no such model"
            continue
        if str(step.model_version) not in _versions(models / step.model_name):
            yield f"step {step.model_name}: its version {step.model_version} is not there; name one that is"
        if config.max_batch_size > model.max_batch_size:
            yield f"max_batch_size is {config.max_batch_size}, over the {model.max_batch_size} of {step.model_name}"
        for tensor in model.input:
            source = step.input_map.get(tensor.name, "")
            yield from _of_tensor(f"step {step.model_name}: input {tensor.name}", tensor, known.get(source))
        known |= {step.output_map[one.name]: one for one in model.output if one.name in step.output_map}
    for output in config.output:
        yield from _of_tensor(f"output {output.name}", output, known.get(output.name))


def _of_tensor(
    what: str, wanted: ModelInput | ModelOutput, given: ModelInput | ModelOutput | None
) -> Iterator[str]:
    if given is None:
        yield f"{what}: comes from nowhere"
    elif (wanted.data_type, list(wanted.dims)) != (given.data_type, list(given.dims)):
        yield f"{what}: is {_shown(wanted)}, and is given {_shown(given)}"


def _shown(tensor: ModelInput | ModelOutput) -> str:
    return f"{DataType.Name(tensor.data_type)} {list(tensor.dims)}"
