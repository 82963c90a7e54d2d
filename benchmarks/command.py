"""How a benchmark ends: with its own exit code, or with a sentence about what it could not work with."""

import sys
from collections.abc import Callable
from typing import NoReturn

from slipway.errors import SlipwayError


def run(main: Callable[[list[str]], int]) -> NoReturn:
    """Exit with what `main(arguments)` returns; with that of a SlipwayError where one is raised, and its sentence."""
    try:
        sys.exit(main(sys.argv[1:]))
    except SlipwayError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
