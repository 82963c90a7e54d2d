"""`make serve` finds a place to listen, whoever else does."""

import socket

import pytest

from serve import up
from serve.front import Front
from serve.server import LOOPBACK, Ports, free_ports


@pytest.fixture
def usual(monkeypatch: pytest.MonkeyPatch) -> Ports:
    """Stand in for 8000 to 8002, which may or may not be free on this machine."""
    ports = free_ports()
    monkeypatch.setattr(up, "USUAL_PORTS", ports)
    return ports


def test_the_usual_ports_are_triton_s() -> None:
    assert Ports(http=8000, grpc=8001, metrics=8002) == up.USUAL_PORTS


def test_the_usual_ports_are_taken_if_they_are_free(usual: Ports, caplog: pytest.LogCaptureFixture) -> None:
    assert up.choose_ports() == usual
    assert not caplog.text


def test_each_port_that_is_in_use_is_replaced_and_named(
    usual: Ports, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with socket.create_server((LOOPBACK, usual.http)), socket.create_server((LOOPBACK, usual.metrics)):
        chosen = up.choose_ports()
    assert chosen.grpc == usual.grpc
    assert len({chosen.http, chosen.grpc, chosen.metrics, usual.http, usual.metrics}) == 5
    assert caplog.messages == [
        f"port {usual.http} is in use; taking {chosen.http}",
        f"port {usual.metrics} is in use; taking {chosen.metrics}",
    ]


def test_commands_are_told_of_ports_that_are_not_the_usual_ones(usual: Ports) -> None:
    with Front(free_ports()) as front:
        assert f'make predict IMAGE=... ARGS="--url {front.http}"' in up.elsewhere(front)
        assert f'make gateway ARGS="--stable {front.http} {front.grpc}"' in up.elsewhere(front)
    with Front(usual) as front:
        assert up.elsewhere(front) == ""
