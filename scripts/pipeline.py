"""The main job: data, fit, evaluate, export, publish, smoke, promote, report. Each stage is a command of its own.

    pipeline.py --config configs/digits.yaml [--training.epochs 3 ...]

Options other than --config are passed on to the stages that read the configuration. A stage tells its progress
on stderr and, as the only line on stdout, the path of what it made or found already made; the next stage is
handed that path. The first stage that fails ends the pipeline.

Exit codes are those of the stages: 0 done, 1 failed, 2 wrong usage, 75 stopped by SIGTERM or SIGHUP (run it again),
130 Ctrl-C.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("data", "fit", "evaluate", "export", "publish", "smoke", "promote", "report")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# What a stage's exit code means to whoever called us: wrong usage, or stopped by a signal and to be run again.
PASSED_ON = (2, os.EX_TEMPFAIL)

Row = tuple[str, ...]


class PipelineError(Exception):
    """A sentence for the person who runs this, and the code to exit with."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="pipeline.py",
        description="data, fit, evaluate, export, publish, smoke, promote, report; ends with the first that fails.",
        epilog="Other options, such as --training.epochs 3, are passed on to the stages that read the config.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", default=str(ROOT / "configs" / "digits.yaml"), help="default: %(default)s"
    )
    options, overrides = parser.parse_known_args(arguments)
    try:
        _require_environments()
        with StageRunner().forwarding_signals() as runner:
            rows = run_pipeline(runner, ["--config", options.config, *overrides])
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print("\n".join(["", *aligned(rows)]))
    return 0


class StageRunner:
    """Runs stages one at a time, each in a process group of its own, and passes signals on to the running one."""

    def __init__(self) -> None:
        self._started = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._received: int | None = None

    def run(self, stage: str, side: str, *arguments: str | Path) -> Path:
        """Run `python -m <side> <arguments>` in that side's environment; returns the path that it prints."""
        self._started += 1
        title = f"[{self._started}/{len(STAGES)}] {stage}"
        _progress(title)
        started = time.monotonic()
        with tempfile.TemporaryFile() as output:
            code = self._wait_for([_python(side), "-m", side, *arguments], output.fileno())
            output.seek(0)
            printed = output.read().decode(errors="replace").split("\n")
        self._raise_if_stopped(title)
        if code:
            raise PipelineError(
                f"{title} {_ending(code)}; what it says is above", code if code in PASSED_ON else 1
            )
        _progress(f"{title}: {time.monotonic() - started:.1f} s\n")
        return _made(title, printed)

    @contextmanager
    def forwarding_signals(self) -> Iterator["StageRunner"]:
        """Pass SIGINT, SIGTERM and SIGHUP on to the running stage instead of dying beside it."""
        before = {number: signal.signal(number, self._forward) for number in SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _wait_for(self, command: list[str | Path], output: int) -> int:
        # A session of its own: a Ctrl-C at the terminal reaches the stage once, through us, and everything
        # that the stage has started can be ended with it.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, start_new_session=True)
        self._process = process
        if self._received is not None:  # arrived while the process was being started
            os.killpg(process.pid, self._received)
        # Until it is reaped, below, the number of its group cannot belong to anybody else.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        self._process = None
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        # A second signal means that the first was not obeyed.
        passed_on = number if self._received is None else signal.SIGKILL
        self._received = number
        if self._process is not None:
            os.killpg(self._process.pid, passed_on)

    def _raise_if_stopped(self, title: str) -> None:
        if self._received == signal.SIGINT:
            raise PipelineError(f"{title}: stopped by SIGINT", 128 + signal.SIGINT)
        if self._received is not None:
            # Whatever the stage made of it: those before it are done, so that nothing is lost by another run.
            name = signal.Signals(self._received).name
            raise PipelineError(f"{title}: stopped by {name}; run it again", os.EX_TEMPFAIL)


def run_pipeline(runner: StageRunner, settings: list[str]) -> list[Row]:
    """Every stage, each handed what the ones before it made; returns the rows of the closing table."""
    data = runner.run("data", "train", "data", *settings)
    runner.run("fit", "train", "fit", *settings)
    evaluation = runner.run("evaluate", "train", "evaluate", *settings)
    bundle = runner.run("export", "train", "export", *settings)
    release = runner.run("publish", "serve", "publish", "--bundle", bundle, "--no-promote")
    # Two pipelines at once may serve the same release; neither may read the other's answers.
    with tempfile.TemporaryDirectory(prefix="slipway-smoke-") as scratch:
        smoke = Path(scratch, "smoke.json")
        expected: list[str | Path] = ["--images", data, "--bundle", bundle, "--evaluation", evaluation]
        runner.run("smoke", "serve", "smoke", "--release", release, *expected, "--output", smoke)
        runner.run("promote", "serve", "promote", release.name)
        report = runner.run("report", "train", "report", *settings, "--smoke", smoke)
        return summary(evaluation, bundle, smoke, report)


def summary(evaluation: Path, bundle: Path, smoke: Path, report: Path) -> list[Row]:
    """The rows of the closing table. Raises PipelineError if what the stages wrote is not what they promised."""
    try:
        metrics = _read_json(evaluation / "metrics.json")
        protocols = _read_json(smoke)["protocols"]
        return [
            ("test accuracy", f"{metrics['accuracy']:.4f} ({metrics['samples']} images)"),
            ("checkpoint", metrics["checkpoint"]),
            ("bundle", f"{bundle.parent.name}/{bundle.name}"),
            ("parity", _read_json(bundle / "parity.json")["verdict"]),
            _served("served over HTTP", protocols["http"]),
            _served("served over gRPC", protocols["grpc"]),
            ("report", str(report)),
        ]
    except KeyError as error:
        raise PipelineError(
            f"the closing table lacks {error}: a stage wrote less than it promises"
        ) from error


def _served(label: str, result: dict[str, Any]) -> Row:
    if result["agreeing"] != result["images"]:
        raise PipelineError(
            f"{label}: only {result['agreeing']} of {result['images']} answers agree with evaluation"
        )
    return (
        label,
        f"{result['agreeing']}/{result['images']} agree",
        f"{result['requests_per_second']:.0f} requests/s",
        f"p50 {result['p50_ms']:.1f} ms",
        f"p99 {result['p99_ms']:.1f} ms",
    )


def aligned(rows: list[Row]) -> list[str]:
    """Rows as lines. Columns are as wide as their widest cell, but a row's last cell may be as long as it likes."""
    widths: dict[int, int] = {}
    for row in rows:
        for column, cell in enumerate(row[:-1]):
            widths[column] = max(widths.get(column, 0), len(cell))
    return ["  ".join([*(cell.ljust(widths[i]) for i, cell in enumerate(row[:-1])), row[-1]]) for row in rows]


def _python(side: str) -> Path:
    return ROOT / ".venv" / side / "bin" / "python"


def _require_environments() -> None:
    for python in map(_python, ("train", "serve")):
        if not python.exists():
            raise PipelineError(f"{python} is not there; run `make setup`")


def _made(title: str, printed: list[str]) -> Path:
    lines = [line for line in printed if line.strip()]
    if not lines:
        raise PipelineError(f"{title}: ended well but printed no path of what it made")
    if not Path(lines[-1]).exists():
        raise PipelineError(f"{title}: says that it made {lines[-1]}, but nothing is there")
    return Path(lines[-1])


def _ending(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"failed with exit code {code}"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise PipelineError(f"{path}: cannot be read ({error})") from error


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
