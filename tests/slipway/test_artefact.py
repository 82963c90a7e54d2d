"""The list of a bundle's artefacts, and where each may be loaded."""

import json
import platform
from pathlib import Path

import pytest

from slipway.artefact import (
    Artefact,
    ArtefactError,
    instructions,
    read_artefacts,
    read_default,
    require_runs_here,
    same_gpu,
    write_artefacts,
)

ONNX = Artefact(name="onnx", runtime="onnxruntime", precision="float32", files=("model.onnx",))
OPENVINO = Artefact(name="openvino-int8", runtime="openvino", precision="int8", files=("model.int8.xml",))
FOR_GPUS = Artefact(name="onnx-fp16", runtime="onnxruntime", precision="float16", files=("model.fp16.onnx",))
COMPILED = Artefact(
    name="aoti",
    runtime="aoti",
    precision="float32",
    files=("model.aoti.pt2",),
    requires={"machine": platform.machine(), "instructions": instructions()},
)


def test_list_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_artefacts(tmp_path, [ONNX, COMPILED])
    for artefact in (ONNX, COMPILED):
        (tmp_path / artefact.file).touch()
    assert read_artefacts(tmp_path) == (ONNX, COMPILED)
    assert json.loads((tmp_path / "artefacts.json").read_text())["default"] == "onnx"
    assert COMPILED.file == "model.aoti.pt2"


def test_another_than_onnx_is_served_where_the_list_says_so(tmp_path: Path) -> None:
    write_artefacts(tmp_path, [ONNX, OPENVINO], "openvino-int8")
    for artefact in (ONNX, OPENVINO):
        (tmp_path / artefact.file).touch()
    assert read_default(tmp_path) == OPENVINO
    assert OPENVINO.tolerance > ONNX.tolerance > 0


@pytest.mark.parametrize("default", ["aoti", "gone"])
def test_what_no_server_can_run_is_not_to_be_served(tmp_path: Path, default: str) -> None:
    write_artefacts(tmp_path, [ONNX, COMPILED], default)
    for artefact in (ONNX, COMPILED):
        (tmp_path / artefact.file).touch()
    with pytest.raises(
        ArtefactError, match=f"says that '{default}' is to be served, which is no artefact of onn"
    ):
        read_artefacts(tmp_path)


def test_what_is_for_gpus_is_not_to_be_served_everywhere(tmp_path: Path) -> None:
    write_artefacts(tmp_path, [ONNX, FOR_GPUS], "onnx-fp16")
    for artefact in (ONNX, FOR_GPUS):
        (tmp_path / artefact.file).touch()
    with pytest.raises(
        ArtefactError, match="'onnx-fp16' is to be served everywhere, but it is for GPUs only"
    ):
        read_default(tmp_path)
    assert [each.for_gpus for each in (ONNX, OPENVINO, COMPILED, FOR_GPUS)] == [False, False, False, True]


def test_missing_list_is_told(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match=r"artefacts\.json: is not there; the bundle was exported before"):
        read_artefacts(tmp_path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("no JSON", "cannot be read as a list of artefacts"),
        ('{"format": "slipway-artefacts/9"}', "has format 'slipway-artefacts/9'"),
        ('{"format": "slipway-artefacts/1", "artefacts": [{"name": "onnx"}]}', "cannot be read as a list"),
        ('{"format": "slipway-artefacts/1", "artefacts": []}', "cannot be read as a list"),
        ('{"format": "slipway-artefacts/1", "artefacts": [], "default": "onnx"}', "lists no artefact 'onnx'"),
    ],
)
def test_broken_list_is_told_by_file(tmp_path: Path, content: str, complaint: str) -> None:
    (tmp_path / "artefacts.json").write_text(content)
    with pytest.raises(ArtefactError, match=complaint):
        read_artefacts(tmp_path)


@pytest.mark.parametrize("name", ["gone.onnx", "../model.onnx"])
def test_file_that_is_not_in_the_bundle_is_told(tmp_path: Path, name: str) -> None:
    write_artefacts(tmp_path, [Artefact(**{**vars(ONNX), "files": (name,)})])
    with pytest.raises(ArtefactError, match=f"lists '{name}', which is no file of this bundle"):
        read_artefacts(tmp_path)


@pytest.mark.parametrize("name", ["model.py", "numpy.py", "serving.json", "model.so"])
def test_file_that_would_be_run_or_believed_where_it_is_served_is_none_of_an_artefact(
    tmp_path: Path, name: str
) -> None:
    """A release puts the files of its artefact beside its own code."""
    (tmp_path / name).touch()
    write_artefacts(tmp_path, [Artefact(**{**vars(ONNX), "files": (name,)})])
    with pytest.raises(ArtefactError, match=f"lists '{name}'; an artefact's files end in .onnx, "):
        read_artefacts(tmp_path)


def test_what_was_built_here_runs_here() -> None:
    require_runs_here(ONNX)
    require_runs_here(COMPILED)


@pytest.mark.parametrize(
    ("what", "wanted", "complaint"),
    [
        ("machine", "riscv128", "was built for machine riscv128, and this machine has "),
        ("instructions", ["amx_quantum"], "was built for amx_quantum, and this machine has no amx_quantum"),
        ("numpy", "0.0.1", "was built for numpy 0.0.1, and this machine has "),
        ("no-such-package", "1.0", "was built for no-such-package 1.0, and this machine has none"),
    ],
)
def test_what_was_built_for_another_machine_is_refused(what: str, wanted: object, complaint: str) -> None:
    """Case C10."""
    artefact = Artefact(**{**vars(COMPILED), "requires": {what: wanted}})
    with pytest.raises(ArtefactError, match=rf"aoti \(model\.aoti\.pt2\): {complaint}"):
        require_runs_here(artefact)


H200 = {"name": "NVIDIA H200", "capability": "9.0", "cuda": "13.0"}


@pytest.mark.parametrize(
    ("found", "runs"),
    [
        (H200, True),
        ({**H200, "name": "NVIDIA H100 PCIe"}, True),
        ({**H200, "capability": "8.6"}, False),
        ({**H200, "capability": "10.0"}, False),
        ({**H200, "cuda": "12.8"}, False),
        (None, False),
    ],
)
def test_compiled_for_a_gpu_runs_on_those_of_its_capability_and_cuda(
    found: dict[str, str] | None, runs: bool
) -> None:
    """Case C10."""
    assert same_gpu(H200, found) is runs


def test_what_was_built_for_another_gpu_is_refused_with_both() -> None:
    """Case C10."""
    artefact = Artefact(**{**vars(COMPILED), "requires": {**COMPILED.requires, "gpu": H200}})
    require_runs_here(artefact, H200)
    built = r"was built for NVIDIA H200 \(compute capability 9\.0, CUDA 13\.0\), and this machine has"
    with pytest.raises(ArtefactError, match=rf"{built} no GPU that PyTorch can use"):
        require_runs_here(artefact)
    a10 = {"name": "NVIDIA A10", "capability": "8.6", "cuda": "13.0"}
    with pytest.raises(ArtefactError, match=rf"{built} NVIDIA A10 \(compute capability 8\.6, CUDA 13\.0\)"):
        require_runs_here(artefact, a10)
