"""The images are pinned, run as nobody special, and get nothing but what they need."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
TARGETS = ("train", "serve")


def stage(name: str) -> str:
    """The text of one build stage."""
    stages = re.split(r"^(?=FROM )", DOCKERFILE, flags=re.MULTILINE)
    return next(text for text in stages if re.match(rf"FROM \S+ AS {name}$", text, re.MULTILINE))


def test_bases_are_pinned_by_tag_through_arguments() -> None:
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert set(bases) == {
        f"${{{name}_IMAGE}}${{{name}_DIGEST:+@}}${{{name}_DIGEST}}" for name in ("PYTHON", "TRITON")
    }
    assert not re.search(r":latest|^# *syntax", DOCKERFILE, re.MULTILINE)


@pytest.mark.parametrize("target", TARGETS)
def test_image_does_not_run_as_root(target: str) -> None:
    users = re.findall(r"^USER (\S+)$", stage(target), re.MULTILINE)
    assert users
    assert users[-1].split(":")[0] not in ("0", "root")


@pytest.mark.parametrize("target", TARGETS)
def test_a_change_of_the_source_does_not_install_the_packages_again(target: str) -> None:
    install = DOCKERFILE.index(f"-r /tmp/{target}.lock")
    first_source = DOCKERFILE.index("COPY", DOCKERFILE.index(f"COPY requirements/{target}.lock") + 1)
    assert install < first_source


def test_packages_are_installed_by_hash() -> None:
    installs = re.findall(r"pip install.*", DOCKERFILE)
    assert len(installs) == len(TARGETS)
    assert all("--require-hashes" in line and "--no-deps" in line for line in installs)


@pytest.mark.parametrize("target", TARGETS)
def test_caches_are_where_any_user_may_write(target: str) -> None:
    """Case E03. As a user whom the image does not know, the serving image is run by deploy.smoke."""
    assert re.search(r"\bHOME=/tmp\b", stage(target))
    if target == "train":
        assert "TORCHINDUCTOR_CACHE_DIR=/tmp/" in stage(target)


@pytest.mark.parametrize("target", TARGETS)
def test_labels_change_no_layer_above_them(target: str) -> None:
    """The commit is another one with every build."""
    lines = stage(target).splitlines()
    commit = lines.index("ARG COMMIT=unknown")
    assert not [line for line in lines[commit + 1 :] if re.match("RUN|COPY", line)]


def test_health_is_a_golden_inference() -> None:
    assert 'CMD ["python3", "-m", "serve", "health"]' in stage("serve")


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_image_of_one_side_holds_no_code_of_the_other() -> None:
    assert "COPY serve" not in stage("train")
    assert "COPY train" not in stage("serve")


def test_build_context_holds_exactly_what_is_copied() -> None:
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    copied = set(re.findall(r"^COPY (?!--from)(\S+) \S+$", DOCKERFILE, re.MULTILINE))
    assert "*" in ignore
    assert allowed == copied
