"""API keys: made here, given away once, and kept only as what they hash to.

The file has a line `"SHA-256 of the key, in hexadecimal" name;` for each key, as nginx reads it. A key has 256 random
bits, so that a plain hash is enough. Two keys may have one name, for as long as it takes to replace one by the other.
"""

import hashlib
import os
import re
import secrets
from pathlib import Path

from slipway.errors import SlipwayError, UsageError

# Names are logged, and count requests.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
# What nginx would read as something else than a client's name.
_RESERVED = frozenset({"default", "hostnames", "include", "volatile"})


def add(name: str, file: Path) -> str:
    """Make a key, append its hash to `file` (made with mode 0600 if it is not there), and return the key.

    Raises:
        UsageError: the name is none.
        SlipwayError: the file cannot be written.
    """
    if not _NAME.fullmatch(name) or name in _RESERVED:
        raise UsageError(f"{name!r} is no name for a client; expected letters, digits, . _ and -, 64 at most")
    key = f"slipway_{secrets.token_urlsafe(32)}"
    line = f'"{digest(key)}" {name};\n'
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w") as output:  # noqa: PTH123
            output.write(line)
    except OSError as error:
        raise SlipwayError(f"{file}: the key cannot be added ({error.strerror})") from error
    return key


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
