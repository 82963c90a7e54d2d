"""The command line: exit codes, messages, and the rule for relative paths."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slipway import sealed
from tests.train.conftest import MakeFolder


def run(*arguments: str, cwd: Path | str = "/") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "train", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "--optimzer.lr", "1"], "--optimzer.lr is not an option; did you mean optimizer.lr?"),
        (["fit", "--modell.name", "resnet18"], "--modell.name is not an option; did you mean model.name?"),
        (["fit", "--training.num-epochs", "3"], "did you mean training.epochs?"),
        (["fit", "--optimizer.lr", "fast"], "optimizer.lr is the text 'fast'; expected number"),
        (["fit", "--training.epochs", "0"], "training.epochs is 0; must be at least 1"),
        (["fit", "--config", "nowhere.yaml"], "/nowhere.yaml: there is no such config file"),
        (["fit", "--model.name", "resnet-18", "--data.embedded", "digits"], "did you mean resnet18?"),
        (["data", "chek"], "argument action: invalid choice: 'chek'"),
        (
            ["export", "--recommend", "--export.formats", "[pt2]"],
            "export.formats is ['pt2']; onnx must be among them: others are made from it",
        ),
        (["export", "--export.formats", "[onnx, openvno]"], "did you mean openvino?"),
        (["bundle", "verify"], "the following arguments are required: bundle"),
        (["ft"], "invalid choice: 'ft'"),
        ([], "the following arguments are required"),
    ],
)
def test_wrong_usage_exits_with_2_and_names_the_nearest(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    """Case E01."""
    extra = ["--data.root", str(tmp_path / "digits")] if "--data.embedded" in arguments else []
    result = run(*arguments, *extra)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_unknown_key_in_a_file_names_file_path_and_nearest_key(tmp_path: Path) -> None:
    """Case E01."""
    file = tmp_path / "a b.yaml"
    file.write_text("optimizer:\n  weigth_decay: 0.1\n  lr: '1e-3'\nepochs: 3\n")
    result = run("fit", "--config", str(file))
    assert result.returncode == 2
    assert (
        f"{file}: optimizer.weigth_decay is not an option; did you mean optimizer.weight_decay?"
        in result.stderr
    )
    assert f"{file}: optimizer.lr is the text '1e-3'; expected number" in result.stderr
    assert f"{file}: epochs is not an option; did you mean training.epochs?" in result.stderr


def test_missing_data_names_the_absolute_path(tmp_path: Path) -> None:
    """Case E05: a path on the command line starts where the person stands."""
    result = run("data", "--data.root", "my images", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: {tmp_path / 'my images'}: there is no such folder")


def test_data_is_the_same_from_every_directory(make_folder: MakeFolder, tmp_path: Path) -> None:
    """Case E05."""
    root = make_folder()
    (tmp_path / "a b").mkdir()
    results = [run("data", "--data.root", str(root), cwd=cwd) for cwd in ("/", tmp_path, tmp_path / "a b")]
    assert {(result.returncode, result.stdout) for result in results} == {(0, f"{root}\n")}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_stage_that_is_stopped_says_run_me_again(tmp_path: Path, number: int) -> None:
    """Case B04: here in front of a lock that somebody else holds; launchers take any other code for a failure."""
    command = [
        sys.executable,
        "-m",
        "train",
        "data",
        "--data.embedded=digits",
        f"--data.root={tmp_path}/digits",
    ]
    with (
        sealed.only_one(tmp_path / "digits", "the data set"),
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
    ):
        try:
            assert process.stderr
            assert "waiting for it" in process.stderr.readline()
            process.send_signal(number)
            assert process.communicate() == ("", "error: stopped by a signal; run it again\n")
            assert process.returncode == 75
        finally:
            process.kill()


def test_help_lists_options_with_defaults() -> None:
    result = run("fit", "--help")
    assert result.returncode == 0
    assert "--optimizer.lr" in result.stdout
    assert "(default: 0.001)" in result.stdout
    assert "0: in proportion to image.size, 256 for 224" in " ".join(result.stdout.split())
