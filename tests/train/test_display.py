import io
import re
from contextlib import redirect_stderr

import pytest
import torch

from train.display import display
from train.evaluate import Score
from train.meter import Meter

SCORE = Score(samples=8, loss=0.5, accuracy=0.75)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def shown(self) -> str:
        """Without what moves the cursor and sets colours."""
        return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", self.getvalue())


def test_bar_says_how_training_goes_and_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("TERM", "xterm")
    meter = Meter(torch.device("cpu"))
    meter.memory_mb = 1234.5
    with redirect_stderr(Terminal()) as terminal, display(10, 2, done=6, speaks=True) as show:
        show.step(7, 1.25, 1e-3, meter)
        show.epoch(0, 7, "ema", SCORE)
    shown = terminal.shown()
    assert " 7/10 " in shown
    assert re.search(r"loss 1\.2500  lr 1\.00e-03  \d+ images/s  1,23\d MB", shown)
    assert "epoch 1/2, step 7: validation accuracy of the moving average 0.7500, loss 0.5000\n" in shown


def test_elsewhere_an_epoch_is_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with redirect_stderr(io.StringIO()), display(10, 2, speaks=True) as show:
        show.step(5, 1.25, 1e-3, Meter(torch.device("cpu")))
        show.epoch(0, 5, "raw", SCORE)
    (line,) = caplog.messages
    assert line.startswith("epoch 1/2, step 5: validation accuracy 0.7500, loss 0.5000, train loss 1.2500, ")


def test_other_ranks_show_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with redirect_stderr(Terminal()) as terminal, display(10, 2, speaks=False) as show:
        show.step(5, 1.25, 1e-3, Meter(torch.device("cpu")))
        show.epoch(0, 5, "raw", SCORE)
    assert terminal.getvalue() == ""
    assert not caplog.messages
