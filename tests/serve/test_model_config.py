"""One description, and its targets."""

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from serve import model_config
from serve.model_config import Description, Target
from serve.protocol import DEADLINE_SECONDS
from slipway.contract import Preprocessing, Signature

SIGNATURE = Signature(
    name="tiny",
    classes=("a", "b", "c"),
    preprocessing=Preprocessing(image_size=32, resize_size=36),
    mean=(0.5, 0.5, 0.5),
    std=(0.2, 0.2, 0.2),
    max_batch=16,
)


def description(*, target: Target = "embedded", runtime: str = "onnxruntime", cpus: int = 2) -> Description:
    return Description(
        signature=SIGNATURE, version=7, target=target, runtime=runtime, precision="float32", cpus=cpus
    )


def all_three(of: Description) -> list[ModelConfig]:
    return [model_config.preprocess(of), model_config.classifier(of), model_config.ensemble(of)]


def test_all_three_serve_the_version_of_the_bundle_and_no_other() -> None:
    for config in all_three(description()):
        assert list(config.version_policy.specific.versions) == [7]
        assert config.max_batch_size == 16
    assert [step.model_version for step in model_config.ensemble(description()).ensemble_scheduling.step] == [
        7,
        7,
    ]


def test_what_is_written_is_read_back_as_the_same_message() -> None:
    for config in all_three(description()):
        assert text_format.Parse(model_config.render(config), ModelConfig()) == config


def test_targets_differ_in_the_backend_of_the_classifier_and_nothing_else() -> None:
    embedded, container = all_three(description()), all_three(description(target="container"))
    assert (embedded[1].backend, container[1].backend) == ("python", "onnxruntime")
    container[1].backend = "python"
    assert embedded == container


def test_what_no_backend_of_the_container_is_proven_with_runs_in_python_in_both() -> None:
    for target in ("embedded", "container"):
        assert model_config.classifier(description(target=target, runtime="openvino")).backend == "python"


def test_on_gpus_runs_the_classifier_and_nothing_else() -> None:
    container, gpu = (
        all_three(description(target="container")),
        all_three(description(target="container-gpu")),
    )
    (group,) = gpu[1].instance_group
    assert (group.kind, group.count) == (group.KIND_GPU, 1)
    gpu[1].instance_group[0].CopyFrom(container[1].instance_group[0])
    assert gpu == container


def test_tensorrt_makes_one_engine_for_every_batch_and_changes_nothing_else() -> None:
    with_it = all_three(description(target="container-tensorrt"))
    (accelerator,) = with_it[1].optimization.execution_accelerators.gpu_execution_accelerator
    assert accelerator.name == "tensorrt"
    assert dict(accelerator.parameters) == {
        "precision_mode": "FP32",
        "trt_profile_min_shapes": "image:1x3x32x32",
        "trt_profile_opt_shapes": "image:16x3x32x32",
        "trt_profile_max_shapes": "image:16x3x32x32",
    }
    with_it[1].ClearField("optimization")
    assert with_it == all_three(description(target="container-gpu"))


@pytest.mark.parametrize("cpus", [1, 2, 3, 4, 6, 7, 16, 64])
def test_instances_times_threads_stay_within_the_cpus(cpus: int) -> None:
    """Case D10."""
    config = model_config.classifier(description(cpus=cpus))
    (group,) = config.instance_group
    threads = int(config.parameters["intra_op_thread_count"].string_value)
    assert threads >= 1
    assert cpus / 2 < group.count * threads <= cpus


def test_ensemble_says_nothing_that_triton_refuses_for_ensembles() -> None:
    said = {field.name for field, _ in model_config.ensemble(description()).ListFields()}
    assert not said & {"instance_group", "model_warmup", "optimization", "dynamic_batching"}


def test_queue_gives_up_before_the_client_does() -> None:
    """Case D09."""
    for config in all_three(description())[:2]:
        assert config.dynamic_batching.default_priority_level in range(
            1, config.dynamic_batching.priority_levels
        )
        policy = config.dynamic_batching.default_queue_policy
        assert 0 < policy.default_timeout_microseconds < DEADLINE_SECONDS * 1e6 / 2
        assert policy.max_queue_size > 0
