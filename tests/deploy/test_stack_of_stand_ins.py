"""`make stack` on a real engine, by real Compose: all of the service, for a CPU, until somebody is told of an alert.

Triton and the gateway are our own images, on stand-ins for their bases; what monitors is programs of Debian's, in place
of images that cannot be pulled here. In Grafana's and the collector's place stands only something that runs.
"""

import json
import os
import re
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import pytest

from deploy import stack
from deploy.bases import Base
from deploy.gateway import certificate, keys
from deploy.smoke import KILL_MODELS
from serve import releases, repository
from serve.client import CLIENTS, Client
from serve.protocol import NotAllowed
from serve.release import Release, open_release
from slipway.paths import PROJECT_ROOT
from tests.deploy import stand_ins
from tests.deploy.monitoring import alertmanager_in_a_hurry, copy_in_a_hurry
from tests.deploy.test_monitoring import panels
from tests.programs import require
from tests.serve.tools import CPUS, wait_until

# Whichever comes first makes the images.
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1800)]

Image = tuple[str, Base]
# Who owns the secrets; root calls `make stack` in his name.
USER = 12345
# Service -> the program of Debian's that stands in for it, and where it lies in the real image.
STAND_INS = {
    "prometheus": ("prometheus", ["/bin/prometheus"]),
    "alertmanager": ("prometheus-alertmanager", ["/bin/alertmanager"]),
    "node-exporter": ("prometheus-node-exporter", ["/bin/node_exporter"]),
    "grafana": ("busybox", ["/bin/busybox", "httpd"]),
    "collector": ("busybox", ["/bin/busybox", "httpd"]),
    "inbox": ("busybox", ["/bin/busybox", "httpd"]),
}
OURS = ("triton", "watch", "gateway")
# A page that keeps what is sent to it.
KEEP = "#!/bin/sh\ncat >> /tmp/told\necho 'Content-Type: text/plain'\necho\necho ok\n"


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The service that runs. folder: of its secrets; key: of a client."""

    client: docker.DockerClient
    project: str
    folder: Path
    release: Release
    key: str

    def containers(self, *filters: str) -> list[Any]:
        labels = [f"com.docker.compose.project={self.project}", *filters]
        return self.client.containers.list(filters={"label": labels})

    def container(self, service: str) -> Any:
        (found,) = self.containers(f"com.docker.compose.service={service}")
        return found

    def address(self, service: str) -> str:
        """Where a service is reached from outside."""
        ((published,),) = [ports for ports in self.container(service).ports.values() if ports]
        return f"{published['HostIp']}:{published['HostPort']}"

    def ask(self, service: str, path: str) -> Any:
        with urllib.request.urlopen(f"http://{self.address(service)}{path}", timeout=30) as answer:
            return json.load(answer)

    def through_the_gateway(self, protocol: str, key: str) -> Client:
        url, certificates = f"https://{self.address('gateway')}", self.folder / "gateway_certificate"
        return CLIENTS[protocol](url, api_key=key, certificates=certificates)

    def told(self) -> str:
        return self.container("inbox").exec_run(["cat", "/tmp/told"]).output.decode()


def image(service: str) -> str:
    """Not the name of the real one, which somebody may have in the same engine."""
    return f"slipway/stand-in-for-{service}:{os.getpid()}"


def secrets_in(folder: Path) -> str:
    """Write all that `make stack` asks for and does not make itself; returns the key of a client."""
    key = keys.add("alice", folder / "gateway_keys")
    certificate.make(folder / "gateway_certificate", folder / "gateway_certificate_key")
    (folder / "slack_api_url").write_text("http://inbox:8080/cgi-bin/hook")
    for name in stack.WHAT_BRINGS:
        (folder / name).chmod(0o600)
        os.chown(folder / name, USER, USER)
    return key


def files_in(folder: Path) -> None:
    """What is mounted: monitoring in a hurry, a page that keeps what it is sent, Grafana's health, a run."""
    copy_in_a_hurry(folder / "prometheus")
    (folder / "alertmanager").mkdir()
    (folder / "alertmanager" / "alertmanager.yml").write_text(alertmanager_in_a_hurry())
    for path, text in (("cgi-bin/hook", KEEP), ("api/health", "{}")):
        page = folder / "www" / path
        page.parent.mkdir(parents=True)
        page.write_text(text)
        page.chmod(0o755)
    run = folder / "runs" / "tiny-1"
    run.mkdir(parents=True)
    (run / "metrics.prom").write_text('slipway_training_running{run="tiny-1"} 1\n')


def override(folder: Path, images: dict[str, str]) -> Path:
    """What is other here than in the real stack. images: service -> the image that is there already."""

    def page(port: int) -> dict[str, Any]:
        """Served by busybox, which as the first process of a container does not hear that it shall end."""
        command = ["-f", "-p", str(port), "-h", "/www"]
        return {"command": command, "volumes": [f"{folder}/www:/www:ro"], "stop_grace_period": "0s"}

    repository = f"{folder}/repository:/app/model_repository:ro"
    other: dict[str, dict[str, Any]] = {
        "triton": {"volumes": [repository], "shm_size": "512m"},
        "watch": {"volumes": [repository]},
        "gateway": {},
        "prometheus": {"volumes": [f"{folder}/prometheus:/etc/prometheus:ro"]},
        "alertmanager": {"volumes": [f"{folder}/alertmanager:/etc/alertmanager:ro"]},
        "node-exporter": {"volumes": [f"{folder}/runs:/runs:ro"]},
        "grafana": page(3000),
        "collector": page(4318),
        "inbox": {**page(8080), "profiles": ["cpu"], "tmpfs": ["/tmp"], "networks": ["inside"]},
    }
    for service, changes in other.items():
        changes |= {"image": images[service], "pull_policy": "never", "build": "!reset"}
        if service not in ("collector", "inbox"):
            changes["healthcheck"] = {"interval": "1s"}
    secrets = {name: {"file": f"{folder}/{name}"} for name in (*stack.WHAT_BRINGS, stack.GRAFANA_PASSWORD)}
    file = folder / "override.yaml"
    text = json.dumps({"services": other, "secrets": secrets})  # JSON is YAML, but for tags
    file.write_text(text.replace('"!reset"', "!reset null"))
    return file


@pytest.fixture(scope="module")
def running(
    docker_host: str,
    docker_client: docker.DockerClient,
    serve_image: Image,
    gateway_image: Image,
    bundle: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stack]:
    require(*(program for program, _ in STAND_INS.values()), "openssl")
    folder = tmp_path_factory.mktemp("stack")
    release = open_release(repository.publish(bundle, folder / "repository", "embedded", CPUS))
    releases.move_current(release.directory)
    key = secrets_in(folder)
    files_in(folder)
    images = {"triton": serve_image[0], "watch": serve_image[0], "gateway": gateway_image[0]}
    images |= {service: image(service) for service in STAND_INS}
    project = f"slipway-test-{os.getpid()}"
    environment = os.environ | {
        "DOCKER_HOST": docker_host,
        "COMPOSE_FILE": f"{stack.COMPOSE}:{override(folder, images)}",
        "COMPOSE_PROJECT_NAME": project,
        "SLIPWAY_USER": f"{USER}:{USER}",
        # Any port that is free.
        **{f"{name}_PORT": "0" for name in ("GATEWAY", "PROMETHEUS", "ALERTMANAGER", "GRAFANA")},
    }

    def make_stack(action: str) -> int:
        command = [sys.executable, "-m", "deploy.stack", action]
        return subprocess.run(command, cwd=PROJECT_ROOT, env=environment, check=False).returncode

    found = Stack(client=docker_client, project=project, folder=folder, release=release, key=key)
    with ExitStack() as undo:
        for service, (program, entry_point) in STAND_INS.items():
            undo.callback(docker_client.images.remove, image(service), force=True)
            stand_ins.make(docker_client, image(service), program, entry_point)
        undo.callback(remove_volumes, docker_client, project)
        undo.callback(make_stack, "down")
        if make_stack("up"):
            for container in found.containers():
                print(container.name, container.logs(tail=20).decode(errors="replace"), sep="\n")
            pytest.fail("`make stack` failed; what it and its containers said is above")
        yield found
        assert make_stack("down") == 0
        assert not found.containers()


def remove_volumes(client: docker.DockerClient, project: str) -> None:
    """`down` keeps what Prometheus and Grafana keep."""
    for volume in client.volumes.list(filters={"label": f"com.docker.compose.project={project}"}):
        volume.remove(force=True)


def test_every_service_is_well_and_confined(running: Stack) -> None:
    for service in (*OURS, *STAND_INS):
        container = running.container(service)
        settings = container.attrs["HostConfig"]
        assert service in ("collector", "inbox") or container.health == "healthy"
        if service != "inbox":
            assert settings["ReadonlyRootfs"]
            assert settings["CapDrop"] == ["ALL"]
            assert settings["Memory"] > 0


@pytest.mark.parametrize("protocol", CLIENTS)
def test_golden_images_are_answered_through_the_gateway_to_who_has_a_key(
    running: Stack, protocol: str
) -> None:
    """And by a gateway that runs as whoever owns the secrets."""
    golden = running.release.golden
    with running.through_the_gateway(protocol, running.key) as client:
        answers = client.classify([one.image for one in golden])
    assert [answer.label for answer in answers] == [one.label for one in golden]
    assert {answer.release for answer in answers} == {running.release.identity}
    with running.through_the_gateway(protocol, "slipway_wrong") as client, pytest.raises(NotAllowed):
        client.classify([golden[0].image])
    status = running.container("gateway").exec_run(["cat", "/proc/1/status"]).output.decode()
    assert re.search(rf"^Uid:\t{USER}\t", status, re.MULTILINE)


def test_grafana_can_read_the_password_that_was_made_for_it(running: Stack) -> None:
    """By root, while Grafana runs as somebody else and without capabilities."""
    found = running.container("grafana").exec_run(["cat", f"/run/secrets/{stack.GRAFANA_PASSWORD}"])
    assert found.exit_code == 0
    assert found.output.decode() == (running.folder / stack.GRAFANA_PASSWORD).read_text()


def test_all_that_monitors_finds_what_it_is_told_of(running: Stack) -> None:
    def up() -> set[str]:
        found = running.ask("prometheus", "/api/v1/targets?state=active")["data"]["activeTargets"]
        return {target["labels"]["job"] for target in found if target["health"] == "up"}

    wait_until(lambda: up() == {"service", "triton", "training"})
    query = "/api/v1/query?query=slipway_training_running"
    wait_until(lambda: len(running.ask("prometheus", query)["data"]["result"]) == 1)


def test_no_panel_about_serving_is_empty_but_those_that_say_why(running: Stack) -> None:
    def empty() -> set[str]:
        return {
            title
            for title, panel in panels()
            if title.startswith("serving.json") and not any(map(answer, panel["targets"]))
        }

    def answer(target: dict[str, Any]) -> list[Any]:
        query = urllib.parse.urlencode({"query": target["expr"]})
        return running.ask("prometheus", f"/api/v1/query?{query}")["data"]["result"]

    excused = {title for title, panel in panels() if "noValue" in panel["fieldConfig"]["defaults"]}
    wait_until(lambda: empty() <= excused)


def test_a_model_that_dies_is_told_to_whom_is_on_call(running: Stack) -> None:
    """Case D03: Triton itself goes on as if nothing had happened."""

    def firing() -> bool:
        """Also for a moment in the beginning, in this hurry, before the first golden image was answered."""
        alerts = running.ask("prometheus", "/api/v1/alerts")["data"]["alerts"]
        return "GoldenProbeFailing" in {alert["labels"]["alertname"] for alert in alerts}

    def told() -> int:
        return running.told().count("FIRING GoldenProbeFailing")

    wait_until(lambda: not firing())
    before = told()
    assert running.container("triton").exec_run(["python3", "-c", KILL_MODELS]).exit_code == 0
    wait_until(firing)
    wait_until(lambda: told() > before)
    assert "docs/runbooks/GoldenProbeFailing.md" in running.told()
    assert "#on-call" in running.told()
