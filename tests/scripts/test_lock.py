"""The locks are what their sources say, name no index, and keep CUDA out of serving (cases E02, E07)."""

import re
import shutil
from pathlib import Path

import pytest

from scripts import lock
from slipway import compatibility

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the requirements of this checkout, to be spoilt."""
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    return tmp_path


def locked(name: str) -> dict[str, str]:
    return lock.pins((ROOT / "requirements" / f"{name}.lock").read_text(encoding="utf-8"))


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_locks_of_this_checkout_are_current() -> None:
    assert lock.check(ROOT) == []


@pytest.mark.parametrize("name", ["serve", "dev"])
def test_serve_lock_has_no_torch_or_cuda_packages(name: str) -> None:
    heavy = re.compile(r"torch.*|lightning.*|nvidia-.*|cuda-.*|triton|onnxruntime-gpu|cupy.*")
    assert [package for package in locked(name) if heavy.fullmatch(package)] == []


def test_training_and_serving_decode_images_with_the_same_pillow() -> None:
    assert locked("train")["pillow"] == locked("serve")["pillow"]


@pytest.mark.parametrize("below", ["train", "serve"])
def test_dev_layer_changes_no_version_of_what_is_below(below: str) -> None:
    tools, environment = locked("dev"), locked(below)
    shared = tools.keys() & environment.keys()
    assert shared
    assert {name: tools[name] for name in shared} == {name: environment[name] for name in shared}


@pytest.mark.parametrize(
    "name", ["train", "serve", "server", "dev", "benchmark", "deploy", "peers", "extras"]
)
def test_stale_lock_is_detected(checkout: Path, name: str) -> None:
    with (checkout / f"requirements/{name}.in").open("a") as file:
        file.write("six==1.17.0\n")
    assert lock.check(checkout) == [
        f"requirements/{name}.lock: requirements/{name}.in has changed since it was made; run `make lock`"
    ]


def test_layer_is_stale_when_a_lock_below_it_was_made_again(checkout: Path) -> None:
    below = checkout / "requirements/serve.lock"
    body = lock.body_of(below.read_text(encoding="utf-8")).replace("idna==3.20", "idna==3.19")
    serve = next(layer for layer in lock.LOCKS if layer.name == "serve")
    below.write_text("\n".join([*lock.header(checkout, serve, body), body]), encoding="utf-8")
    assert lock.check(checkout) == [
        f"requirements/{layer}.lock: requirements/serve.lock has changed since it was made; run `make lock`"
        for layer in ("dev", "deploy", "peers")
    ]


def test_lock_edited_by_hand_is_detected(checkout: Path) -> None:
    replace(checkout / "requirements/dev.lock", "pytest==9.2.0", "pytest==9.1.0")
    assert lock.check(checkout) == [
        "requirements/dev.lock: was edited by hand, or made for another Python or platform; run `make lock`",
        "requirements/deploy.lock: requirements/dev.lock has changed since it was made; run `make lock`",
        "requirements/peers.lock: requirements/dev.lock has changed since it was made; run `make lock`",
        "requirements/extras.lock: requirements/dev.lock has changed since it was made; run `make lock`",
    ]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("six==1.17.0", "has no hash for `six==1.17.0`"),
        ("six>=1.17.0 --hash=sha256:" + "0" * 64, "has no exact version for"),
        ("-i wheels", "`-i wheels` says where to install from"),
        ("six @ file:///wheels/six.whl", "says where to install from"),
    ],
)
def test_line_that_leaves_something_open_is_detected(checkout: Path, line: str, complaint: str) -> None:
    with (checkout / "requirements/serve.lock").open("a") as file:
        file.write(f"{line}\n")
    assert any(complaint in problem for problem in lock.check(checkout))


def test_source_that_is_not_an_exact_pin_is_detected_with_its_line(checkout: Path) -> None:
    replace(checkout / "requirements/serve.in", "pillow==13.0.0", "pillow>=13")
    problem = "requirements/serve.in:4: `pillow>=13` is not an exact pin; write name==version"
    assert problem in lock.check(checkout)


def test_missing_lock_is_detected(checkout: Path) -> None:
    (checkout / "requirements/train.lock").unlink()
    assert lock.check(checkout) == ["requirements/train.lock: is missing; restore it or run `make lock`"]


def test_pin_that_differs_from_the_compatibility_table_is_detected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    table = tmp_path / "compatibility.toml"
    shutil.copy(compatibility.TABLE, table)
    replace(table, 'torch = "2.14.1"', 'torch = "2.14.0"')
    monkeypatch.setattr(compatibility, "load", lambda: compatibility.read(table))
    assert lock.check(ROOT) == [
        (
            "requirements/train.lock: has torch 2.14.1, but src/slipway/compatibility.toml says 2.14.0; "
            "change one of them, then run `make lock`"
        )
    ]


def test_check_exits_1_with_a_sentence(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lock, "ROOT", checkout)
    assert lock.main(["--check"]) == 0
    (checkout / "requirements/train.lock").unlink()
    assert lock.main(["--check"]) == 1
    assert capsys.readouterr().err.startswith("error: requirements/train.lock: is missing")
