"""How many CPUs this process may use. A container sees the CPUs of its host, but may use fewer."""

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def available_cpus(cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> int:
    """The smallest of CPU affinity and the CPU limits of all cgroups around this process; at least 1."""
    return max(1, int(min([len(os.sched_getaffinity(0)), *_limits(cgroups, own)])))


def _limits(cgroups: Path, own: Path) -> Iterator[float]:
    for directory in _directories(cgroups, own):
        try:  # cgroup v2: "<quota> <period>", or "max <period>"
            quota, period = (directory / "cpu.max").read_text().split()
        except (OSError, ValueError):
            try:  # cgroup v1: -1 means no limit
                quota = (directory / "cpu.cfs_quota_us").read_text().strip()
                period = (directory / "cpu.cfs_period_us").read_text()
            except OSError:
                continue
        if quota not in ("max", "-1"):
            yield int(quota) / int(period)


def _directories(cgroups: Path, own: Path) -> Iterator[Path]:
    """Where limits on this process may be written down: its own cgroup and every one above it.

    A line of /proc/self/cgroup is `<hierarchy>:<controllers>:<path>`, with no controllers in version 2. Inside a
    container the path may be the host's and lead nowhere; the limit then lies at the top of the hierarchy.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = cgroups / "cpu" if controllers else cgroups
        directory = top / path.lstrip("/")
        yield from (place for place in [directory, *directory.parents] if place.is_relative_to(top))
