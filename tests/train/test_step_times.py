"""Made-up recordings, of a CPU and of CUDA: where time goes to when work overlaps, nests, and runs on many threads."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from train.step_times import (
    HIDING,
    KINDS,
    WAITING,
    Event,
    Kind,
    Span,
    events_in,
    exposed,
    most_expensive,
    spans_of,
)

MAIN, GLOO, AUTOGRAD, LOADER = 1, 2, 3, 4
STREAM, COPIES, NCCL = "stream 7", "stream 8", "stream 9"


def op(name: str, start: int, end: int, thread: int = MAIN) -> Event:
    return Event(name=name, category="cpu_op", thread=thread, start=start, end=end)


def named(name: str, start: int, end: int, thread: int = MAIN) -> Event:
    return Event(name=name, category="user_annotation", thread=thread, start=start, end=end)


def kernel(start: int, end: int, name: str = "gemm", stream: str = STREAM) -> Event:
    return Event(name=name, category="kernel", thread=stream, start=start, end=end)


def copy(start: int, end: int, direction: str = "HtoD", stream: str = STREAM) -> Event:
    name = f"Memcpy {direction} (Pinned -> Device)"
    return Event(name=name, category="gpu_memcpy", thread=stream, start=start, end=end)


def times(*events: Event, launch: float = 0, start: int = 0, end: int = 100) -> dict[str, int]:
    """Those of the five kinds that took any time."""
    return {kind: time for kind, time in exposed(spans_of(events, launch), start, end).items() if time}


def test_nothing_recorded_is_all_overhead() -> None:
    assert times() == {"overhead": 100}


def test_operations_of_the_host_are_what_a_cpu_computes() -> None:
    assert times(op("aten::conv2d", 10, 40), op("torchvision::nms", 50, 60)) == {
        "compute": 40,
        "overhead": 60,
    }


def test_nested_operations_count_once() -> None:
    nested = [
        op("aten::conv2d", 10, 40),
        op("aten::convolution", 10, 39),
        op("aten::mkldnn_convolution", 12, 38),
    ]
    assert times(*nested) == {"compute": 30, "overhead": 70}
    assert most_expensive(spans_of(nested), 3) == [("aten::conv2d", 30)]


def test_what_only_stands_around_operations_computes_nothing() -> None:
    around = [
        named("Optimizer.step#AdamW.step", 0, 100),
        op("autograd::engine::evaluate_function: AddmmBackward0", 0, 90),
        op("AddmmBackward0", 1, 89),
        op("torch::autograd::AccumulateGrad", 90, 95),
        op("torch.distributed.ddp.reducer::copy_bucket_to_grad", 95, 99),
    ]
    assert times(*around) == {"overhead": 100}
    assert times(*around, op("aten::mm", 20, 60)) == {"compute": 40, "overhead": 60}


def test_compiled_code_of_a_cpu_is_computing() -> None:
    compiled = [op("Torch-Compiled Region: 0/0", 0, 90), op("## Call CompiledFxGraph fgoo ##", 10, 80)]
    assert times(*compiled, op("aten::convolution_backward", 20, 30)) == {"compute": 70, "overhead": 30}


def test_launching_is_overhead_of_each_operation_and_of_each_within_it() -> None:
    nested = [op("aten::to", 0, 40), op("aten::_to_copy", 5, 35), op("aten::copy_", 10, 30)]
    assert times(*nested, op("aten::relu", 50, 60), launch=5) == {"compute": 25 + 5, "overhead": 70}
    assert times(*nested, launch=20) == {"overhead": 100}


def test_threads_that_compute_at_the_same_time_count_once() -> None:
    """Operations of the autograd engine's thread while the main one waits for it, and in parallel to it."""
    assert times(op("aten::mm", 10, 50), op("aten::mm", 30, 80, AUTOGRAD)) == {"compute": 70, "overhead": 30}
    waits = op("autograd::engine::execute", 0, 100)
    assert times(waits, op("aten::mm", 30, 80, AUTOGRAD)) == {"compute": 50, "overhead": 50}


def test_threads_do_not_nest_in_each_other() -> None:
    outer, elsewhere = op("aten::mm", 0, 50), op("aten::add", 10, 20, AUTOGRAD)
    assert dict(most_expensive(spans_of([outer, elsewhere]), 2)) == {"aten::mm": 50, "aten::add": 10}


def test_what_a_loader_without_workers_computes_is_waiting_for_data() -> None:
    assert times(named(WAITING, 10, 60), op("aten::stack", 20, 50)) == {"data": 50, "overhead": 50}


def test_collective_costs_what_nothing_computes_behind() -> None:
    sending = named("gloo:all_reduce", 20, 80, GLOO)
    assert times(sending) == {"communication": 60, "overhead": 40}
    assert times(sending, op("aten::mm", 0, 50)) == {"compute": 50, "communication": 30, "overhead": 20}
    assert times(sending, op("aten::mm", 0, 100)) == {"compute": 100}


def test_what_a_collective_does_itself_is_communication() -> None:
    """FSDP on gloo copies within its thread; the call of it copies on the main one."""
    inside = [named("gloo:all_gather", 20, 80, GLOO), op("aten::copy_", 30, 40, GLOO)]
    assert times(*inside) == {"communication": 60, "overhead": 40}
    call = [op("c10d::allreduce_", 0, 30), op("aten::copy_", 5, 25)]
    assert times(*call, launch=10) == {"communication": 30, "overhead": 70}
    assert times(op("_c10d_functional::wait_tensor", 0, 30)) == {"communication": 30, "overhead": 70}


def test_host_beside_a_device_computes_nothing() -> None:
    host = [op("aten::conv2d", 0, 60), op("c10d::allreduce_", 60, 90)]
    assert times(*host, kernel(50, 70)) == {"compute": 20, "overhead": 80}


def test_waiting_for_data_costs_what_the_device_has_nothing_to_do_in() -> None:
    assert times(named(WAITING, 10, 60), kernel(0, 30)) == {"compute": 30, "data": 30, "overhead": 40}
    loader = op("aten::stack", 10, 60, LOADER)
    assert times(loader, kernel(0, 30)) == {"compute": 30, "overhead": 70}


def test_copy_to_the_device_costs_what_no_kernel_hides() -> None:
    assert times(copy(0, 50), kernel(50, 90)) == {"transfer": 50, "compute": 40, "overhead": 10}
    assert times(copy(0, 50, stream=COPIES), kernel(30, 90)) == {
        "transfer": 30,
        "compute": 60,
        "overhead": 10,
    }
    assert times(copy(40, 50, stream=COPIES), kernel(30, 90)) == {"compute": 60, "overhead": 40}


def test_only_copies_to_the_device_are_transfer() -> None:
    """A loss is read by a copy from it, and a layout is changed by one on it."""
    assert times(copy(0, 10, "DtoH"), copy(10, 30, "DtoD")) == {"compute": 30, "overhead": 70}


def test_message_of_nccl_costs_what_no_kernel_hides() -> None:
    sending = kernel(
        20, 80, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", NCCL
    )
    assert times(sending, kernel(0, 50)) == {"compute": 50, "communication": 30, "overhead": 20}
    assert times(sending, copy(70, 90)) == {"communication": 60, "transfer": 10, "overhead": 30}


def test_small_kernels_with_gaps_between_them_are_overhead() -> None:
    small = [kernel(start, start + 2) for start in range(0, 100, 10)]
    assert times(*small, *(op("aten::relu", first, last) for first, last in pairwise(range(0, 101, 10)))) == {
        "compute": 20,
        "overhead": 80,
    }


def test_only_the_measured_time_counts() -> None:
    assert times(kernel(0, 30), kernel(90, 200), start=20, end=100) == {"compute": 20, "overhead": 60}


def test_most_expensive_are_summed_by_name_and_compute_only() -> None:
    events = [
        kernel(0, 10),
        kernel(20, 30),
        kernel(0, 15, "relu"),
        kernel(0, 90, "ncclDevKernel_AllGather", NCCL),
    ]
    assert most_expensive(spans_of(events), 1) == [("gemm", 20)]


def test_trace_is_read_to_the_nanosecond() -> None:
    line = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "tid": 7, "ts": 5199441707355.652, "dur": 0.249}
    (event,) = events_in({"traceEvents": [{"ph": "M", "name": "process_name"}, line]})
    assert event == Event(
        name="aten::mm", category="cpu_op", thread=7, start=5199441707355652, end=5199441707355901
    )


spans = st.builds(
    lambda kind, start, length: Span(kind=kind, name="", start=start, end=start + length),
    st.sampled_from(HIDING),
    st.integers(0, 30),
    st.integers(0, 20),
)


@given(st.lists(spans, max_size=12))
def test_every_moment_is_that_of_the_kind_that_hides_the_others(found: list[Span]) -> None:
    expected: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    for moment in range(5, 40):
        going_on = {span.kind for span in found if span.start <= moment < span.end}
        expected[next((kind for kind in HIDING if kind in going_on), "overhead")] += 1
    assert exposed(found, 5, 40) == expected
