"""`make gateway`, as somebody at a terminal meets it."""

import re
import signal
import socket
import ssl
import stat
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from deploy.gateway import __main__ as commands
from deploy.gateway import up
from serve.server import LOOPBACK, free_ports
from slipway.errors import UsageError
from tests.deploy.gateway.tools import NEEDED
from tests.programs import require

# The command, in a folder of its own instead of the project's.
START = """
import sys
from pathlib import Path
from deploy.gateway import up
folder = Path(sys.argv.pop(1))
up.KEYS, up.CERTIFICATE = folder / "keys.conf", folder / "certificate.pem"
up.CERTIFICATE_KEY = folder / "certificate.key"
from deploy.gateway import __main__ as commands
from slipway import command
command.run(commands.main)
"""


@pytest.fixture
def listen() -> str:
    return f"{LOOPBACK}:{free_ports().http}"


def run(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", START, str(folder), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def started(process: "subprocess.Popen[str]") -> str:
    """What it says until it is open."""
    assert process.stderr is not None
    text = ""
    while "Ctrl-C stops it" not in text:
        line = process.stderr.readline()
        assert line, text
        text += line
    return text


@pytest.mark.integration
def test_the_first_start_makes_a_certificate_and_a_key_and_shows_it_once(tmp_path: Path, listen: str) -> None:
    require(*NEEDED)
    folder = tmp_path / ".gateway"
    said = []
    for _ in range(2):
        with run(folder, "up", "--listen", listen) as process:
            try:
                said.append(started(process))
                context = ssl.create_default_context(cafile=folder / "certificate.pem")
                with urllib.request.urlopen(f"https://{listen}/", context=context, timeout=60) as page:
                    assert b"Try the model" in page.read()
            finally:
                process.send_signal(signal.SIGINT)
                output, rest = process.communicate(timeout=120)
        assert process.returncode == 0, rest
    first, second = said
    assert re.search(r"made a key, which is not shown again:\n\n  slipway_\S{43}\n", first)
    assert "slipway_" not in second
    assert f"https://{listen}/" in second
    for name in ("keys.conf", "certificate.key"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    assert output.startswith('{"time":')  # the log


@pytest.mark.integration
def test_a_key_for_one_more_client_is_the_only_line_on_stdout(tmp_path: Path) -> None:
    with run(tmp_path, "key", "bob", "--keys", str(tmp_path / "keys.conf")) as process:
        output, told = process.communicate()
    assert process.returncode == 0, told
    assert re.fullmatch(r"slipway_\S{43}\n", output)


@pytest.mark.integration
def test_a_file_of_keys_that_was_named_is_not_made(tmp_path: Path, listen: str) -> None:
    require(*NEEDED)
    with run(tmp_path, "up", "--listen", listen, "--keys", str(tmp_path / "missing.conf")) as process:
        _, told = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "missing.conf" in told
    assert not (tmp_path / "missing.conf").exists()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--canary-percent", "5"], "canary_percent is 5, but no canary is named"),
        (["--listen", "8443"], "8443 is no address; expected host:port"),
    ],
)
def test_wrong_settings_are_named_before_anything_is_made(
    arguments: list[str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(up, "prepare", lambda _: pytest.fail("makes something"))
    with pytest.raises(UsageError, match=problem):
        commands.main(["up", *arguments])


def test_nobody_behind_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server((LOOPBACK, 0)) as somebody:
        address = f"{LOOPBACK}:{somebody.getsockname()[1]}"
        up.warn_of_nobody(address)
        assert not caplog.text
    up.warn_of_nobody(address)
    assert f"WARNING: nobody listens on {address} yet (Connection refused); `make serve` says" in caplog.text
