"""A release insists on the versions it was published for."""

import importlib.metadata
import platform

import pytest

from serve.models import environment
from serve.models.environment import WrongEnvironment

INSTALLED = {"numpy": "1.26.4", "pillow": "13.0.0"}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    packages = dict(INSTALLED)

    def version(name: str) -> str:
        if name not in packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(platform, "python_version", lambda: "3.11.7")
    return packages


def test_what_is_pinned_passes_and_is_told() -> None:
    assert environment.check("3.11", INSTALLED) == "Python 3.11.7, numpy 1.26.4, pillow 13.0.0"


@pytest.mark.parametrize("numpy", ["2.0.0", "2.4.6", "3.1"])
def test_numpy_2_is_refused_whatever_is_pinned(installed: dict[str, str], numpy: str) -> None:
    installed["numpy"] = numpy
    with pytest.raises(
        WrongEnvironment, match=f"numpy {numpy} is installed .* silently wrong; it needs numpy"
    ):
        environment.check("3.11", {**INSTALLED, "numpy": numpy})


@pytest.mark.parametrize(
    ("python", "packages", "words"),
    [
        ("3.12", INSTALLED, r"Python 3\.11\.7 is installed .* published for Python 3\.12"),
        ("3.1", INSTALLED, r"Python 3\.11\.7 is installed .* published for Python 3\.1"),
        (
            "3.11",
            {**INSTALLED, "pillow": "12.1.0"},
            r"pillow 13\.0\.0 is installed .* published for pillow 12\.1\.0",
        ),
        (
            "3.11",
            {**INSTALLED, "numpy": "1.26.3"},
            r"numpy 1\.26\.4 is installed .* published for numpy 1\.26\.3",
        ),
        ("3.11", {**INSTALLED, "onnxruntime": "1.32.0"}, "onnxruntime is not installed"),
    ],
)
def test_other_versions_are_refused_with_both(python: str, packages: dict[str, str], words: str) -> None:
    with pytest.raises(WrongEnvironment, match=words):
        environment.check(python, packages)
