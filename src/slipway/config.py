"""Typed configuration: frozen dataclasses, a small YAML file that overrides them, options that override both.

    @dataclass(frozen=True, kw_only=True)
    class Optimizer:
        lr: float = option(0.1, "peak learning rate", above=0)

A dataclass of such sections is a whole configuration. `load` fills it from defaults, then a YAML 1.2 file, then
`--section.key value` options, checks types and ranges strictly, and reports every problem at once. An unknown
key is never ignored: the message names the nearest one (github.com/unslothai/unsloth/pull/10452 is what happens
otherwise).
"""

import argparse
import dataclasses
import difflib
import io
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from slipway.errors import UsageError
from slipway.paths import PROJECT_ROOT, relative_to_project

Config = TypeVar("Config")


class ConfigError(UsageError):
    """One line for each problem: where it stands, which key, what is wrong, what was probably meant."""


def option(
    default: Any,
    help: str,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> Any:
    """A field of a configuration section: its default, its help text and its range."""
    limits = {"above": above, "at_least": at_least, "below": below, "at_most": at_most}
    return dataclasses.field(default=default, metadata={"help": help, "limits": limits})


def section(type_: type) -> Any:
    """A field that holds another dataclass, with its own defaults."""
    return dataclasses.field(default_factory=type_)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One leaf of the configuration: `key` is its dotted path."""

    key: str
    type: Any
    default: Any
    help: str
    limits: Mapping[str, float | None]


def options_of(config_type: type, prefix: str = "") -> Iterator[Option]:
    """Every leaf below a configuration dataclass, in the order of definition."""
    hints = typing.get_type_hints(config_type)
    for field in dataclasses.fields(config_type):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from options_of(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield Option(
                key=f"{prefix}{field.name}",
                type=hints[field.name],
                default=field.default,
                help=field.metadata["help"],
                limits=field.metadata["limits"],
            )


def load(config_type: type[Config], file: Path | None, overrides: Mapping[str, str]) -> Config:
    """Defaults, then the YAML file, then overrides given as text by dotted key.

    Raises:
        ConfigError: unknown keys, wrong types, values out of range, settings that do not fit each other.
    """
    options = {option.key: option for option in options_of(config_type)}
    problems: list[str] = []
    values = {key: _from_project(option.default) for key, option in options.items()}
    if file is not None:
        given: set[str] = set()
        for key, value in _flatten(_read_yaml(file), options):
            if key in given:  # as `a.b: 1` and under `a:`
                problems.append(f"{file}: {key} is given twice")
            given.add(key)
            _take(values, options, key, value, where=str(file), problems=problems)
    for key, text in overrides.items():
        if key in options:
            value = _from_text(text, options[key].type)
            _take(values, options, key, value, where="command line", problems=problems)
        else:
            problems.append(f"command line: --{_unknown(key, options)}")
    if problems:
        raise ConfigError("\n       ".join(problems))
    config = _build(config_type, values)
    if conflicts := list(_conflicts(config)):
        raise ConfigError("\n       ".join(conflicts))
    return config


def add_options(parser: argparse.ArgumentParser, config_type: type) -> None:
    """Give an argparse parser one `--dotted.key` option for each leaf, with its help and default."""
    for leaf in options_of(config_type):
        parser.add_argument(
            f"--{leaf.key}",
            dest=leaf.key,
            metavar=_type_name(leaf.type),
            default=argparse.SUPPRESS,
            help=f"{leaf.help} (default: {_plain(leaf.default)})".replace("%", "%%"),
        )


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str], config_type: type
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Parse a command line into the parser's own arguments and the overrides of the configuration.

    Raises ConfigError for an unknown option, naming the nearest one.
    """
    namespace, unknown = parser.parse_known_args(arguments)
    actions = parser._actions  # noqa: SLF001 - argparse has no public list of its options
    known = [string.lstrip("-") for action in actions for string in action.option_strings]
    for argument in unknown:
        if argument.startswith("--"):
            raise ConfigError(f"command line: --{_unknown(argument[2:].split('=')[0], known)}")
        raise ConfigError(f"command line: {argument!r} is one value too many")
    keys = {leaf.key for leaf in options_of(config_type)}
    overrides = {key: value for key, value in vars(namespace).items() if key in keys}
    return namespace, overrides


def to_dict(config: Any) -> dict[str, Any]:
    """The resolved configuration as plain data; paths inside the project are written relative to it."""
    return {
        field.name: to_dict(value) if dataclasses.is_dataclass(value) else _plain(value)
        for field in dataclasses.fields(config)
        for value in [getattr(config, field.name)]
    }


def to_yaml(config: Any) -> str:
    """The resolved configuration, every value, as a file that `load` reads back."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    stream = io.StringIO()
    yaml.dump(to_dict(config), stream)
    return stream.getvalue()


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        content = YAML(typ="safe", pure=True).load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file.absolute()}: there is no such config file") from None
    except MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{file}: cannot be read as YAML: {line}{what}") from error
    # ValueError: not UTF-8, and also what looks like a date but is none.
    except (OSError, ValueError, RecursionError, YAMLError) as error:
        raise ConfigError(f"{file}: cannot be read as YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: must hold `section:` blocks with `key: value` lines")
    return content


def _flatten(
    content: dict[Any, Any], options: Mapping[str, Option], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Nested sections -> dotted keys. Stops at options, so that an option may itself hold a mapping's worth.

    A section may be empty (all of it commented out). One that is not known is looked into, to name the keys.
    """
    for name, value in content.items():
        key = f"{prefix}{name}"
        is_section = any(known.startswith(f"{key}.") for known in options)
        if (is_section and value is None) or (
            isinstance(value, dict) and key not in options and (is_section or value)
        ):
            yield from _flatten(value or {}, options, f"{key}.")
        else:
            yield key, value


def _take(
    values: dict[str, Any],
    options: Mapping[str, Option],
    key: str,
    value: Any,
    *,
    where: str,
    problems: list[str],
) -> None:
    """Check one value and put it in its place, or say what is wrong with it."""
    if key not in options:
        problems.append(f"{where}: {_unknown(key, options)}")
        return
    base = Path.cwd() if where == "command line" else PROJECT_ROOT
    try:
        values[key] = _check(value, options[key].type, base)
        _check_range(values[key], options[key].limits)
    except ValueError as error:
        problems.append(f"{where}: {key} {error}")
    except OverflowError:
        problems.append(f"{where}: {key} is too large for a number")


def _check(value: Any, expected: Any, base: Path) -> Any:
    """`value` as type `expected`, or ValueError with the rest of a sentence. Nothing is guessed: '1' is text."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return _check(value, inner, base)
    if origin is Literal:
        if (type(value), value) not in [(type(argument), argument) for argument in arguments]:
            near = difflib.get_close_matches(str(value), map(str, arguments), n=1)
            _wrong(
                value,
                f"one of {', '.join(map(str, arguments))}" + (f"; did you mean {near[0]}?" if near else ""),
            )
        return value
    if origin is tuple:
        repeated = arguments[-1] is Ellipsis
        if not isinstance(value, list | tuple) or not (repeated or len(value) == len(arguments)):
            _wrong(value, _type_name(expected))
        return tuple(_check(item, arguments[0 if repeated else i], base) for i, item in enumerate(value))
    if expected is Path and isinstance(value, str) and value:
        return base / value
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        _wrong(value, _type_name(expected))
    return value


def _wrong(value: Any, expected: str) -> NoReturn:
    shown = f"the text {value!r}" if isinstance(value, str) else repr(value)
    raise ValueError(f"is {shown}; expected {expected}")


def _check_range(value: Any, limits: Mapping[str, float | None]) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    holds = {
        "above": lambda limit: value > limit,
        "at_least": lambda limit: value >= limit,
        "below": lambda limit: value < limit,
        "at_most": lambda limit: value <= limit,
    }
    for name, limit in limits.items():
        # Written so that NaN, for which every comparison is false, is out of range.
        if limit is not None and not holds[name](limit):
            raise ValueError(f"is {value}; must be {name.replace('_', ' ')} {limit:g}")


def _conflicts(config: Any, prefix: str = "") -> Iterator[str]:
    """What the sections themselves find: each may define `problems()`, yielding (key, sentence)."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _conflicts(value, f"{prefix}{field.name}.")
    if hasattr(config, "problems"):
        for key, sentence in config.problems():
            yield f"{prefix}{key} {sentence}"


def _build(config_type: type[Config], values: Mapping[str, Any], prefix: str = "") -> Config:
    hints = typing.get_type_hints(config_type)
    arguments = {}
    for field in dataclasses.fields(config_type):  # type: ignore[arg-type]
        key = f"{prefix}{field.name}"
        is_section = dataclasses.is_dataclass(hints[field.name])
        arguments[field.name] = _build(hints[field.name], values, f"{key}.") if is_section else values[key]
    return config_type(**arguments)


def _from_text(text: str, expected: Any) -> Any:
    """What a command line's text stands for: text where text is expected, else a YAML 1.2 value."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if expected in (str, Path) or (origin is Literal and all(isinstance(a, str) for a in arguments)):
        return text
    try:
        value = YAML(typ="safe", pure=True).load(text)
    except (ValueError, RecursionError, YAMLError):
        return text
    # `--resume runs/12` means a path although YAML would read other things in some paths.
    is_union = origin in (Union, types.UnionType)
    return text if is_union and value is not None and {str, Path} & set(arguments) else value


def _unknown(key: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    """`key` is not an option, and what was probably meant: compared as a whole, and by its last part."""
    if inside := [candidate for candidate in known if candidate.startswith(f"{key}.")]:
        return f"{key} is no option but a section of some, such as {inside[0]}"
    leaf = key.rsplit(".", 1)[-1].replace("-", "_")

    def likeness(candidate: str) -> tuple[float, float]:
        whole = difflib.SequenceMatcher(None, key.replace("-", "_"), candidate).ratio()
        last = difflib.SequenceMatcher(None, leaf, candidate.rsplit(".", 1)[-1]).ratio()
        # Of several with the same last part, the one that is closest as a whole.
        return max(whole, last), whole

    nearest = max(known, key=likeness)
    return f"{key} is not an option; did you mean {nearest}?"


def _type_name(expected: Any) -> str:
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if a is type(None) else _type_name(a) for a in arguments)
    if origin is Literal:
        return "{" + ",".join(map(str, arguments)) + "}"
    if origin is tuple:
        items = "..." if arguments[-1] is Ellipsis else str(len(arguments))
        return f"[{items} x {_type_name(arguments[0])}]"
    names = {int: "integer", float: "number", bool: "true or false", str: "text", Path: "path"}
    return names[expected]


def _from_project(default: Any) -> Any:
    return PROJECT_ROOT / default if isinstance(default, Path) else default


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(relative_to_project(value))
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
