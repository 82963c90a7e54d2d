from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import save_model
from torch import nn

from slipway import sealed
from slipway.errors import UsageError
from slipway.sealed import SealError
from tests.train.conftest import MakeConfig, MakeFolder
from train.config import ModelConfig
from train.fit import fit
from train.folder import read_folder
from train.model import build_model
from train.runs import read_metrics, run_for
from train.warm_start import WarmStartError, start

NAME = "mobilenet_v3_small"


def classifier(classes: int, name: str = NAME) -> nn.Module:
    return build_model(ModelConfig(name=name), classes, 32, (0.5,) * 3, (0.5,) * 3)


@pytest.fixture
def weights_of_torchvision(
    tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[dict[str, torch.Tensor]]:
    """A file where torchvision keeps what it downloaded, so that nothing is downloaded."""
    name = getattr(request, "param", NAME)
    torch.manual_seed(7)
    state = torchvision.models.get_model(name, weights=None).state_dict()
    before = torch.hub.get_dir()
    torch.hub.set_dir(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    url = torchvision.models.get_model_weights(name)["DEFAULT"].url
    torch.save(state, tmp_path / "checkpoints" / url.rsplit("/", 1)[1])
    yield state
    torch.hub.set_dir(before)


def test_torchvision_weights_fill_all_but_another_head(
    weights_of_torchvision: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    model = classifier(5)
    head = model.get_parameter("backbone.classifier.3.weight").clone()
    caplog.set_level("INFO")
    start(model, ModelConfig(name=NAME, pretrained="DEFAULT"))
    state = model.state_dict()
    for name, value in weights_of_torchvision.items():
        if not name.startswith("classifier.3."):
            assert torch.equal(state[f"backbone.{name}"], value)
    assert torch.equal(state["backbone.classifier.3.weight"], head)
    assert "new: backbone.classifier.3.weight, backbone.classifier.3.bias" in caplog.text


@pytest.mark.usefixtures("weights_of_torchvision")
@pytest.mark.parametrize("weights_of_torchvision", ["resnet18"], indirect=True)
def test_small_stem_does_not_fit_torchvision_weights() -> None:
    """3x3 instead of 7x7."""
    config = ModelConfig(name="resnet18", pretrained="DEFAULT", stem="small")
    model = build_model(config, 3, 32, (0.5,) * 3, (0.5,) * 3)
    with pytest.raises(
        WarmStartError, match=r"do not fit this model: backbone\.conv1\.weight .*another model\.name"
    ):
        start(model, config)


@pytest.mark.usefixtures("weights_of_torchvision")
def test_damaged_file_of_torchvision_weights_is_named(tmp_path: Path) -> None:
    (file,) = (tmp_path / "checkpoints").iterdir()
    for content in (file.read_bytes()[:5000], b"<html>Too many requests</html>", b""):
        file.write_bytes(content)
        with pytest.raises(WarmStartError, match=rf"{file} cannot be loaded .* delete it"):
            start(classifier(3), ModelConfig(name=NAME, pretrained="DEFAULT"))


@pytest.mark.usefixtures("weights_of_torchvision")
def test_download_that_was_cut_short_is_said_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch compares hashes, and raises a RuntimeError."""
    (file,) = (tmp_path / "checkpoints").iterdir()
    served = tmp_path / file.name
    served.write_bytes(file.read_bytes()[:5000])
    file.unlink()
    monkeypatch.setattr(torchvision.models.get_model_weights(NAME)["DEFAULT"].value, "url", served.as_uri())
    with pytest.raises(WarmStartError, match=rf"could not be downloaded \(invalid hash .* at {file}"):
        start(classifier(3), ModelConfig(name=NAME, pretrained="DEFAULT"))


def test_unknown_torchvision_weights_name_the_known() -> None:
    with pytest.raises(UsageError, match=r"for mobilenet_v3_small there is IMAGENET1K_V1"):
        start(classifier(3), ModelConfig(name=NAME, pretrained="IMAGENET21K"))


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_weights_with_auxiliary_heads_are_refused_for_what_they_are(name: str) -> None:
    model = build_model(ModelConfig(name=name), 3, 96, (0.5,) * 3, (0.5,) * 3)
    with pytest.raises(WarmStartError, match=f"torchvision's weights of {name} have auxiliary heads"):
        start(model, ModelConfig(name=name, pretrained="DEFAULT"))


def test_a_run_starts_from_a_checkpoint(make_folder: MakeFolder, make_config: MakeConfig) -> None:
    root = make_folder()
    first = fit(make_config(root, training__epochs="1"), read_folder(make_config(root).data))
    source = max((first / "checkpoints").glob("step-*"))
    config = make_config(root, model__start_from=str(source), optimizer__lr="1e-9", training__seed="5")
    folder = read_folder(config.data)
    run = run_for(config, folder)
    fit(config, folder)
    *_, last = read_metrics(run_for(make_config(root, training__epochs="1"), folder))
    evaluations = [line for line in read_metrics(run) if line["kind"] == "evaluation"]
    # At this rate nothing is learnt: it is the first run's model, up to its moving batch statistics.
    assert evaluations[0]["loss"] == pytest.approx(last["loss"], abs=0.05)


def test_weights_of_a_bundle_fill_the_model(tmp_path: Path) -> None:
    trained, model = classifier(3), classifier(3)
    with sealed.stage(tmp_path / "1", kind="bundle") as staging:
        save_model(trained, str(staging / "weights.safetensors"))
    start(model, ModelConfig(name=NAME, start_from=tmp_path / "1"))
    own = model.state_dict()
    assert all(torch.equal(value, own[name]) for name, value in trained.state_dict().items())


@pytest.mark.parametrize("kind", ["bundle", "release"])
def test_sealed_directory_without_weights_is_refused(tmp_path: Path, kind: str) -> None:
    with sealed.stage(tmp_path / "1", kind=kind):
        pass
    with pytest.raises(WarmStartError, match=f"a sealed {kind} without weights .* name a checkpoint"):
        start(classifier(3), ModelConfig(name=NAME, start_from=tmp_path / "1"))


def test_where_the_checkpoint_lies_does_not_matter(
    make_folder: MakeFolder, make_config: MakeConfig, tmp_path: Path
) -> None:
    root = make_folder()
    folder = read_folder(make_config(root).data)
    for name, content in (("one", "1"), ("moved", "1"), ("other", "2")):
        with sealed.stage(tmp_path / name, kind="checkpoint", inputs=content):
            pass
    one, moved, other = (
        run_for(make_config(root, model__start_from=str(tmp_path / name)), folder)
        for name in ("one", "moved", "other")
    )
    assert one == moved != other


def test_what_is_no_checkpoint_is_refused(
    tmp_path: Path, make_folder: MakeFolder, make_config: MakeConfig
) -> None:
    config = make_config(make_folder(), model__start_from=str(tmp_path))
    with pytest.raises(SealError, match="is not a sealed directory"):
        fit(config, read_folder(config.data))
