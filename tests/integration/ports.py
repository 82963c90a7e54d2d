"""Ports that nobody listens on now."""

import socket
from contextlib import ExitStack


def free_ports(count: int) -> list[int]:
    """They differ, because all are held until the last is chosen."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [int(listener.getsockname()[1]) for listener in listeners]
