"""The gateway: TLS, keys, limits and a log in front of a server, and the try-it page.

    python -m deploy.gateway up          in front of `python -m serve up`, until Ctrl-C
    python -m deploy.gateway key NAME    make a key for one more client

`python -m deploy.gateway COMMAND --help` explains each.
"""

import argparse
from pathlib import Path

from deploy.gateway import keys, up
from deploy.gateway.settings import Settings, Upstream
from deploy.gateway.up import CERTIFICATE, CERTIFICATE_KEY, KEYS
from serve.server import LOOPBACK
from serve.up import USUAL_PORTS
from slipway import command
from slipway.paths import relative_to_project

LISTEN = f"{LOOPBACK}:8443"


def main(arguments: list[str]) -> object:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.gateway",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _up_options(commands.add_parser("up", help="run the gateway in the foreground; Ctrl-C stops it"))
    told = "make a key for a client, and print it, once; nginx reads the file again on SIGHUP"
    _key_options(commands.add_parser("key", help=told))
    options = parser.parse_args(arguments)
    command.unwind_on_signals()
    return {"up": _up, "key": _key}[options.command](options)


def _up_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--listen", default=LISTEN, metavar="HOST:PORT", help=f"where clients come to (default: {LISTEN})")
    _add_upstream(parser, "stable", "who answers", Upstream(http=_usual("http"), grpc=_usual("grpc")))
    for name, what in (("canary", "who answers some requests"), ("shadow", "who is asked some, besides")):
        _add_upstream(parser, name, what, None)
        add(f"--{name}-percent", type=float, default=0, metavar="N", help="how many of 100 (default: 0)")
    for option, path in (("keys", KEYS), ("certificate", CERTIFICATE), ("certificate-key", CERTIFICATE_KEY)):
        shown = relative_to_project(path)
        add(
            f"--{option}",
            type=Path,
            default=path,
            metavar="PATH",
            help=f"(default: {shown}, made if missing)",
        )
    for option in ("requests-per-minute", "burst", "max-request-bytes"):
        default = getattr(Settings, option.replace("-", "_"))
        add(f"--{option}", type=int, default=default, metavar="N", help=f"(default: {default})")


def _add_upstream(parser: argparse.ArgumentParser, name: str, what: str, default: Upstream | None) -> None:
    shown = f" (default: {default.http} {default.grpc})" if default else ""
    parser.add_argument(
        f"--{name}",
        nargs=2,
        metavar=("HTTP", "GRPC"),
        type=str,
        default=[default.http, default.grpc] if default else None,
        help=f"{what}: host:port of its HTTP and of its gRPC{shown}",
    )


def _usual(kind: str) -> str:
    return f"{LOOPBACK}:{getattr(USUAL_PORTS, kind)}"


def _up(options: argparse.Namespace) -> None:
    values = vars(options)
    del values["command"]
    for name in ("stable", "canary", "shadow"):
        values[name] = values[name] and Upstream(http=values[name][0], grpc=values[name][1])
    up.run(Settings(**values))


def _key_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="NAME", help="whose key it is; it is logged, and its requests are counted"
    )
    parser.add_argument("--keys", type=Path, default=KEYS, metavar="PATH", help="file to add it to")


def _key(options: argparse.Namespace) -> str:
    return keys.add(options.name, options.keys)


if __name__ == "__main__":
    command.run(main)
