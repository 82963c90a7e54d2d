"""python -m train data | plan | fit | profile | evaluate | export | report | explain | bundle"""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from slipway import command
from slipway.config import add_options, load, parse
from slipway.errors import UsageError
from train.config import Config
from train.preemption import ended_by_signals

if TYPE_CHECKING:
    from train.dataset import Dataset

# Where launchers put the number of a rank: torchrun, srun, and Fabric for hardware.devices.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID")

COMMANDS = {
    "data": "write the embedded data set if asked to, and check, measure, split or show the images",
    "plan": "say what memory a step takes, and what ranks send, before there are GPUs or images",
    "fit": "train, or continue, or find finished, the run of this configuration",
    "profile": "train a few steps, and say what their time goes into, what makes them slow, and what to do about it",
    "evaluate": "evaluate the run's best checkpoint on the test split",
    "export": "export the run's best checkpoint to a proven, sealed bundle",
    "report": "write the run's report.html",
    "explain": "say why torch.compile breaks up or recompiles the model, or why it cannot be exported",
}


@ended_by_signals()
def main(arguments: list[str]) -> Path | str | None:
    """Do one stage; returns what it made, which is printed as the only line on stdout."""
    if arguments[:1] == ["bundle"]:
        from train.bundles import main as bundle

        return bundle(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="python -m train",
        description="Train an image classifier and hand it over as a sealed bundle.",
        epilog="Progress goes to stderr; the path of what was made goes to stdout. Exit codes: 0 done, 1 failed, "
        "2 wrong usage, 75 stopped by a signal (run it again), 130 interrupted. A relative path given here starts "
        "at the current directory; one in a config file, at the project root.",
        allow_abbrev=False,
    )
    stages = parser.add_subparsers(dest="stage", metavar="|".join([*COMMANDS, "bundle"]), required=True)
    stages.add_parser("bundle", help="verify a bundle, or say how two differ; see `bundle --help`")
    parsers = {}
    for name, help in COMMANDS.items():
        parsers[name] = stages.add_parser(name, help=help, description=help, allow_abbrev=False)
        parsers[name].add_argument("--config", type=Path, help="YAML file that overrides defaults")
        if name == "data":
            _add_actions(parsers[name])
        if name == "export":
            parsers[name].add_argument(
                "--recommend", action="store_true", help="the same as --export.recommend true"
            )
        if name == "plan":
            parsers[name].add_argument(
                "--classes", type=int, help="how many, without looking at the data set"
            )
        if name == "report":
            parsers[name].add_argument("--smoke", type=Path, help="result of the smoke test, to be shown")
        add_options(parsers[name], Config)
    if not arguments or arguments[0] not in parsers:
        parser.parse_args(arguments)
        raise UsageError(f"choose one of {', '.join([*COMMANDS, 'bundle'])}")
    stage = arguments[0]
    chosen, overrides = parse(parsers[stage], arguments[1:], Config)
    if getattr(chosen, "recommend", False):
        overrides["export.recommend"] = "true"
    config = load(Config, chosen.config, overrides)
    return _run(stage, config, chosen)


def _add_actions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        nargs="?",
        choices=("check", "stats", "split", "show"),
        default="check",
        help="check: exit with 1 if training should not begin; stats: write doctor.json, all there is to say; "
        "split: write which file falls into which split; show: write a page with pictures (default: check)",
    )
    parser.add_argument("--to", type=Path, help="split: copy the images to {train,val,test}/<class>/* there")


def _run(stage: str, config: Config, chosen: argparse.Namespace) -> Path | str | None:
    # Imported stage by stage: torch takes seconds, and `--help`, `data` and wrong options should answer at once.
    if stage == "explain":
        from train.explain import explain

        return "\n".join(explain(config))
    if stage == "plan":
        from train.plan import plan

        return "\n".join(plan(config, _classes(config) if chosen.classes is None else chosen.classes))
    from train.debug import simplified

    whole = _read(config)
    config, dataset = simplified(config, whole)
    if stage == "data":
        from train.data_actions import act

        # As it is: a debug mode that validates on what it trains on is no leak.
        return act(chosen.action, config, whole, chosen.to)
    if stage == "fit":
        return _fit(config, dataset)
    if stage == "profile":
        from train.profile import profile

        return profile(config, dataset)
    return _work_on_run(stage, config, dataset, getattr(chosen, "smoke", None))


def _read(config: Config) -> "Dataset":
    from train.sources import read_dataset

    if config.data.embedded:
        from train.embedded import write_embedded

        write_embedded(config.data)
    return read_dataset(config.data)


def _classes(config: Config) -> int:
    from train.dataset import DataError

    try:
        return len(_read(config).classes)
    except DataError as error:
        raise UsageError(
            f"{error}. To plan without images, say with --classes how many there will be"
        ) from error


def _fit(config: Config, dataset: "Dataset") -> Path | None:
    from lightning.fabric.utilities import rank_zero_only

    from train.fit import fit

    run = fit(config, dataset)
    return run if getattr(rank_zero_only, "rank", 0) == 0 else None


def _work_on_run(stage: str, config: Config, dataset: "Dataset", smoke: Path | None) -> Path:
    """Evaluate, then export, then report, up to the stage asked for. What is sealed already is only looked up."""
    from train.evaluate import evaluate
    from train.runs import run_for

    run = run_for(config, dataset)
    evaluation = evaluate(config, run, dataset)
    if stage == "evaluate":
        return evaluation
    from train.export import export

    bundle = export(config, run, dataset, evaluation)
    if stage == "export":
        return bundle
    from train.report import write_report
    from train.sources import folder_of

    images = folder_of(dataset, "test", config.data.cache)
    return write_report(run.directory, images, evaluation, bundle, smoke)


def _rank() -> str:
    """Of many ranks, which one this is, as PyTorch puts it in front of a traceback; the first one speaks for all."""
    rank = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0")
    return "" if rank == "0" else f"[rank{rank}]: "


if __name__ == "__main__":
    command.run(main, speaker=_rank)
