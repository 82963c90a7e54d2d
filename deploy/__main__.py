"""Deploying: build images, try them as they will run, and list what is in them.

    python -m deploy image --target serve
    python -m deploy smoke --bundle bundles/digits/1
    python -m deploy sbom

`python -m deploy COMMAND --help` explains each.
"""

from collections.abc import Callable

from slipway import command
from slipway.errors import UsageError


def main(arguments: list[str]) -> object:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return None
    name, *rest = arguments
    if name not in COMMANDS:
        raise UsageError(f"command line: {name} is not a command of deploy; there are {', '.join(COMMANDS)}")
    command.unwind_on_signals()
    return COMMANDS[name](rest)


def _image(arguments: list[str]) -> object:
    from deploy import images

    return images.main(arguments)


def _smoke(arguments: list[str]) -> None:
    from deploy import smoke

    smoke.main(arguments)


def _sbom(arguments: list[str]) -> object:
    from deploy import sbom

    return sbom.main(arguments)


COMMANDS: dict[str, Callable[[list[str]], object]] = {"image": _image, "smoke": _smoke, "sbom": _sbom}

if __name__ == "__main__":
    command.run(main)
