"""Serving: publish a bundle, run the server, check it, ask it.

    python -m serve publish --bundle bundles/digits/1
    python -m serve up
    python -m serve promote digits-1 | rollback | list | verify model_repository/current
    python -m serve push digits-1 s3://releases | pull s3://releases/digits-1
    python -m serve watch --http triton:8000 --grpc triton:8001 --metrics triton:8002
    python -m serve predict cat.jpg
    python -m serve smoke --release ... --images ... --bundle ... --evaluation ... --output ...
    python -m serve container | health

`python -m serve COMMAND --help` explains each.
"""

import argparse
import difflib
import io
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from serve import connection
from slipway import command, config
from slipway.cpus import available_cpus
from slipway.errors import UsageError
from slipway.paths import PROJECT_ROOT

REPOSITORY = PROJECT_ROOT / "model_repository"
CURRENT = REPOSITORY / "current"
DEFAULT_URLS = {"http": "127.0.0.1:8000", "grpc": "127.0.0.1:8001"}
DEFAULT_METRICS = "127.0.0.1:8002"
PROBE_SECONDS = 4.0  # for each answer; whoever runs `health` gives it 10


@dataclass(frozen=True, kw_only=True)
class Command:
    """One `python -m serve <name>`: its options and what it does with them."""

    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], object]
    # Checked here and not by argparse, which would complain about `--images` where `--image` was mistyped.
    required: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NoConfiguration:
    """Serving has no configuration file: a release says everything itself."""


def main(arguments: list[str]) -> object:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return None
    name, *rest = arguments
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        raise UsageError(f"command line: {name} is not a command of serve; {hint}")
    chosen = COMMANDS[name]
    parser = argparse.ArgumentParser(
        prog=f"python -m serve {name}", description=chosen.help, allow_abbrev=False
    )
    chosen.add_options(parser)
    options, _ = config.parse(parser, rest, NoConfiguration)
    for option in chosen.required:
        if option not in options:
            raise UsageError(f"command line: --{option} is missing; see `python -m serve {name} --help`")
    command.unwind_on_signals()
    return chosen.run(options)


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {chosen.help}" for name, chosen in COMMANDS.items()]
    return "\n".join([str(__doc__), *lines])


def _publish_options(parser: argparse.ArgumentParser) -> None:
    _add_path(parser, "--bundle", "directory of the exported bundle (required)")
    _add_path(parser, "--repository", "model repository to publish into", REPOSITORY)
    parser.add_argument(
        "--target",
        choices=["embedded", "container", "container-gpu", "container-tensorrt"],
        default="embedded",
        help="embedded (default): the Triton of `make setup`; container: NVIDIA's image; container-gpu: the same, "
        "with the model on its GPUs, in float16 if the bundle has onnx-fp16; container-tensorrt: compiled for them "
        "by TensorRT when the server starts, which takes up to minutes",
    )
    parser.add_argument(
        "--public-key",
        type=Path,
        metavar="PATH",
        help="PEM file of the key whose owner must have signed the bundle (default: any bundle is taken)",
    )
    parser.add_argument(
        "--sign-key",
        type=Path,
        metavar="PATH",
        help="PEM file of the private key to sign the release with, for those who `pull` it (default: not signed)",
    )
    parser.add_argument(
        "--cpus", type=int, help="how many CPUs the server will have (default: as many as here)"
    )
    parser.add_argument(
        "--fused",
        action="store_true",
        help="one model that decodes and answers, in place of one for each: faster where few clients ask few CPUs",
    )
    parser.add_argument(
        "--no-promote",
        action="store_true",
        help="only make the release: somebody tries it, such as `smoke`, and `promote` lets it be served then",
    )


def _publish(options: argparse.Namespace) -> Path:
    from serve import releases, repository

    count = available_cpus() if options.cpus is None else options.cpus
    if count < 1:
        raise UsageError(f"command line: --cpus is {count}; must be at least 1")
    release = repository.publish(
        options.bundle,
        options.repository,
        options.target,
        count,
        fused=options.fused,
        public_key=options.public_key,
        sign_key=options.sign_key,
    )
    return release if options.no_promote else releases.promote(release)


def _promote_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="RELEASE", help="name of the release, as `list` shows it")
    _repository_option(parser)


def _promote(options: argparse.Namespace) -> Path:
    from serve import releases

    return releases.promote(releases.find(options.repository, options.name))


def _repository_option(parser: argparse.ArgumentParser) -> None:
    _add_path(parser, "--repository", "model repository", REPOSITORY)


def _rollback(options: argparse.Namespace) -> Path:
    from serve import releases

    return releases.rollback(options.repository)


def _list(options: argparse.Namespace) -> None:
    from serve import releases

    for line in releases.table(options.repository):
        print(line)


def _verify_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "release", type=Path, metavar="PATH", help="directory of the release, or a link to it"
    )
    _release_key_option(parser)


def _verify(options: argparse.Namespace) -> str:
    from serve.release import open_release
    from slipway import signing

    if options.public_key is not None:
        signing.require_signed(options.release.resolve(), options.public_key)
    return open_release(options.release).identity


def _push_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="RELEASE", help="name of the release, as `list` shows it")
    parser.add_argument(
        "place", metavar="s3://BUCKET/PREFIX", help="where releases lie; the prefix may be missing"
    )
    _repository_option(parser)


def _push(options: argparse.Namespace) -> str:
    from serve import releases, remote

    return remote.push(releases.find(options.repository, options.name), options.place)


def _pull_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", metavar="s3://BUCKET/PREFIX/RELEASE", help="what `push` printed")
    _repository_option(parser)
    _release_key_option(parser)


def _pull(options: argparse.Namespace) -> Path:
    from serve import remote

    return remote.pull(options.address, options.repository, options.public_key)


def _release_key_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--public-key",
        type=Path,
        metavar="PATH",
        help="PEM file of the key whose owner must have signed the release (default: any release is taken)",
    )


def _up_options(parser: argparse.ArgumentParser) -> None:
    _add_path(parser, "--release", "release to serve, or a link to it that may be moved meanwhile", CURRENT)
    parser.add_argument(
        "--probe-seconds",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="how often to check that a golden image is answered well (default: 5)",
    )
    parser.add_argument(
        "--ports",
        nargs=3,
        type=int,
        metavar=("HTTP", "GRPC", "METRICS"),
        help="where to listen, or fail (default: 8000 8001 8002, and free ports in place of those that are taken)",
    )
    _traces_option(parser)


def _up(options: argparse.Namespace) -> None:
    from serve import up
    from serve.server import Ports

    if not options.probe_seconds > 0:
        raise UsageError(f"command line: --probe-seconds is {options.probe_seconds:g}; must be above 0")
    ports = None
    if options.ports is not None:
        http, grpc, metrics = connection.ports("ports", options.ports)
        ports = Ports(http=http, grpc=grpc, metrics=metrics)
    up.run(options.release, ports, options.probe_seconds, _traces(options))


def _traces_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--traces",
        metavar="URL",
        help="where to send traces, OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces (default: nowhere)",
    )


def _traces(options: argparse.Namespace) -> str | None:
    url: str | None = options.traces
    if url is not None and not re.fullmatch(r"http://[^\s/]+/\S+", url):
        raise UsageError(
            f"command line: --traces is {url}; expected http://host:port/path, such as "
            "http://127.0.0.1:4318/v1/traces"
        )
    return url


def _watch_options(parser: argparse.ArgumentParser) -> None:
    _add_path(parser, "--release", "release that is to answer, or a link to it that may be moved", CURRENT)
    _add_server_options(parser)
    parser.add_argument("--address", default="127.0.0.1", help="where to show metrics (default: 127.0.0.1)")
    parser.add_argument(
        "--port", type=int, default=9102, help="where to show metrics; 0 takes a free port (default: 9102)"
    )
    parser.add_argument(
        "--probe-seconds", type=float, default=5.0, metavar="SECONDS", help="how often to ask (default: 5)"
    )


def _watch(options: argparse.Namespace) -> None:
    from serve import watch

    if not options.probe_seconds > 0:
        raise UsageError(f"command line: --probe-seconds is {options.probe_seconds:g}; must be above 0")
    if not 0 <= options.port <= connection.LAST_PORT:
        raise UsageError(f"command line: --port is {options.port}; must be within 0..{connection.LAST_PORT}")
    urls, metrics = _server_addresses(options)
    watch.run(
        options.release,
        urls,
        metrics,
        options.probe_seconds,
        (options.address, options.port),
    )


def _container_options(parser: argparse.ArgumentParser) -> None:
    _add_path(parser, "--release", "release to serve, or a link to it", CURRENT)
    _traces_option(parser)
    parser.add_argument("arguments", nargs="*", help="for tritonserver, after `--`")


def _container(options: argparse.Namespace) -> None:
    from serve import container

    container.become_triton(options.release, _traces(options), options.arguments)


def _health_options(parser: argparse.ArgumentParser) -> None:
    _add_path(parser, "--release", "release that is to answer, or a link to it", CURRENT)
    _add_server_options(parser)


def _health(options: argparse.Namespace) -> None:
    from serve import health
    from serve.release import open_release

    urls, metrics = _server_addresses(options)
    release = open_release(options.release, with_model=False)
    ask = partial(health.probe, release, urls, PROBE_SECONDS)
    if not health.answers_or_is_busy(ask, metrics, PROBE_SECONDS):
        print("busy: the golden image was not answered in time, but others are", file=sys.stderr)


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    for name, url in {**DEFAULT_URLS, "metrics": DEFAULT_METRICS}.items():
        parser.add_argument(
            f"--{name}", default=url, help=f"host:port of the server's {name} (default: {url})"
        )


def _server_addresses(options: argparse.Namespace) -> tuple[dict[str, str], str]:
    """Protocol -> host:port, and that of the metrics."""
    urls = {name: connection.address(name, getattr(options, name)) for name in DEFAULT_URLS}
    return urls, connection.address("metrics", options.metrics)


def _smoke_options(parser: argparse.ArgumentParser) -> None:
    _add_path(parser, "--release", "release to serve", CURRENT)
    _add_path(parser, "--images", "folder that the paths in the predictions start from (required)")
    _add_path(parser, "--bundle", "bundle that the release was made of (required)")
    _add_path(parser, "--evaluation", "directory that `make evaluate` wrote (required)")
    _add_path(parser, "--output", "JSON file to write the result to (required)")


def _smoke(options: argparse.Namespace) -> Path:
    from serve import smoke
    from serve.release import open_release

    release = open_release(options.release, with_model=False)  # the test reads the model
    predictions = smoke.predictions_of(release, options.bundle, options.evaluation)
    return smoke.run(release.directory, options.images, predictions, options.output)


def _predict_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "images",
        nargs="+",
        metavar="IMAGE",
        help='files, folders, or quoted patterns such as "photos/**/*.jpg"',
    )
    parser.add_argument(
        "--format",
        choices=["text", "csv", "json"],
        default="text",
        help="text (default), csv with a header, or json with an object a line",
    )
    parser.add_argument(
        "--protocol", choices=list(DEFAULT_URLS), default="http", help="http (default) or grpc"
    )
    parser.add_argument(
        "--url",
        help="host:port, or https://host:port of a gateway (default: where `python -m serve up` listens)",
    )
    parser.add_argument(
        "--certificates",
        type=Path,
        metavar="PATH",
        help="PEM file of the authorities to believe, in place of the system's",
    )
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="PATH",
        help="file with what the gateway knows us by "
        f"(default: {connection.API_KEY} in the environment, for https only)",
    )


def _predict(options: argparse.Namespace) -> None:
    from serve import predict

    given = options.url or DEFAULT_URLS[options.protocol]
    tls = "https://" if given.startswith("https://") else ""
    url = tls + connection.address("url", given.removeprefix(tls))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names of files need not be UTF-8.
        sys.stdout.reconfigure(errors="backslashreplace")
    predict.run(
        options.images,
        url,
        options.protocol,
        options.format,
        partial(print, flush=True),
        api_key=connection.api_key(options.api_key_file, url),
        certificates=connection.certificates(options.certificates, url),
    )


def _add_path(parser: argparse.ArgumentParser, option: str, help: str, default: Path | None = None) -> None:
    """An option that is a path. Without a default it is absent from the result if it was not given."""
    if default is None:
        parser.add_argument(option, type=Path, default=argparse.SUPPRESS, metavar="PATH", help=help)
    else:
        shown = default.relative_to(PROJECT_ROOT)  # a link is followed when it is used, and not before
        parser.add_argument(
            option, type=Path, default=default, metavar="PATH", help=f"{help} (default: {shown})"
        )


COMMANDS = {
    "publish": Command(
        help="Make a sealed release of a bundle, and promote it unless told not to.",
        add_options=_publish_options,
        run=_publish,
        required=("bundle",),
    ),
    "promote": Command(
        help="Try a release with a server of its own, and let model_repository/current lead to it if it is good.",
        add_options=_promote_options,
        run=_promote,
    ),
    "rollback": Command(
        help="Let model_repository/current lead to the release that was served before.",
        add_options=_repository_option,
        run=_rollback,
    ),
    "list": Command(
        help="List the releases, and say which is served and which was served before.",
        add_options=_repository_option,
        run=_list,
    ),
    "verify": Command(
        help="Check every file of a release against its seal, and print what answers call it.",
        add_options=_verify_options,
        run=_verify,
    ),
    "push": Command(
        help="Copy a release to S3-compatible storage, for other machines to `pull`; nothing there is overwritten.",
        add_options=_push_options,
        run=_push,
    ),
    "pull": Command(
        help="Take a release out of S3-compatible storage into the model repository, if it is whole; promote it then.",
        add_options=_pull_options,
        run=_pull,
    ),
    "up": Command(
        help="Serve what model_repository/current leads to, in the foreground; Ctrl-C stops it cleanly.",
        add_options=_up_options,
        run=_up,
    ),
    "watch": Command(
        help="Ask a server that others run for golden images, and show Prometheus how that goes; Ctrl-C stops it.",
        add_options=_watch_options,
        run=_watch,
    ),
    "smoke": Command(
        help="Send every test image through a real server and compare with offline evaluation.",
        add_options=_smoke_options,
        run=_smoke,
        required=("images", "bundle", "evaluation", "output"),
    ),
    "container": Command(
        help="Verify a release and become its Triton server: what a container runs, see docs/containers.md.",
        add_options=_container_options,
        run=_container,
    ),
    "health": Command(
        help="Ask a running server for a golden image over HTTP and gRPC; fail if it does not answer as it should.",
        add_options=_health_options,
        run=_health,
    ),
    "predict": Command(
        help="Ask a running server about image files, folders and patterns.",
        add_options=_predict_options,
        run=_predict,
    ),
}

if __name__ == "__main__":
    command.run(main)
