"""Ports that nobody listens on now."""

import random
import socket
from contextlib import ExitStack

# Below those that Linux gives to whoever asks for any: the other suite asks all the time, and what is chosen here may
# be taken up a minute later, when all of a cluster runs.
CHOICE = range(20_000, 32_768)


def free_ports(count: int) -> list[int]:
    """They differ, because all are held until the last is chosen."""
    with ExitStack() as stack:
        chosen = list[int]()
        for port in random.sample(CHOICE, len(CHOICE)):
            if len(chosen) == count:
                break
            listener = stack.enter_context(socket.socket())
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            chosen.append(port)
        return chosen
