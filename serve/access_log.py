"""HAProxy says of each inference request how it ended and how long it took; here that is counted.

It says so through a pipe that nobody else writes to, a line a request (serve/haproxy.cfg):

    http POST 200 3 --
    grpc POST 200 3 -- 14

protocol, method, HTTP status, milliseconds from the first byte in to the last byte out, how the session ended, and
for gRPC the status of the call if that was an error, else a dash. The pipe holds 64 KiB, some 3,000 lines; if we fall
behind further, HAProxy drops lines: it never waits for us.
"""

import logging
import os
import threading

from serve.metrics import ServiceMetrics

# The status codes of gRPC for what is not the server's failure; without one the call went well.
_GRPC_OUTCOMES = {
    "-": "ok",  # none was seen
    "0": "ok",
    "1": "abandoned",  # CANCELLED
    "3": "refused",  # INVALID_ARGUMENT
    "4": "abandoned",  # DEADLINE_EXCEEDED
    "5": "refused",  # NOT_FOUND
    "8": "unavailable",  # RESOURCE_EXHAUSTED
    "12": "refused",  # UNIMPLEMENTED
    "14": "unavailable",  # UNAVAILABLE
}
_HTTP_OUTCOMES = {"200": "ok", "408": "abandoned", "429": "unavailable", "503": "unavailable"}
_CLIENT_LEFT = ("C", "c")

logger = logging.getLogger(__name__)


class AccessLog:
    """A pipe, and a thread that counts what comes out of it. `descriptor` is the end to write to."""

    def __init__(self, metrics: ServiceMetrics) -> None:
        self._metrics = metrics
        reading, self.descriptor = os.pipe()
        self._thread = threading.Thread(target=self._count, args=(reading,), name="access-log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Count what is left, once nobody else writes any more."""
        os.close(self.descriptor)
        self._thread.join()

    def _count(self, reading: int) -> None:
        with os.fdopen(reading, encoding="ascii", errors="replace") as lines:
            for line in lines:
                try:
                    request = outcome_of(line)
                except (ValueError, IndexError):
                    # Of another version, say; the next lines may be as they should.
                    logger.warning("WARNING: HAProxy logged what cannot be counted: %r", line)
                    continue
                if request is not None:
                    self._metrics.answered(*request)


def outcome_of(line: str) -> tuple[str, str, float] | None:
    """Protocol, outcome (serve.metrics.OUTCOMES) and seconds; None for what never became a request."""
    protocol, method, status, milliseconds, end, *grpc_status = line.split()
    if method != "POST":
        return None
    seconds = max(0, int(milliseconds)) / 1000
    if end.startswith(_CLIENT_LEFT):
        outcome = "abandoned"
    elif protocol == "grpc" and status == "200":
        outcome = _GRPC_OUTCOMES.get(grpc_status[0], "failed")
    else:
        outcome = _HTTP_OUTCOMES.get(status, "refused" if status.startswith("4") else "failed")
    return protocol, outcome, seconds
