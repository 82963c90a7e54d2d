"""What the locks install, as CycloneDX: every package with its version and its hashes, for scanners and for customers.

    python -m deploy sbom

What the bases of the images bring is not in it: their publishers list that.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from slipway.errors import SlipwayError
from slipway.paths import PROJECT_ROOT, relative_to_project

LOCKS = ("serve", "server", "train")
FOLDER = PROJECT_ROOT / "build" / "sbom"


def write(lock: str, folder: Path) -> Path:
    """Write `<lock>.cdx.json` of requirements/<lock>.lock; returns its path. The same lock gives the same bytes.

    Raises SlipwayError, with what the tool said.
    """
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / f"{lock}.cdx.json"
    command = [
        # A list is no graph, of which the tool would warn.
        *(sys.executable, "-W", "ignore", "-m", "cyclonedx_py", "requirements"),
        *("--pyproject", "pyproject.toml", "--output-reproducible", "--output-file", str(output)),
        f"requirements/{lock}.lock",
    ]
    done = subprocess.run(command, cwd=PROJECT_ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SlipwayError(f"requirements/{lock}.lock: no list could be made of it:\n{done.stderr.strip()}")
    return output


def main(arguments: list[str]) -> Path:
    parser = argparse.ArgumentParser(
        prog="python -m deploy sbom",
        description="List what the locks install, as CycloneDX; print the folder of the lists.",
    )
    parser.parse_args(arguments)
    for lock in LOCKS:
        write(lock, FOLDER)
    return relative_to_project(FOLDER)
