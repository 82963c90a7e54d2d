"""python -m train bundle verify PATH | diff BEFORE AFTER"""

import argparse
from pathlib import Path

from slipway.bundle_diff import differences
from train.verify import verify

DESCRIPTIONS = {
    "verify": "Hash every file of a bundle again, and ask every artefact its golden inputs again.",
    "diff": "Say what changed from one bundle to another; print nothing if they hold the same.",
}


def main(arguments: list[str]) -> Path | str | None:
    """Returns what is printed on stdout: the verified bundle, or a line for each difference."""
    parser = argparse.ArgumentParser(prog="python -m train bundle", allow_abbrev=False)
    jobs = parser.add_subparsers(dest="job", metavar="|".join(DESCRIPTIONS), required=True)
    parsers = {
        name: jobs.add_parser(name, help=text, description=text, allow_abbrev=False)
        for name, text in DESCRIPTIONS.items()
    }
    parsers["verify"].add_argument(
        "bundle", type=Path, help="directory of a bundle, such as bundles/digits/1"
    )
    parsers["verify"].add_argument(
        "--key", type=Path, help="public key (PEM) that the bundle must be signed with"
    )
    for name in ("before", "after"):
        parsers["diff"].add_argument(name, type=Path, help="directory of a bundle")
    chosen = parser.parse_args(arguments)
    if chosen.job == "verify":
        return verify(chosen.bundle, chosen.key)
    return "\n".join(differences(chosen.before, chosen.after)) or None
