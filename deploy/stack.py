"""The whole service on one machine, by Docker Compose: `make stack`.

    python -m deploy.stack up [--profile cpu|gpu]     build and start; returns when all of it is well
    python -m deploy.stack down                       stop it; what Prometheus and Grafana keep is kept

Compose itself would start without a secret and let a service fail later: so they are looked at first. docs/compose.md.
"""

import argparse
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

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
        require_secrets(COMPOSE)
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


def require_secrets(file: Path) -> None:
    """Make Grafana's password if there is none. Raises SlipwayError, naming every other secret that is missing."""
    missing = []
    described: dict[str, Any] = YAML(typ="safe").load(file)["secrets"]
    for name, secret in described.items():
        path = (file.parent / secret["file"]).resolve()
        if path.is_file() and path.stat().st_size > 0:
            continue
        if name == GRAFANA_PASSWORD:
            make_password(path)
        else:
            missing.append(f"  {relative_to_project(path)}: {WHAT_BRINGS[name]}")
    if missing:
        raise SlipwayError("\n".join(["these secrets are missing:", *missing]))


def make_password(path: Path) -> None:
    """For the user admin of Grafana; readable for its owner alone."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(24))


def compose(profile: str, *arguments: str) -> None:
    """Run Compose, which says itself what it does. Raises SlipwayError if it fails."""
    # Secrets are readable for their owner alone: whatever reads one runs as that user.
    environment = {"SLIPWAY_USER": f"{os.getuid()}:{os.getgid()}", **os.environ}
    done = subprocess.run(
        [PROGRAM, "--file", COMPOSE, "--profile", profile, *arguments], env=environment, check=False
    )
    if done.returncode:
        raise SlipwayError(
            f"docker-compose {arguments[0]} failed with exit code {done.returncode}; see above"
        )


if __name__ == "__main__":
    command.run(main)
