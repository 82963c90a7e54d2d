"""Where the stand-in cannot be made it says why, and it takes with it only what a container can use."""

import os
from pathlib import Path

import pytest

from deploy import stand_in
from deploy.stand_in import NoStandIn


def test_missing_debootstrap_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.programs.SEARCHED", "/nowhere")
    with pytest.raises(NoStandIn, match="debootstrap, which makes the stand-in, was not found"):
        stand_in._install_debian(tmp_path)


def test_nobody_but_root_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *arguments, **options: "/usr/sbin/debootstrap")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NoStandIn, match="only root can make the stand-in"):
        stand_in._install_debian(tmp_path)


def test_pips_settings_go_along_but_no_folder_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "https://packages.example/python")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"file://{tmp_path} https://more.example/python")
    settings = stand_in._pip_settings()
    assert settings["index-url"] == "https://packages.example/python"
    assert settings["extra-index-url"] == "https://more.example/python"


def test_what_a_failed_step_said_is_shown() -> None:
    with pytest.raises(NoStandIn, match="a step: failed with exit code 3:\nno room"):
        stand_in._run("a step", ["sh", "-c", "echo no room; exit 3"])
