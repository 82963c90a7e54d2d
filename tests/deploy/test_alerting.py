"""A real service, watched by a real Prometheus: all that is asked for is there, and an alert reaches somebody."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from serve import repository, tether
from serve.client import CLIENTS
from serve.server import LOOPBACK
from tests import images
from tests.deploy.monitoring import SECRET, alertmanager_in_a_hurry, copy_in_a_hurry
from tests.deploy.processes import listening
from tests.deploy.test_monitoring import panels, queries
from tests.programs import require
from tests.serve.tools import CPUS, make_bundle, wait_until
from train.exposition import Exposition

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]

# What only a GPU, or Triton's build for one, brings.
ON_A_GPU = {"nv_gpu_memory_used_bytes", "nv_gpu_memory_total_bytes", "nv_gpu_utilization"}
PROMQL = {
    *("sum", "min", "max", "count", "topk", "by", "on", "group_left", "and", "or", "abs", "time", "vector"),
    *("rate", "increase", "histogram_quantile"),
}
# What training logs: tests/train/test_exposition.py holds a real run to it.
FIGURES = ("loss", "lr", "gradient_norm", "images_per_second", "data_wait", "memory_mb")


class Inbox(ThreadingHTTPServer):
    """Takes messages as Slack does."""

    daemon_threads = True

    def __init__(self) -> None:
        self.messages: list[Any] = []
        super().__init__((LOOPBACK, 0), _Incoming)


class _Incoming(BaseHTTPRequestHandler):
    server: Inbox

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.messages.append(json.loads(body))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def inbox() -> Iterator[Inbox]:
    with Inbox() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@dataclass(frozen=True, kw_only=True)
class Watched:
    """release: what is served. service: `serve up`. urls: protocol -> host:port; prometheus and the others, too."""

    release: Path
    service: "subprocess.Popen[bytes]"
    urls: dict[str, str]
    inbox: Inbox

    def ask(self, whom: str, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"http://{self.urls[whom]}{path}?{query}", timeout=30) as answer:
            return json.load(answer)

    def tell_of(self, alert: str) -> None:
        """As Prometheus would tell Alertmanager."""
        alerts = [{"labels": {"alertname": alert, "service": "slipway", "severity": "critical"}}]
        request = urllib.request.Request(
            f"http://{self.urls['alertmanager']}/api/v2/alerts",
            json.dumps(alerts).encode(),
            {"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=30).close()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    require("prometheus", "prometheus-alertmanager", "prometheus-node-exporter")
    folder = tmp_path_factory.mktemp("monitoring")
    bundle = make_bundle(folder / "tiny" / "1")
    release = repository.publish(bundle, folder / "models", "embedded", CPUS)
    with ExitStack() as stack:
        messages = stack.enter_context(inbox())
        service, urls = stack.enter_context(served(release, folder / "service.log"))
        urls["training"] = stack.enter_context(training(folder))
        urls["alertmanager"] = stack.enter_context(alertmanager(folder, messages))
        urls["prometheus"] = stack.enter_context(prometheus(folder, urls))
        yield Watched(release=release, service=service, urls=urls, inbox=messages)


def servers_of(service: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    return [child for child in psutil.Process(service.pid).children() if child.name() == "tritonserver"]


@contextmanager
def served(release: Path, log: Path) -> Iterator[tuple["subprocess.Popen[bytes]", dict[str, str]]]:
    options = ["-m", "serve", "up", "--release", str(release), "--probe-seconds", "5"]
    # Whoever kills the test ends the service, too.
    command = tether.command(Path(sys.executable), *options, signal_number=signal.SIGTERM)
    with log.open("wb") as output:
        process = subprocess.Popen(command, stderr=output)
    try:
        wait_until(lambda: "Ctrl-C stops it" in log.read_text() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        found = re.findall(
            rf"^  (HTTP|gRPC|metrics) +(?:http://)?({LOOPBACK}:\d+)", log.read_text(), re.MULTILINE
        )
        yield process, {name.lower(): url for name, url in found}
    finally:
        process.terminate()
        process.wait(120)


@contextmanager
def training(folder: Path) -> Iterator[str]:
    """A run that says how it goes, and node_exporter, which reads it."""
    run = folder / "runs" / "tiny-1"
    run.mkdir(parents=True)

    def options(address: str) -> list[str]:
        textfiles = f"--collector.textfile.directory={folder / 'runs' / '*'}"
        return [
            f"--web.listen-address={address}",
            "--collector.disable-defaults",
            "--collector.textfile",
            textfiles,
        ]

    with (
        Exposition(run, run / "checkpoints", 1000) as exposition,
        listening("prometheus-node-exporter", options, "/", folder / "node.log") as address,
    ):
        exposition._write_at = 0
        exposition.update(1, 8, dict.fromkeys(FIGURES, 0.5))
        yield address


@contextmanager
def alertmanager(folder: Path, messages: Inbox) -> Iterator[str]:
    """With our configuration, but in a hurry."""
    place = folder / "alertmanager"
    place.mkdir()
    secret = place / "slack_api_url"
    secret.write_text(f"http://{LOOPBACK}:{messages.server_port}/secret")
    (place / "alertmanager.yml").write_text(alertmanager_in_a_hurry().replace(SECRET, str(secret)))

    def options(address: str) -> list[str]:
        return [
            f"--config.file={place / 'alertmanager.yml'}",
            f"--storage.path={place / 'data'}",
            f"--web.listen-address={address}",
            "--cluster.listen-address=",
        ]

    with listening("prometheus-alertmanager", options, "/-/ready", folder / "alertmanager.log") as address:
        yield address


@contextmanager
def prometheus(folder: Path, urls: dict[str, str]) -> Iterator[str]:
    """With our configuration and rules, but in a hurry."""
    place = folder / "prometheus"
    config = copy_in_a_hurry(place)
    targets = {
        "service": "metrics",
        "triton": "metrics",
        "training": "training",
        "alertmanager": "alertmanager",
    }
    assert {file.stem for file in (place / "targets").iterdir()} == targets.keys()
    for job, name in targets.items():
        (place / "targets" / f"{job}.yml").write_text(json.dumps([{"targets": [urls[name]]}]))

    def options(address: str) -> list[str]:
        return [
            f"--config.file={config}",
            f"--storage.tsdb.path={place / 'data'}",
            f"--web.listen-address={address}",
        ]

    with listening("prometheus", options, "/-/ready", folder / "prometheus.log") as address:
        yield address


def names_in(query: str) -> set[str]:
    """The metrics that a query asks for."""
    bare = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]', "", query)
    bare = re.sub(r"\b(by|on|group_left) *\([^)]*\)", "", bare)
    return set(re.findall(r"(?<![\w.])[a-z_][\w:]*", bare)) - PROMQL


def test_every_metric_that_is_asked_for_is_there(watched: Watched) -> None:
    """In rules and dashboards, of the service, Triton, its models and training."""
    with CLIENTS["http"](watched.urls["http"]) as client:
        client.classify([images.flat(5)])
    wanted = {name for query in queries() for name in names_in(query)} - ON_A_GPU
    assert len(wanted) > 30

    def missing() -> set[str]:
        return wanted - set(watched.ask("prometheus", "/api/v1/label/__name__/values")["data"])

    wait_until(lambda: not missing())


def test_no_panel_of_a_dashboard_is_empty(watched: Watched) -> None:
    """Of those that may be, each says why."""
    with CLIENTS["http"](watched.urls["http"]) as client:
        client.classify([images.flat(5)])

    def empty() -> set[str]:
        return {title for title, panel in panels() if not any(map(answer, panel["targets"]))}

    def answer(target: dict[str, Any]) -> list[Any]:
        return watched.ask("prometheus", "/api/v1/query", query=target["expr"])["data"]["result"]

    on_a_gpu = {title for title, panel in panels() if "nv_gpu" in panel["targets"][0]["expr"]}
    assert len(on_a_gpu) == 2
    wait_until(lambda: empty() <= on_a_gpu)
    assert all(
        "noValue" in panel["fieldConfig"]["defaults"] for title, panel in panels() if title in on_a_gpu
    )


def test_a_server_that_is_sick_is_told_to_whom_is_on_call(watched: Watched) -> None:
    """Its release is gone, so that the server that is killed cannot be replaced."""

    def firing() -> set[str]:
        found = watched.ask("prometheus", "/api/v1/alerts")["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in found if alert["state"] == "firing"}

    def suppressed() -> set[str]:
        found = watched.ask("alertmanager", "/api/v2/alerts")
        return {alert["labels"]["alertname"] for alert in found if alert["status"]["inhibitedBy"]}

    def told() -> str:
        return json.dumps(watched.inbox.messages)

    sick = {"TritonDown", "GoldenProbeFailing"}
    wait_until(lambda: "Watchdog" in firing() and not sick & firing())
    watched.release.rename(watched.release.with_name("gone"))
    wait_until(lambda: len(servers_of(watched.service)) == 1)
    os.kill(servers_of(watched.service)[0].pid, signal.SIGKILL)
    wait_until(lambda: sick <= firing())
    wait_until(lambda: "docs/runbooks/TritonDown.md" in told())
    message = next(one for one in watched.inbox.messages if "TritonDown" in json.dumps(one))
    assert message["channel"] == "#on-call"
    # Where nobody serves, it need not be said as well that golden images are not answered. That `watch` does not answer
    # either says nothing about Triton.
    watched.tell_of("ServiceDown")
    wait_until(lambda: "GoldenProbeFailing" in suppressed())
    assert "TritonDown" not in suppressed()
    assert "Watchdog" not in told()
