"""Starting and stopping a real Triton: in odd places, with things missing, and never leaving anything behind."""

import os
import shutil
import signal
import socket
import time
import urllib.request
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.http

from serve import repository
from serve import server as servers
from serve.client import CLIENTS, HttpClient
from serve.health import WrongAnswer, check
from serve.protocol import ServerFailure
from serve.release import Release, open_release
from serve.server import TRITON, Ports, PortTaken, Server, ServerError, free_ports, serving
from slipway import sealed
from slipway.bundle import Bundle
from tests import images
from tests.serve.tools import (
    CPUS,
    SERVE,
    TRAIN,
    edit_text,
    make_bundle,
    model_processes,
    still_running,
    variant,
    wait_until_gone,
)

pytestmark = pytest.mark.integration


def label_of_5(server: Server) -> str:
    with HttpClient(server.http) as client:
        return client.classify([images.flat(5)])[0].label


def watch(server: Server) -> None:
    """Until it ends. Its status can be collected when its last thread is gone, a moment after it looks dead."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        server.raise_if_ended()
        time.sleep(0.05)


def test_nothing_is_left_behind(release: Release) -> None:
    with serving(release) as server:
        folder = server.log.parent
        processes = [server.pid, *model_processes(server)]
        memory = {path for path in Path("/dev/shm").glob("slipway-*") if server.id in path.name}
        assert len(processes) == 1 + 2 * CPUS
        assert memory
    assert not any(still_running(pid) for pid in processes)
    assert not any(path.exists() for path in memory)
    assert not folder.exists()
    assert all(servers.is_free(port) for port in (server.ports.http, server.ports.grpc, server.ports.metrics))
    sealed.verify(release.directory, "release")  # Triton's byte code did not go into it


def test_every_step_has_run_alone_and_in_a_full_batch_before_the_first_request(release: Release) -> None:
    """Case D11: Triton counts its warm-up as work, and listens only when it is done."""
    with serving(release) as server, tritonclient.http.InferenceServerClient(server.http) as raw:
        for model in ("preprocess", "classifier"):
            (statistics,) = raw.get_inference_statistics(model)["model_stats"]
            sizes = {
                entry["batch_size"]: entry["compute_infer"]["count"] for entry in statistics["batch_stats"]
            }
            # Every instance warms up; readiness asks twice more for one image.
            assert sizes.keys() == {1, release.signature.max_batch}
            assert sizes[release.signature.max_batch] == CPUS


def test_a_server_that_does_not_stop_is_killed_with_all_its_processes(
    release: Release, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(release) as server:
        processes = [server.pid, *model_processes(server)]
        memory = [path for path in Path("/dev/shm").glob("slipway-*") if server.id in path.name]
        os.kill(server.pid, signal.SIGSTOP)
        monkeypatch.setattr(servers, "STOP_SECONDS", 0.5)
    assert "killing it" in caplog.text
    wait_until_gone(processes)
    assert not any(path.exists() for path in memory)


def test_models_are_not_led_elsewhere_and_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    unwanted = ("PYTHONPATH", "PYTHONHOME", "COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")
    for name in (*unwanted, "KEPT"):
        monkeypatch.setenv(name, "anything")
    variables = servers._environment(SERVE)
    assert not variables.keys() & set(unwanted)
    assert variables["KEPT"] == "anything"
    assert variables["PATH"].startswith(f"{SERVE / 'bin'}{os.pathsep}")


def test_a_failure_while_serving_stops_the_server(release: Release) -> None:
    with pytest.raises(ZeroDivisionError), serving(release) as server:
        raise ZeroDivisionError
    assert not still_running(server.pid)


def test_it_listens_on_loopback_only(server: Server) -> None:
    listening = [c.laddr for c in psutil.Process(server.pid).net_connections() if c.status == "LISTEN"]
    # gRPC's socket is an IPv6 one, bound to the IPv4 address of the loopback.
    assert {address.ip.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
    assert {address.port for address in listening} == {
        server.ports.http,
        server.ports.grpc,
        server.ports.metrics,
    }


def test_spaces_in_every_path(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton hangs in loading for ever where one of its own paths contains a space."""
    here = tmp_path / "a folder with spaces"
    (here / "temporary files").mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(here / "temporary files"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (here / "python env").symlink_to(SERVE, target_is_directory=True)
    shutil.copytree(TRITON, here / "triton server", symlinks=True)
    release = open_release(repository.publish(bundle.directory, here / "model repository", "embedded", CPUS))
    with serving(release, python=here / "python env", triton=here / "triton server") as server:
        assert label_of_5(server) == "5"
        assert "a folder with spaces" in Path(f"/proc/{server.pid}/exe").readlink().as_posix()


def test_two_servers_at_once_do_not_disturb_each_other(release: Release, tmp_path: Path) -> None:
    swapped = make_bundle(tmp_path / "bundles" / "tiny" / "2", "--reverse-classes")
    other = open_release(repository.publish(swapped, tmp_path / "repository", "embedded", CPUS))
    with serving(release) as first:
        with serving(other) as second:
            assert (label_of_5(first), label_of_5(second)) == ("5", "6")
        assert label_of_5(first) == "5"


def test_a_given_port_that_is_taken_is_named(release: Release) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        free = free_ports()
        with (
            pytest.raises(PortTaken, match=f"port {port} is in use"),
            serving(release, ports=Ports(http=free.http, grpc=port, metrics=free.metrics)),
        ):
            pass


@pytest.mark.parametrize("which", ["http", "grpc", "metrics"])
def test_a_chosen_port_that_is_lost_before_triton_takes_it_is_replaced(
    release: Release, server: Server, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """The port was taken by another server with the same release: its right answers must not be ours."""
    chosen = free_ports()
    lost = Ports(**{**vars(chosen), which: getattr(server.ports, which)})
    choices = [lost, free_ports()]
    monkeypatch.setattr(servers, "free_ports", lambda: choices.pop(0))
    monkeypatch.setattr(servers, "is_free", lambda _: True)
    with serving(release) as own:
        assert not choices
        assert getattr(own.ports, which) != getattr(server.ports, which)
        assert own.pid != server.pid
        assert label_of_5(own) == "5"


def test_a_server_that_dies_is_noticed_with_the_end_of_its_log(release: Release) -> None:
    with serving(release) as server:
        server.raise_if_ended()
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(
            ServerError, match=r"(?s)ended by itself with status -9; the end of its log:.*Started"
        ):
            watch(server)


def test_a_server_that_looks_dead_before_its_last_thread_has_gone_ended_with_a_status(
    release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is said of an end must not depend on which of the two is seen first."""

    def look(process: psutil.Process) -> str:
        process.kill()
        return psutil.STATUS_ZOMBIE

    with serving(release) as server:
        monkeypatch.setattr(psutil.Process, "status", look)
        with pytest.raises(ServerError, match="ended by itself with status -9"):
            server.raise_if_crippled()


def test_health_check_sees_dead_models_that_triton_does_not(release: Release) -> None:
    with serving(release) as server:
        for pid, command in model_processes(server).items():
            if "/classifier/" in command:
                os.kill(pid, signal.SIGKILL)
        with urllib.request.urlopen(f"http://{server.http}/v2/health/ready", timeout=10) as response:
            assert response.status == 200
        for protocol, url in server.urls.items():
            with CLIENTS[protocol](url) as client, pytest.raises(ServerFailure, match="not healthy"):
                check(client, release)


def test_a_process_that_may_not_be_looked_at_is_not_taken_for_dead(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(*_: object) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "status", deny)
    server.raise_if_crippled()
    monkeypatch.setattr(psutil.Process, "net_connections", deny)
    assert not server.answers()


def test_a_release_whose_models_have_vanished_is_refused_in_words(release: Release, tmp_path: Path) -> None:
    vanished = variant(release, tmp_path / "release", lambda _: None)
    shutil.rmtree(vanished.models)
    with (
        pytest.raises(
            ServerError, match=f"{vanished.directory}: Triton could not be started with it: .*No such"
        ),
        serving(vanished),
    ):
        pass


def test_numpy_2_is_refused_in_words(release: Release) -> None:
    """Case D18."""
    words = r"could not load model \w+: .*numpy 2\.\S+ is installed .* reads numpy 2 arrays silently wrong"
    with pytest.raises(ServerError, match=words), serving(release, python=TRAIN):
        pass


def test_other_versions_than_the_pinned_are_refused(release: Release, tmp_path: Path) -> None:
    """Case D18."""

    def pin_another(models: Path) -> None:
        edit_text(models / "preprocess" / "1" / "serving.json", '"pillow": "13.0.0"', '"pillow": "12.0.0"')

    words = (
        r"could not load model preprocess: .*pillow 13\.0\.0 is installed .* published for pillow 12\.0\.0"
    )
    with (
        pytest.raises(ServerError, match=words),
        serving(variant(release, tmp_path / "release", pin_another)),
    ):
        pass


def test_versions_are_written_to_the_log_when_models_load(server: Server) -> None:
    """Case D18."""
    log = server.log.read_text()
    assert "with Python 3.11." in log
    assert "numpy 1.26.4, pillow 13.0.0" in log
    assert "onnxruntime 1.32.0" in log


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("pytriton/tritonserver/bin/tritonserver", "the Triton server is missing"),
        ("pytriton/tritonserver/backends/python/triton_python_backend_stub", "stub of .* is missing"),
        ("nvidia_pytriton.libs/libpython3.11.so.1.0", "libpython is missing"),
    ],
)
def test_what_is_missing_of_triton_is_named_with_the_command_that_brings_it(
    release: Release, tmp_path: Path, missing: str, words: str
) -> None:
    """Case D18."""
    shutil.copytree(TRITON, tmp_path / "triton", copy_function=os.symlink, symlinks=True)
    (tmp_path / "triton" / missing).unlink()
    with (
        pytest.raises(ServerError, match=f"{missing}: .*{words}; `make setup` puts it there"),
        serving(release, triton=tmp_path / "triton"),
    ):
        pass


def test_an_environment_of_another_python_is_refused(release: Release, tmp_path: Path) -> None:
    """Case D18."""
    (tmp_path / "lib" / "python3.12").mkdir(parents=True)
    with (
        pytest.raises(ServerError, match=r"is not a Python 3\.11 environment"),
        serving(release, python=tmp_path),
    ):
        pass


def test_other_golden_pixels_than_at_export_are_refused(release: Release, tmp_path: Path) -> None:
    """As another version of a decoder would give."""

    def darker(models: Path) -> None:
        code = models / "preprocess" / "1" / "slipway" / "preprocessing.py"
        edit_text(code, "np.asarray(image).transpose(2, 0, 1)", "(np.asarray(image) // 2).transpose(2, 0, 1)")

    changed = variant(release, tmp_path / "release", darker)
    with pytest.raises(ServerError, match=r"flat_2\.png decodes to other pixels here"), serving(changed):
        pass


def test_other_golden_logits_than_at_export_are_refused(release: Release, tmp_path: Path) -> None:
    """As an exchanged model file, or another ONNX Runtime, would give."""

    def exchange(models: Path) -> None:
        path = models / "classifier" / "1" / "golden_logits.npy"
        np.save(path, np.load(path) + 0.01)

    with (
        pytest.raises(ServerError, match=r"golden logits differ by 0\.01 .* the limit is 0\.0015"),
        serving(variant(release, tmp_path / "release", exchange)),
    ):
        pass


def test_a_wrong_answer_to_the_golden_image_is_not_ready(release: Release, tmp_path: Path) -> None:
    """The model is right and its labels are another model's: all of Triton's health checks are content."""

    def swap_labels(models: Path) -> None:
        for model in ("classify", "classifier"):
            path = models / model / "labels.txt"
            path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))

    changed = variant(release, tmp_path / "release", swap_labels)
    with (
        pytest.raises(WrongAnswer, match=r"the golden image was answered '9' .* it is '2'"),
        serving(changed),
    ):
        pass


def test_a_release_for_the_container_says_how_to_get_one_for_here(bundle: Bundle, tmp_path: Path) -> None:
    release = open_release(repository.publish(bundle.directory, tmp_path, "container", CPUS))
    with (
        pytest.raises(ServerError, match=r"was published for the container; .*--target embedded"),
        serving(release),
    ):
        pass
