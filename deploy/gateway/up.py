"""Run the gateway in the foreground until Ctrl-C or SIGTERM."""

import logging
import socket

from deploy.gateway import certificate, keys
from deploy.gateway.nginx import Gateway
from deploy.gateway.settings import Settings
from slipway.paths import PROJECT_ROOT, relative_to_project

# What is used, and made where it is missing, if nothing else is named.
FOLDER = PROJECT_ROOT / ".gateway"
KEYS = FOLDER / "keys.conf"
CERTIFICATE = FOLDER / "certificate.pem"
CERTIFICATE_KEY = FOLDER / "certificate.key"
CONNECT_SECONDS = 2.0

logger = logging.getLogger(__name__)


def run(settings: Settings) -> None:
    """Raises SlipwayError if the gateway cannot be opened, or ends by itself."""
    prepare(settings)
    try:
        with Gateway(settings) as gateway:
            logger.info("%s", describe(gateway, settings))
            warn_of_nobody(settings.stable.http)
            gateway.wait()
    except KeyboardInterrupt:
        logger.info("stopped")


def warn_of_nobody(address: str) -> None:
    """Say so if nobody listens where requests go to. Whoever answers them may still be starting."""
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        logger.warning(
            "WARNING: nobody listens on %s yet (%s); `make serve` says where it does, and --stable takes that",
            address,
            error.strerror or error,
        )


def prepare(settings: Settings) -> None:
    """Make what is missing of our own files; those that somebody named have to be there."""
    if settings.certificate == CERTIFICATE and not CERTIFICATE.exists():
        certificate.make(CERTIFICATE, CERTIFICATE_KEY)
    if settings.keys == KEYS and not KEYS.exists():
        logger.info("made a key, which is not shown again:\n\n  %s\n", keys.add("local", KEYS))


def describe(gateway: Gateway, settings: Settings) -> str:
    certificates = f'Path("{relative_to_project(settings.certificate)}")'
    return f"""
the gateway is open:

  try it   https://{gateway.address}/ (the browser has to be told to trust the certificate)
  clients  HttpClient("https://{gateway.address}", api_key=..., certificates={certificates})

It reads keys and certificate again after `kill -HUP {gateway.pid}`. A line of JSON for each request follows.
Ctrl-C stops it."""
