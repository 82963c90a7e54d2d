"""Real Compose, a real engine and the real file; programs of Debian's stand in for images that cannot be pulled here.

What monitors is started without what is monitored: that nobody serves is what the alert says.
"""

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import pytest

from deploy import stack
from serve.server import LOOPBACK, free_ports
from tests.deploy import stand_ins
from tests.deploy.monitoring import alertmanager_in_a_hurry, copy_in_a_hurry
from tests.programs import require
from tests.serve.tools import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.slow]

# Service -> the program of Debian's that stands in for it, and where it lies in the real image.
STAND_INS = {
    "prometheus": ("prometheus", ["/bin/prometheus"]),
    "alertmanager": ("prometheus-alertmanager", ["/bin/alertmanager"]),
    "node-exporter": ("prometheus-node-exporter", ["/bin/node_exporter"]),
    "inbox": ("busybox", ["/bin/busybox", "httpd"]),
}
# A page that keeps what is sent to it.
KEEP = "#!/bin/sh\ncat >> /tmp/told\necho 'Content-Type: text/plain'\necho\necho ok\n"


@dataclass(frozen=True, kw_only=True)
class Stack:
    client: docker.DockerClient
    project: str
    ports: dict[str, int]

    def container(self, service: str) -> Any:
        (found,) = self.client.containers.list(
            filters={
                "label": [
                    f"com.docker.compose.project={self.project}",
                    f"com.docker.compose.service={service}",
                ]
            }
        )
        return found

    def ask(self, service: str, path: str) -> Any:
        with urllib.request.urlopen(f"http://{LOOPBACK}:{self.ports[service]}{path}", timeout=30) as answer:
            return json.load(answer)

    def told(self) -> str:
        return self.container("inbox").exec_run(["cat", "/tmp/told"]).output.decode()


def image(service: str) -> str:
    """Not the name of the real one, which somebody may have in the same engine."""
    return f"slipway/stand-in-for-{service}:{os.getpid()}"


def override(folder: Path) -> Path:
    """What is other here than in the real stack: haste, an inbox in place of Slack, and runs of our own."""
    copy_in_a_hurry(folder / "prometheus")
    (folder / "alertmanager").mkdir()
    (folder / "alertmanager" / "alertmanager.yml").write_text(alertmanager_in_a_hurry())
    page = folder / "www" / "cgi-bin" / "hook"
    page.parent.mkdir(parents=True)
    page.write_text(KEEP)
    page.chmod(0o755)
    run = folder / "runs" / "tiny-1"
    run.mkdir(parents=True)
    (run / "metrics.prom").write_text('slipway_training_running{run="tiny-1"} 1\n')
    secret = folder / "slack_api_url"
    secret.write_text("http://inbox:8080/cgi-bin/hook")
    secret.chmod(0o600)
    content = {
        "services": {
            "prometheus": {
                "image": image("prometheus"),
                "volumes": [f"{folder}/prometheus:/etc/prometheus:ro"],
            },
            "alertmanager": {
                "image": image("alertmanager"),
                "volumes": [f"{folder}/alertmanager:/etc/alertmanager:ro"],
            },
            "node-exporter": {"image": image("node-exporter"), "volumes": [f"{folder}/runs:/runs:ro"]},
            "inbox": {
                "image": image("inbox"),
                "command": ["-f", "-p", "8080", "-h", "/www"],
                "volumes": [f"{folder}/www:/www:ro"],
                "tmpfs": ["/tmp"],
                "networks": ["inside"],
            },
        },
        "secrets": {"slack_api_url": {"file": str(secret)}},
    }
    file = folder / "override.yaml"
    file.write_text(json.dumps(content))  # JSON is YAML
    return file


@pytest.fixture(scope="module")
def running(
    docker_host: str, docker_client: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    require(*(program for program, _ in STAND_INS.values()))
    for service, (program, entry_point) in STAND_INS.items():
        stand_ins.make(docker_client, image(service), program, entry_point)
    folder = tmp_path_factory.mktemp("stack")
    ports, project = free_ports(), f"slipway-test-{os.getpid()}"
    environment = os.environ | {
        "DOCKER_HOST": docker_host,
        "SLIPWAY_USER": f"{os.getuid()}:{os.getgid()}",
        "PROMETHEUS_PORT": str(ports.http),
        "ALERTMANAGER_PORT": str(ports.grpc),
    }
    files = ["--file", str(stack.COMPOSE), "--file", str(override(folder))]
    compose = [str(stack.PROGRAM), "--project-name", project, *files, "--profile", "cpu"]
    try:
        up = [*compose, "up", "--detach", "--wait", "--no-build", "--pull", "never", *STAND_INS]
        done = subprocess.run(up, env=environment, check=False)
        if done.returncode:
            subprocess.run([*compose, "logs"], env=environment, check=False)
        assert done.returncode == 0
        yield Stack(
            client=docker_client,
            project=project,
            ports={"prometheus": ports.http, "alertmanager": ports.grpc},
        )
    finally:
        subprocess.run([*compose, "down", "--volumes", "--timeout", "5"], env=environment, check=False)
        for service in STAND_INS:
            docker_client.images.remove(image(service), force=True)


def test_stand_ins_are_well_confined_and_told_of_each_other(running: Stack) -> None:
    for service in ("prometheus", "alertmanager", "node-exporter"):
        settings = running.container(service).attrs["HostConfig"]
        assert settings["ReadonlyRootfs"]
        assert settings["CapDrop"] == ["ALL"]
        assert settings["Memory"] > 0
        assert running.container(service).health == "healthy"

    def up() -> set[str]:
        found = running.ask("prometheus", "/api/v1/targets?state=active")["data"]["activeTargets"]
        return {target["labels"]["job"] for target in found if target["health"] == "up"}

    wait_until(lambda: up() == {"training"})
    query = "/api/v1/query?query=slipway_training_running"
    wait_until(lambda: len(running.ask("prometheus", query)["data"]["result"]) == 1)


def test_an_alert_goes_from_stand_in_to_stand_in_until_somebody_is_told(running: Stack) -> None:
    wait_until(lambda: "docs/runbooks/ServiceDown.md" in running.told())
    assert "#on-call" in running.told()
