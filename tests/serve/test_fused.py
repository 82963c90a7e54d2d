"""A release as one model answers as the ensemble does, and is held to the same."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http

from serve import model_config, repository
from serve.client import CLIENTS, Client
from serve.protocol import ServerFailure
from serve.release import Release
from serve.server import Server, serving
from slipway.bundle import Bundle
from slipway.errors import UsageError
from tests import images
from tests.serve.tools import CPUS, ask_together, edit_text, model_processes, variant

FAILS = 7  # the class of the input that the failing model fails on


def test_it_is_one_model_with_the_ends_of_the_ensemble(release: Release, fused_release: Release) -> None:
    assert [path.name for path in fused_release.models.iterdir()] == ["classify"]
    one = model_config.read(fused_release.models / "classify")
    ensemble = model_config.read(release.models / "classify")
    assert (one.input, one.output) == (ensemble.input, ensemble.output)
    classifier = model_config.read(release.models / "classifier")
    assert one.parameters[model_config.THREADS] == classifier.parameters[model_config.THREADS]
    assert fused_release.identity == release.identity
    assert [golden.label for golden in fused_release.golden] == [golden.label for golden in release.golden]


@pytest.mark.parametrize("target", ["container", *model_config.ON_GPUS])
def test_it_is_for_the_embedded_target_only(
    bundle: Bundle, tmp_path: Path, target: model_config.Target
) -> None:
    with pytest.raises(UsageError, match=f"with {target} it was never tried"):
        repository.publish(bundle.directory, tmp_path, target, CPUS, fused=True)


@pytest.fixture(scope="module")
def fused_server(fused_release: Release) -> Iterator[Server]:
    with serving(fused_release) as server:
        yield server


@pytest.mark.integration
def test_answers_are_those_of_the_ensemble_to_the_bit(
    client: Client, protocol: str, fused_server: Server
) -> None:
    """Alone and in a batch, over both protocols. Case D01."""
    sent = [images.flat(k) for k in range(8)]
    with CLIENTS[protocol](fused_server.urls[protocol]) as fused:
        for batch in (sent, sent[3:4]):
            for own, other in zip(fused.classify(batch), client.classify(batch), strict=True):
                assert np.array_equal(own.probabilities, other.probabilities)
                assert (own.top, own.release, own.model_version) == (
                    other.top,
                    other.release,
                    other.model_version,
                )
    assert len(model_processes(fused_server)) == CPUS


@pytest.mark.integration
def test_every_instance_has_run_alone_and_in_a_full_batch_before_the_first_request(
    fused_release: Release,
) -> None:
    """Case D11."""
    with serving(fused_release) as server, tritonclient.http.InferenceServerClient(server.http) as raw:
        (statistics,) = raw.get_inference_statistics("classify")["model_stats"]
    sizes = {entry["batch_size"]: entry["compute_infer"]["count"] for entry in statistics["batch_stats"]}
    assert sizes[fused_release.signature.max_batch] == CPUS
    assert sizes[1] > CPUS  # readiness asks as well


@pytest.mark.integration
def test_a_failing_model_tells_the_log_and_not_the_client(
    fused_release: Release, protocol: str, tmp_path: Path
) -> None:
    def fail(models: Path) -> None:
        edit_text(
            models / "classify" / "1" / "serve" / "models" / "classifier.py",
            "            self._count(requests, images, logits)\n",
            f"            if len(logits) == 1 and logits[0].argmax() == {FAILS}:\n"
            '                raise RuntimeError("a secret")\n'
            "            self._count(requests, images, logits)\n",
        )

    with serving(variant(fused_release, tmp_path / "release", fail)) as server:
        (failure,) = ask_together(protocol, server, [images.flat(FAILS)])
        assert isinstance(failure, ServerFailure)
        assert "see the server's log" in str(failure)
        assert "secret" not in str(failure)
        assert "a secret" in server.log.read_text()
        with CLIENTS[protocol](server.urls[protocol]) as client:
            assert client.classify([images.flat(1)])[0].label == "1"
