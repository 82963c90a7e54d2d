"""The configurations of the three Triton models, built as Triton's own protobuf messages.

    classify (ensemble):  encoded image -> preprocess -> uint8 pixels -> classifier -> logits, probabilities

All three carry the bundle's version, so they are promoted and rolled back together. One description serves all
targets: `embedded` runs ONNX Runtime or OpenVINO in Triton's Python backend, and so does `container`, but for ONNX
Runtime: that runs in Triton's own `onnxruntime` backend, which only NVIDIA's image has. `container-gpu` runs it there
on GPUs, and `container-tensorrt` has TensorRT compute there what it can.

Fused, `classify` is one Python model that does what the two steps do: a request goes to one process instead of two.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInput, ModelOutput, ModelWarmup

from slipway.contract import INPUT, LOGITS, PROBABILITIES, Signature

Target = Literal["embedded", "container", "container-gpu", "container-tensorrt"]
ON_GPUS: tuple[Target, ...] = ("container-gpu", "container-tensorrt")

CONFIGURATION = "config.pbtxt"
PREPROCESS = "preprocess"
CLASSIFIER = "classifier"
ENSEMBLE = "classify"
ENCODED = "encoded"
RELEASE = "release"

LABELS_FILE = "labels.txt"
WARMUP_IMAGE = "golden_encoded"
WARMUP_PIXELS = "golden_pixels"
THREADS = "intra_op_thread_count"

# One-thread instances answer more requests per second than one instance with as many threads, but each holds
# the model in memory and loads it at start; beyond this many, CPUs become threads.
MAX_INSTANCES = 4
# A full queue is answered 503 at once, and a request that waited this long is refused: well before clients give
# up (serve.client), so that nothing is computed for somebody who has left.
MAX_QUEUE_SIZE = 256
QUEUE_TIMEOUT_SECONDS = 10

# Whatever waits is served in this order, however long the rest has waited; each has a queue of its own.
Priority = Literal["probe", "interactive", "bulk"]
PRIORITIES: dict[Priority, int] = {"probe": 1, "interactive": 2, "bulk": 3}
DEFAULT_PRIORITY: Priority = "interactive"


@dataclass(frozen=True, kw_only=True)
class Description:
    """What the configurations are made from.

    runtime: what runs the model: onnxruntime or openvino. precision: what the model computes in.
    cpus: how many CPUs the server will have; instances x threads of a model stay within it.
    fused: one model, of this name, in place of the ensemble and its steps.
    """

    signature: Signature
    version: int
    target: Target
    runtime: str
    precision: str
    cpus: int
    fused: bool = False

    @property
    def backend(self) -> str:
        """Triton's, of the classifier."""
        return "onnxruntime" if self.target != "embedded" and self.runtime == "onnxruntime" else "python"

    @property
    def instances(self) -> int:
        return min(self.cpus, MAX_INSTANCES)

    @property
    def threads(self) -> int:
        """Of one classifier instance."""
        return self.cpus // self.instances


def preprocess(description: Description) -> ModelConfig:
    """Encoded bytes in, pixels out. Images of any length batch together, because one image is one string."""
    return ModelConfig(
        name=PREPROCESS,
        backend="python",
        max_batch_size=description.signature.max_batch,
        version_policy=_only(description.version),
        input=[_encoded_input()],
        output=[
            ModelOutput(name=INPUT, data_type="TYPE_UINT8", dims=_pixel_dims(description.signature)),
            _release_output(),
        ],
        instance_group=_instances(description),
        dynamic_batching=_dynamic_batching(),
        model_warmup=_warm_ups(description, ENCODED, "TYPE_STRING", [1], WARMUP_IMAGE),
    )


def classifier(description: Description) -> ModelConfig:
    """Pixels in, logits and probabilities out."""
    pixels = _pixel_dims(description.signature)
    config = ModelConfig(
        name=CLASSIFIER,
        backend=description.backend,
        max_batch_size=description.signature.max_batch,
        version_policy=_only(description.version),
        input=[ModelInput(name=INPUT, data_type="TYPE_UINT8", dims=pixels)],
        output=_answer_outputs(description.signature),
        instance_group=_on_gpus() if description.target in ON_GPUS else _instances(description),
        dynamic_batching=_dynamic_batching(),
        model_warmup=_warm_ups(description, INPUT, "TYPE_UINT8", pixels, WARMUP_PIXELS),
    )
    _limit_threads(config, description)
    if description.target == "container-tensorrt":
        _leave_to_tensorrt(config, description)
    return config


def fused(description: Description) -> ModelConfig:
    """What clients call, as one model: encoded bytes in, logits and probabilities out."""
    config = preprocess(description)
    config.name = ENSEMBLE
    del config.output[:]
    config.output.extend([*_answer_outputs(description.signature), _release_output()])
    _limit_threads(config, description)
    return config


def ensemble(description: Description) -> ModelConfig:
    """What clients call. It takes exactly this version of each step, never "the latest"."""
    config = ModelConfig(
        name=ENSEMBLE,
        platform="ensemble",
        max_batch_size=description.signature.max_batch,
        version_policy=_only(description.version),
        input=[_encoded_input()],
        output=[*_answer_outputs(description.signature), _release_output()],
    )
    steps = config.ensemble_scheduling.step
    steps.add(
        model_name=PREPROCESS,
        model_version=description.version,
        input_map={ENCODED: ENCODED},
        output_map={INPUT: INPUT, RELEASE: RELEASE},
    )
    steps.add(
        model_name=CLASSIFIER,
        model_version=description.version,
        input_map={INPUT: INPUT},
        output_map={LOGITS: LOGITS, PROBABILITIES: PROBABILITIES},
    )
    return config


def render(config: ModelConfig) -> str:
    """The text of config.pbtxt."""
    return text_format.MessageToString(config)


def read(model: Path) -> ModelConfig:
    """The configuration in a model's directory."""
    return text_format.Parse((model / CONFIGURATION).read_text(), ModelConfig())


def instances(models: Path) -> int:
    """How many instances of preprocessing a folder of models asks for."""
    model = models / PREPROCESS if (models / PREPROCESS).is_dir() else models / ENSEMBLE
    return sum(group.count for group in read(model).instance_group)


def _encoded_input() -> ModelInput:
    return ModelInput(name=ENCODED, data_type="TYPE_STRING", dims=[1])


def _release_output() -> ModelOutput:
    return ModelOutput(name=RELEASE, data_type="TYPE_STRING", dims=[1])


def _answer_outputs(signature: Signature) -> list[ModelOutput]:
    # The label file makes Triton's classification extension answer with names.
    return [
        ModelOutput(
            name=name, data_type="TYPE_FP32", dims=[len(signature.classes)], label_filename=LABELS_FILE
        )
        for name in (LOGITS, PROBABILITIES)
    ]


def _pixel_dims(signature: Signature) -> list[int]:
    size = signature.preprocessing.image_size
    return [3, size, size]


def _only(version: int) -> model_config_pb2.ModelVersionPolicy:
    return model_config_pb2.ModelVersionPolicy(
        specific=model_config_pb2.ModelVersionPolicy.Specific(versions=[version])
    )


def _limit_threads(config: ModelConfig, description: Description) -> None:
    """Left to itself, ONNX Runtime takes one thread for every core of the host, in every instance."""
    config.parameters[THREADS].string_value = str(description.threads)
    config.parameters["inter_op_thread_count"].string_value = "1"


def _instances(description: Description) -> list[model_config_pb2.ModelInstanceGroup]:
    return [model_config_pb2.ModelInstanceGroup(kind="KIND_CPU", count=description.instances)]


def _on_gpus() -> list[model_config_pb2.ModelInstanceGroup]:
    """One instance on each GPU that the server finds; without one it does not start."""
    return [model_config_pb2.ModelInstanceGroup(kind="KIND_GPU", count=1)]


def _leave_to_tensorrt(config: ModelConfig, description: Description) -> None:
    """One engine for all batches, made when the model is loaded: without a profile each larger batch makes a new one.

    The parameters are those of Triton's ONNX Runtime backend; another one's name makes it refuse the model.
    """
    largest = description.signature.max_batch
    profile = {"min": 1, "opt": largest, "max": largest}
    accelerator = config.optimization.execution_accelerators.gpu_execution_accelerator.add(name="tensorrt")
    accelerator.parameters["precision_mode"] = "FP16" if description.precision == "float16" else "FP32"
    for which, batch in profile.items():
        shape = "x".join(map(str, [batch, *_pixel_dims(description.signature)]))
        accelerator.parameters[f"trt_profile_{which}_shapes"] = f"{INPUT}:{shape}"


def _dynamic_batching() -> model_config_pb2.ModelDynamicBatching:
    """Batch what is waiting, wait for nothing: a queue delay of 3 ms halves throughput at low concurrency."""
    return model_config_pb2.ModelDynamicBatching(
        priority_levels=len(PRIORITIES),
        default_priority_level=PRIORITIES[DEFAULT_PRIORITY],
        default_queue_policy=model_config_pb2.ModelQueuePolicy(
            timeout_action="REJECT",
            default_timeout_microseconds=QUEUE_TIMEOUT_SECONDS * 1_000_000,
            max_queue_size=MAX_QUEUE_SIZE,
        ),
    )


def _warm_ups(
    description: Description, name: str, data_type: str, dims: list[int], file: str
) -> list[ModelWarmup]:
    """One image alone and a full batch. Triton refuses a warm-up on the ensemble, so each step has its own.

    `file` lies in <model>/warmup/ and holds one image, which Triton repeats. It has to be an input that the model
    answers well: an error during warm-up crashes the server.
    """
    warm_ups = []
    for batch_size in sorted({1, description.signature.max_batch}):
        warm_up = ModelWarmup(name=f"golden_{batch_size}", batch_size=batch_size)
        warm_up.inputs[name].data_type = model_config_pb2.DataType.Value(data_type)
        warm_up.inputs[name].dims.extend(dims)
        warm_up.inputs[name].input_data_file = file
        warm_ups.append(warm_up)
    return warm_ups
