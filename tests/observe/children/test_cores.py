"""How many cores a process may use: affinity, quotas of both versions of control groups, and the load."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from foredraft.observe.children.cores import idle_cores, usable_cores


@pytest.fixture(autouse=True)
def eight_idle_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.2, 0.2, 0.2), raising=False)


def files(root: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


V2, V1 = "proc/self/cgroup", "sys/fs/cgroup/cpu/pod/cpu.cfs_%s_us"
FIRST = {V2: "5:memory:/pod\n4:cpu,cpuacct:/pod\n"}


@pytest.mark.parametrize(
    ("texts", "cores"),
    [
        ({}, 8),
        ({V2: "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({V2: "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        ({V2: "0::/pod/one\n", "sys/fs/cgroup/pod/cpu.max": "250000 100000\n"}, 3),
        ({V2: "0::/pod\n", "sys/fs/cgroup/pod/cpu.max": "5000 100000\n"}, 1),
        ({V2: "0::/pod\n", "sys/fs/cgroup/pod/cpu.max": "no numbers\n"}, 8),
        ({**FIRST, V1 % "quota": "400000\n", V1 % "period": "100000\n"}, 4),
        ({**FIRST, V1 % "quota": "-1\n", V1 % "period": "100000\n"}, 8),
        # In a container, the path of the first version is the host's, and the container's own files stand at the top.
        ({**FIRST, "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 2),
    ],
)  # fmt: skip
def test_a_quota_limits_the_cores(texts: dict[str, str], cores: int, tmp_path: Path):
    assert usable_cores(files(tmp_path, texts)) == cores == idle_cores(tmp_path)


def test_affinity_and_load_limit_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 6})
    assert usable_cores(tmp_path) == 4
    for load, idle in ((2.2, 4), (5.6, 2), (40.0, 1)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert (usable_cores(tmp_path), idle_cores(tmp_path)) == (4, idle)


def test_a_system_without_affinity_or_load_counts_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse() -> tuple[float, float, float]:
        raise OSError

    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "getloadavg", refuse)
    assert usable_cores(tmp_path) == idle_cores(tmp_path) == 8
