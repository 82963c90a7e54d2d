"""`make` is the same on every machine (case E09), from every directory, and removes only what is its own."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")

# What GNU make 3.81, BSD tools or a plain POSIX sh do not have.
NOT_PORTABLE = re.compile(
    r"sed -i|readlink -f|realpath|date -d|grep -P|echo -e|mktemp -p|stat -c|"
    r"\.ONESHELL|\$\(file |\$\(intcmp|\$\(let |\.SHELLFLAGS|::?:=|!=|&:|\bundefine\b|"
    r"\[\[|<<<|<\(|\bpipefail\b|\bsource |\$\$\{\w+(//|:\d)|&>|\blocal |\bfunction "
)


def test_makefile_uses_only_portable_constructs() -> None:
    found = {
        number: line for number, line in enumerate(MAKEFILE.splitlines(), 1) if NOT_PORTABLE.search(line)
    }
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        "\tsed -i s/a/b/ file",
        "\tcd $$(readlink -f .)",
        ".ONESHELL:",
        "$(file >list,$(FILES))",
        "NAME != hostname",
        "a b &: c",
        "\t[[ -f x ]] && echo x",
        "\tset -o pipefail; a | b",
        "NAME ::= x",
    ],
)
def test_construct_that_is_not_portable_is_found(line: str) -> None:
    assert NOT_PORTABLE.search(line)


def make(root: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run `make` from another directory than the checkout's."""
    # The variables of the `make test` that runs this must not come along.
    of_make = ("MAKE", "MFLAGS", "ARGS", "CONFIG", "IMAGE", "PYTHON")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(of_make)}
    return subprocess.run(
        ["make", "--no-print-directory", "-C", root, *arguments],
        cwd="/",
        env={**inherited, **settings},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout in a path with spaces, where every Python only prints what it was called with."""
    root = tmp_path / "my own checkout"
    root.mkdir()
    shutil.copy(ROOT / "Makefile", root)
    for python in ("python3.11", ".venv/train/bin/python", ".venv/serve/bin/python"):
        path = root / python
        path.parent.mkdir(parents=True, exist_ok=True)
        # Arguments to stderr, and on stdout a path, as the stages do.
        path.write_text(
            f'#!/bin/sh\nprintf "{python}" >&2\nprintf " <%s>" "$@" >&2\necho >&2\necho "made by $3"\n'
        )
        path.chmod(0o755)
    return root


def calls(root: Path, *arguments: str) -> list[str]:
    """What `make` called, apart from making the environments."""
    done = make(root, f"PYTHON={root}/python3.11", *arguments)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if "environment.py" not in line]


def test_help_names_every_target_for_people(checkout: Path) -> None:
    shown = make(checkout)
    assert shown.returncode == 0
    documented = set(re.findall(r"^  ([a-z-]+) +\S", shown.stdout, re.MULTILINE))
    assert documented >= {
        *("setup", "data", "train", "evaluate", "export", "publish", "serve", "smoke", "predict", "report"),
        *("pipeline", "test", "test-fast", "lint", "format", "lock", "clean", "distclean", "help"),
    }
    assert documented == set(re.findall(r"^([a-z-]+):.* ## ", MAKEFILE, re.MULTILINE))


def test_no_target_is_taken_for_a_file_of_that_name() -> None:
    declared = re.findall(r"^\.PHONY: (.*)$", MAKEFILE.replace("\\\n", " "), re.MULTILINE)
    targets = re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE)
    assert sorted(" ".join(declared).split()) == sorted(targets)


@pytest.mark.parametrize(("target", "stage"), [("train", "fit"), ("export", "export"), ("report", "report")])
def test_config_and_options_reach_the_stage(checkout: Path, target: str, stage: str) -> None:
    assert calls(checkout, target, "CONFIG=my own.yaml", "ARGS=--optimizer.lr 0.1") == [
        f".venv/train/bin/python <-m> <train> <{stage}> <--config> <my own.yaml> <--optimizer.lr> <0.1>"
    ]


def test_smoke_is_handed_what_each_stage_made(checkout: Path) -> None:
    *_, publish, smoke = calls(checkout, "smoke")
    assert publish.endswith(" <publish> <--bundle> <made by export> <--no-promote>")
    assert smoke.startswith(
        ".venv/serve/bin/python <-m> <serve> <smoke> <--release> <made by publish> <--images> <made by data> "
        "<--bundle> <made by export> <--evaluation> <made by evaluate> <--output>"
    )


@pytest.mark.parametrize(
    ("arguments", "called"),
    [
        (["image", "TARGET=gateway"], "<deploy> <image> <--target> <gateway>"),
        (["image", "ARGS=--base stand-in"], "<deploy> <image> <--target> <serve> <--base> <stand-in>"),
        (["sbom"], "<deploy> <sbom>"),
        (["smoke-deploy", "BUNDLE=my bundle"], "<deploy> <smoke> <--bundle> <my bundle>"),
        (["stack", "PROFILE=gpu"], "<deploy.stack> <up> <--profile> <gpu>"),
    ],
)
def test_deploying_is_a_call_of_one_command(checkout: Path, arguments: list[str], called: str) -> None:
    assert calls(checkout, *arguments)[-1] == f".venv/serve/bin/python <-m> {called}"


def test_predict_takes_an_image_with_a_space_in_its_name(checkout: Path) -> None:
    assert calls(checkout, "predict", "IMAGE=my cat.jpg") == [
        ".venv/serve/bin/python <-m> <serve> <predict> <my cat.jpg>"
    ]


def test_predict_without_an_image_says_how(checkout: Path) -> None:
    done = make(checkout, f"PYTHON={checkout}/python3.11", "predict")
    assert done.returncode == 2
    assert "error: name the image: make predict IMAGE=path" in done.stderr


def test_failing_stage_ends_a_target_of_several(checkout: Path) -> None:
    (checkout / ".venv/train/bin/python").write_text("#!/bin/sh\nexit 1\n")
    done = make(checkout, f"PYTHON={checkout}/python3.11", "publish")
    assert done.returncode != 0
    assert "<publish>" not in done.stderr


@pytest.mark.parametrize("target", ["pipeline", "train", "serve"])
def test_signal_to_make_reaches_the_program_which_ends_in_its_own_time(checkout: Path, target: str) -> None:
    """A shell between them would end at once, and leave the program running for nobody."""
    program = "#!/bin/sh\ncase $* in *environment.py*) exit;; esac\n"
    program += "trap 'sleep 0.5; touch saved; exit 75' TERM\ntouch started\nwhile :; do sleep 0.1; done\n"
    for python in ("python3.11", ".venv/train/bin/python", ".venv/serve/bin/python"):
        (checkout / python).write_text(program)
    command = ["make", "-C", str(checkout), f"PYTHON={checkout}/python3.11", target]
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True) as process:
        try:
            wait_until((checkout / "started").exists)
            process.terminate()
            process.wait(timeout=PATIENCE)
            assert (checkout / "saved").exists()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_missing_python_is_explained(checkout: Path) -> None:
    done = make(checkout, "PYTHON=/nowhere/python3.11", "setup")
    assert done.returncode != 0
    assert "error: /nowhere/python3.11 was not found; install Python 3.11, or say where it is" in done.stderr


def test_clean_keeps_environments_and_folders_of_ones_own(checkout: Path) -> None:
    made = [
        "data/digits/train/7/1.png",
        "data/.cache/shards/1.json",
        "runs/digits/config.yaml",
        "bundles/digits/v1/x",
        "model_repository/x",
    ]
    kept = ["data/cats/train/tabby/1.png", "configs/mine.yaml", ".venv/train/bin/python"]
    for name in [*made, *kept]:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).touch()
    assert make(checkout, "clean").returncode == 0
    assert [name for name in [*made, *kept] if (checkout / name).exists()] == kept
