"""CI of forks, on GitHub and on GitLab, does what a laptop does: it calls Make targets, and nothing else."""

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from slipway import compatibility

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"(?m)^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8")))
# Shell that GitLab's file needs to go on after a benchmark that missed its target; GitHub has `if:` for that.
PLUMBING = re.compile(r"failed=|test -z \"\$failed\" \|\| .*")

Jobs = dict[str, list[str]]
"""Job name -> the Make targets that it calls, in order."""


def load(path: Path) -> Any:
    return YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))


def github() -> dict[str, Any]:
    return dict(chain.from_iterable(load(path)["jobs"].items() for path in WORKFLOWS))


def gitlab() -> dict[str, Any]:
    content = load(ROOT / ".gitlab-ci.yml")
    return {name: job for name, job in content.items() if "script" in job}


def commands(job: dict[str, Any]) -> list[str]:
    scripts = job.get("script") or [step["run"] for step in job["steps"] if "run" in step]
    return [line for script in scripts for line in script.splitlines() if not PLUMBING.fullmatch(line)]


def targets(job: dict[str, Any]) -> Iterator[str]:
    """The targets that a job calls. A call of anything but `make` fails: nothing is installed by another way."""
    for command in commands(job):
        called = re.match(r'(?:sudo (?:--preserve-env=CI )?)?make ("\$TARGET"|[a-z-]+)(?= |$)', command)
        assert called, f"{command}: is no call of make"
        yield from matrix(job) if "$" in called[1] else [called[1]]


def matrix(job: dict[str, Any]) -> list[str]:
    if "strategy" in job:
        return job["strategy"]["matrix"]["target"]
    return job["parallel"]["matrix"][0]["TARGET"]


def test_both_call_the_same_targets_in_the_same_jobs() -> None:
    on_github = {name: list(targets(job)) for name, job in github().items()}
    on_gitlab = {name: list(targets(job)) for name, job in gitlab().items()}
    assert on_github == on_gitlab
    assert on_github.keys() >= {"lint", "test", "pipeline", "chaos", "benchmarks"}
    called = set(chain.from_iterable(on_github.values()))
    assert called <= TARGETS
    assert called >= {target for target in TARGETS if target.startswith(("benchmark-", "chaos-"))}


def test_tests_that_need_programs_and_root_get_both() -> None:
    """On GitLab everybody is root. Without CI, which sudo would hide, what cannot run would be skipped."""
    for name, job in [*github().items(), *gitlab().items()]:
        called = list(targets(job))
        if not {"test", "chaos-serve"} & set(called):
            continue
        assert called[0] == "programs", name
        others = [command for command in commands(job) if "make programs" not in command]
        assert "script" in job or all(one.startswith("sudo --preserve-env=CI ") for one in others), name


def test_what_is_checked_before_a_merge_is_what_this_repository_checks() -> None:
    ours = re.findall(r"(?m)^step make ([a-z-]+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    changes = [load(path) for path in WORKFLOWS if "pull_request" in load(path)["on"]]
    called = chain.from_iterable(targets(job) for content in changes for job in content["jobs"].values())
    assert set(called) >= set(ours)


def test_python_is_that_of_the_project() -> None:
    """On GitHub by its version; on GitLab the larger variant of the base image, with make and git, by digest."""
    table = compatibility.load()
    text = "".join(path.read_text(encoding="utf-8") for path in WORKFLOWS)
    assert set(re.findall(r"python-version: (.*)", text)) == {f'"{table.python}"'}
    tag = re.escape(table.docker.python_image.replace("-slim", ""))
    assert re.fullmatch(rf"{tag}@sha256:[0-9a-f]{{64}}", load(ROOT / ".gitlab-ci.yml")["default"]["image"])


def test_actions_are_those_of_github_by_commit_and_each_has_one_version() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in WORKFLOWS)
    uses = re.findall(r"uses: (.*)", text)
    pinned = re.compile(r"(actions/[\w-]+)(?:/[\w-]+)?@([0-9a-f]{40} # v\d+\.\d+\.\d+)")
    found = [pinned.fullmatch(line) for line in uses]
    assert uses
    assert all(found)
    versions = {match.groups() for match in found if match}
    assert len(versions) == len({action for action, _version in versions})
