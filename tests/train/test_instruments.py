import json
from pathlib import Path

import pytest
import torch

from tests.train.conftest import MakeConfig, MakeFolder
from train.config import DebugConfig
from train.fit import fit
from train.folder import read_folder
from train.instruments import instruments
from train.runs import Run


def test_profile_of_a_few_steps_is_written_and_shown(
    make_folder: MakeFolder, make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = make_config(make_folder(), debug__profile="true", training__epochs="4")
    run = fit(config, read_folder(config.data))
    events = json.loads((run / "profile.json").read_text())["traceEvents"]
    assert any("conv" in event.get("name", "") for event in events)
    assert "Self CPU" in caplog.text


def test_anomaly_detection_names_the_operation(tmp_path: Path) -> None:
    x = torch.tensor(-1.0, requires_grad=True)
    with (
        instruments(DebugConfig(anomaly=True), Run(directory=tmp_path, inputs="")),
        pytest.warns(UserWarning, match="Error detected in SqrtBackward"),
        pytest.raises(RuntimeError, match="SqrtBackward0"),
    ):
        (x.sqrt() * 0).backward()
