"""The whole service on one machine, by Docker Compose: `make stack`.

    python -m deploy.stack up [--profile cpu|gpu]     build and start; returns when all of it is well
    python -m deploy.stack down                       stop it; what Prometheus and Grafana keep is kept

Compose itself would start without a secret and let a service fail later: so they are looked at first. What is other on
a machine stands in compose.override.yaml beside compose.yaml, or in the files that COMPOSE_FILE names, as for Compose.
docs/compose.md.
"""

import argparse
import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from slipway import command
from slipway.errors import SlipwayError
from slipway.paths import PROJECT_ROOT, relative_to_project

COMPOSE = PROJECT_ROOT / "deploy" / "compose" / "compose.yaml"
PROGRAM = Path(sys.prefix) / "bin" / "docker-compose"
# Profile -> the service that runs the models in it.
PROFILES = {"cpu": "triton", "gpu": "triton-gpu"}
GRAFANA_PASSWORD = "grafana_admin_password"
WHAT_BRINGS = {
    "slack_api_url": "put the address of an incoming webhook in it, which is told of alerts",
    "gateway_keys": "`python -m deploy.gateway key NAME` makes it, and `make gateway` all three for a try",
    "gateway_certificate": "put the certificate of this machine there, as PEM",
    "gateway_certificate_key": "put the key of the certificate there, as PEM",
}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.stack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("action", choices=["up", "down"])
    parser.add_argument(
        "--profile", choices=list(PROFILES), default="cpu", help="where the models run (default: cpu)"
    )
    options = parser.parse_args(arguments)
    if options.action == "up":
        require_ordinary_user()
        require_secrets(secrets_of(options.profile))
        # To Compose, what another profile has started is nothing that is left over; both would answer as `triton`.
        for profile, server in PROFILES.items():
            if profile != options.profile:
                compose(profile, "rm", "--stop", "--force", server)
        compose(options.profile, "up", "--build", "--detach", "--wait", "--remove-orphans")
    else:
        for profile in PROFILES:
            compose(profile, "down")


def require_ordinary_user() -> None:
    """Raises SlipwayError for root: without capabilities, nginx cannot become somebody else, as it wants to."""
    if os.getuid() == 0 and "SLIPWAY_USER" not in os.environ:
        raise SlipwayError(
            "the gateway does not run as root; call this as a user who may use Docker and owns the secrets, or set "
            "SLIPWAY_USER to that user's uid:gid"
        )


def secrets_of(profile: str) -> dict[str, Path]:
    """Name -> file of each secret that is a file, as Compose understands all its files.

    A secret of yours may be a variable, or external: Compose itself says when it has none. Raises SlipwayError if
    Compose does not understand the files.
    """
    described = json.loads(compose(profile, "config", "--format", "json", capture=True))["secrets"]
    return {
        name: Path(secret["file"])
        for name, secret in described.items()
        if "file" in secret and not secret.get("external")
    }


def require_secrets(files: Mapping[str, Path]) -> None:
    """Make Grafana's password if there is none. Raises SlipwayError, naming every other secret that is missing."""
    missing = []
    for name, path in files.items():
        if path.is_dir():  # Docker makes one where it finds nothing
            missing.append(f"  {relative_to_project(path)}: is a folder; remove it")
            continue
        if path.is_file() and path.stat().st_size > 0:
            continue
        if name == GRAFANA_PASSWORD:
            make_password(path)
        else:
            missing.append(f"  {relative_to_project(path)}: {WHAT_BRINGS.get(name, 'a secret of your own')}")
    if missing:
        raise SlipwayError("\n".join(["these secrets are missing:", *missing]))


def make_password(path: Path) -> None:
    """For the user admin of Grafana; readable for its owner alone, and that is whom Grafana runs as.

    Raises SlipwayError if it cannot be given to that user. The file is empty then, and made again the next time.
    """
    if not re.fullmatch(r"\d+:\d+", user()):
        raise SlipwayError(f"SLIPWAY_USER: {user()!r} is no uid:gid, such as 1000:1000")
    uid, gid = map(int, user().split(":"))
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        path.chmod(0o600)  # it may be an older, empty one
        try:
            os.fchown(file.fileno(), uid, gid)
        except PermissionError:
            raise SlipwayError(
                f"{relative_to_project(path)}: cannot be given to SLIPWAY_USER, {user()}; call this as that user"
            ) from None
        file.write(secrets.token_urlsafe(24))


def user() -> str:
    """uid:gid of whom a service runs as that reads a secret: secrets are readable for their owner alone."""
    return os.environ.get("SLIPWAY_USER", f"{os.getuid()}:{os.getgid()}")


def compose(profile: str, *arguments: str, capture: bool = False) -> str:
    """Run Compose, which says itself what it does; returns its output if that is to be captured.

    Raises SlipwayError if it fails, or is not there.
    """
    if not PROGRAM.exists():
        raise SlipwayError(f"{relative_to_project(PROGRAM)} is missing; `make stack` installs it")
    done = subprocess.run(
        [PROGRAM, "--profile", profile, *arguments],
        cwd=COMPOSE.parent,
        env={**os.environ, "SLIPWAY_USER": user()},
        stdout=subprocess.PIPE if capture else None,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SlipwayError(
            f"docker-compose {arguments[0]} failed with exit code {done.returncode}; see above"
        )
    return done.stdout or ""


if __name__ == "__main__":
    command.run(main)
