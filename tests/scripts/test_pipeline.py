"""The pipeline hands each stage what the one before made, stops at the first failure, and leaves nothing running."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts import pipeline

# Stands in for `python -m train …` and `python -m serve …`: notes how it was called, does what BEHAVIOUR says for
# its stage, else writes what that stage promises.
FAKE_STAGE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

folder = Path(os.environ["STAGES"])
side, stage, *options = sys.argv[2:]
with (folder / "calls.jsonl").open("a") as calls:
    calls.write(json.dumps([side, stage, *options]) + "\\n")
print(f"{stage} at work", file=sys.stderr)

def wait_for_signal(number, frame):
    (folder / "signalled").write_text(signal.Signals(number).name)
    sys.exit(1)

behaviour = json.loads(os.environ["BEHAVIOUR"])
wanted = behaviour.get(stage, "")
if wanted.startswith("exit "):
    sys.exit(int(wanted.split()[1]))
if wanted == "die":
    os.kill(os.getpid(), signal.SIGKILL)
if wanted == "leave a child":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (folder / "child").write_text(str(child.pid))
    sys.exit(1)
if wanted == "wait":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, wait_for_signal)
    (folder / "waiting").touch()
    time.sleep(600)
if wanted == "print nothing":
    sys.exit(0)

made = folder / {"export": "bundles/digits/v7"}.get(stage, stage)
made.mkdir(parents=True, exist_ok=True)
if stage == "evaluate":
    metrics = {"checkpoint": "step-00000042", "split": "test", "samples": 360, "accuracy": 0.99166, "loss": 0.1}
    (made / "metrics.json").write_text(json.dumps(metrics))
if stage == "export":
    (made / "parity.json").write_text(json.dumps({"verdict": "passed"}))
if stage == "smoke":
    made = Path(options[options.index("--output") + 1])
    speed = {"requests_per_second": 412.3, "p50_ms": 2.14, "p99_ms": 4.86, "images": 360}
    agreeing = 359 if wanted == "disagree" else 360
    protocols = {"http": {**speed, "agreeing": 360}, "grpc": {**speed, "agreeing": agreeing}}
    made.write_text(json.dumps({"verdict": "passed", "protocols": protocols, "bad_inputs": []}))
print(made)
"""


@dataclass(frozen=True)
class Checkout:
    """A checkout whose two environments run FAKE_STAGE."""

    root: Path
    stages: Path
    monkeypatch: pytest.MonkeyPatch
    capture: pytest.CaptureFixture[str]

    def run(self, *arguments: str, **behaviour: str) -> tuple[int, str, str]:
        """Run the pipeline; exit code, stdout and stderr, those of the stages included."""
        self.monkeypatch.setattr(pipeline, "ROOT", self.root)
        self.monkeypatch.setenv("STAGES", str(self.stages))
        self.monkeypatch.setenv("BEHAVIOUR", json.dumps(behaviour))
        code = pipeline.main(list(arguments))
        return (code, *self.capture.readouterr())

    def start(self, **behaviour: str) -> subprocess.Popen[str]:
        """Start the pipeline as a process of its own, to be sent signals, and wait until a stage waits."""
        shutil.copy(pipeline.__file__, self.root / "scripts")
        settings = {"STAGES": str(self.stages), "BEHAVIOUR": json.dumps(behaviour)}
        process = subprocess.Popen(
            [sys.executable, str(self.root / "scripts" / "pipeline.py")],
            env={**os.environ, **settings},
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_until((self.stages / "waiting").exists, "the stage to start")
        return process

    def calls(self) -> list[list[str]]:
        """How the stages were called, in order."""
        return [json.loads(line) for line in (self.stages / "calls.jsonl").read_text().splitlines()]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Checkout:
    root, stages = tmp_path / "a checkout", tmp_path / "made here"
    stages.mkdir()
    (root / "scripts").mkdir(parents=True)
    (root / "fake_stage.py").write_text(FAKE_STAGE)
    for side in ("train", "serve"):
        python = root / ".venv" / side / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{root}/fake_stage.py" "$@"\n')
        python.chmod(0o755)
    return Checkout(root, stages, monkeypatch, capfd)


def errors(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("error:")]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"waited 30 s for {what}"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether the process exists and is more than an entry that nobody has collected yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_table_tells_what_was_made(checkout: Checkout) -> None:
    code, stdout, stderr = checkout.run()
    assert code == 0, stderr
    served = "360/360 agree  412 requests/s  p50 2.1 ms  p99 4.9 ms"
    assert stdout.splitlines() == [
        "",
        "test accuracy     0.9917 (360 images)",
        "checkpoint        step-00000042",
        "bundle            digits/v7",
        "parity            passed",
        f"served over HTTP  {served}",
        f"served over gRPC  {served}",
        f"report            {checkout.stages / 'report'}",
    ]
    assert "[4/8] export\nexport at work\n[4/8] export: 0." in stderr


def test_each_stage_is_handed_what_the_ones_before_it_made(checkout: Checkout) -> None:
    checkout.run("--config", "my config.yaml", "--training.epochs", "3")
    settings = ["--config", "my config.yaml", "--training.epochs", "3"]
    made: Callable[[str], str] = lambda name: str(checkout.stages / name)  # noqa: E731
    calls = checkout.calls()
    smoke_file = calls[5][-1]
    bundle = made("bundles/digits/v7")
    expected = ["--images", made("data"), "--bundle", bundle, "--evaluation", made("evaluate")]
    assert calls == [
        ["train", "data", *settings],
        ["train", "fit", *settings],
        ["train", "evaluate", *settings],
        ["train", "export", *settings],
        ["serve", "publish", "--bundle", bundle, "--no-promote"],
        ["serve", "smoke", "--release", made("publish"), *expected, "--output", smoke_file],
        ["serve", "promote", "publish"],
        ["train", "report", *settings, "--smoke", smoke_file],
    ]


def test_two_pipelines_do_not_write_to_one_smoke_file(checkout: Checkout) -> None:
    checkout.run()
    checkout.run()
    files = [call[-1] for call in checkout.calls() if call[1] == "smoke"]
    assert len(set(files)) == 2
    assert not any(Path(file).exists() for file in files)


@pytest.mark.parametrize(
    ("behaviour", "exit_code", "line"),
    [
        ("exit 1", 1, "error: [4/8] export failed with exit code 1; what it says is above"),
        ("exit 3", 1, "error: [4/8] export failed with exit code 3; what it says is above"),
        ("exit 2", 2, "error: [4/8] export failed with exit code 2; what it says is above"),
        ("exit 75", 75, "error: [4/8] export failed with exit code 75; what it says is above"),
        ("die", 1, "error: [4/8] export was killed by SIGKILL; what it says is above"),
        ("print nothing", 1, "error: [4/8] export: ended well but printed no path of what it made"),
    ],
)
def test_first_failing_stage_is_named_and_ends_the_pipeline(
    checkout: Checkout, behaviour: str, exit_code: int, line: str
) -> None:
    code, stdout, stderr = checkout.run(export=behaviour)
    assert (code, stdout, errors(stderr)) == (exit_code, "", [line])
    assert [call[1] for call in checkout.calls()] == ["data", "fit", "evaluate", "export"]


def test_answers_that_disagree_with_evaluation_are_a_failure(checkout: Checkout) -> None:
    code, _, stderr = checkout.run(smoke="disagree")
    assert code == 1
    assert errors(stderr) == ["error: served over gRPC: only 359 of 360 answers agree with evaluation"]


def test_missing_environment_is_told_before_anything_runs(checkout: Checkout) -> None:
    shutil.rmtree(checkout.root / ".venv" / "serve")
    code, _, stderr = checkout.run()
    assert code == 1
    assert not (checkout.stages / "calls.jsonl").exists()
    assert errors(stderr)[0].endswith(".venv/serve/bin/python is not there; run `make setup`")


@pytest.mark.parametrize(
    ("number", "exit_code", "said"),
    [
        (signal.SIGINT, 130, "stopped by SIGINT"),
        (signal.SIGTERM, 75, "stopped by SIGTERM; run it again"),
        (signal.SIGHUP, 75, "stopped by SIGHUP; run it again"),
    ],
)
def test_signal_is_passed_on_to_the_running_stage(
    checkout: Checkout, number: signal.Signals, exit_code: int, said: str
) -> None:
    process = checkout.start(fit="wait")
    process.send_signal(number)
    _, stderr = process.communicate(timeout=30)
    assert (checkout.stages / "signalled").read_text() == number.name
    assert process.returncode == exit_code
    assert errors(stderr) == [f"error: [2/8] fit: {said}"]
    assert "Traceback" not in stderr


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_second_signal_ends_a_stage_that_ignores_the_first(
    checkout: Checkout, number: signal.Signals, exit_code: int
) -> None:
    python = checkout.root / ".venv/train/bin/python"
    deaf = "import signal, time; "
    deaf += f"signal.signal({number.value}, lambda *_: open({str(checkout.stages / 'heard')!r}, 'w')); "
    deaf += f"open({str(checkout.stages / 'waiting')!r}, 'w'); time.sleep(600)"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{deaf}"\n')
    process = checkout.start()
    process.send_signal(number)
    wait_until((checkout.stages / "heard").exists, "the stage to hear the first signal")
    assert process.poll() is None
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == exit_code


def test_nothing_that_a_stage_started_outlives_it(checkout: Checkout) -> None:
    code, _, _ = checkout.run(fit="leave a child")
    assert code == 1
    child = int((checkout.stages / "child").read_text())
    wait_until(lambda: not is_running(child), "the child to end")


@pytest.mark.parametrize("lacking", ["accuracy", "checkpoint"])
def test_stage_that_wrote_less_than_it_promises_is_a_clear_failure(checkout: Checkout, lacking: str) -> None:
    fake = checkout.root / "fake_stage.py"
    fake.write_text(fake.read_text().replace(f'"{lacking}"', '"something else"'))
    code, _, stderr = checkout.run()
    assert code == 1
    assert errors(stderr) == [
        f"error: the closing table lacks '{lacking}': a stage wrote less than it promises"
    ]
