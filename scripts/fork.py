"""Give a fork a name of its own, and merge what upstream has done since.

    fork.py rename acme             what is called slipway is called acme from now on: in every file, and in paths
    fork.py update upstream/main    merge that commit of upstream's, renamed in the same way

Renaming is a function of the files alone. So an update renames what upstream was when it was last merged, and what it
is now, and merges what lies between the two. Upstream's name stays in three files (this one, its test and its page), in
the comments of requirements/, and in the names of formats.

Standard library only, and ruff of .venv/serve, because another name sorts imports otherwise.
"""

import argparse
import keyword
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUFF = ROOT / ".venv" / "serve" / "bin" / "ruff"
UPSTREAM = "slipway"
KEPT = frozenset({"scripts/fork.py", "tests/scripts/test_fork.py", "docs/forking.md"})
# Not a byte changes below it: a lock keeps the hash of what it was made from, an environment that of its lock.
PINNED = "requirements/"
# By it the package is known that has the name.
MARK = "compatibility.toml"
# Formats of files, such as slipway-sealed/1, are called the same in every fork: they are hashed, and handed on.
NO_FORMAT = r"(?!-[a-z-]+/\d)"
LOCKED = re.compile(r"(?m)^([a-z0-9_.-]+)==")
IMPORTED = re.compile(r"(?m)^\s*(?:from|import) (\w+)")


class ForkError(Exception):
    """A sentence for the person who runs this."""

    exit_code = 1


class UsageError(ForkError):
    """A name or a commit that will not do."""

    exit_code = 2


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="fork.py", description=__doc__.split("\n", maxsplit=1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("rename", help="call everything by another name").add_argument("name")
    commands.add_parser("update", help="merge a commit of upstream's").add_argument("commit")
    options = parser.parse_args(arguments)
    try:
        require_nothing_uncommitted(ROOT)
        if options.command == "rename":
            require_usable(ROOT, options.name)
            rename(ROOT, options.name)
            git(ROOT, "add", "--all")
            print(
                f"called {options.name}; look at it (git diff --staged), try it (make test-fast), commit it"
            )
        else:
            print(update(ROOT, options.commit))
    except ForkError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def require_nothing_uncommitted(root: Path) -> None:
    """Raises ForkError: what the command does could not be told from it afterwards."""
    if git(root, "status", "--porcelain"):
        raise ForkError("there are changes that are not committed; commit or stash them first")


def require_usable(root: Path, name: str) -> None:
    """Raises UsageError, saying why, if the fork cannot be called so; ForkError if it has a name already."""
    if not re.fullmatch(r"[a-z][a-z0-9]{1,19}", name) or keyword.iskeyword(name):
        raise UsageError(
            f"{name!r} cannot be imported everywhere; take a word of 2 to 20 lower-case letters and digits"
        )
    if (now := name_of(root)) != UPSTREAM:
        raise ForkError(f"this fork is called {now} already")
    sources = [root / path for path in tracked(root) if path.endswith(".py")]
    imported = {word for file in sources for word in IMPORTED.findall(file.read_text(encoding="utf-8"))}
    locks = (root / "requirements").glob("*.lock")
    installed = {package for lock in locks for package in LOCKED.findall(lock.read_text(encoding="utf-8"))}
    if name in imported | installed | sys.stdlib_module_names or (root / name).exists():
        raise UsageError(f"{name} is imported or installed here already, as something else")


def name_of(root: Path) -> str:
    """What the package in a checkout is called. Raises ForkError if there is none."""
    for mark in root.glob(f"src/*/{MARK}"):
        return mark.parent.name
    raise ForkError(f"{root}: is no checkout of {UPSTREAM} or of a fork of it; src/*/{MARK} is missing")


def rename(root: Path, name: str) -> None:
    """Call everything in a checkout by another name. Raises ForkError if ruff is missing or fails."""
    for path in sorted(path for path in tracked(root) if not is_kept(path)):
        file, target = root / path, root / path.replace(UPSTREAM, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        file.rename(target)
        _remove_empty(file.parent)
        if target.is_symlink():
            continue  # what it leads to is renamed for itself, or is not ours
        try:
            text = target.read_bytes().decode()
        except UnicodeDecodeError:
            continue  # an image
        target.write_bytes(renamed(text, name).encode())
    for arguments in (["check", "--quiet", "--select", "I", "--fix"], ["format", "--quiet"]):
        _run(root, str(RUFF), *arguments, ".")


def is_kept(path: str) -> bool:
    """Whether a file stays as it is under every name."""
    return path in KEPT or path.startswith(PINNED)


def _remove_empty(folder: Path) -> None:
    """And those above it that only held it."""
    while not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent


def renamed(text: str, name: str) -> str:
    for spelling in (str.lower, str.upper, str.capitalize):
        text = re.sub(spelling(UPSTREAM) + NO_FORMAT, spelling(name), text)
    return text


def update(root: Path, commit: str) -> str:
    """Merge a commit of upstream's into the checkout; returns what is left to do.

    Raises:
        UsageError: there is no such commit.
        ForkError: there is no history in common with it; or all is merged but what conflicts.
    """
    name = name_of(root)
    theirs, base = common_history(root, commit)
    if base == theirs:
        return f"{commit} is merged already"
    trees = [tree_called(root, name, one) for one in (base, theirs)]
    done = subprocess.run(
        ["git", "merge-recursive", trees[0], "--", "HEAD", trees[1]],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 1):
        raise ForkError(f"git merge-recursive: {done.stderr.strip()}")
    # From here on it is a merge like any other, whose second parent is upstream's own commit.
    folder = root / git(root, "rev-parse", "--git-dir")
    (folder / "MERGE_HEAD").write_text(f"{theirs}\n")
    (folder / "MERGE_MSG").write_text(f"Merge {commit} of upstream\n")
    if done.returncode:
        raise ForkError(
            f"not all could be merged:\n{done.stdout.strip()}\n"
            "mend what conflicts, then: git add …, make test-fast, git commit"
        )
    return "merged; look at it (git diff --staged), try it (make test-fast), then: git commit"


def common_history(root: Path, commit: str) -> tuple[str, str]:
    """A commit of upstream's by its hash, and the last one before it that is merged.

    Raises UsageError if there is no such commit, ForkError if there is no history in common with it.
    """
    try:
        theirs = git(root, "rev-parse", "--verify", f"{commit}^{{commit}}")
    except ForkError:
        raise UsageError(f"{commit} is no commit here; `git fetch upstream` brings upstream's") from None
    try:
        return theirs, git(root, "merge-base", "HEAD", theirs)
    except ForkError:
        raise ForkError(
            f"{commit} has no history in common with this checkout; if it is shallow: git fetch --unshallow; if it "
            "began as a copy of a commit of upstream's, say of which, once: git merge --strategy ours "
            "--allow-unrelated-histories COMMIT"
        ) from None


def tree_called(root: Path, name: str, commit: str) -> str:
    """The tree of a commit, in which everything is called by the fork's name."""
    with checked_out(root, commit) as folder:
        if name_of(folder) != name:
            rename(folder, name)
            git(folder, "add", "--all")
        return git(folder, "write-tree")


@contextmanager
def checked_out(root: Path, commit: str) -> Iterator[Path]:
    """Another working tree of the same repository, for as long as a `with` block lasts."""
    with tempfile.TemporaryDirectory(prefix="fork-") as scratch:
        folder = Path(scratch, "tree")
        git(root, "worktree", "add", "--quiet", "--detach", str(folder), commit)
        try:
            yield folder
        finally:
            git(root, "worktree", "remove", "--force", str(folder))


def tracked(root: Path) -> set[str]:
    return {path for path in git(root, "ls-files", "-z").split("\0") if path}


def git(root: Path, *arguments: str) -> str:
    return _run(root, "git", *arguments).strip("\n")


def _run(root: Path, *command: str) -> str:
    """What a command prints. Raises ForkError."""
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ForkError(f"{command[0]} is missing; `make lint` puts it there") from None
    if done.returncode:
        said = done.stderr.strip() or f"exit code {done.returncode}, without a word"
        raise ForkError(f"{' '.join(command[:3])}: {said}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
