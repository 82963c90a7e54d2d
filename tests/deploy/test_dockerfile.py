"""The images are pinned, run as nobody special, and get nothing but what they need."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import images
from deploy.gateway.settings import TEMPLATE, Settings

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
# With Python in them, and packages of a lock.
WITH_PYTHON = ("train", "serve")


def stage(name: str) -> str:
    """The text of one build stage."""
    stages = re.split(r"^(?=FROM )", DOCKERFILE, flags=re.MULTILINE)
    return next(text for text in stages if re.match(rf"FROM \S+ AS {name}$", text, re.MULTILINE))


def variables(name: str) -> dict[str, str]:
    """What ENV says in a build stage."""
    (block,) = re.findall(r"^ENV ((?:.*\\\n)*.*)$", stage(name), re.MULTILINE)
    return dict(word.split("=", 1) for word in block.replace("\\\n", " ").split())


def test_bases_are_pinned_by_tag_through_arguments() -> None:
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert set(bases) == {
        f"${{{name}_IMAGE}}${{{name}_DIGEST:+@}}${{{name}_DIGEST}}" for name in images.TARGETS.values()
    }
    assert not re.search(r":latest|^# *syntax", DOCKERFILE, re.MULTILINE)


@pytest.mark.parametrize("target", images.TARGETS)
def test_image_is_built_of_its_own_stages_alone(target: str) -> None:
    """The classic builder would make, and pull, whatever else stands above it."""
    stages = re.findall(r"^FROM \S+ AS (\S+)$", images.stages_of(target), re.MULTILINE)
    assert stages[-1] == target
    assert all(name.startswith(target) for name in stages)
    assert set(re.findall(r"--from=(\S+)", images.stages_of(target))) == set(stages[:-1])


@pytest.mark.parametrize("target", images.TARGETS)
def test_image_does_not_run_as_root(target: str) -> None:
    users = re.findall(r"^USER (\S+)$", stage(target), re.MULTILINE)
    assert users
    assert users[-1].split(":")[0] not in ("0", "root")


@pytest.mark.parametrize("target", WITH_PYTHON)
def test_a_change_of_the_source_does_not_install_the_packages_again(target: str) -> None:
    install = DOCKERFILE.index(f"-r /tmp/{target}.lock")
    first_source = DOCKERFILE.index("COPY", DOCKERFILE.index(f"COPY requirements/{target}.lock") + 1)
    assert install < first_source


def test_packages_are_installed_by_hash() -> None:
    installs = re.findall(r"pip install.*", DOCKERFILE)
    assert len(installs) == len(WITH_PYTHON)
    assert all("--require-hashes" in line and "--no-deps" in line for line in installs)


@pytest.mark.parametrize("target", WITH_PYTHON)
def test_caches_are_where_any_user_may_write(target: str) -> None:
    """Case E03. As a user whom the image does not know, the serving image is run by deploy.smoke."""
    assert re.search(r"\bHOME=/tmp\b", stage(target))
    if target == "train":
        assert "TORCHINDUCTOR_CACHE_DIR=/tmp/" in stage(target)


def test_python_is_told_the_same_in_both_images() -> None:
    """Their bases differ, so that the Dockerfile has to say it twice."""
    common, serve = variables("train"), variables("serve")
    assert serve
    assert {name: common.get(name) for name in serve} == serve


def test_gateway_is_told_all_that_its_template_asks_for_and_the_same_as_outside_of_a_container() -> None:
    told = {name: value for name, value in variables("gateway").items() if name.startswith("GATEWAY_")}
    assert told.keys() == set(re.findall(r"\$\{(GATEWAY_\w+)\}", TEMPLATE.read_text(encoding="utf-8")))
    for name in ("canary_percent", "shadow_percent", "requests_per_minute", "burst", "max_request_bytes"):
        assert told[f"GATEWAY_{name.upper()}"] == str(getattr(Settings, name))


@pytest.mark.parametrize("target", images.TARGETS)
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
