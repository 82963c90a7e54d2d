"""Everything that names a version names the one in the compatibility table."""

import platform
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from scripts import environment
from slipway import compatibility

ROOT = Path(__file__).resolve().parents[2]
TABLE = compatibility.load()


def installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def test_this_environment_has_the_versions_of_the_table() -> None:
    side = TABLE.train if installed("torch") else TABLE.serve
    assert {package: installed(package) for package in side} == side
    assert platform.python_version().startswith(f"{TABLE.python}.")


def test_environments_are_made_with_the_python_of_the_table() -> None:
    assert TABLE.python == environment.PYTHON


def test_package_may_run_on_the_pythons_of_the_table() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    allowed = SpecifierSet(project["requires-python"])
    assert TABLE.python in allowed
    assert TABLE.triton.container.python in allowed


def test_dockerfile_builds_on_the_images_of_the_table() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert dict(re.findall(r"^ARG (\w+_IMAGE)=(\S+)$", dockerfile, re.MULTILINE)) == {
        "NGINX_IMAGE": TABLE.docker.nginx_image,
        "PYTHON_IMAGE": TABLE.docker.python_image,
        "TRITON_IMAGE": TABLE.triton.container.image,
    }
    assert TABLE.docker.python_image.startswith(f"python:{TABLE.python}.")
    assert f":{TABLE.triton.container.release}-" in TABLE.triton.container.image


def test_exported_models_load_in_every_triton_of_the_table() -> None:
    for triton in (TABLE.triton.embedded, TABLE.triton.container):
        assert TABLE.export.opset <= triton.max_opset
        assert TABLE.export.ir_version <= triton.max_ir_version


def test_embedded_triton_reads_the_numpy_of_serving_correctly() -> None:
    assert TABLE.serve["numpy"] in SpecifierSet(TABLE.triton.embedded.numpy)


def test_parity_is_judged_by_the_onnxruntime_that_serves() -> None:
    assert TABLE.train["onnxruntime"] == TABLE.serve["onnxruntime"]


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("opset = 20\n", "", "export.opset is missing"),
        ("opset = 20\n", "opset = 20\nopsett = 21\n", "export.opsett is not known"),
        ("opset = 20\n", 'opset = "20"\n', "export.opset is '20', which is not of type int"),
        ("[docker]", "[podman]", "has no 'docker'"),
    ],
)
def test_slip_in_the_table_is_named(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    path = tmp_path / "compatibility.toml"
    text = compatibility.TABLE.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(complaint)) as caught:
        compatibility.read(path)
    assert str(path) in str(caught.value)
