"""Ask a server that somebody else runs for golden images, and show Prometheus how that goes.

In containers, Docker or Kubernetes starts and replaces servers. Nobody there looks at answers every few seconds, as
`serve up` does, and says to Prometheus what it saw. It shows the same metrics; of those that it knows nothing about,
nothing grows.
"""

import contextlib
import logging
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from serve import health
from serve.metrics import ServiceMetrics
from serve.release import Release, followed, open_release
from slipway.errors import SlipwayError

logger = logging.getLogger(__name__)


def run(
    link: Path, urls: Mapping[str, str], triton_metrics: str, probe_seconds: float, listen: tuple[str, int]
) -> None:
    """Until interrupted.

    Args:
        link: the release that is to answer, or a link to one that may be moved to another meanwhile.
        urls: protocol -> host:port. triton_metrics: host:port where the server shows its own.
        listen: address and port where metrics are shown; port 0 takes a free one.

    Raises SlipwayError if somebody else listens there.
    """
    metrics = ServiceMetrics()
    with contextlib.ExitStack() as stack:
        try:
            port = stack.enter_context(metrics.exposed(*listen))
        except OSError as error:
            where = "{}:{}".format(*listen)
            raise SlipwayError(f"metrics cannot be shown at {where}: {error}; give another --port") from error
        logger.info(
            "asking %s; metrics are at http://%s:%d/metrics", ", ".join(urls.values()), listen[0], port
        )
        try:
            _watch(link, urls, triton_metrics, probe_seconds, metrics)
        except KeyboardInterrupt:
            logger.info("stopped")


def _watch(
    link: Path,
    urls: Mapping[str, str],
    triton_metrics: str,
    probe_seconds: float,
    metrics: ServiceMetrics,
) -> None:
    release: Release | None = None
    said: str | None = None
    seconds = probe_seconds / len(urls)
    while True:
        busy = False
        try:
            if release is None or release.directory != followed(link):
                release = None
                release = open_release(link)  # what cannot be opened could not be served either
            ask = partial(health.probe, release, urls, seconds)
            busy = not health.answers_or_is_busy(ask, triton_metrics, seconds)
            problem = "busy: the golden image was not answered in time, but others are" if busy else ""
        except SlipwayError as error:
            problem = str(error)
        if not busy:
            metrics.probed(good=not problem)
        if problem != said:
            logger.info("%s", f"WARNING: {problem}" if problem else "golden images are answered well")
            said = problem
        time.sleep(probe_seconds)
