"""What the server answers is what offline evaluation answers, by name, and says who answered."""

from pathlib import Path

import numpy as np
import pytest

from serve import releases, repository
from serve.client import CLIENTS, Client
from serve.protocol import UnknownModel
from serve.release import Release, open_release
from serve.server import Server, serving
from slipway.bundle import Bundle
from tests import images
from tests.serve.tools import CPUS, Oracle, make_bundle
from tests.slipway import preprocessed

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("batch", [1, 8])
def test_ensemble_agrees_with_offline_evaluation_on_odd_and_normal_images(
    client: Client, oracle: Oracle, batch: int
) -> None:
    """Case D01."""
    nasty = {name: data for name, (data, _) in preprocessed.corpus().items()}
    files = images.odd() | images.normal(100) | nasty
    names = list(files)
    for start in range(0, len(names), batch):
        own = names[start : start + batch]
        for name, answer in zip(own, client.classify([files[name] for name in own]), strict=True):
            assert answer.label == oracle.label(files[name]), name
            np.testing.assert_allclose(
                answer.probabilities, oracle.probabilities(files[name]), rtol=0, atol=1e-4, err_msg=name
            )


@pytest.mark.parametrize("k", range(12))
def test_label_name_of_a_class_is_its_folder_not_its_place_in_sorted_text(client: Client, k: int) -> None:
    """Case A03."""
    (answer,) = client.classify([images.flat(k)], top=3)
    assert answer.label == str(k)
    assert len({name for name, _ in answer.top}) == 3
    assert [probability for _, probability in answer.top] == sorted(answer.probabilities, reverse=True)[:3]


def test_answer_names_the_release_and_the_version(client: Client, release: Release) -> None:
    """Case D13."""
    (answer,) = client.classify([images.flat(0)])
    assert answer.release == release.identity
    assert answer.release.startswith("tiny/1@")
    assert answer.model_version == "1"


def test_unknown_version_is_an_error_not_another_version(protocol: str, server: Server) -> None:
    """Case D13."""
    with (
        CLIENTS[protocol](server.urls[protocol], version="99") as client,
        pytest.raises(UnknownModel, match="99"),
    ):
        client.classify([images.flat(0)])


def test_a_new_version_is_what_answers_after_it_was_published(bundle: Bundle, tmp_path: Path) -> None:
    """Case D13."""
    swapped = make_bundle(tmp_path / "bundles" / "tiny" / "2", "--reverse-classes")
    models = tmp_path / "repository"
    for directory, version, label in ((bundle.directory, "1", "3"), (swapped, "2", "8")):
        releases.promote(repository.publish(directory, models, "embedded", CPUS))
        with serving(open_release(models / "current")) as server:
            for protocol, url in server.urls.items():
                with CLIENTS[protocol](url) as client:
                    (answer,) = client.classify([images.flat(3)])
                assert (answer.model_version, answer.label) == (version, label)
                assert answer.release.startswith(f"tiny/{version}@")
