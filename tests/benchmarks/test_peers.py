"""A peer is asked in its own way, and ends with all that it started."""

import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from benchmarks import peers
from benchmarks.peers import PeerClient, PeerError
from tests.serve.tools import wait_until_gone

pytestmark = pytest.mark.integration

# Stands in for a peer's program: starts a process in a group of its own, and answers what it was sent by its length.
PROGRAM = """\
import http.server, json, os, subprocess, sys
from pathlib import Path

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        form = self.headers["Content-Type"].startswith("multipart/form-data; boundary=")
        answer = json.dumps({"probabilities": [len(body), form]}).encode()
        self.send_response(500 if body == b"bad" else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments):
        pass

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
Path(os.environ["SLIPWAY_RELEASE"], "child").write_text(str(child.pid))
http.server.HTTPServer(("127.0.0.1", int(os.environ["SLIPWAY_PORT"])), Handler).serve_forever()
"""


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """A Python that runs this program whatever it is told to run."""
    (folder / "program.py").write_text(program)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{folder}/program.py"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))


@pytest.mark.parametrize("name", ["FastAPI", "LitServe"])
def test_peer_gets_the_image_as_it_wants_it_and_leaves_nothing_running(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, PROGRAM)
    with peers.running(name, tmp_path, 2, b"image") as port:
        client = PeerClient(name, port)
        length, form = client.probabilities(b"image")
        assert bool(form) == (name == "LitServe")
        assert length > len(b"image") if form else length == len(b"image")
        if not form:
            with pytest.raises(PeerError, match="answered 500"):
                client.probabilities(b"bad")
        np.testing.assert_array_equal(client.probabilities(b"image"), [length, form])
        client.close()
    wait_until_gone([int((tmp_path / "child").read_text())])


def test_peer_that_ends_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, "raise SystemExit('no such package')")
    before = set(psutil.Process().children())
    words = r"FastAPI did not answer: .*; what it said is above"
    with pytest.raises(PeerError, match=words), peers.running("FastAPI", tmp_path, 2, b"image"):
        pytest.fail("it does not run")
    assert set(psutil.Process().children()) == before
