"""What a container runs: a release is verified, then this process becomes Triton and serves it.

There is no supervisor in a container. Whoever runs it restarts what has ended, replaces what its probe (`serve health`)
finds sick, and switches releases by starting a container with another one.
"""

import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from serve import linter, model_config, shared_memory, tracing
from serve.release import open_release
from serve.server import DRAIN_SECONDS, MODELS, ServerError, folder_of_links

PROGRAM = "tritonserver"


def become_triton(directory: Path, traces: str | None, arguments: Sequence[str]) -> NoReturn:
    """Serve a release, or what a link leads to now, on Triton's usual ports and all addresses.

    Args:
        traces: URL that takes OpenTelemetry's traces, OTLP over HTTP; None if nobody does.
        arguments: for tritonserver, after ours, so that they win.

    Raises:
        SealError: the release is damaged.
        ServerError: Triton is not there, would not serve this release, or finds no shared memory.
    """
    release = open_release(directory)
    if mistakes := list(linter.problems(release.models)):
        raise ServerError(f"Triton would not serve this: {'; '.join(mistakes)}")
    if (program := shutil.which(PROGRAM)) is None:
        raise ServerError(
            f"{PROGRAM} was not found; this is what runs in a container, see `python -m serve up`"
        )
    # A container that is restarted may find the shared memory of the one before: Kubernetes keeps the volume.
    shared_memory.remove_abandoned()
    shared_memory.warn_if_less_than(model_config.instances(release.models) * release.largest_batch_bytes)
    identity = f"{shared_memory.PREFIX}{uuid.uuid4().hex[:12]}"
    try:
        with shared_memory.owned(identity) as ownership:
            os.set_inheritable(ownership, True)  # noqa: FBT003 - its parameter has no name
            models = folder_of_links(release) / MODELS
            ours = [*_arguments(models, identity), *tracing.options(traces)]
            os.execv(program, [PROGRAM, *ours, *arguments])
    except OSError as error:
        raise ServerError(f"{program} could not be started: {error}") from error


def _arguments(models: Path, identity: str) -> list[str]:
    return [
        f"--model-repository={models}",
        "--model-control-mode=none",
        # What a model takes and gives is what the release says, not what Triton finds out by itself.
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={DRAIN_SECONDS}",
        f"--backend-config=python,shm-region-prefix-name={identity}",
    ]
