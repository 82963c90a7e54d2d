"""A setting is taken exactly as it was meant, or refused in words that say what was probably meant (case E01)."""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipway.config import ConfigError, add_options, load, option, options_of, parse, section, to_yaml
from slipway.errors import UsageError
from slipway.paths import PROJECT_ROOT


@dataclass(frozen=True, kw_only=True)
class Schedule:
    warmup: float = option(0.1, "share of all steps", at_least=0, below=1)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    name: Literal["sgd", "adamw"] = option("sgd", "which rule")
    lr: float = option(0.1, "peak learning rate, 100% of it", above=0)
    weight_decay: float = option(0.0, "of weights", at_least=0)
    clip_norm: float | None = option(1.0, "largest gradient norm", above=0)
    schedule: Schedule = section(Schedule)


@dataclass(frozen=True, kw_only=True)
class Training:
    epochs: int = option(10, "passes over the data", at_least=1, at_most=1000)
    accumulate: Literal[1, 2, 4] = option(1, "micro-batches")
    deterministic: bool = option(default=True, help="same bits each time")
    resume: Path | None = option(None, "checkpoint to go on from")


@dataclass(frozen=True, kw_only=True)
class Data:
    root: Path = option(Path("data") / "photos", "image folder")
    more: tuple[Path, ...] = option((), "further folders")
    mean: tuple[float, float, float] = option((0.5, 0.5, 0.5), "per channel")
    tags: tuple[str, ...] = option((), "words")
    note: str = option("", "free text")
    val_fraction: float = option(0.2, "held out for validation", above=0, below=1)
    test_fraction: float = option(0.2, "held out for the test", above=0, below=1)
    limit: float = option(0.0, "no range is given")

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.val_fraction + self.test_fraction >= 1:
            yield "val_fraction", "and data.test_fraction leave nothing to train on"


@dataclass(frozen=True, kw_only=True)
class Config:
    optimizer: Optimizer = section(Optimizer)
    training: Training = section(Training)
    data: Data = section(Data)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "a.yaml"


def load_text(file: Path, text: str, **overrides: str) -> Config:
    file.write_text(text, encoding="utf-8")
    return load(Config, file, overrides)


def problems_of(file: Path, text: str) -> list[str]:
    """The lines of the message, without the file's name that each begins with."""
    with pytest.raises(ConfigError) as caught:
        load_text(file, text)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert all(line.startswith(f"{file}: ") for line in lines)
    return [line.removeprefix(f"{file}: ") for line in lines]


def override(key: str, text: str) -> Config:
    return load(Config, None, {key: text})


def problem_on_command_line(key: str, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        override(key, text)
    return str(caught.value).removeprefix("command line: ")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="test", allow_abbrev=False)
    made.add_argument("--config", type=Path)
    add_options(made, Config)
    return made


# Unknown keys


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("lr: 0.1", "lr is not an option; did you mean optimizer.lr?"),
        ("learning_rate: 0.1", "learning_rate is not an option; did you mean "),
        (
            "optimizer: {weigth_decay: 0}",
            "optimizer.weigth_decay is not an option; did you mean optimizer.weight_decay?",
        ),
        (
            "optimizer: {weight-decay: 0}",
            "optimizer.weight-decay is not an option; did you mean optimizer.weight_decay?",
        ),
        ("num-epochs: 3", "num-epochs is not an option; did you mean training.epochs?"),
        ("training: {epoch: 3}", "training.epoch is not an option; did you mean training.epochs?"),
        ("training: {lr: 3}", "training.lr is not an option; did you mean optimizer.lr?"),
        (
            "optimizer: {schedule: {warm_up: 0}}",
            "optimizer.schedule.warm_up is not an option; did you mean optimizer.schedule.warmup?",
        ),
        ("optimzer: {lr: 0.1}", "optimzer.lr is not an option; did you mean optimizer.lr?"),
        ("optimzer: {}", "optimzer is not an option; did you mean "),
        ("optimzer:", "optimzer is not an option; did you mean "),
        ("optimizer: 0.1", "optimizer is no option but a section of some, such as optimizer.name"),
        ("optimizer: {lr: {peak: 0.1}}", "optimizer.lr is {'peak': 0.1}; expected number"),
        ("optimizer: {lr.peak: 1}", "optimizer.lr.peak is not an option; did you mean optimizer.lr?"),
        ("Training: {epochs: 3}", "Training.epochs is not an option; did you mean training.epochs?"),
        ("1: 2", "1 is not an option; did you mean "),
        ("null: 2", "None is not an option; did you mean "),
    ],
)
def test_unknown_key_in_a_file_names_the_nearest(file: Path, text: str, complaint: str) -> None:
    (problem,) = problems_of(file, text)
    assert problem.startswith(complaint)


@pytest.mark.parametrize(
    ("argument", "complaint"),
    [
        ("--num-epochs", "--num-epochs is not an option; did you mean training.epochs?"),
        ("--train.epoch=3", "--train.epoch is not an option; did you mean training.epochs?"),
        (
            "--optimizer.weight-decay",
            "--optimizer.weight-decay is not an option; did you mean optimizer.weight_decay?",
        ),
        ("--lr", "--lr is not an option; did you mean optimizer.lr?"),
        ("--optimizer.l", "--optimizer.l is not an option; did you mean optimizer.lr?"),
        ("--optimizer", "--optimizer is no option but a section of some, such as optimizer.name"),
        ("--confg", "--confg is not an option; did you mean config?"),
        ("epochs=3", "'epochs=3' is one value too many"),
    ],
)
def test_unknown_option_on_the_command_line_names_the_nearest(argument: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(parser(), [argument, "3"] if argument[0] == "-" and "=" not in argument else [argument], Config)
    assert str(caught.value) == f"command line: {complaint}"


def test_unknown_override_names_the_nearest() -> None:
    complaint = "--optimizer.weigth_decay is not an option; did you mean optimizer.weight_decay?"
    assert problem_on_command_line("optimizer.weigth_decay", "0") == complaint


def test_wrong_configuration_is_wrong_usage() -> None:
    """Exit code 2, which `command.run` takes from here."""
    assert issubclass(ConfigError, UsageError)
    assert ConfigError("").exit_code == 2


# Types


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("optimizer: {lr: '1e-3'}", "optimizer.lr is the text '1e-3'; expected number"),
        ("optimizer: {lr: 1:30}", "optimizer.lr is the text '1:30'; expected number"),
        ("optimizer: {lr: true}", "optimizer.lr is True; expected number"),
        ("optimizer: {lr: }", "optimizer.lr is None; expected number"),
        ("optimizer: {lr: [0.1]}", "optimizer.lr is [0.1]; expected number"),
        (
            "training: {deterministic: yes}",
            "training.deterministic is the text 'yes'; expected true or false",
        ),
        ("training: {deterministic: on}", "training.deterministic is the text 'on'; expected true or false"),
        ("training: {deterministic: 1}", "training.deterministic is 1; expected true or false"),
        (
            "training: {deterministic: 'true'}",
            "training.deterministic is the text 'true'; expected true or false",
        ),
        ("training: {epochs: 3.0}", "training.epochs is 3.0; expected integer"),
        ("training: {epochs: 1e1}", "training.epochs is 10.0; expected integer"),
        ("training: {epochs: true}", "training.epochs is True; expected integer"),
        ("training: {epochs: '3'}", "training.epochs is the text '3'; expected integer"),
        ("training: {resume: 12}", "training.resume is 12; expected path"),
        ("data: {root: ''}", "data.root is the text ''; expected path"),
        ("data: {note: 3}", "data.note is 3; expected text"),
        ("data: {note: 2024-02-29}", "data.note is datetime.date(2024, 2, 29); expected text"),
        ("data: {mean: [0.5, 0.5]}", "data.mean is [0.5, 0.5]; expected [3 x number]"),
        ("data: {mean: 0.5}", "data.mean is 0.5; expected [3 x number]"),
        ("data: {mean: [0.5, 0.5, '0.5']}", "data.mean is the text '0.5'; expected number"),
        ("data: {tags: word}", "data.tags is the text 'word'; expected [... x text]"),
        ("data: {tags: [1]}", "data.tags is 1; expected text"),
        (
            "optimizer: {name: sdg}",
            "optimizer.name is the text 'sdg'; expected one of sgd, adamw; did you mean sgd?",
        ),
        ("optimizer: {name: lion}", "optimizer.name is the text 'lion'; expected one of sgd, adamw"),
        ("optimizer: {name: SGD}", "optimizer.name is the text 'SGD'; expected one of sgd, adamw"),
        ("training: {accumulate: 3}", "training.accumulate is 3; expected one of 1, 2, 4"),
        ("training: {accumulate: true}", "training.accumulate is True; expected one of 1, 2, 4"),
        ("training: {accumulate: 1.0}", "training.accumulate is 1.0; expected one of 1, 2, 4"),
    ],
)
def test_value_of_another_type_is_refused_and_never_converted(file: Path, text: str, complaint: str) -> None:
    assert problems_of(file, text) == [complaint]


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 0.001), ("1E3", 1000.0), ("2", 2.0), (".5", 0.5), ("1_000", 1000.0)]
)
def test_number_is_a_number_however_it_is_written(file: Path, text: str, value: float) -> None:
    """YAML 1.1, as PyYAML reads it, takes 1e-3 for text."""
    from_file = load_text(file, f"optimizer: {{lr: {text}}}").optimizer.lr
    from_command_line = override("optimizer.lr", text).optimizer.lr
    assert from_file == from_command_line == value
    assert type(from_file) is type(from_command_line) is float


@pytest.mark.parametrize("text", ["yes", "no", "on", "off", "y", "N"])
def test_words_are_words(file: Path, text: str) -> None:
    """YAML 1.1 makes booleans of them: the Norway problem."""
    assert load_text(file, f"data: {{note: {text}}}").data.note == text


def test_text_on_the_command_line_is_taken_as_it_stands() -> None:
    for text in ("null", "123", "1e-3", "true", "[", "{a: b}", "2024-02-30", "", " x ", "--", "ä"):
        assert override("data.note", text).data.note == text


def test_null_is_for_what_may_be_absent(file: Path) -> None:
    assert load_text(file, "optimizer: {clip_norm: null}").optimizer.clip_norm is None
    assert override("optimizer.clip_norm", "null").optimizer.clip_norm is None
    assert override("training.resume", "null").training.resume is None
    assert problems_of(file, "training: {epochs: null}") == ["training.epochs is None; expected integer"]


def test_list_is_written_the_same_in_a_file_and_on_the_command_line(file: Path) -> None:
    for key, text, value in (
        ("mean", "[1, 0.5, 2e-1]", (1.0, 0.5, 0.2)),
        ("tags", "[a, b]", ("a", "b")),
        ("tags", "[]", ()),
        ("more", "[/x, /y z]", (Path("/x"), Path("/y z"))),
    ):
        from_file = getattr(load_text(file, f"data: {{{key}: {text}}}").data, key)
        assert from_file == getattr(override(f"data.{key}", text).data, key) == value


def test_choice_of_numbers_is_open_to_the_command_line() -> None:
    assert override("training.accumulate", "4").training.accumulate == 4


# Ranges and conflicts


@pytest.mark.parametrize(
    ("key", "text", "complaint"),
    [
        ("optimizer.lr", "0", "optimizer.lr is 0.0; must be above 0"),
        ("optimizer.lr", "-1", "optimizer.lr is -1.0; must be above 0"),
        ("optimizer.lr", ".nan", "optimizer.lr is nan; must be above 0"),
        ("optimizer.clip_norm", ".nan", "optimizer.clip_norm is nan; must be above 0"),
        ("optimizer.weight_decay", "-1e-9", "optimizer.weight_decay is -1e-09; must be at least 0"),
        ("optimizer.schedule.warmup", "1", "optimizer.schedule.warmup is 1.0; must be below 1"),
        ("training.epochs", "0", "training.epochs is 0; must be at least 1"),
        ("training.epochs", "1001", "training.epochs is 1001; must be at most 1000"),
        ("optimizer.lr", "9" * 400, "optimizer.lr is too large for a number"),
    ],
)
def test_value_out_of_range_is_refused(key: str, text: str, complaint: str) -> None:
    assert problem_on_command_line(key, text) == complaint


def test_ends_of_a_range_belong_to_it_where_they_should() -> None:
    assert override("optimizer.weight_decay", "0").optimizer.weight_decay == 0
    assert override("optimizer.schedule.warmup", "0").optimizer.schedule.warmup == 0
    assert override("training.epochs", "1000").training.epochs == 1000
    assert math.isnan(override("data.limit", ".nan").data.limit)


def test_settings_that_do_not_fit_each_other_are_refused(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(file, "data: {val_fraction: 0.5, test_fraction: 0.5}")
    assert str(caught.value) == "data.val_fraction and data.test_fraction leave nothing to train on"


def test_every_problem_is_reported_at_once(file: Path) -> None:
    text = "lr: 1\noptimizer: {name: sdg, lr: 0}\ntraining: {epochs: many, deterministic: yes}\n"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(Config, file, {"data.val_fraction": "2", "data.rooot": "x"})
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert [line.split(" is ")[0] for line in lines] == [
        f"{file}: lr",
        f"{file}: optimizer.name",
        f"{file}: optimizer.lr",
        f"{file}: training.epochs",
        f"{file}: training.deterministic",
        "command line: data.val_fraction",
        "command line: --data.rooot",
    ]


# Files


def test_command_line_goes_before_file_goes_before_default(file: Path) -> None:
    file.write_text("optimizer: {lr: 1}\ntraining: {epochs: 5}\n", encoding="utf-8")
    config = load(Config, file, {"optimizer.lr": "2"})
    assert (config.optimizer.lr, config.training.epochs, config.optimizer.weight_decay) == (2.0, 5, 0.0)


@pytest.mark.parametrize(
    "text",
    [
        "optimizer: {lr: 1, lr: 2}",
        "training:\n  epochs: 1\ndata: {}\ntraining:\n  epochs: 2",
        "optimizer: {lr: 1}\noptimizer.lr: 2",
    ],
)
def test_key_given_twice_is_refused(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"duplicate key|optimizer\.lr is given twice"):
        load(Config, file, {})


def test_empty_file_and_empty_section_change_nothing(file: Path) -> None:
    """A section whose lines are all commented out is null to YAML."""
    for text in ("", "# nothing\n", "optimizer:\n  # lr: 1\n", "optimizer: {}\n"):
        assert load_text(file, text) == load(Config, None, {})


@pytest.mark.parametrize("text", ["word", "- 1", "3", "[a]"])
def test_file_that_is_no_mapping_is_refused(file: Path, text: str) -> None:
    assert problems_of(file, text) == ["must hold `section:` blocks with `key: value` lines"]


@pytest.mark.parametrize(
    "content",
    [
        b"optimizer: {lr: 1",
        b"\toptimizer: 1",
        b"a: 1\n---\nb: 2",
        b"a: *unknown",
        b"optimizer: !!python/object:os.system {}",
        b"\xff\xfe\x00",
        b"\0",
        b"data: {note: 2024-02-30}",
        b"training: {epochs: %s}" % (b"9" * 5000),
        b"[" * 500,
    ],
)
def test_file_that_cannot_be_read_is_named_in_a_sentence(file: Path, content: bytes) -> None:
    """Whatever the YAML reader raises: no traceback for a slip of the finger."""
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load(Config, file, {})
    assert str(caught.value).startswith(f"{file}: cannot be read as YAML: ")
    assert "\n" not in str(caught.value)


def test_key_that_is_given_twice_is_named_with_its_line(file: Path) -> None:
    (problem,) = problems_of(file, "optimizer:\n  lr: 0.1\n  lr: 0.2\n")
    assert problem.startswith("cannot be read as YAML: line 3: ")
    assert 'duplicate key "lr"' in problem


def test_missing_file_is_named_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case E05."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load(Config, Path("configs/none.yaml"), {})
    assert str(caught.value) == f"{tmp_path}/configs/none.yaml: there is no such config file"


def test_directory_instead_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory"):
        load(Config, tmp_path, {})


@pytest.mark.parametrize("text", ["2024-02-30", "9" * 5000, "[" * 500, "[", "{a", "*x", "\0"])
def test_odd_text_on_the_command_line_is_refused_in_words(text: str) -> None:
    assert problem_on_command_line("training.epochs", text).startswith("training.epochs is ")


# Paths


def test_paths_start_where_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case E05: on the command line at the current directory, in a file at the project root."""
    elsewhere = tmp_path / "with a space"
    elsewhere.mkdir()
    (elsewhere / "a.yaml").write_text("data: {root: photos, more: [a, /b]}", encoding="utf-8")
    for place in (PROJECT_ROOT, Path("/"), elsewhere):
        monkeypatch.chdir(place)
        config = load(Config, elsewhere / "a.yaml", {"training.resume": "runs/12"})
        assert config.data.root == PROJECT_ROOT / "photos"
        assert config.data.more == (PROJECT_ROOT / "a", Path("/b"))
        assert config.training.resume == place / "runs/12"


def test_default_paths_start_at_the_project_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case E05."""
    monkeypatch.chdir(tmp_path)
    assert load(Config, None, {}).data.root == PROJECT_ROOT / "data/photos"


def test_path_that_looks_like_a_number_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert override("training.resume", "12").training.resume == tmp_path / "12"


# Written out again


def test_resolved_configuration_says_every_value(file: Path) -> None:
    text = to_yaml(load(Config, None, {"data.root": "/photos"}))
    for leaf in options_of(Config):
        assert f" {leaf.key.rsplit('.', 1)[-1]}:" in text
    assert "/photos" in text


def test_paths_in_the_project_are_written_relative_to_it() -> None:
    """So that a checkout can move, and a run's config does not name somebody's home."""
    text = to_yaml(load(Config, None, {}))
    assert str(PROJECT_ROOT) not in text
    assert "root: data/photos" in text


# Anything that can be written into a UTF-8 file: all but lone surrogates.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
TRICKY = st.sampled_from(
    [
        "yes",
        "no",
        "null",
        "~",
        "1e-3",
        "0x10",
        "010",
        "2024-02-30",
        "- a",
        "a: b",
        "#",
        " x ",
        "'",
        '"',
        "%",
        "\n",
        "|",
    ]
)
NAMES = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=8)
PATHS = st.one_of(
    NAMES.map(lambda name: PROJECT_ROOT / "data" / name), NAMES.map(lambda name: Path("/photos") / name)
)
NUMBERS = st.floats(allow_nan=False)
POSITIVE = st.floats(min_value=0, exclude_min=True, allow_nan=False)


@st.composite
def configurations(draw: st.DrawFn) -> Config:
    fractions = st.floats(min_value=0.001, max_value=0.49)
    return Config(
        optimizer=Optimizer(
            name=draw(st.sampled_from(["sgd", "adamw"])),
            lr=draw(POSITIVE),
            clip_norm=draw(st.none() | POSITIVE),
            schedule=Schedule(warmup=draw(st.floats(min_value=0, max_value=1, exclude_max=True))),
        ),
        training=Training(
            epochs=draw(st.integers(1, 1000)),
            accumulate=draw(st.sampled_from([1, 2, 4])),
            deterministic=draw(st.booleans()),
            resume=draw(st.none() | PATHS),
        ),
        data=Data(
            root=draw(PATHS),
            more=tuple(draw(st.lists(PATHS, max_size=2))),
            mean=draw(st.tuples(NUMBERS, NUMBERS, NUMBERS)),
            tags=tuple(draw(st.lists(TEXT | TRICKY, max_size=3))),
            note=draw(TEXT | TRICKY),
            val_fraction=draw(fractions),
            test_fraction=draw(fractions),
        ),
    )


@settings(max_examples=60)
@given(config=configurations())
def test_resolved_configuration_reads_back_the_same(
    tmp_path_factory: pytest.TempPathFactory, config: Config
) -> None:
    file = tmp_path_factory.getbasetemp() / "resolved.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    again = load(Config, file, {})
    assert again == config
    assert to_yaml(again) == to_yaml(config)


# Help and parsing


def test_help_lists_every_option_with_meaning_and_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    text = parser().format_help()
    for line in (
        "--optimizer.name {sgd,adamw}",
        "peak learning rate, 100% of it (default: 0.1)",
        "checkpoint to go on from (default: None)",
        "image folder (default: data/photos)",
        "per channel (default: [0.5, 0.5, 0.5])",
        "--training.resume path or null",
        "--data.mean [3 x number]",
        "--data.tags [... x text]",
        "--training.deterministic true or false",
    ):
        assert line in text
    assert all(f"--{leaf.key} " in text and leaf.help in text for leaf in options_of(Config))


@pytest.mark.parametrize("columns", ["40", "80", "120"])
def test_help_fits_any_terminal(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """argparse breaks its usage line with an assertion where a bracket stands in the wrong place."""
    monkeypatch.setenv("COLUMNS", columns)
    assert "--data.tags" in parser().format_help()


def test_options_and_the_parsers_own_arguments_are_told_apart() -> None:
    arguments = ["--config", "a.yaml", "--optimizer.lr=1e-3", "--data.note", "a b", "--training.epochs", "3"]
    namespace, overrides = parse(parser(), arguments, Config)
    assert namespace.config == Path("a.yaml")
    assert overrides == {"optimizer.lr": "1e-3", "data.note": "a b", "training.epochs": "3"}
    config = load(Config, None, overrides)
    assert config == replace(
        load(Config, None, {}),
        optimizer=replace(Optimizer(), lr=0.001),
        training=replace(Training(), epochs=3),
        data=replace(Data(), root=PROJECT_ROOT / "data/photos", note="a b"),
    )


@pytest.mark.parametrize("arguments", [["--optimizer.lr"], ["--config"]])
def test_option_without_its_value_is_wrong_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(parser(), arguments, Config)
    assert caught.value.code == 2
    assert "expected one argument" in capsys.readouterr().err


def test_configuration_cannot_be_changed_afterwards() -> None:
    config: Any = load(Config, None, {})
    with pytest.raises(AttributeError):
        config.optimizer.lr = 1.0
