"""A stand-in for NVIDIA's Triton image, for machines that cannot pull it: on Debian, as root, without any registry.

It has what the Dockerfile and the smoke test need: the layout of folders, the entry point, Python with pip, and a real
Triton, the one from the wheel in .venv/server. It has another release of Triton than the image, no backend but
Python's, Debian's Python instead of Ubuntu's, and no CUDA. So it proves how our own image is built, started, probed,
limited and stopped. It does not prove that NVIDIA's image can be pulled and behaves the same, or that anything runs
on a GPU.

It takes with it where pip gets packages on this machine and whom it trusts, so it is for this machine only.
"""

import ast
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import docker

from scripts import environment, programs
from serve import server
from slipway import compatibility, hashing
from slipway.errors import SlipwayError
from slipway.paths import PROJECT_ROOT

REPOSITORY = "slipway/stand-in-for-tritonserver"
SUITE = "bookworm"  # whose Python is that of .venv/serve
PACKAGES = ("ca-certificates", "libarchive13", "libpython3.11", "python3-pip")
# Kept between calls: it takes most of the time.
CACHE = PROJECT_ROOT / ".venv" / "stand-in"
LOCK = PROJECT_ROOT / "requirements" / "server.lock"
SETTINGS = ("index-url", "extra-index-url", "trusted-host", "proxy", "timeout")
WHEEL = Path("opt/triton-wheel")
CERTIFICATES = Path("etc/ssl/certs/ca-certificates.crt")
ENTRY_POINT = "/opt/nvidia/nvidia_entrypoint.sh"
PATH = "/opt/tritonserver/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

logger = logging.getLogger(__name__)


class NoStandIn(SlipwayError):
    """The stand-in cannot be made here: the message says why."""


def ensure(client: docker.DockerClient) -> str:
    """The name of the stand-in in this engine; it is made if it is not there. Raises NoStandIn."""
    settings, certificates = _pip_settings(), _certificates()
    made_from = {
        "code": hashing.of_file(Path(__file__)),
        "lock": hashing.of_file(LOCK),
        "pip": settings,
        "certificates": hashing.of_file(certificates) if certificates else "",
    }
    key = hashing.of_data(made_from)[:12]
    tag = f"{compatibility.load().triton.embedded.release}-{key}"
    name = f"{REPOSITORY}:{tag}"
    if not client.images.list(name):
        archive = _archive(key, lambda root: _fill(root, settings, certificates))
        logger.info("importing %s", name)
        client.api.import_image_from_file(
            str(archive),
            repository=REPOSITORY,
            tag=tag,
            changes=[f"ENV PATH={PATH}", "WORKDIR /opt/tritonserver", f'ENTRYPOINT ["{ENTRY_POINT}"]'],
        )
    return name


def _archive(key: str, fill: Callable[[Path], None]) -> Path:
    """The stand-in's files as one tar file, found or made."""
    archive = CACHE / f"{key}.tar"
    with environment.only_one(CACHE):
        if not archive.exists():
            shutil.rmtree(CACHE, ignore_errors=True)  # those made from something else
            CACHE.mkdir()
            with tempfile.TemporaryDirectory(prefix="slipway-stand-in-") as folder:
                root = Path(folder, "root")
                fill(root)
                unfinished = archive.with_suffix(".unfinished")
                _run(
                    "packing the stand-in",
                    ["tar", "-C", str(root), "-cf", str(unfinished), *_left_out(), "."],
                )
                unfinished.rename(archive)
    return archive


def _left_out() -> list[str]:
    return [f"--exclude=./{path}" for path in ("var/cache/apt/*", "var/lib/apt/lists/*", "usr/share/doc/*")]


def _fill(root: Path, settings: dict[str, str], certificates: Path | None) -> None:
    _install_debian(root)
    _copy_triton(root)
    entry_point = root / ENTRY_POINT.lstrip("/")
    entry_point.parent.mkdir(parents=True)
    entry_point.write_text('#!/bin/sh\n# A stand-in: NVIDIA\'s prints its notices here.\nexec "$@"\n')
    entry_point.chmod(0o755)
    lines = [f"{key} = {value}" for key, value in settings.items()]
    (root / "etc" / "pip.conf").write_text("\n".join(["[global]", *lines, ""]))
    if certificates:
        shutil.copyfile(certificates, root / CERTIFICATES)


def _install_debian(root: Path) -> None:
    debootstrap = shutil.which("debootstrap", path=programs.SEARCHED)
    if debootstrap is None:
        raise NoStandIn(
            "debootstrap, which makes the stand-in, was not found; on Debian `make programs` installs it"
        )
    if os.geteuid() != 0:
        raise NoStandIn("only root can make the stand-in: debootstrap changes into the system that it makes")
    include = f"--include={','.join(PACKAGES)}"
    command = [debootstrap, "--variant=minbase", include, SUITE, str(root), *_mirror()]
    _run(f"making a Debian {SUITE} with Python for the stand-in", command)


def _mirror() -> list[str]:
    """Where this machine gets Debian's packages; nothing, for debootstrap's own choice, where it gets none."""
    apt = shutil.which("apt-get")
    if apt is None:
        return []
    command = [apt, "indextargets", "--format", "$(CODENAME) $(COMPONENT) $(SITE)", "Identifier: Packages"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    lines = [line.split() for line in listed.splitlines()]
    return [site for codename, component, site in lines if (codename, component) == (SUITE, "main")][:1]


def _copy_triton(root: Path) -> None:
    """Triton as `make setup` unpacked it, under the paths of NVIDIA's image."""
    program = server.find_triton(server.TRITON)
    for part in (program, server.TRITON / "nvidia_pytriton.libs"):
        shutil.copytree(
            part,
            root / WHEEL / part.relative_to(server.TRITON),
            symlinks=True,
            # The link to this machine's libpython: there, Debian's is found without.
            ignore=shutil.ignore_patterns("libpython*", "python_backend_stubs"),
        )
    (root / "opt" / "tritonserver").mkdir()
    for name in ("bin", "backends", "caches"):
        link = root / "opt" / "tritonserver" / name
        link.symlink_to(Path("/") / WHEEL / program.relative_to(server.TRITON) / name)


def _pip_settings() -> dict[str, str]:
    """What pip is told here, in files or variables, about where packages come from, if a container can use it."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    told = dict(line.split("=", 1) for line in listed.splitlines() if "=" in line)
    found = {}
    for key in SETTINGS:
        for section in (":env:", "install", "global"):  # as pip does: the first that has it wins
            values = ast.literal_eval(told.get(f"{section}.{key}", "''")).split()
            if usable := [value for value in values if not value.startswith("file:")]:
                found[key] = " ".join(usable)
                break
    return found


def _certificates() -> Path | None:
    """The certificates that this machine trusts, which may be more than Debian's."""
    named = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE") or f"/{CERTIFICATES}"
    return Path(named) if Path(named).is_file() else None


def _run(step: str, command: list[str]) -> None:
    logger.info("%s", step)
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-10:])
        raise NoStandIn(f"{step}: failed with exit code {done.returncode}:\n{tail}")
