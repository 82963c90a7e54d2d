from tests.train.conftest import MakeConfig, MakeFolder
from train.debug import simplified
from train.fit import fit
from train.folder import read_folder
from train.runs import Run, read_metrics, run_for


def test_without_a_mode_nothing_changes(make_folder: MakeFolder, make_config: MakeConfig) -> None:
    config = make_config(make_folder())
    folder = read_folder(config.data)
    assert simplified(config, folder) == (config, folder)


def test_one_batch_goes_once_through_everything(make_folder: MakeFolder, make_config: MakeConfig) -> None:
    config = make_config(make_folder(), debug__mode="one-batch", training__batch_size="6")
    full = read_folder(config.data)
    config, folder = simplified(config, full)
    assert {sample.label for sample in folder.splits["train"]} == {0, 1, 2}
    assert len(folder.splits["test"]) == len(full.splits["test"])
    lines = list(read_metrics(Run(directory=fit(config, folder), inputs="")))
    assert [line["kind"] for line in lines] == ["train", "evaluation"]


def test_overfitting_learns_a_batch_by_heart(make_folder: MakeFolder, make_config: MakeConfig) -> None:
    root = make_folder()
    config = make_config(root, debug__mode="overfit", training__batch_size="6", optimizer__lr="0.003")
    config, folder = simplified(config, read_folder(config.data))
    assert folder.splits["train"] == folder.splits["val"]
    assert run_for(config, folder) != run_for(make_config(root), folder)
    lines = read_metrics(Run(directory=fit(config, folder), inputs=""))
    *_, last = (line["loss"] for line in lines if line["kind"] == "train")
    assert last < 0.1
