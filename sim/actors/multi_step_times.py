"""When the rounds of a multi-step end, from the times that device and host take for each of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class MultiStepTimes(NamedTuple):
    """When the rounds of a multi-step end: on the device, at the host, and when the round after each is launched."""

    device_end_ns: np.ndarray  # int64 [rounds]
    commit_end_ns: np.ndarray  # int64 [rounds]
    next_launch_ns: np.ndarray  # int64 [rounds]


class RunningMultiStep:
    """A multi-step on the device that ends after `rounds` of its rounds, or earlier."""

    def __init__(self, times: MultiStepTimes, rounds: int) -> None:
        self.rounds: int = rounds
        self._commit_end_ns = times.commit_end_ns

    @property
    def end_ns(self) -> int:
        """When the last of its rounds is committed."""
        return int(self._commit_end_ns[self.rounds - 1])

    def round_at(self, now_ns: int) -> int:
        """Return the number of the round, from 1, that is not committed before `now_ns`."""
        return int(self._commit_end_ns.searchsorted(now_ns)) + 1

    def end_after(self, rounds: int) -> None:
        """Let it end after so many rounds, if it does not end earlier."""
        self.rounds = min(self.rounds, rounds)


def synchronous_times(
    start_ns: int, device_ns: np.ndarray, commit_ns: np.ndarray, launch_ns: int | np.ndarray
) -> MultiStepTimes:
    """Return the times of rounds that run one after the other: plan, launch, run, commit;
    plan, launch, run, commit; …"""
    next_launch_ns = start_ns + np.add.accumulate(device_ns + commit_ns + launch_ns)
    commit_end_ns = next_launch_ns - launch_ns
    return MultiStepTimes(commit_end_ns - commit_ns, commit_end_ns, next_launch_ns)


def overlap_times(
    start_ns: int,
    planned_ns: int,
    device_ns: np.ndarray,
    commit_ns: np.ndarray,
    host_ns: int | np.ndarray,
    late_ns: int | np.ndarray = 0,
) -> MultiStepTimes:
    """Return the times of rounds of which j + 1 is planned and launched while j runs, and before j is committed.
    `late_ns`: a further part of the launch, which begins only when j has ended."""
    first_end_ns = start_ns + int(device_ns[0])
    second_launch_ns = planned_ns + (host_ns if isinstance(host_ns, int) else int(host_ns[0]))
    is_late = not isinstance(late_ns, int) or late_ns > 0
    if (
        not is_late
        and second_launch_ns <= first_end_ns
        and not np.count_nonzero((device_ns - host_ns)[1:] < commit_ns[:-1])
    ):
        # The device is never kept waiting.
        device_end_ns = first_end_ns + np.add.accumulate(device_ns) - device_ns[0]
        commit_end_ns = device_end_ns + commit_ns
        next_launch_ns = np.empty_like(commit_end_ns)
        next_launch_ns[0] = planned_ns
        next_launch_ns[1:] = commit_end_ns[:-1]
        next_launch_ns += host_ns
        return MultiStepTimes(device_end_ns, commit_end_ns, next_launch_ns)
    ends, commits, launches = [], [], []
    end_ns, ready_ns = first_end_ns, second_launch_ns  # of round j, and of round j + 1 without the late part
    next_runs = [*device_ns[1:].tolist(), 0]  # round j + 1 on the device
    next_hosts = (
        [host_ns] * len(device_ns) if isinstance(host_ns, int) else [*host_ns[1:].tolist(), 0]
    )  # planning j + 2
    lates = np.broadcast_to(late_ns, device_ns.shape).tolist()
    for run_ns, cost_ns, plan_ns, wait_ns in zip(next_runs, commit_ns.tolist(), next_hosts, lates, strict=True):
        launch_ns = max(ready_ns, end_ns) + wait_ns
        ends.append(end_ns)
        launches.append(launch_ns)
        commits.append(launch_ns + cost_ns)
        end_ns = launch_ns + run_ns
        ready_ns = commits[-1] + plan_ns
    return MultiStepTimes(np.array(ends), np.array(commits), np.array(launches))
