"""The way to a server that is far away, or in another network: a relay of TCP connections."""

import asyncio
import ctypes
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from serve.server import LOOPBACK

CLONE_NEWNET = 0x40000000  # from linux/sched.h

Parts = asyncio.Queue[tuple[float, bytes]]


class Line:
    """Connect to `url` instead of the server's own, for as long as a `with` block lasts.

    Args:
        server: host:port.
        delay_seconds: how long each byte travels, in either direction.
        network: a process in whose network the server is, if that is not ours.
    """

    def __init__(self, server: str, *, delay_seconds: float = 0.0, network: int | None = None) -> None:
        self._host, self._port = server.split(":")
        self._delay_seconds = delay_seconds
        self._network = network
        # It stays in our network when the thread leaves it.
        self._listener = socket.create_server((LOOPBACK, 0))
        self.url = f"{LOOPBACK}:{self._listener.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            if self._network is not None:
                _enter_network_of(self._network)
            runner.run(self._relay())

    async def _relay(self) -> None:
        async with await asyncio.start_server(self._connect, sock=self._listener):
            await self._over.wait()

    async def _connect(self, near: asyncio.StreamReader, near_end: asyncio.StreamWriter) -> None:
        try:
            far, far_end = await asyncio.open_connection(self._host, self._port)
        except OSError:  # nobody listens there, which clients are to see
            near_end.close()
            return
        try:
            await asyncio.gather(self._carry(near, far_end), self._carry(far, near_end))
        except asyncio.CancelledError:
            pass  # the line is taken away, about which Python 3.11 would complain
        finally:
            near_end.close()
            far_end.close()

    async def _carry(self, source: asyncio.StreamReader, end: asyncio.StreamWriter) -> None:
        parts: Parts = asyncio.Queue()
        await asyncio.gather(self._take(source, parts), _give(parts, end))

    async def _take(self, source: asyncio.StreamReader, parts: Parts) -> None:
        """Note all that comes, and last its end as a part of no bytes, with the moment at which it is to arrive."""
        while True:
            data = b""
            with suppress(OSError):  # a connection that is broken off ends, too
                data = await source.read(2**16)
            parts.put_nowait((time.monotonic() + self._delay_seconds, data))
            if not data:
                return


async def _give(parts: Parts, end: asyncio.StreamWriter) -> None:
    while True:
        due, data = await parts.get()
        await asyncio.sleep(due - time.monotonic())
        if not data:
            end.close()
            return
        end.write(data)


def _enter_network_of(process: int) -> None:
    """This thread's sockets belong to the network of another process from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/proc/{process}/ns/net").open() as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
