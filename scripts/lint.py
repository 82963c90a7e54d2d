"""Check every file of this checkout with the linter that is made for its kind.

    lint.py                          every check; exit 1 if one found something
    lint.py shellcheck yamllint      only these

A check chooses its files by name or by content among those that git does not ignore, so a file that is added is checked
from then on. Where a program is missing its files are not checked, which is said, and in CI (CI=true) is a failure.

Standard library only.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path, PurePath
from posixpath import normpath

from scripts import programs, run_tests

ROOT = Path(__file__).resolve().parents[1]
PYTHON = {side: str(ROOT / ".venv" / side / "bin" / "python") for side in ("train", "serve")}
# Programs that come in wheels go first: their versions are pinned.
SEARCHED = os.pathsep.join([str(ROOT / ".venv" / "serve" / "bin"), programs.SEARCHED])

Choose = Callable[[Path, str], bool]
"""Whether a check is for a file, given the root of the checkout and the file's path in it."""

Examine = Callable[[Path, list[str]], Iterator[str]]
"""Examines files of the checkout at a root; yields what is wrong with them, in the words of the linter."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A linter: which programs it needs, which files it is for, and what to do about what it finds."""

    name: str
    needs: tuple[str, ...]
    chooses: Choose
    examine: Examine
    advice: str


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a check. `state` is one of OK, NO_FILES, FAILED and NOT_CHECKED."""

    check: Check
    state: str
    files: int
    seconds: float = 0.0
    output: str = ""


OK, NO_FILES, FAILED, NOT_CHECKED = "ok", "no files", "FAILED", "NOT CHECKED"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="lint.py", description="Check every file with its linter.")
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"{', '.join(BY_NAME)} (default: all)")
    names = parser.parse_args(arguments).checks or list(BY_NAME)
    if unknown := [name for name in names if name not in BY_NAME]:
        parser.error(f"there is no check {unknown[0]}; the checks are {', '.join(BY_NAME)}")
    files = tracked(ROOT)
    # Two of them, the types, take as long as all others together; so they are begun first and run beside those.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        begun = [pool.submit(run, ROOT, files, BY_NAME[name]) for name in names]
        for ended in as_completed(begun):
            show(ended.result())
    return conclude([check.result() for check in begun])


def tracked(root: Path) -> list[str]:
    """Every file that git tracks or would track, as paths relative to `root`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {root}: git has to say which files there are, and cannot; see above")
    return sorted(name for name in set(done.stdout.split("\0")) if name and (root / name).is_file())


def run(root: Path, files: list[str], check: Check) -> Result:
    chosen = [name for name in files if check.chooses(root, name)]
    if not chosen:
        return Result(check=check, state=NO_FILES, files=0)
    if missing := [name for name in check.needs if shutil.which(name, path=SEARCHED) is None]:
        said = f"{', '.join(missing)} not found; `make programs` installs what Debian has"
        return Result(check=check, state=NOT_CHECKED, files=len(chosen), output=said)
    started = time.monotonic()
    output = "\n".join(check.examine(root, chosen))
    seconds = time.monotonic() - started
    return Result(
        check=check, state=FAILED if output else OK, files=len(chosen), seconds=seconds, output=output
    )


def show(result: Result) -> None:
    """Print a line for the check, and below it what it found."""
    count = f"{result.files} file{'' if result.files == 1 else 's'}" if result.files else ""
    seconds = f"{result.seconds:.1f} s" if result.seconds else ""
    print(f"{result.check.name:18} {result.state:12} {count:>10} {seconds:>8}".rstrip(), flush=True)
    if result.output:
        print("\n".join(f"    {line}" for line in result.output.splitlines()))
        print(f"    → {result.check.advice}", flush=True)


def conclude(results: list[Result]) -> int:
    """Say at the end what must not be overlooked above; returns the exit code."""
    failed = [result.check.name for result in results if result.state == FAILED]
    skipped = [result.check.name for result in results if result.state == NOT_CHECKED]
    if skipped:
        kind = "error" if os.environ.get("CI") else "warning"
        print(f"{kind}: not checked, for want of programs: {', '.join(skipped)}", file=sys.stderr)
    if failed:
        print(f"error: {', '.join(failed)} found something; it is shown above", file=sys.stderr)
    return 1 if failed or (skipped and os.environ.get("CI")) else 0


def complaints(root: Path, command: list[str]) -> Iterator[str]:
    """Run a linter; yields what it says if it is not content."""
    done = subprocess.run(
        command,
        cwd=root,
        env={**os.environ, "PATH": SEARCHED, "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        yield done.stdout.strip() or f"{' '.join(command)}: exit code {done.returncode}, without a word"


def at_once(*commands: tuple[str, ...]) -> Examine:
    """Each command once, with all files."""

    def examine(root: Path, files: list[str]) -> Iterator[str]:
        for command in commands:
            yield from complaints(root, [*command, *files])

    return examine


def locks(root: Path, _files: list[str]) -> Iterator[str]:
    yield from complaints(root, [PYTHON["serve"], "scripts/lock.py", "--check"])


def compose(root: Path, files: list[str]) -> Iterator[str]:
    """Each by itself, but compose.<what>.yaml laid over the compose.yaml beside it, where there is one."""
    bases = {PurePath(name).parent: name for name in files if PurePath(name).stem in COMPOSE_BASES}
    for name in files:
        base = bases.get(PurePath(name).parent, name)
        layers = [word for layer in dict.fromkeys([base, name]) for word in ("--file", layer)]
        yield from complaints(root, ["docker-compose", "--profile", "*", *layers, "config", "--quiet"])


def kubernetes(root: Path, files: list[str]) -> Iterator[str]:
    """What each kustomization makes."""
    validate = [PYTHON["serve"], "-m", "deploy.kubernetes.validate"]
    yield from complaints(root, [*validate, *whole_kustomizations(root, files)])


def whole_kustomizations(root: Path, files: list[str]) -> list[str]:
    """Folders of kustomizations that no other is built on: parts, such as components, make nothing by themselves."""
    folders = {str(PurePath(name).parent): (root / name).read_text(encoding="utf-8") for name in files}
    parts = {
        normpath(f"{folder}/{named}")
        for folder, text in folders.items()
        for named in re.findall(LIST_ITEM, text)
    }
    return sorted(folders.keys() - parts)


def named(pattern: str) -> Choose:
    """Files whose path, or its end, is matched as a whole by a regular expression."""
    whole = re.compile(rf"(?:.*/)?(?:{pattern})")
    return lambda _root, name: whole.fullmatch(name) is not None


def yaml_with(*keys: str) -> Choose:
    """YAML files that have all these keys at the top."""
    is_yaml = named(YAML)

    def chooses(root: Path, name: str) -> bool:
        if not is_yaml(root, name):
            return False
        text = (root / name).read_text(encoding="utf-8", errors="replace")
        return all(re.search(rf"(?m)^{key}:", text) for key in keys)

    return chooses


def is_shell(root: Path, name: str) -> bool:
    """Files that say so in their name or in their first line."""
    if PurePath(name).suffix in (".sh", ".bash", ".sbatch"):
        return True
    with (root / name).open("rb") as file:
        return re.match(rb"#! ?\S*[/ ](ba|da)?sh\b", file.readline(80)) is not None


def of_side(side: str) -> Choose:
    """Python files that run in the environment of one side; what both sides import counts for both.

    Tests count where they run. What several suites share counts for training, because not all of it can be imported
    in the other environment; what that side's tests import of it is examined there along with them.
    """
    folders = {"train": "train|scripts", "serve": "serve|deploy"}[side]
    in_folders = re.compile(rf"(src/slipway|{folders}|{'|'.join(run_tests.SUITES[side])})/.*\.py")

    def chooses(root: Path, name: str) -> bool:
        if re.fullmatch(r"benchmarks/(\w+/)?\w+\.py", name):
            text = (root / name).read_text("utf-8")
            serves = "/peers/" in name or re.search(r"(?m)^(from|import) (serve|deploy)\b", text) is not None
            return serves == (side == "serve")
        if re.fullmatch(r"tests/\w+\.py", name):
            return side == "train"
        return in_folders.fullmatch(name) is not None

    return chooses


def types(side: str) -> Check:
    return Check(
        name=f"mypy-{side}",
        needs=(PYTHON[side],),
        chooses=of_side(side),
        examine=at_once((PYTHON[side], "-m", "mypy", "--cache-dir", f".mypy_cache/{side}")),
        advice="give it the type that it has; `# type: ignore[code]` needs a reason beside it",
    )


COMPOSE_BASES = ("compose", "docker-compose")
LIST_ITEM = r"(?m)^ *- +([\w./-]+)$"
YAML = r"[^/]+\.ya?ml|\.yamllint"
WORKFLOW = r"\.github/(workflows/[^/]+|dependabot)\.ya?ml"

CHECKS = (
    types("train"),
    types("serve"),
    Check(
        name="locks",
        needs=(PYTHON["serve"],),
        chooses=named(r"requirements/\w+\.(in|lock)"),
        examine=locks,
        advice="`make lock` makes the locks again from requirements/*.in",
    ),
    Check(
        name="ruff",
        needs=("ruff",),
        chooses=named(r"[^/]+\.pyi?"),
        examine=at_once(("ruff", "check", "--quiet"), ("ruff", "format", "--check")),
        advice="`make format` mends what can be mended",
    ),
    Check(
        name="hadolint",
        needs=("hadolint",),
        chooses=named(r"(Dockerfile|Containerfile)(\.[\w-]+)?|[\w-]+\.Dockerfile"),
        examine=at_once(("hadolint",)),
        advice="mend it, or `# hadolint ignore=DL…` above the line, with the reason",
    ),
    Check(
        name="shellcheck",
        needs=("shellcheck",),
        chooses=is_shell,
        examine=at_once(("shellcheck",)),
        advice="mend it, or `# shellcheck disable=SC…` above the line, with the reason",
    ),
    Check(
        name="yamllint",
        needs=("yamllint",),
        chooses=named(YAML),
        examine=at_once(("yamllint", "--strict", "--format", "parsable")),
        advice="mend it; what counts is in .yamllint",
    ),
    Check(
        name="jactionlint",
        needs=("jactionlint", "shellcheck"),
        chooses=named(WORKFLOW),
        examine=at_once(("jactionlint", "--strict-exit")),
        advice="`jactionlint --explain RULE` says what it means; the program is in .venv/serve/bin",
    ),
    Check(
        name="zizmor",
        needs=("zizmor",),
        chooses=named(WORKFLOW),
        examine=at_once(("zizmor", "--offline", "--quiet", "--persona", "pedantic")),
        advice="mend it; a workflow that strangers can steer is worse than none",
    ),
    Check(
        name="gitlab-ci",
        needs=("check-jsonschema",),
        chooses=named(r"\.gitlab-ci\.yml"),
        examine=at_once(
            ("check-jsonschema", "--builtin-schema", "vendor.gitlab-ci", "--data-transform", "gitlab-ci")
        ),
        advice="mend it; the schema is GitLab's own, as check-jsonschema ships it",
    ),
    Check(
        name="dependabot",
        needs=("check-jsonschema",),
        chooses=named(r"\.github/dependabot\.ya?ml"),
        examine=at_once(("check-jsonschema", "--builtin-schema", "vendor.dependabot")),
        advice="mend it; the schema is GitHub's own, as check-jsonschema ships it",
    ),
    Check(
        name="compose",
        needs=("docker-compose",),
        chooses=named(r"(docker-)?compose(\.[\w-]+)?\.ya?ml"),
        examine=compose,
        advice="mend it; `docker-compose config`, without --quiet, shows what Compose made of it",
    ),
    Check(
        name="kubernetes",
        needs=("kubectl",),
        chooses=named(r"kustomization\.ya?ml"),
        examine=kubernetes,
        advice="mend the manifest; `kubectl kustomize FOLDER` shows what Kustomize made of it",
    ),
    Check(
        name="prometheus",
        needs=("promtool",),
        chooses=yaml_with("scrape_configs"),
        # The files that it names are those of a container.
        examine=at_once(("promtool", "check", "config", "--syntax-only")),
        advice="mend it; what it says about fields is in Prometheus' documentation of its configuration",
    ),
    Check(
        name="prometheus-rules",
        needs=("promtool",),
        chooses=yaml_with("groups"),
        examine=at_once(("promtool", "check", "rules", "--lint-fatal")),
        advice="mend the rule",
    ),
    Check(
        name="prometheus-tests",
        needs=("promtool",),
        chooses=yaml_with("rule_files", "tests"),
        examine=at_once(("promtool", "test", "rules")),
        advice="a rule does not do what its test says; mend the one that is wrong",
    ),
    Check(
        name="alertmanager",
        needs=("amtool",),
        chooses=yaml_with("route", "receivers"),
        examine=at_once(("amtool", "check-config")),
        advice="mend it; alerts that reach nobody are found when it is too late",
    ),
)
BY_NAME = {check.name: check for check in CHECKS}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
