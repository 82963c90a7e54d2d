"""What changed from one bundle to another, in words: contract, labels, metrics, artefacts, answers, provenance."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slipway import bundle, sealed
from slipway.artefact import Artefact, read_artefacts, read_default
from slipway.bundle import Bundle, open_bundle


def differences(before: Path, after: Path) -> list[str]:
    """A sentence for each difference, in order of consequence; empty if the bundles hold the same.

    Raises SealError, ContractError, BundleError, ArtefactError: one of the two cannot be trusted.
    """
    old, new = open_bundle(before), open_bundle(after)
    return [
        *_contract(old, new),
        *_labels(old, new),
        *_metrics(old, new),
        *_artefacts(old, new),
        *_golden(old, new),
        *_provenance(old, new),
    ]


def _contract(old: Bundle, new: Bundle) -> Iterator[str]:
    if old.signature.contract_hash() == new.signature.contract_hash():
        return
    yield "contract: they cannot replace each other without the clients noticing"
    was, now = (_read(each, bundle.SIGNATURE) for each in (old, new))
    for part in (was, now):
        for told_elsewhere in ("contract", "classes"):
            del part[told_elsewhere]
    yield from _changes("contract", was, now)


def _labels(old: Bundle, new: Bundle) -> Iterator[str]:
    was, now = old.signature.classes, new.signature.classes
    for name in now:
        if name not in was:
            yield f"labels: {name!r} is new"
    for name in was:
        if name not in now:
            yield f"labels: {name!r} is gone"
    kept = [name for name in was if name in now]
    if kept != [name for name in now if name in was]:
        yield "labels: the order of the classes changed, and with it the meaning of every output"


def _metrics(old: Bundle, new: Bundle) -> Iterator[str]:
    was, now = (_read(each, bundle.PROVENANCE).get("metrics", {}) for each in (old, new))
    yield from _changes("metrics", was, now)


def _artefacts(old: Bundle, new: Bundle) -> Iterator[str]:
    served, serves = (read_default(one.directory).name for one in (old, new))
    if served != serves:
        yield f"artefacts: {serves} is served, and was {served}"
    was, now = ({each.name: each for each in read_artefacts(one.directory)} for one in (old, new))
    for name in sorted(was.keys() | now.keys()):
        if name not in was:
            yield f"artefacts: {name} is new"
        elif name not in now:
            yield f"artefacts: {name} is gone"
        elif _content(old, was[name]) != _content(new, now[name]):
            yield f"artefacts: {name} has other content"
        yield from _changes(f"artefacts: {name}", *(_rest(each.get(name)) for each in (was, now)))


def _content(opened: Bundle, artefact: Artefact) -> list[str]:
    files = sealed.read_manifest(opened.directory).files
    return [files[name] for name in artefact.files]


def _rest(artefact: Artefact | None) -> dict[str, Any]:
    """What it needs and how it is run; nothing where there is no such artefact, which was told already."""
    return {} if artefact is None else {"settings": artefact.settings, "requires": artefact.requires}


def _golden(old: Bundle, new: Bundle) -> Iterator[str]:
    was, now = ({each.pixels_sha256: each.label for each in one.golden} for one in (old, new))
    if was.keys() != now.keys():
        yield f"golden: {len(now.keys() - was.keys())} inputs are new, {len(was.keys() - now.keys())} are gone"
    changed = sum(was[pixels] != now[pixels] for pixels in was.keys() & now.keys())
    if changed:
        yield f"golden: {changed} of {len(was.keys() & now.keys())} common inputs have another answer"


def _provenance(old: Bundle, new: Bundle) -> Iterator[str]:
    was, now = (_read(each, bundle.PROVENANCE) for each in (old, new))
    for part in (was, now):
        part.pop("metrics", None)
    yield from _changes("provenance", was, now)


def _changes(what: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    before, after = dict(_leaves(was)), dict(_leaves(now))
    for key in sorted(before.keys() | after.keys()):
        if key not in before:
            yield f"{what}: {key} is new: {after[key]}"
        elif key not in after:
            yield f"{what}: {key} is gone; it was {before[key]}"
        elif before[key] != after[key]:
            yield f"{what}: {key} was {before[key]}, is {after[key]}"


def _leaves(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value, ensure_ascii=False)


def _read(opened: Bundle, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((opened.directory / name).read_bytes())
    return content
