"""Try the serving image as it will run: hardened, in a container, asked from outside.

    python -m deploy smoke --bundle bundles/digits/1

The image is built, a release of the bundle is published and served, and what it promises is checked one by one; the
first thing that does not hold ends the test. Its containers, network, release and image are gone afterwards; an engine
that runs anyway keeps the builder's cache, and the stand-in.
Every line says what the image stands on, because a stand-in proves less than NVIDIA's image (deploy/stand_in.py).
"""

import argparse
import logging
import tempfile
import time
from pathlib import Path

import docker
import numpy as np
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from deploy import bases, engine, images
from deploy.bases import Base
from deploy.service import CPUS, USER, Service, served
from serve import health, model_config, releases, repository, smoke
from serve import protocol as requests
from serve.client import CLIENTS
from serve.protocol import RefusedInput
from serve.release import Release, open_release
from serve.smoke import Expected, SmokeTestFailed
from slipway.errors import UsageError

ANSWER_SECONDS = 30
# Triton's exit timeout (serve.server), and time to end.
STOP_SECONDS = 30
MEGABYTE = 2**20
TOO_LARGE = 80 * MEGABYTE
# Protocol -> a client that sends everything, and what its errors mean.
RAW = {
    "http": (tritonclient.http, requests.http_error),
    "grpc": (tritonclient.grpc, requests.grpc_error),
}
KILL_MODELS = """
import psutil
for process in psutil.process_iter(["name"]):
    if process.info["name"].startswith("triton_python"):
        process.kill()
"""

logger = logging.getLogger(__name__)


def run(bundle: Path, choice: bases.Choice) -> None:
    """Build the image and try it with a release of `bundle`.

    Raises:
        UsageError: there is no bundle.
        NoEngine, NoBase, BuildFailed, NoStandIn, NoProgram: there was nothing to try.
        SmokeTestFailed: something does not hold.
    """
    if not bundle.is_dir():
        raise UsageError(f"{bundle}: is no bundle; `make export` makes one")
    with (
        engine.running() as host,
        engine.client(host) as client,
        tempfile.TemporaryDirectory() as folder,
        images.made(client, host, "serve", choice) as (image, base),
    ):
        size = client.images.get(image).attrs["Size"] // 1_000_000
        report(base, "image", f"{image}, {size} MB, on {base.description}")
        target: model_config.Target = "container" if base.kind == bases.ORIGINAL else "embedded"
        release = open_release(repository.publish(bundle, Path(folder, "repository"), target, CPUS))
        releases.move_current(release.directory)
        try_release(client, image, base, release)
        report(base, "passed", f"{image} serves {release.identity}")


def try_release(client: docker.DockerClient, image: str, base: Base, release: Release) -> None:
    """Serve what `current` leads to beside this release, and hold it against the release. Raises SmokeTestFailed."""
    expected = [
        Expected(path=one.path, file=one.path.name, label=one.label, probabilities=one.probabilities)
        for one in release.golden
    ]
    with served(client, image, release) as service:
        seconds = service.wait_until_it_answers()
        report(base, "ready", f"{release.identity} answered a golden image after {seconds:.1f} s")
        report(base, "hardened", _check_hardening(service))
        for protocol, url in service.urls.items():
            report(base, f"golden, {protocol}", _check_golden(protocol, url, expected, release))
        report(base, "bad input", _check_bad_inputs(service, expected))
        report(base, "sizes", _check_sizes(service, release))
        report(base, "metrics", _check_metrics(service, len(expected)))
        report(base, "dead model", _check_that_health_sees_a_dead_model(service))
        report(base, "killed", _check_recovery(service))
        report(base, "stopped", _check_stop(service))
        report(base, "log", _check_log(service))


def report(base: Base, what: str, finding: str) -> None:
    logger.info("%-8s  %-12s  %s", base.kind, what, finding)


def _check_hardening(service: Service) -> str:
    """Asked of the kernel, about the process that serves."""
    _, text = service.run("cat", "/proc/1/status")
    status = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    found = (status["Uid"].split()[0], int(status["CapEff"], 16), status["NoNewPrivs"])
    if found != (str(USER), 0, "1"):
        raise SmokeTestFailed(f"user, capabilities and no-new-privileges are {found} in the container")
    code, _ = service.run("touch", "/app/here")
    if code == 0:
        raise SmokeTestFailed("the root of the container can be written to")
    return f"user {USER}, no capabilities, no new privileges, read-only root"


def _check_golden(protocol: str, url: str, expected: list[Expected], release: Release) -> str:
    summary, outcomes = smoke.compare_all(protocol, url, expected, release)
    for outcome in outcomes:
        if outcome.problem:
            raise SmokeTestFailed(
                f"{outcome.file}: over {protocol}, in a batch of {outcome.batch}, {outcome.problem}"
            )
    return (
        f"{summary.agreeing} of {summary.images} images, alone and together; probabilities at most "
        f"{summary.max_probability_difference:.1g} off"
    )


def _check_bad_inputs(service: Service, expected: list[Expected]) -> str:
    results = smoke.send_bad_inputs(service.urls, expected)
    for result in results:
        if not result["passed"]:
            raise SmokeTestFailed(f"{result['name']}: was answered {result['http']!r} and {result['grpc']!r}")
    names = ", ".join(result["name"] for result in results)
    return f"{names}: the client's fault, and nothing happens to good images beside it"


def _check_sizes(service: Service, release: Release) -> str:
    """Case D17. Zeros behind a JPEG's or a PNG's end are no part of the image, so any size has a known answer."""
    limit = release.signature.preprocessing.max_bytes
    golden = release.golden[0]
    sizes = sorted({min(5 * MEGABYTE, limit), min(30 * MEGABYTE, limit), limit})
    for protocol, url in service.urls.items():
        with CLIENTS[protocol](url, deadline_seconds=ANSWER_SECONDS) as client:
            for size in sizes:
                (answer,) = client.classify([golden.image.ljust(size, b"\0")])
                if answer.label != golden.label:
                    raise SmokeTestFailed(f"{size} bytes over {protocol}: were answered {answer.label!r}")
        _check_refusal(protocol, url, golden.image.ljust(TOO_LARGE, b"\0"))
    shown = ", ".join(f"{size // MEGABYTE} MiB" for size in sizes)
    return f"{shown} answered; 80 MiB refused with the limit of {limit:,} bytes"


def _check_refusal(protocol: str, url: str, image: bytes) -> None:
    """By the server: our own client would not send it."""
    data = np.empty((1, 1), dtype=np.object_)
    data[0, 0] = image
    module, explain = RAW[protocol]
    inputs, outputs = requests.request(module, data, top=1)
    try:
        with module.InferenceServerClient(url) as client:
            client.infer(model_config.ENSEMBLE, inputs, outputs=outputs)
    except InferenceServerException as error:
        told = explain(url, error)
        if isinstance(told, RefusedInput) and told.code == "TOO_MANY_BYTES":
            return
        raise SmokeTestFailed(f"{len(image)} bytes over {protocol}: were refused with {told}") from error
    raise SmokeTestFailed(f"{len(image)} bytes over {protocol}: were not refused")


def _check_metrics(service: Service, golden: int) -> str:
    answered = health.load(service.metrics, ANSWER_SECONDS).answered
    # Every golden image was asked for over both protocols, alone and in a batch.
    if answered < 4 * golden:
        raise SmokeTestFailed(f"the metrics count {answered} answers, after at least {4 * golden}")
    return f"{answered} images classified"


def _check_that_health_sees_a_dead_model(service: Service) -> str:
    """Case D03: the probe is content with the server as it is, and not when the processes of a model are dead."""
    for kill, wanted in (("", 0), (KILL_MODELS, 1)):
        if kill:
            service.run("python3", "-c", kill)
        code, output = service.run("python3", "-m", "serve", "health")
        if code != wanted:
            raise SmokeTestFailed(f"`serve health` ended with {code} instead of {wanted}: {output}")
    return f"`serve health` sees it: {output.splitlines()[-1]}"


def _check_recovery(service: Service) -> str:
    """SIGKILL from outside: Docker takes a `docker kill` as the wish that it shall not be restarted."""
    service.container.reload()
    kill = f"import os; os.kill({service.container.attrs['State']['Pid']}, 9)"
    service.client.containers.run(
        service.image, ["-c", kill], entrypoint="python3", user="0", pid_mode="host", remove=True
    )
    seconds = service.wait_until_it_answers(restarts=1)
    return f"the server's process: restarted, and answered a golden image after {seconds:.1f} s"


def _check_stop(service: Service) -> str:
    """All our connections are closed by now; an idle one would make Triton wait for it, and exit with 1."""
    start = time.monotonic()
    service.container.stop(timeout=STOP_SECONDS)
    code = service.container.wait()["StatusCode"]
    if code != 0:
        raise SmokeTestFailed(f"stopped, and the exit code is {code}{service.log_tail()}")
    return f"exit code 0 after {time.monotonic() - start:.1f} s"


def _check_log(service: Service) -> str:
    """What was refused is a client's affair, and leaves no trace of an accident."""
    log = service.log()
    if "Traceback" in log or "\nAt:\n" in log:
        raise SmokeTestFailed(f"there is a traceback in the log{service.log_tail()}")
    return f"{len(log.splitlines())} lines, no traceback"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m deploy smoke", description="Try the serving image with a release of a bundle."
    )
    parser.add_argument("--bundle", type=Path, required=True, metavar="PATH", help="directory of the bundle")
    bases.add_option(parser)
    options = parser.parse_args(arguments)
    run(options.bundle, options.base)
