"""Images in place of those that cannot be pulled here: a program of Debian's, with the entry point of the real one.

They show that Compose's file starts, confines and connects such a program, and nothing about what is in the real image.
"""

import io
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

import docker

from scripts import programs

NOBODY = 65534
BUSYBOX = "busybox"
# What health checks of the real images call, too.
APPLETS = ("sh", "wget", "cat", "httpd")
# What Debian's Alertmanager reads from there, and the real one has in itself.
TEMPLATES = Path("/usr/share/prometheus/alertmanager")


def make(client: docker.DockerClient, image: str, program: str, entry_point: Sequence[str]) -> None:
    """Give `client` an image of that name, from which `program` runs as nobody: `entry_point[0]` is where it lies."""
    repository, tag = image.rsplit(":", 1)
    changes = [f"USER {NOBODY}:{NOBODY}", f"ENTRYPOINT {list(entry_point)}".replace("'", '"')]
    client.api.import_image_from_data(
        _archive(_found(program), entry_point[0]), repository, tag, changes=changes
    )


def _archive(program: Path, place: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", dereference=True) as archive:
        for folder in ("tmp", "prometheus"):
            about = tarfile.TarInfo(folder)
            about.type, about.mode, about.uid, about.gid = tarfile.DIRTYPE, 0o1777, NOBODY, NOBODY
            archive.addfile(about)
        files = {place: program, f"/bin/{BUSYBOX}": _found(BUSYBOX)}
        files |= {str(path): path for path in _libraries(program)}
        if program.name == "prometheus-alertmanager":
            files[str(TEMPLATES)] = TEMPLATES
        for name, file in files.items():
            archive.add(file, name.lstrip("/"))
        for applet in APPLETS:
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname = tarfile.SYMTYPE, BUSYBOX
            archive.addfile(link)
    return buffer.getvalue()


def _found(program: str) -> Path:
    path = shutil.which(program, path=programs.SEARCHED)
    assert path is not None
    return Path(path)


def _libraries(program: Path) -> list[Path]:
    """What the program is linked with, and what loads that; nothing for one that is linked statically."""
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    return [Path(word) for word in listed.split() if word.startswith("/")]
