"""Environments are made once, made again when what they are made from changes, and never left half-made."""

import base64
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from scripts import environment

SCRIPT = Path(environment.__file__)
STUB = "pytriton/tritonserver/python_backend_stubs/3.11/triton_python_backend_stub"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with a lock for everything, all of them empty."""
    root = tmp_path / "a checkout"
    (root / "requirements").mkdir(parents=True)
    for layer in ("train", "serve", "server", "dev", "benchmark", "deploy", "peers", "extras"):
        (root / f"requirements/{layer}.lock").write_text(f"# {layer}\n", encoding="utf-8")
    monkeypatch.setattr(environment, "ROOT", root)
    return root


def raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def change_lock(checkout: Path, layer: str) -> None:
    with (checkout / f"requirements/{layer}.lock").open("a", encoding="utf-8") as file:
        file.write("# changed\n")


@dataclass
class Steps:
    """Stands in for venv and pip: notes what was asked for, and makes what a step would leave behind.

    cut_short: a step that contains this text raises KeyboardInterrupt, as Ctrl-C does.
    """

    done: list[str] = field(default_factory=list)
    cut_short: str | None = None

    def run(self, step: str, command: list[str], busy: int) -> None:
        self.done.append(step)
        if self.cut_short and self.cut_short in step:
            raise KeyboardInterrupt
        if "venv" in command:
            Path(command[-1], "lib", f"python{environment.PYTHON}", "site-packages").mkdir(parents=True)

    def of(self, *arguments: str) -> list[str]:
        """The steps that a run with these arguments took."""
        self.done.clear()
        environment.main(list(arguments))
        return list(self.done)


@pytest.fixture
def steps(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Steps:
    fake = Steps()
    monkeypatch.setattr(environment, "run", fake.run)
    return fake


FROM_SCRATCH = [
    f".venv/train: making an environment of Python {sys.version.split()[0]}",
    ".venv/train: installing requirements/train.lock",
]
TOOLS = ".venv/train: installing requirements/dev.lock"


def test_environment_that_is_up_to_date_is_left_alone(steps: Steps) -> None:
    assert steps.of("train") == FROM_SCRATCH
    assert steps.of("train") == []


@pytest.mark.parametrize("link", [".venv", ".venv/train"])
def test_environment_of_another_checkout_is_left_alone(
    steps: Steps, checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], link: str
) -> None:
    """It would be removed as a stale one, because its checkout is not this."""
    theirs = tmp_path / "theirs"
    (theirs / "train").mkdir(parents=True)
    stamp = theirs / "train" / "train.stamp"
    stamp.touch()
    (checkout / link).parent.mkdir(exist_ok=True)
    (checkout / link).symlink_to(theirs if link == ".venv" else theirs / "train")
    assert environment.main(["train"]) == 1
    assert "an environment belongs to one checkout: remove the link" in capsys.readouterr().err
    assert stamp.exists()


def test_changed_lock_is_installed_from_scratch(steps: Steps, checkout: Path) -> None:
    steps.of("train")
    leftover = checkout / ".venv/train/leftover"
    leftover.touch()
    change_lock(checkout, "train")
    assert steps.of("train") == FROM_SCRATCH
    assert not leftover.exists()


def test_tools_go_on_top_of_a_finished_environment(steps: Steps) -> None:
    steps.of("train")
    assert steps.of("train", "--dev") == [TOOLS]
    assert steps.of("train", "--dev") == []
    assert steps.of("train") == []


def test_changed_tools_are_installed_from_scratch(steps: Steps, checkout: Path) -> None:
    steps.of("train", "--dev")
    change_lock(checkout, "dev")
    assert steps.of("train") == [], "whoever asks for no tools need not wait for them"
    assert steps.of("train", "--dev") == [*FROM_SCRATCH, TOOLS]


def test_layers_of_tools_do_not_disturb_each_other(checkout: Path, steps: Steps) -> None:
    steps.of("train", "--dev")
    assert steps.of("train", "--benchmark") == [".venv/train: installing requirements/benchmark.lock"]
    assert steps.of("train", "--dev") == []


@pytest.mark.parametrize("cut_short", ["making", "train.lock", "dev.lock"])
def test_half_made_environment_is_made_from_scratch(steps: Steps, cut_short: str) -> None:
    steps.cut_short = cut_short
    steps.of("train", "--dev")
    steps.cut_short = None
    assert steps.of("train", "--dev") == [*FROM_SCRATCH, TOOLS]


def test_half_removed_environment_is_not_taken_for_the_old_one(
    steps: Steps, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps.of("train")
    lock = checkout / "requirements/train.lock"
    old = lock.read_bytes()
    change_lock(checkout, "train")
    with monkeypatch.context() as cut_short:
        cut_short.setattr(shutil, "rmtree", raise_interrupt)
        steps.of("train")
    lock.write_bytes(old)
    assert steps.of("train") == FROM_SCRATCH


def test_another_python_makes_the_environment_again(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    steps.of("train")
    monkeypatch.setattr("platform.python_version", lambda: "3.11.99")
    assert len(steps.of("train")) == 2


def test_moved_checkout_makes_the_environment_again(
    steps: Steps, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps.of("train")
    moved = checkout.rename(checkout.with_name("moved"))
    monkeypatch.setattr(environment, "ROOT", moved)
    assert steps.of("train") == FROM_SCRATCH


def test_wrong_python_is_told_in_one_line(
    steps: Steps, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("platform.python_version_tuple", lambda: ("3", "9", "18"))
    assert environment.main(["train"]) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: Slipway needs Python 3.11, but ")
    assert message.count("\n") == 1
    assert steps.done == []


def test_missing_libpython_is_explained_before_anything_is_downloaded(
    steps: Steps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_config_var", {"LIBDIR": str(tmp_path / "usr/lib")}.get)
    assert environment.main(["server"]) == 1
    message = capsys.readouterr().err
    assert "libpython3.11.so.1.0 was not found" in message
    assert str(tmp_path / "lib") in message
    assert str(tmp_path / "usr/lib") in message
    assert "the package libpython3.11" in message
    assert "--enable-shared" in message
    assert not [step for step in steps.done if "server.lock" in step]


# From here on with the real venv and pip, which take seconds, and packages made on the spot.


@dataclass(frozen=True)
class RealCheckout:
    """A checkout in a path with a space, whose locks name packages that lie in `wheels`."""

    root: Path
    wheels: Path

    def package(self, layer: str, name: str, files: dict[str, str]) -> None:
        """Make `layer` consist of one package with these files."""
        path = self.wheels / f"{name}-1.0-py3-none-any.whl"
        info = f"{name}-1.0.dist-info"
        contents = {
            **files,
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        record = [f"{file},{_record_hash(text)},{len(text)}" for file, text in contents.items()]
        with zipfile.ZipFile(path, "w") as archive:
            for file, text in contents.items():
                archive.writestr(file, text)
            archive.writestr(f"{info}/RECORD", "\n".join([*record, f"{info}/RECORD,,", ""]))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        lock = self.root / "requirements" / f"{layer}.lock"
        lock.write_text(f"{name}==1.0 --hash=sha256:{digest}\n", encoding="utf-8")

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels)}
        command = [sys.executable, str(self.root / "scripts" / "environment.py"), *arguments]
        return subprocess.Popen(
            command,
            env={**os.environ, **settings},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str) -> tuple[int, str]:
        """Exit code and stderr."""
        process = self.start(*arguments)
        _, stderr = process.communicate(timeout=120)
        return process.returncode, stderr

    def python(self, side: str, code: str) -> str:
        """What `code` prints in an environment, started in another directory."""
        command = [str(self.root / ".venv" / side / "bin" / "python"), "-c", code]
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True)
        return done.stdout.strip()


def _record_hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256={base64.urlsafe_b64encode(digest).decode().rstrip('=')}"


@pytest.fixture
def real(tmp_path: Path) -> RealCheckout:
    wheels, root = tmp_path / "wheels", tmp_path / "a checkout"
    wheels.mkdir()
    for folder in ("requirements", "scripts", "src/slipway", "train"):
        (root / folder).mkdir(parents=True)
    shutil.copy(SCRIPT, root / "scripts")
    (root / "src/slipway/__init__.py").write_text("NAME = 'slipway'\n", encoding="utf-8")
    (root / "train/__init__.py").write_text("NAME = 'train'\n", encoding="utf-8")
    checkout = RealCheckout(root, wheels)
    checkout.package("train", "engine", {"engine.py": "NAME = 'engine'\n"})
    checkout.package("serve", "client", {"client.py": ""})
    return checkout


@pytest.mark.slow
def test_two_runs_at_once_make_one_environment_that_works_from_anywhere(real: RealCheckout) -> None:
    first, second = real.start("train"), real.start("train")
    told = [process.communicate(timeout=120)[1] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0]
    assert sorted(text.count("installing") for text in told) == [0, 1]
    assert any("another run is making it; waiting" in text for text in told)
    code = "import engine, slipway, train; print(engine.NAME, slipway.NAME, train.NAME)"
    assert real.python("train", code) == "engine slipway train"


@pytest.mark.slow
def test_environment_of_a_killed_run_is_repaired_by_the_next(real: RealCheckout) -> None:
    process = real.start("train")
    stamp = real.root / ".venv/train/train.stamp"
    deadline = time.monotonic() + 60
    while not stamp.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    code, stderr = real.run("train")
    assert code == 0
    # The pip that outlived its run is waited for first, if it is not through yet.
    assert stderr.splitlines()[-len(FROM_SCRATCH) :] == FROM_SCRATCH
    assert real.python("train", "import engine; print(engine.NAME)") == "engine"


@pytest.mark.slow
def test_failed_install_shows_what_pip_said_and_is_not_taken_for_done(real: RealCheckout) -> None:
    lock = real.root / "requirements/train.lock"
    lock.write_text("engine==1.0 --hash=sha256:" + "0" * 64 + "\n", encoding="utf-8")
    code, stderr = real.run("train")
    assert code == 1
    assert "error: .venv/train: installing requirements/train.lock: failed with exit code 1" in stderr
    assert "DO NOT MATCH THE HASHES" in stderr
    assert environment.installed(real.root / ".venv/train", "train") == {}


@pytest.mark.slow
def test_server_is_unpacked_outside_the_environments_and_runs_this_python(real: RealCheckout) -> None:
    files = {STUB: "stub", "pytriton/tritonserver/backends/python/keep": "", "nvidia_pytriton.libs/keep": ""}
    real.package("server", "nvidia_pytriton", files)
    code, stderr = real.run("server")
    assert code == 0, stderr
    server = real.root / ".venv/server"
    stub = server / "pytriton/tritonserver/backends/python/triton_python_backend_stub"
    assert stub.read_text(encoding="utf-8") == "stub"
    library = server / "nvidia_pytriton.libs/libpython3.11.so.1.0"
    assert library.resolve() == environment.find_libpython().resolve()
    assert real.python("serve", "import importlib.util as i; print(i.find_spec('pytriton'))") == "None"
    assert real.run("server") == (0, "")
