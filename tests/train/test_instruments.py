import json

import pytest
import torch

from tests.train.conftest import MakeConfig, MakeFolder
from train.fit import fit
from train.folder import read_folder
from train.mixing import Mixed
from train.runs import run_for


def test_profile_of_a_few_steps_is_written_and_shown(
    make_folder: MakeFolder, make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = make_config(make_folder(), debug__profile="true", training__epochs="4")
    run = fit(config, read_folder(config.data))
    events = json.loads((run / "profile.json").read_text())["traceEvents"]
    assert any("conv" in event.get("name", "") for event in events)
    assert "Self CPU" in caplog.text


def test_anomaly_detection_names_the_operation(
    make_folder: MakeFolder, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(make_folder(), debug__anomaly="true", training__epochs="1")

    def losses(mixed: Mixed, logits: torch.Tensor, label_smoothing: float) -> torch.Tensor:
        return (-logits.square()).sqrt().sum(dim=1) * 0

    monkeypatch.setattr(Mixed, "losses", losses)
    with (
        pytest.warns(UserWarning, match="Error detected in SqrtBackward"),
        pytest.raises(RuntimeError, match="SqrtBackward0"),
    ):
        fit(config, read_folder(config.data))


def test_looking_closer_goes_on_with_the_same_run(make_folder: MakeFolder, make_config: MakeConfig) -> None:
    root = make_folder()
    folder = read_folder(make_config(root).data)
    closer = make_config(root, debug__anomaly="true", debug__profile="true")
    assert run_for(closer, folder) == run_for(make_config(root), folder)
