"""What a command line says of a server: its address, the key that it knows us by, and whose certificates to believe.

All of it is checked before anything is sent. Light to import: `python -m serve --help` does.
"""

import ipaddress
import os
import re
import ssl
from collections.abc import Sequence
from pathlib import Path

from slipway.errors import UsageError

API_KEY = "SLIPWAY_API_KEY"
LAST_PORT = 65535


def address(option: str, given: str) -> str:
    """host:port. `up` prints addresses as a browser wants them, Triton's clients want them bare. Raises UsageError."""
    bare = given.removeprefix("http://").rstrip("/")
    try:
        host_and_port(bare)
    except ValueError as error:
        raise UsageError(f"command line: --{option} is {given}; {error}") from None
    return bare


def host_and_port(text: str) -> tuple[str, int]:
    """What host:port consists of. A host of IPv6 stands in brackets there, and without them in the result.

    Raises ValueError, whose words say what is wrong with it.
    """
    found = re.fullmatch(r"(?:\[(?P<ipv6>[^\s/\]]+)\]|(?P<name>[^\s/:\[\]]+)):(?P<port>\d+)", text)
    if found is None or not 0 < int(found["port"]) <= LAST_PORT:
        raise ValueError("expected host:port")
    host = found["ipv6"] or found["name"]
    try:
        if found["ipv6"]:
            ipaddress.IPv6Address(host)
        host.encode("idna")  # as is done before a name is looked up
    except ValueError:
        raise ValueError(f"expected host:port, and {host} can be no host") from None
    return host, int(found["port"])


def ports(option: str, given: Sequence[int]) -> Sequence[int]:
    """The same, if a server can listen on each of them. Raises UsageError."""
    if len(set(given)) < len(given) or not all(0 < number <= LAST_PORT for number in given):
        shown = " ".join(map(str, given))
        raise UsageError(
            f"command line: --{option} is {shown}; expected three different ones within 1..{LAST_PORT}"
        )
    return given


def api_key(file: Path | None, url: str) -> str:
    """Out of a file or the environment, never an option's value: anybody on this machine may read command lines.

    Empty if there is none. Raises UsageError.
    """
    if file is None:
        where, text = f"{API_KEY} in the environment", os.environ.get(API_KEY, "")
        if not text or not url.startswith("https://"):
            return ""
    else:
        where, text = f"command line: --api-key-file {file}", _text_of_key(file)
    key = text.strip()
    if not re.fullmatch(r"[!-~]+", key):
        raise UsageError(f"{where}: holds no key; expected one, and nothing else")
    return key


def _text_of_key(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"command line: --api-key-file {file}: cannot be read ({error})") from None


def certificates(file: Path | None, url: str) -> Path | None:
    """The same file, if it holds some and `url` is one of TLS. Raises UsageError."""
    if file is None:
        return None
    if not url.startswith("https://"):
        raise UsageError(f"command line: --certificates is of no use without TLS; write --url https://{url}")
    try:
        ssl.create_default_context(cafile=file)
    except OSError as error:
        raise UsageError(f"command line: --certificates {file}: holds no certificate ({error})") from None
    return file
