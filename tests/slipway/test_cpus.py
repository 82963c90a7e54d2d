"""A container sees its host's CPUs and may use fewer."""

import os
from pathlib import Path

import pytest

from slipway.cpus import available_cpus

AFFINITY = len(os.sched_getaffinity(0))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def many_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


def test_without_limits_it_is_the_affinity(tmp_path: Path) -> None:
    assert available_cpus(tmp_path, tmp_path / "cgroup") == AFFINITY


@pytest.mark.parametrize(
    ("limit", "cpus"), [("200000 100000", 2), ("350000 100000", 3), ("50000 100000", 1), ("max 100000", 64)]
)
def test_limit_of_cgroup_version_2(tmp_path: Path, many_cpus: None, limit: str, cpus: int) -> None:
    write(tmp_path / "cgroup", "0::/pod/container\n")
    write(tmp_path / "fs/pod/container/cpu.max", f"{limit}\n")
    assert available_cpus(tmp_path / "fs", tmp_path / "cgroup") == cpus


def test_limit_of_a_cgroup_further_up_counts_too(tmp_path: Path, many_cpus: None) -> None:
    write(tmp_path / "cgroup", "0::/pod/container\n")
    write(tmp_path / "fs/pod/container/cpu.max", "max 100000\n")
    write(tmp_path / "fs/pod/cpu.max", "400000 100000\n")
    assert available_cpus(tmp_path / "fs", tmp_path / "cgroup") == 4


def test_in_a_container_the_path_is_the_hosts_and_the_limit_at_the_top(
    tmp_path: Path, many_cpus: None
) -> None:
    write(tmp_path / "cgroup", "0::/docker/0123abc\n")
    write(tmp_path / "fs/cpu.max", "150000 100000\n")
    assert available_cpus(tmp_path / "fs", tmp_path / "cgroup") == 1


@pytest.mark.parametrize(("quota", "cpus"), [("300000", 3), ("-1", 64)])
def test_limit_of_cgroup_version_1(tmp_path: Path, many_cpus: None, quota: str, cpus: int) -> None:
    write(tmp_path / "cgroup", "4:memory:/other\n2:cpu,cpuacct:/docker/0123abc\n")
    write(tmp_path / "fs/cpu/cpu.cfs_quota_us", f"{quota}\n")
    write(tmp_path / "fs/cpu/cpu.cfs_period_us", "100000\n")
    assert available_cpus(tmp_path / "fs", tmp_path / "cgroup") == cpus
