"""An image of a few programs of this machine, with what they are linked with, and busybox for a shell.

Stand-ins are made of it: no registry is asked, nobody has to be root, and it takes a second.
"""

import io
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from scripts import programs
from slipway.errors import SlipwayError

BUSYBOX = "busybox"


class NoProgram(SlipwayError):
    """A program of which an image was to be made is not on this machine: the message says which."""


def archive(
    contents: Mapping[str, Path], applets: Iterable[str], folders: Iterable[str] = (), script: str = ""
) -> bytes:
    """The files of an image, as a tar file that an engine imports: the same bytes as long as they are the same files.

    Args:
        contents: path in the image -> a program, library or folder of this machine.
        applets: what is to be there of busybox, in /bin.
        folders: below the root, for everybody to write to; /tmp is there in any case.
        script: of the shell, /entry-point in the image; nothing if there is none.

    Raises NoProgram: busybox is missing.
    """
    libraries = {str(path): path for program in contents.values() for path in _libraries(program)}
    files = {**libraries, **contents, f"/bin/{BUSYBOX}": found(BUSYBOX)}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", dereference=True) as output:
        for folder in ("tmp", *folders):
            output.addfile(_entry(folder, tarfile.DIRTYPE, 0o1777))
        for name, path in files.items():
            output.add(path, name.lstrip("/"))
        for applet in applets:
            link = _entry(f"bin/{applet}", tarfile.SYMTYPE, 0o777)
            link.linkname = BUSYBOX
            output.addfile(link)
        if script:
            about = _entry("entry-point", tarfile.REGTYPE, 0o755)
            about.size = len(script.encode())
            output.addfile(about, io.BytesIO(script.encode()))
    return buffer.getvalue()


def found(program: str) -> Path:
    """Where a program is on this machine. Raises NoProgram."""
    path = shutil.which(program, path=programs.SEARCHED)
    if path is None:
        raise NoProgram(
            f"{program}, to be put into an image, was not found; on Debian `make programs` installs it"
        )
    return Path(path)


def _entry(name: str, kind: bytes, mode: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = kind, mode
    return entry


def _libraries(program: Path) -> list[Path]:
    """What it is linked with, and what loads that; nothing for a folder, or where all is linked statically."""
    if program.is_dir():
        return []
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    return [Path(word) for word in listed.split() if word.startswith("/")]
