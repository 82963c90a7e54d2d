"""The stack is what Compose makes of the file: everything in it is pinned, confined, limited and looked after.

Compose itself reads the file; no engine and no image is needed for that.
"""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deploy import stack
from slipway import compatibility
from slipway.errors import SlipwayError
from slipway.paths import PROJECT_ROOT
from tests.deploy.monitoring import PROMETHEUS
from tests.deploy.test_kubernetes import LARGEST_BATCH_BYTES

OWN_IMAGES = {"slipway-serve:local", "slipway-gateway:local"}
# Holds one program and no shell: nothing in it could ask.
WITHOUT_HEALTH_CHECK = {"collector"}


@pytest.fixture(scope="module", params=list(stack.PROFILES))
def composed(request: pytest.FixtureRequest) -> dict[str, Any]:
    command = [
        stack.PROGRAM,
        "--file",
        stack.COMPOSE,
        "--profile",
        request.param,
        "config",
        "--format",
        "json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def services(composed: dict[str, Any]) -> dict[str, Any]:
    return composed["services"]


def test_every_service_is_confined(services: dict[str, Any]) -> None:
    assert len(services) == 8
    for name, service in services.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert int(service["mem_limit"]) > 0, name
        assert not service.get("privileged"), name
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}, name
        assert "/var/run/docker.sock" not in json.dumps(service), name


def test_what_is_mounted_from_here_cannot_be_written(services: dict[str, Any]) -> None:
    for name, service in services.items():
        binds = [volume for volume in service.get("volumes", []) if volume["type"] == "bind"]
        assert all(bind["read_only"] for bind in binds), name


def test_what_is_mounted_from_here_is_here(services: dict[str, Any]) -> None:
    """But for what the stages make."""
    for service in services.values():
        for volume in service.get("volumes", []):
            if volume["type"] == "bind":
                source = Path(volume["source"]).relative_to(PROJECT_ROOT)
                made = source.parts[0] in ("model_repository", "runs")
                assert made or (PROJECT_ROOT / source).exists(), source


def test_every_service_is_asked_how_it_is(services: dict[str, Any]) -> None:
    asked = {name for name, service in services.items() if not service["healthcheck"].get("disable")}
    assert services.keys() - asked == WITHOUT_HEALTH_CHECK


def test_the_outside_is_reached_on_loopback_only(services: dict[str, Any]) -> None:
    published = {
        name: [(port["host_ip"], port["target"]) for port in service["ports"]]
        for name, service in services.items()
        if "ports" in service
    }
    assert published == {
        "gateway": [("127.0.0.1", 8443)],
        "prometheus": [("127.0.0.1", 9090)],
        "alertmanager": [("127.0.0.1", 9093)],
        "grafana": [("127.0.0.1", 3000)],
    }


def test_triton_is_reached_from_inside_only_and_has_shared_memory(composed: dict[str, Any]) -> None:
    """Case D06: of the 64 MB that Docker gives, two large requests would take all."""
    triton = next(service for name, service in composed["services"].items() if name.startswith("triton"))
    assert list(triton["networks"]) == ["inside"]
    assert composed["networks"]["inside"]["internal"]
    # As in Kubernetes (test_kubernetes.py), for a release that was published for 2 CPUs, as docs/compose.md has it.
    assert int(triton["shm_size"]) >= 2 * LARGEST_BATCH_BYTES
    assert int(triton["mem_limit"]) > int(triton["shm_size"])
    on_gpu = "triton-gpu" in composed["services"]
    assert bool(triton.get("deploy", {}).get("resources")) == on_gpu


def test_images_are_those_of_the_table(services: dict[str, Any]) -> None:
    images = {service["image"] for service in services.values()} - OWN_IMAGES
    assert images == set(compatibility.load().compose.values())
    assert all(re.fullmatch(r"[\w./-]+:v?\d[\w.-]*", image) for image in images)


def test_what_is_our_own_is_a_target_of_the_dockerfile(services: dict[str, Any]) -> None:
    for service in services.values():
        assert ("build" in service) == (service["image"] in OWN_IMAGES)
        if "build" in service:
            assert service["image"] == f"slipway-{service['build']['target']}:local"
            assert service["build"]["context"] == str(PROJECT_ROOT)


def test_the_gateway_is_told_nothing_that_its_image_does_not_know(services: dict[str, Any]) -> None:
    template = PROJECT_ROOT / "deploy" / "gateway" / "nginx.conf.template"
    known = set(re.findall(r"\$\{(GATEWAY_\w+)\}", template.read_text()))
    assert services["gateway"]["environment"].keys() <= known


def test_secrets_are_files_and_nothing_else_holds_any(composed: dict[str, Any]) -> None:
    assert set(composed["secrets"]) == {*stack.WHAT_BRINGS, stack.GRAFANA_PASSWORD}
    assert all("file" in secret for secret in composed["secrets"].values())
    for name, service in composed["services"].items():
        for variable, value in (service.get("environment") or {}).items():
            secret = re.search(r"(?i)password|secret|token|_key", variable)
            assert not secret or str(value).startswith("/run/secrets/") or "KEYS" in variable, (
                name,
                variable,
            )


def test_prometheus_finds_every_target_that_it_is_told_of(services: dict[str, Any]) -> None:
    targets = stack.COMPOSE.parent / "targets"
    assert {path.name for path in targets.iterdir()} == {
        path.name for path in (PROMETHEUS / "targets").iterdir()
    }
    named = {host for path in targets.iterdir() for host in re.findall(r'"([\w-]+):\d+"', path.read_text())}
    assert named <= services.keys() | {"triton"}


def secrets_in(folder: Path, *present: str) -> dict[str, Path]:
    """One secret of ours that is made, two that have to be there."""
    for name in present:
        (folder / name).write_text("there")
    return {name: folder / name for name in (stack.GRAFANA_PASSWORD, "slack_api_url", "gateway_keys")}


def test_an_override_of_compose_is_taken_into_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork keeps what is other on its machines apart from the file that it gets from upstream."""
    override = tmp_path / "override.yaml"
    override.write_text(json.dumps({"secrets": {"slack_api_url": {"file": str(tmp_path / "other")}}}))
    monkeypatch.setenv("COMPOSE_FILE", f"{stack.COMPOSE}:{override}")
    files = stack.secrets_of("cpu")
    assert files.keys() == {*stack.WHAT_BRINGS, stack.GRAFANA_PASSWORD}
    assert files["slack_api_url"] == tmp_path / "other"
    assert files["gateway_keys"] == PROJECT_ROOT / ".gateway" / "keys.conf"


def test_secrets_that_are_no_files_are_left_to_compose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    override = tmp_path / "override.yaml"
    external, variable = "slack_api_url: {external: true}", "token: {environment: TOKEN}"
    override.write_text(f"secrets: {{{external}, {variable}}}\nservices: {{watch: {{secrets: [token]}}}}\n")
    monkeypatch.setenv("COMPOSE_FILE", f"{stack.COMPOSE}:{override}")
    monkeypatch.setenv("TOKEN", "a secret")
    assert stack.secrets_of("cpu").keys() == {*stack.WHAT_BRINGS, stack.GRAFANA_PASSWORD} - {"slack_api_url"}


def test_root_is_told_that_the_gateway_does_not_run_as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getuid", lambda: 0)
    monkeypatch.delenv("SLIPWAY_USER", raising=False)
    with pytest.raises(SlipwayError, match="the gateway does not run as root; call this as a user who"):
        stack.main(["up"])


def test_servers_of_the_other_profile_are_taken_away_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both would answer as `triton`."""
    asked: list[tuple[str, ...]] = []
    monkeypatch.setenv("SLIPWAY_USER", "1000:1000")
    monkeypatch.setattr(stack, "require_secrets", lambda files: None)
    monkeypatch.setattr(stack, "secrets_of", lambda profile: {})
    monkeypatch.setattr(stack, "compose", lambda *arguments: asked.append(arguments))
    stack.main(["up", "--profile", "gpu"])
    assert asked[0] == ("cpu", "rm", "--stop", "--force", "triton")
    assert asked[1][:2] == ("gpu", "up")


def test_secrets_that_are_missing_are_named_and_what_brings_them(tmp_path: Path) -> None:
    with pytest.raises(
        SlipwayError, match=r"missing:\n .*slack_api_url: put the address .*\n .*keys: `python"
    ):
        stack.require_secrets(secrets_in(tmp_path))


def test_a_secret_that_is_a_folder_is_named(tmp_path: Path) -> None:
    """Docker makes one where it finds nothing to mount."""
    files = secrets_in(tmp_path, "slack_api_url", "gateway_keys")
    files[stack.GRAFANA_PASSWORD].mkdir()
    with pytest.raises(SlipwayError, match=rf"{stack.GRAFANA_PASSWORD}: is a folder; remove it"):
        stack.require_secrets(files)


def test_an_empty_password_is_made_again_for_its_owner_alone(tmp_path: Path) -> None:
    files = secrets_in(tmp_path, "slack_api_url", "gateway_keys")
    password = files[stack.GRAFANA_PASSWORD]
    password.touch(mode=0o644)
    stack.require_secrets(files)
    assert password.stat().st_mode & 0o777 == 0o600


def test_compose_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "PROGRAM", tmp_path / "docker-compose")
    with pytest.raises(SlipwayError, match="docker-compose is missing; `make stack` installs it"):
        stack.compose("cpu", "config")


def test_a_password_is_made_once_and_is_for_its_owner(tmp_path: Path) -> None:
    files = secrets_in(tmp_path, "slack_api_url", "gateway_keys")
    stack.require_secrets(files)
    password = tmp_path / stack.GRAFANA_PASSWORD
    text = password.read_text()
    assert len(text) >= 32
    assert password.stat().st_mode & 0o777 == 0o600
    stack.require_secrets(files)
    assert password.read_text() == text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_password_that_root_makes_is_for_whom_grafana_runs_as(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPWAY_USER", "12345:54321")
    stack.make_password(tmp_path / "password")
    status = (tmp_path / "password").stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (12345, 54321, 0o600)


def test_a_password_that_cannot_be_given_away_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: int) -> None:
        raise PermissionError

    path = tmp_path / "password"
    monkeypatch.setenv("SLIPWAY_USER", "alice")
    with pytest.raises(SlipwayError, match="SLIPWAY_USER: 'alice' is no uid:gid"):
        stack.make_password(path)
    monkeypatch.setenv("SLIPWAY_USER", "12345:12345")
    monkeypatch.setattr("os.fchown", refuse)
    with pytest.raises(SlipwayError, match="cannot be given to SLIPWAY_USER, 12345:12345; call this as that"):
        stack.make_password(path)
    assert not path.read_text()
