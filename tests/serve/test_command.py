"""`python -m serve` as a person meets it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import astuple
from pathlib import Path

import numpy as np
import psutil
import pytest

from serve import releases, repository, shared_memory
from serve.client import CLIENTS
from serve.protocol import RefusedInput
from serve.release import Release
from serve.server import LOOPBACK, Server, free_ports, is_free
from slipway.bundle import Bundle
from tests import images
from tests.serve.tools import CPUS, PATIENCE, SLOW, wait_until, wait_until_gone

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def serve(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "serve", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["smok"], "smok is not a command of serve; did you mean smoke?"),
        (
            ["quux"],
            "quux is not a command of serve; there are publish, promote, rollback, list, verify, push, pull, up, ",
        ),
        (["smoke", "--relase", "x"], "--relase is not an option; did you mean release?"),
        (["smoke", "--image", "x"], "--image is not an option; did you mean images?"),
        (["publish", "--bundel", "x"], "--bundel is not an option; did you mean bundle?"),
        (["publish"], "--bundle is missing"),
        (["publish", "--bundle", "x", "--cpus", "0"], "--cpus is 0; must be at least 1"),
        (["publish", "--target", "contaner"], "invalid choice: 'contaner'"),
        (
            ["promote", "digits-9", "--repository", "none"],
            "digits-9 is not a release of none; there are none",
        ),
        (
            ["pull", "s3://releases"],
            "s3://releases: is no address of a release; expected s3://bucket/prefix/release",
        ),
        (["up", "now"], "'now' is one value too many"),
        (["up", "--probe-seconds", "0"], "--probe-seconds is 0; must be above 0"),
        (["up", "--ports", "8000", "8001"], "--ports: expected 3 arguments"),
        (
            ["up", "--ports", "8000", "8001", "8000"],
            "--ports is 8000 8001 8000; expected three different ones",
        ),
        (
            ["up", "--ports", "8000", "8001", "65536"],
            "--ports is 8000 8001 65536; expected three different ones",
        ),
        (["up", "--traces", "localhost:4318"], "--traces is localhost:4318; expected http://host:port/path"),
        (["container", "--traces", "collector"], "--traces is collector; expected http://host:port/path"),
        (["predict", "a.png", "--url", "localhost"], "--url is localhost; expected host:port"),
        (["predict", "a.png", "--url", "https://host:80000"], "--url is host:80000; expected host:port"),
        (["health", "--grpc", "127.0.0.1:0"], "--grpc is 127.0.0.1:0; expected host:port"),
        (["watch", "--http", "https://127.0.0.1:1"], "--http is https://127.0.0.1:1; expected host:port"),
        (["watch", "--metrics", "localhost"], "--metrics is localhost; expected host:port"),
        (
            ["predict", __file__, "--url", "a..b:8000"],
            "--url is a..b:8000; expected host:port, and a..b can be no host",
        ),
        (["predict", __file__, "--url", "::1:8000"], "--url is ::1:8000; expected host:port"),
        (["watch", "--port", "70000"], "--port is 70000; must be within 0..65535"),
        (["predict", "a.png", "--api-key-file", "none"], "--api-key-file none: cannot be read"),
        (["predict", "a.png", "--api-key-file", __file__], "test_command.py: holds no key"),
        (
            ["predict", "a.png", "--certificates", __file__],
            "of no use without TLS; write --url https://127.0.0.1:",
        ),
        (
            ["predict", "a.png", "--certificates", __file__, "--url", "https://127.0.0.1:1"],
            "test_command.py: holds no certificate",
        ),
        (["predict", "no-such-file.png"], "no-such-file.png: is not a file"),
        (["predict", "no-such-*.png"], "no-such-*.png: matches no file"),
    ],
)
def test_wrong_usage_is_said_in_one_line_and_exits_2(arguments: list[str], words: str) -> None:
    done = serve(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("key", ["two words", "schl\u00fcssel", " "])
def test_a_key_out_of_the_environment_is_held_to_what_one_out_of_a_file_is(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """And not repeated: it may be all but one."""
    monkeypatch.setenv("SLIPWAY_API_KEY", key)
    done = serve("predict", __file__, "--url", "https://127.0.0.1:1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: SLIPWAY_API_KEY in the environment: holds no key; expected one, and nothing else\n"
    )


@pytest.mark.parametrize(
    "command",
    ["publish", "promote", "rollback", "list", "verify", "push", "pull", "up", "watch", "smoke", "predict"],
)
def test_every_command_explains_itself(command: str) -> None:
    done = serve(command, "--help")
    assert done.returncode == 0
    assert f"python -m serve {command}" in done.stdout
    assert command in serve("--help").stdout


@pytest.mark.integration
def test_publish_prints_the_release_and_nothing_else(bundle: Bundle, tmp_path: Path) -> None:
    """And, told so, promotes nothing."""
    arguments = ["publish", "--bundle", str(bundle.directory), "--repository", "models with space"]
    done = serve(*arguments, "--no-promote", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    current, release = (tmp_path / "models with space" / name for name in ("current", "releases/tiny-1"))
    assert (tmp_path / done.stdout.removesuffix("\n")).resolve() == release.resolve()
    assert not current.is_symlink()
    assert serve(*arguments, cwd=tmp_path).stdout == done.stdout
    assert current.resolve() == release.resolve()


def test_verify_names_a_whole_release_and_refuses_a_changed_one(release: Release, tmp_path: Path) -> None:
    copy = shutil.copytree(release.directory, tmp_path / "copy")
    done = serve("verify", copy)
    assert (done.returncode, done.stdout) == (0, f"{release.identity}\n")
    done = serve("verify", copy, "--public-key", "owner.pub")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{copy}: is not signed" in done.stderr
    labels = copy / "models" / "classifier" / "labels.txt"
    labels.chmod(0o644)
    labels.write_text(labels.read_text().upper() + "x")
    done = serve("verify", copy)
    assert (done.returncode, done.stdout) == (1, "")
    assert "labels.txt: differs from the manifest (SHA-256)" in done.stderr


def test_a_bundle_that_is_none_exits_1(tmp_path: Path) -> None:
    done = serve("publish", "--bundle", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "is not a sealed directory" in done.stderr


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_predict_without_a_server_says_so_and_how_to_start_one(tmp_path: Path, protocol: str) -> None:
    (tmp_path / "a.png").write_bytes(images.flat(0))
    url = f"{LOOPBACK}:{free_ports().http}"
    done = serve("predict", tmp_path / "a.png", "--url", url, "--protocol", protocol)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(
        f"error: {url}: no server answers there over .*; `make serve` starts one\n", done.stderr
    )


@pytest.mark.integration
def test_predict_answers_each_file_and_names_the_refused(
    server: Server, tmp_path: Path, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case A16: also the one whose name is no UTF-8."""
    for k in (3, 10):
        (tmp_path / f"{k}.png").write_bytes(images.flat(k))
    (tmp_path / "page.png").write_bytes(b"<html>")
    odd = os.fsdecode(b"\xe4.png")
    (tmp_path / odd).write_bytes(images.flat(7))
    files = ["3.png", "page.png", odd, "10.png"]
    url = f"http://{server.http}/" if protocol == "http" else server.grpc
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8:strict")
    done = serve("predict", *files, "--protocol", protocol, "--url", url, cwd=tmp_path)
    assert done.returncode == 1
    answers = [re.sub(r"\d+\.\d%", "sure", line) for line in done.stdout.splitlines()]
    assert answers == ["3.png: 3 (sure)", r"\udce4.png: 7 (sure)", "10.png: 10 (sure)"]
    assert "page.png: NOT_AN_IMAGE: not a decodable image" in done.stderr
    assert "1 of 4 files were refused" in done.stderr


@contextmanager
def up(release: Path, log: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """`serve up` in another process, once it is ready; `log` holds what it says."""
    command = [sys.executable, "-m", "serve", "up", "--release", str(release), *options]
    with (
        log.open("w") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        try:
            deadline = time.monotonic() + PATIENCE
            while "Ctrl-C stops it" not in log.read_text():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            yield process
        finally:
            process.terminate()


def curl_in(text: str) -> str:
    """The command that `up` printed, as it would be copied."""
    found = re.search(r"^image=.*?/infer$", text, re.DOTALL | re.MULTILINE)
    assert found, text
    return found[0]


def ports_in(text: str) -> list[int]:
    return [int(port) for port in re.findall(rf"^  \w+ +(?:http://)?{LOOPBACK}:(\d+)", text, re.MULTILINE)]


@needs_curl
@pytest.mark.integration
def test_the_printed_curl_returns_names_and_ctrl_c_stops_cleanly(bundle: Bundle, tmp_path: Path) -> None:
    """Case D08."""
    models, log = tmp_path / "it's a model", tmp_path / "log"
    releases.move_current(repository.publish(bundle.directory, models, "embedded", CPUS))
    with up(models / "current", log) as process:
        asked = [
            subprocess.run(
                [shell, "-c", curl_in(log.read_text())], capture_output=True, text=True, check=True
            )
            for shell in ("sh", "bash")
        ]
        process.send_signal(signal.SIGINT)
        stdout, _ = process.communicate(timeout=PATIENCE)
    for done in asked:
        release, probabilities = json.loads(done.stdout)["outputs"]
        assert release["data"][0].startswith("tiny/1@")
        assert [entry.split(":")[2] for entry in probabilities["data"]] == ["2", "5", "4"]
    assert (process.returncode, stdout) == (0, "")
    assert log.read_text().endswith("stopped\n")
    assert all(is_free(port) for port in ports_in(log.read_text()))


def ask_about_slow(protocol: str, url: str) -> None:
    with CLIENTS[protocol](url) as client:
        client.classify([SLOW])


@pytest.mark.integration
def test_sigterm_answers_what_is_in_flight_and_does_not_wait_for_idle_clients(
    slow_release: Release, tmp_path: Path
) -> None:
    """The answer to SLOW is that it is no image: what matters is that it comes."""
    log = tmp_path / "log"
    with up(slow_release.directory, log) as process, ExitStack() as stack:
        http, grpc, _ = ports_in(log.read_text())
        urls = {"http": f"{LOOPBACK}:{http}", "grpc": f"{LOOPBACK}:{grpc}"}
        for protocol, url in urls.items():
            idle = stack.enter_context(CLIENTS[protocol](url))
            assert idle.classify([images.flat(2)])[0].label == "2"
        pool = stack.enter_context(ThreadPoolExecutor())
        in_flight = [pool.submit(ask_about_slow, protocol, url) for protocol, url in urls.items()]
        triton_log = Path(re.findall(r"its log is (.+)", log.read_text())[0])
        wait_until(lambda: triton_log.read_text().count("slow begins") == len(in_flight))
        process.send_signal(signal.SIGTERM)
        for one in in_flight:
            with pytest.raises(RefusedInput, match="NOT_AN_IMAGE"):
                one.result(timeout=PATIENCE)
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert log.read_text().endswith("stopped\n")


@pytest.mark.integration
def test_nothing_outlives_up_when_it_is_killed_and_the_next_server_cleans_up(
    release: Release, tmp_path: Path
) -> None:
    with up(release.directory, tmp_path / "log") as process:
        children = psutil.Process(process.pid).children(recursive=True)
        assert {"haproxy", "tritonserver"} < {child.name() for child in children}
        (triton,) = (child for child in children if child.name() == "tritonserver")
        (identity,) = re.findall(r"--id=(\S+)", " ".join(triton.cmdline()))
        process.kill()
    wait_until_gone(child.pid for child in children)
    assert list(shared_memory.DIRECTORY.glob(f"{identity}*"))

    def cleaned_up() -> bool:
        shared_memory.remove_abandoned()  # as every server does when it starts
        return not list(shared_memory.DIRECTORY.glob(f"{identity}*"))

    # Triton looks dead, and its lock free, only when the last of its threads has gone.
    wait_until(cleaned_up)


@pytest.mark.integration
def test_up_listens_where_it_was_told_to_or_not_at_all(release: Release, tmp_path: Path) -> None:
    told = list(astuple(free_ports()))
    options = ["--ports", *map(str, told)]
    with up(release.directory, tmp_path / "log", *options):
        assert ports_in((tmp_path / "log").read_text()) == told
        done = serve("up", "--release", release.directory, *options)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"port {told[0]} is in use" in done.stderr


def test_up_with_nothing_published_says_what_publishes(tmp_path: Path) -> None:
    done = serve("up", "--release", tmp_path / "current")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no release is published there; `make publish` does that" in done.stderr


@needs_curl
@pytest.mark.integration
def test_a_whole_image_as_the_body_is_a_request(server: Server, tmp_path: Path) -> None:
    """Case D08."""
    (tmp_path / "image.jpg").write_bytes(images.flat(8, "JPEG") + b"\0\0")
    command = ["curl", "-sS", "-H", "Inference-Header-Content-Length: 0", "-D", "headers", "-o", "answer"]
    url = f"http://{server.http}/v2/models/classify/infer"
    subprocess.run([*command, "--data-binary", "@image.jpg", url], cwd=tmp_path, check=True)
    (length,) = re.findall(r"Inference-Header-Content-Length: (\d+)", (tmp_path / "headers").read_text())
    body = (tmp_path / "answer").read_bytes()
    head, tensors, offset = json.loads(body[: int(length)]), {}, int(length)
    for output in head["outputs"]:
        size = output["parameters"]["binary_data_size"]
        tensors[output["name"]] = body[offset : offset + size]
        offset += size
    assert np.frombuffer(tensors["probabilities"], np.float32).argmax() == 8
