"""What an operator says about the gateway is checked, and all of it reaches nginx."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.gateway.settings import TEMPLATE, Settings, Upstream
from slipway.errors import UsageError
from slipway.paths import PROJECT_ROOT

SETTINGS = Settings(
    listen="127.0.0.1:8443",
    stable=Upstream(http="127.0.0.1:8000", grpc="127.0.0.1:8001"),
    keys=Path("keys.conf"),
    certificate=Path("certificate.pem"),
    certificate_key=Path("certificate.key"),
)


def render(**changes: Any) -> str:
    return replace(SETTINGS, **changes).render(Path("/files"), Path("/scratch"))


def test_nothing_is_left_to_fill_in() -> None:
    assert "GATEWAY_" not in re.sub(r"(?m)^#.*$", "", render())


def test_the_page_for_operators_names_every_variable() -> None:
    """The nginx image fills in the same template from its environment."""
    page = (PROJECT_ROOT / "docs" / "gateway.md").read_text(encoding="utf-8")
    table = "".join(re.findall(r"(?m)^\| `GATEWAY_.*\n", page))
    documented = re.findall(r"`(GATEWAY_\w+)`", table)
    assert sorted(documented) == sorted(set(re.findall(r"\$\{(GATEWAY_\w+)\}", TEMPLATE.read_text())))


def test_without_canary_and_shadow_every_upstream_is_the_stable_one() -> None:
    servers = re.findall(r"server ([\d.]+:\d+)", render())
    assert set(servers) == {"127.0.0.1:8000", "127.0.0.1:8001"}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"canary_percent": 5}, "canary_percent is 5, but no canary is named"),
        ({"shadow_percent": 101, "shadow": SETTINGS.stable}, "shadow_percent is 101; must be from 0 to 100"),
        ({"canary_percent": float("nan"), "canary": SETTINGS.stable}, "canary_percent is nan"),
        ({"burst": 0}, "burst is 0; must be at least 1"),
        ({"listen": "8443"}, "8443 is no address; expected host:port"),
        ({"listen": "127.0.0.1:65536"}, "127.0.0.1:65536 is no address"),
        ({"listen": "127.0.0.1:0"}, "127.0.0.1:0 is no address"),
        ({"stable": Upstream(http="triton:8000;", grpc="triton:8001")}, "triton:8000; is no address"),
    ],
)
def test_settings_that_make_no_sense_are_named(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        replace(SETTINGS, **changes)


@pytest.mark.parametrize("name", ['a"b', "a$b", "a\\b", "a\nb"])
def test_a_path_that_nginx_would_read_as_something_else_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="the gateway takes no path with"):
        render(keys=Path(name))


def test_time_outs_are_those_of_serve_up() -> None:
    """Who waits for whom is decided once: Triton's queue, the client's deadline, and both of its fronts."""
    ours = TEMPLATE.read_text()
    theirs = (PROJECT_ROOT / "serve" / "haproxy.cfg").read_text()
    for own, other in (
        ("client_header_timeout", "http-request"),
        ("client_body_timeout", "client"),
        ("keepalive_timeout", "http-keep-alive"),
        ("proxy_connect_timeout", "connect"),
        ("grpc_connect_timeout", "connect"),
        ("proxy_read_timeout", "server"),
        ("grpc_read_timeout", "server"),
    ):
        found = re.search(rf"^\s*{own} (\d+s);", ours, re.MULTILINE)
        expected = re.search(rf"^\s*timeout {other} (\d+s)$", theirs, re.MULTILINE)
        assert found
        assert expected
        assert found[1] == expected[1]
