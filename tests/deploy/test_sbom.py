"""What is installed can be listed by one command: each package of a lock, with the hashes that the lock has."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from deploy import sbom
from slipway.errors import SlipwayError
from slipway.paths import PROJECT_ROOT


def locked(name: str) -> dict[str, str]:
    """Package -> version in a lock."""
    text = (PROJECT_ROOT / "requirements" / f"{name}.lock").read_text(encoding="utf-8")
    return dict(re.findall(r"(?m)^([\w.-]+)==([^\s;]+)", text))


def components(path: Path) -> list[dict[str, Any]]:
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["bomFormat"] == "CycloneDX"
    return content["components"]


@pytest.mark.parametrize("lock", ["serve", "server"])
def test_every_package_of_a_lock_is_listed_with_its_hashes(lock: str, tmp_path: Path) -> None:
    listed = components(sbom.write(lock, tmp_path))
    assert {one["name"]: one["version"] for one in listed} == locked(lock)
    assert all(one["purl"].startswith("pkg:pypi/") for one in listed)
    assert all(
        any(known["alg"] == "SHA-256" for file in one["externalReferences"] for known in file["hashes"])
        for one in listed
    )


def test_there_is_a_list_for_what_every_image_installs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    monkeypatch.setattr(sbom, "FOLDER", tmp_path)
    monkeypatch.setattr(sbom, "write", lambda lock, folder: written.append(lock))
    assert sbom.main([]) == tmp_path
    dockerfile = (PROJECT_ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert {*re.findall(r"COPY requirements/(\w+)\.lock /tmp", dockerfile), "server"} == set(written)


def test_lock_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SlipwayError, match=r"requirements/none\.lock: no list could be made of it"):
        sbom.write("none", tmp_path)
