"""A certificate of our own making, for local use: nobody believes it who was not told to."""

import os
import shutil
import subprocess
from pathlib import Path

from slipway.errors import SlipwayError

DAYS = 365
HOSTS = "DNS:localhost,IP:127.0.0.1,IP:::1"


def make(certificate: Path, key: Path) -> None:
    """Write a self-signed certificate for this machine, and its key (mode 0600), as PEM.

    Raises SlipwayError if openssl is missing or fails.
    """
    openssl = shutil.which("openssl")
    if openssl is None:
        raise SlipwayError("openssl is missing, which makes the certificate; the package openssl brings it")
    key.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(key, os.O_WRONLY | os.O_CREAT, 0o600))
    command = [
        *(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
        *("-keyout", str(key), "-out", str(certificate), "-days", str(DAYS)),
        *("-subj", "/CN=localhost", "-addext", f"subjectAltName={HOSTS}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SlipwayError(f"{certificate}: openssl could not make it:\n{done.stderr.strip()}")
