"""Run the tests in the environment that each belongs to, and report the coverage of both together.

    run_tests.py [pytest options]    such as -k preprocessing, or -m "not integration"

Both environments run side by side, because their tests wait for other processes half of the time; each line says whose
it is. For --pdb, call pytest of one environment yourself. What failed is said once more at the very end: that is what
is left of a long log that was cut short.

Exits 1 if a test failed in either environment, or if there was none to run.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parents[1]

# What both sides must agree on is tested in both.
SUITES = {
    "train": ["tests/slipway", "tests/train", "tests/scripts", "tests/integration"],
    "serve": ["tests/slipway", "tests/serve", "tests/deploy", "tests/benchmarks"],
}
NO_TESTS_RAN = 5  # pytest's exit code for a selection that matches nothing
SHOWN_OF_MESSAGE = 600  # characters at the end of the run; all of it stands with the test, further up


def main(options: list[str]) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        with ThreadPoolExecutor(len(SUITES)) as pool:
            codes = list(pool.map(lambda name: run_suite(name, options, Path(scratch)), SUITES))
        report_coverage(Path(scratch))
        for name, code in zip(SUITES, codes, strict=True):
            if code not in (0, NO_TESTS_RAN):
                print(f"\n== {name}: pytest ended with {code}", flush=True)
                for failure in failures(results(name, Path(scratch))):
                    print(failure, flush=True)
    if all(code == NO_TESTS_RAN for code in codes):
        print("error: no test was selected in either environment", file=sys.stderr)
        return 1
    # A selection such as `-k checkpoint` may well have nothing in one of the two.
    return 0 if all(code in (0, NO_TESTS_RAN) for code in codes) else 1


def run_suite(name: str, options: list[str], scratch: Path) -> int:
    """Run one environment's tests, and show line by line what they print; the coverage data go to `scratch`."""
    shown = ["--cov", "--cov-report=", "--durations=20", f"--junit-xml={results(name, scratch)}"]
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


def failures(file: Path) -> Iterator[str]:
    """What each failed test of a JUnit file is called, and how its message begins; nothing if pytest itself died."""
    if not file.exists():
        return
    for case in ET.parse(file).iter("testcase"):
        for kind in ("failure", "error"):
            for found in case.iter(kind):
                message = textwrap.indent(found.get("message", "")[:SHOWN_OF_MESSAGE], "    ")
                yield f"{kind}: {case.get('classname')}::{case.get('name')}\n{message}"


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


def results(name: str, scratch: Path) -> Path:
    return scratch / f"{name}.xml"


def python(name: str) -> str:
    return str(ROOT / ".venv" / name / "bin" / "python")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
