"""Refuse to serve with other versions than those the release was published for."""

import importlib.metadata
import platform
from collections.abc import Mapping


class WrongEnvironment(Exception):
    """The sentence that Triton shows as the reason why a model did not load."""


def check(python: str, packages: Mapping[str, str]) -> str:
    """Compare this process with what the release pins; return a line for the log.

    Args:
        python: minor version, such as "3.11".
        packages: distribution name -> exact version.

    Raises:
        WrongEnvironment: a version differs, a package is missing, or numpy is 2 or newer.
    """
    found = {name: _version(name) for name in packages}
    # First, because it is the worst: with numpy 2 this backend does not fail, it computes with wrong numbers
    # (github.com/triton-inference-server/server/issues/7647).
    if int(found.get("numpy", "1").split(".")[0]) >= 2:
        raise WrongEnvironment(
            f"numpy {found['numpy']} is installed where Triton's Python backend runs, and this backend reads "
            f"numpy 2 arrays silently wrong; it needs numpy {packages['numpy']}"
        )
    versions = {"Python": (platform.python_version(), python)}
    versions |= {name: (found[name], packages[name]) for name in packages}
    for name, (here, wanted) in versions.items():
        if here != wanted and not (name == "Python" and here.startswith(f"{wanted}.")):
            raise WrongEnvironment(
                f"{name} {here} is installed where Triton's Python backend runs, but the release was published "
                f"for {name} {wanted}"
            )
    return ", ".join(f"{name} {here}" for name, (here, _) in versions.items())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise WrongEnvironment(f"{package} is not installed where Triton's Python backend runs") from None
