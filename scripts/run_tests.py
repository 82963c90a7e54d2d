"""Run the tests in the environment that each belongs to, and report the coverage of both together.

    run_tests.py [pytest options]    such as -k preprocessing, or -m "not integration"

Both environments run side by side, because their tests wait for other processes half of the time; each line says whose
it is. For --pdb, call pytest of one environment yourself.

Exits 1 if a test failed in either environment, or if there was none to run.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# What both sides must agree on is tested in both.
SUITES = {
    "train": ["tests/slipway", "tests/train", "tests/scripts", "tests/integration"],
    "serve": ["tests/slipway", "tests/serve", "tests/deploy", "tests/benchmarks"],
}
NO_TESTS_RAN = 5  # pytest's exit code for a selection that matches nothing


def main(options: list[str]) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        with ThreadPoolExecutor(len(SUITES)) as pool:
            codes = list(pool.map(lambda name: run_suite(name, options, Path(scratch)), SUITES))
        report_coverage(Path(scratch))
    if all(code == NO_TESTS_RAN for code in codes):
        print("error: no test was selected in either environment", file=sys.stderr)
        return 1
    # A selection such as `-k checkpoint` may well have nothing in one of the two.
    return 0 if all(code in (0, NO_TESTS_RAN) for code in codes) else 1


def run_suite(name: str, options: list[str], scratch: Path) -> int:
    """Run one environment's tests, and show line by line what they print; the coverage data go to `scratch`."""
    shown = ["--cov", "--cov-report=", "--durations=20"]
    # Unbuffered, so that who waits sees how far it is.
    command = [python(name), "-u", "-m", "pytest", *shown, *options, *SUITES[name]]
    environment = {**os.environ, "COVERAGE_FILE": str(scratch / f".coverage.{name}")}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        for line in process.stdout or ():
            print(f"{name}: {line}", end="", flush=True)
    return process.returncode


def report_coverage(scratch: Path) -> None:
    """Combine in `scratch`, where no other run interferes; leave the result where coverage looks for it."""
    print("\n== coverage of both", flush=True)
    combined = scratch / ".coverage"
    coverage = [python("train"), "-m", "coverage"]
    subprocess.run(
        [*coverage, "combine", "--quiet", f"--data-file={combined}", str(scratch)], cwd=ROOT, check=False
    )
    subprocess.run([*coverage, "report", f"--data-file={combined}"], cwd=ROOT, check=False)
    if combined.exists():
        shutil.copy(combined, ROOT / ".coverage")


def python(name: str) -> str:
    return str(ROOT / ".venv" / name / "bin" / "python")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
