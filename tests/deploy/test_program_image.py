"""An image of a program holds all that it needs, and what is missing on this machine is named."""

import io
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deploy import program_image, stand_in_nginx
from deploy.program_image import NoProgram
from scripts import programs
from tests.programs import require


def test_a_program_comes_with_its_libraries_a_shell_and_room_to_write(tmp_path: Path) -> None:
    require("busybox")
    text = tmp_path / "text"
    text.write_text("of no program")
    contents = {"/usr/bin/ls": Path("/bin/ls"), "/etc/text": text}
    data = program_image.archive(contents, ["sh"], folders=["kept"], script="#!/bin/sh\n")
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        files = {one.name: one for one in archive}
    assert any(name.endswith("/libc.so.6") for name in files)
    assert not any(one.issym() for name, one in files.items() if ".so" in name)
    assert (files["bin/sh"].linkname, files["bin/busybox"].isfile()) == ("busybox", True)
    assert (files["tmp"].mode, files["kept"].mode, files["entry-point"].mode) == (0o1777, 0o1777, 0o755)
    assert files["etc/text"].size == len("of no program")


def test_program_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.programs.SEARCHED", "/nowhere")
    with pytest.raises(
        NoProgram, match="nginx, to be put into an image, was not found; on Debian `make programs`"
    ):
        stand_in_nginx.version()


def test_javascript_module_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    require(*stand_in_nginx.PROGRAMS.values())
    monkeypatch.setattr(stand_in_nginx, "MODULE", Path("/nowhere/njs.so"))
    with pytest.raises(NoProgram, match=r"/nowhere/njs\.so, to be put into an image, was not found"):
        stand_in_nginx.ensure(None)


def test_stand_in_is_made_once_and_again_when_anything_in_it_is_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(*stand_in_nginx.PROGRAMS.values(), "busybox", str(stand_in_nginx.MODULE))
    made: list[str] = []

    def import_image(archive: bytes, repository: str, tag: str, changes: list[str]) -> None:
        made.append(f"{repository}:{tag}")

    engine: Any = SimpleNamespace(
        images=SimpleNamespace(list=lambda name: [one for one in made if one == name]),
        api=SimpleNamespace(import_image_from_data=import_image),
    )
    name = stand_in_nginx.ensure(engine)
    assert stand_in_nginx.ensure(engine) == name
    assert made == [name]
    other = tmp_path / "busybox"
    other.write_text("another one")
    other.chmod(0o755)
    monkeypatch.setattr("scripts.programs.SEARCHED", f"{tmp_path}:{programs.SEARCHED}")
    assert stand_in_nginx.ensure(engine) != name
    assert len(made) == 2
