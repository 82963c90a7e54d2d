"""A real S3 server on loopback, and what is needed to be let in."""

import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ACCESS = {
    "AWS_ACCESS_KEY_ID": "somebody",
    "AWS_SECRET_ACCESS_KEY": "a secret of a test",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@contextmanager
def s3_server(log: Path) -> Iterator[str]:
    """A real S3 server, as a process on a port that it chooses itself; yields its URL."""
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "moto.server", "--host", "127.0.0.1", "--port", "0"],
            env={**os.environ, **ACCESS},
            stdout=subprocess.DEVNULL,
            stderr=output,
        )
    try:
        yield _url_in(log, process)
    finally:
        process.terminate()
        process.wait()


def _url_in(log: Path, process: "subprocess.Popen[bytes]") -> str:
    deadline = time.monotonic() + 120
    while not (found := re.search(r"http://127\.0\.0\.1:\d+\s", log.read_text(encoding="utf-8"))):
        assert process.poll() is None, log.read_text(encoding="utf-8")
        assert time.monotonic() < deadline, "the S3 server did not start"
        time.sleep(0.05)
    return found[0].strip()


def make_bucket(endpoint: str, bucket: str) -> None:
    """Of what we use of S3, only tests make buckets: no library of ours does."""
    request = urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")
    with urllib.request.urlopen(request, timeout=60):
        pass
