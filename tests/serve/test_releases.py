"""What is served changes in one step, only to what was seen to work, and back at once."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from serve import releases, repository
from serve import server as servers
from serve.release import Release, open_release
from serve.releases import PromotionRefused
from serve.server import ServerError
from serve.supervisor import wish_of
from slipway.bundle import Bundle
from slipway.errors import SlipwayError, UsageError
from slipway.sealed import SealError
from tests.serve.tools import CPUS, edit_text, variant


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands in for the servers that releases are tried with; names them."""
    names: list[str] = []

    @contextmanager
    def serve(release: Release) -> Iterator[None]:
        names.append(release.directory.name)
        yield

    monkeypatch.setattr(servers, "serving", serve)
    return names


@pytest.fixture
def two(bundle: Bundle, tmp_path: Path) -> tuple[Path, Path]:
    """Two releases, and nothing that is served."""
    first = repository.publish(bundle.directory, tmp_path, "embedded", CPUS)
    return first, repository.publish(bundle.directory, tmp_path, "embedded", 1)


def places(models: Path) -> dict[str, str]:
    links = (models / name for name in ("current", "previous"))
    return {link.name: link.readlink().name for link in links if link.is_symlink()}


def test_promote_and_rollback_move_both_links(
    two: tuple[Path, Path], tmp_path: Path, tried: list[str]
) -> None:
    """A release is tried before it is served for the first time, and not when a rollback brings it back."""
    first, second = two
    assert places(tmp_path) == {}
    assert releases.promote(first) == first
    assert places(tmp_path) == {"current": first.name}
    releases.promote(second)
    assert places(tmp_path) == {"current": second.name, "previous": first.name}
    assert releases.rollback(tmp_path) == first
    assert places(tmp_path) == {"current": first.name, "previous": second.name}
    assert releases.rollback(tmp_path) == second
    assert tried == [first.name, second.name]


def test_what_is_current_already_is_tried_again_and_its_link_made_anew(
    two: tuple[Path, Path], tmp_path: Path, tried: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A supervisor may have refused it: it sees by the link that somebody asks once more."""
    caplog.set_level("INFO")
    first, second = two
    releases.promote(first)
    releases.promote(second)
    before = wish_of(tmp_path / "current")
    assert "already" not in caplog.text
    assert releases.promote(second) == second
    assert f"{second.name} is current already" in caplog.text
    assert tried == [first.name, second.name, second.name]
    assert places(tmp_path) == {"current": second.name, "previous": first.name}
    assert wish_of(tmp_path / "current") != before


def test_links_are_relative_so_that_the_repository_can_be_moved(
    two: tuple[Path, Path], tmp_path: Path, tried: list[str]
) -> None:
    releases.promote(two[0])
    there = tmp_path.with_name(f"{tmp_path.name} moved")
    tmp_path.rename(there)
    assert open_release(there / "current").version == 1
    there.rename(tmp_path)


def test_current_is_never_missing_while_it_moves(
    two: tuple[Path, Path], tmp_path: Path, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    releases.promote(two[0])
    replace = Path.replace

    def watched(self: Path, target: Path) -> Path:
        assert (tmp_path / "current").resolve() in two
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", watched)
    releases.promote(two[1])
    assert (tmp_path / "current").resolve() == two[1]
    assert not [path for path in tmp_path.glob(".*") if path.is_symlink()]


@pytest.mark.parametrize("step", [0, 1])
def test_who_is_killed_while_the_links_move_loses_none(
    two: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    for directory in two:
        releases.move_current(directory)
    replace, seen = Path.replace, []

    def killed(self: Path, target: Path) -> Path:
        seen.append(target)
        if len(seen) > step:
            raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            releases.rollback(tmp_path)
    assert {releases.rollback(tmp_path) for _ in range(2)} == set(two)
    assert set(places(tmp_path)) == {"current", "previous"}


def test_nothing_before_is_nothing_to_roll_back_to(
    two: tuple[Path, Path], tmp_path: Path, tried: list[str]
) -> None:
    for _ in range(2):
        with pytest.raises(SlipwayError, match="no other release was served before the current one"):
            releases.rollback(tmp_path)
        releases.promote(two[0])
    with pytest.raises(SlipwayError, match="no release is published there"):
        releases.rollback(tmp_path / "mistyped")
    assert not (tmp_path / "mistyped").exists()


def test_a_damaged_release_is_neither_promoted_nor_rolled_back_to(
    two: tuple[Path, Path], tmp_path: Path, tried: list[str]
) -> None:
    first, second = two
    releases.promote(first)
    releases.promote(second)
    labels = first / "models" / "classify" / "labels.txt"
    labels.chmod(0o644)
    labels.write_text("damaged\n")
    attempts: list[Callable[[], object]] = [
        lambda: releases.promote(first),
        lambda: releases.rollback(tmp_path),
    ]
    for attempt in attempts:
        with pytest.raises(SealError, match=r"labels\.txt: differs from the manifest"):
            attempt()
        assert (tmp_path / "current").resolve() == second


def test_a_release_that_does_not_run_is_refused(
    two: tuple[Path, Path], tmp_path: Path, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two
    releases.promote(first)

    def fail(_: Release) -> None:
        raise ServerError("Triton could not load model classifier: no memory")

    monkeypatch.setattr(servers, "serving", fail)
    words = f"{second.name}: was not promoted, {first.name} stays current: .* no memory"
    with pytest.raises(PromotionRefused, match=words):
        releases.promote(second)
    before = wish_of(tmp_path / "current")
    with pytest.raises(PromotionRefused, match=f"{first.name}: was not promoted, {first.name} stays current"):
        releases.promote(first)
    assert places(tmp_path) == {"current": first.name}
    assert wish_of(tmp_path / "current") == before


@pytest.mark.integration
def test_a_release_that_answers_wrongly_is_refused_by_a_real_server(release: Release, tmp_path: Path) -> None:
    """Case D04. All of Triton's own checks are content with it: the labels are another model's."""

    def swap_labels(models: Path) -> None:
        for model in ("classify", "classifier"):
            path = models / model / "labels.txt"
            path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))

    broken = variant(release, tmp_path / "releases" / "broken", swap_labels)
    with pytest.raises(PromotionRefused, match="nothing is current: the golden image was answered '9'"):
        releases.promote(broken.directory)
    assert places(tmp_path) == {}


def test_a_release_for_the_container_is_promoted_without_a_trial(
    bundle: Bundle, tmp_path: Path, tried: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    releases.promote(repository.publish(bundle.directory, tmp_path, "container", CPUS))
    assert places(tmp_path) == {"current": "tiny-1"}
    assert "tiny-1 is for the container and cannot be tried here" in caplog.text
    assert tried == []


def test_a_directory_in_the_place_of_the_link_is_not_touched(
    two: tuple[Path, Path], tmp_path: Path, tried: list[str]
) -> None:
    (tmp_path / "current").mkdir()
    with pytest.raises(SlipwayError, match="current: is not a link; move it away"):
        releases.promote(two[0])
    assert (tmp_path / "current").is_dir()


def test_the_list_says_what_is_served_and_what_was(
    two: tuple[Path, Path], bundle: Bundle, tmp_path: Path, tried: list[str]
) -> None:
    first, second = two
    releases.promote(first)
    releases.promote(second)
    container = repository.publish(bundle.directory, tmp_path, "container", CPUS)
    fused = repository.publish(bundle.directory, tmp_path, "embedded", CPUS, fused=True)
    identity = json.loads((first / "release.json").read_text())["identity"]
    assert sorted(releases.table(tmp_path)) == sorted(
        [
            f"previous  {first.name}  {identity}  embedded  onnx",
            f"current   {second.name}  {identity}  embedded  onnx",
            f"          {container.name}  {identity}  container  onnx",
            f"          {fused.name}  {identity}  embedded  onnx, fused",
        ]
    )
    assert list(releases.table(tmp_path / "none")) == []
    edit_text(container / "release.json", "slipway-release/2", "slipway-release/1")
    assert (
        f"          {container.name}  of another version of Slipway; publish its bundle again"
        in releases.table(tmp_path)
    )
    (container / "release.json").unlink()
    assert [line for line in releases.table(tmp_path) if f"{container.name}  damaged: release.json" in line]


def test_an_unknown_release_is_answered_with_those_there_are(two: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"tiny-9 is not a release of .*; there are tiny-1, {two[1].name}"):
        releases.find(tmp_path, "tiny-9")
    assert releases.find(tmp_path, "tiny-1") == two[0]
