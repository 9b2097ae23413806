"""Reports on the transfers of a run: how long they took, how long requests waited for them, and how busy the ports were."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.handoff import TransferState
from ...observe.summary import share

PERCENTILES = {"median": 50, "p90": 90, "p95": 95, "p99": 99}


class TransferTimes:
    """Times of every transfer, in nanoseconds."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys((TransferState.COMPLETED, TransferState.FAILED, TransferState.CANCELLED), 0)
        self._started: dict[str, int] = {}
        self._computed: dict[str, int] = {}
        self._durations = array("q")
        self._waits = array("q")

    def started(self, request_id: str, now_ns: int) -> None:
        """Note when the first byte of a request's KV leaves. A retry does not change it: its client waits since then."""
        self._started.setdefault(request_id, now_ns)

    def computed(self, request_id: str, now_ns: int) -> None:
        """Note when a prompt is computed and its first token known."""
        self._computed.setdefault(request_id, now_ns)

    def joined(self, request_id: str, now_ns: int) -> None:
        """Note that all of it has arrived and is verified: the request takes part in the next round of its decode engine."""
        computed_ns = self._computed.get(request_id)
        if computed_ns is None:
            return  # given up by the prefill engine meanwhile
        # Where the decode engine has every page in its prefix cache, none is sent.
        self._durations.append(now_ns - self._started.get(request_id, computed_ns))
        self._waits.append(now_ns - computed_ns)

    def ended(self, request_id: str, state: TransferState) -> None:
        """Count a transfer that the prefill engine has ended."""
        self.counts[state] += 1
        self._started.pop(request_id, None)
        self._computed.pop(request_id, None)

    def to_json(self) -> dict[str, Any]:
        summary: dict[str, Any] = {
            "transfers_completed": self.counts[TransferState.COMPLETED],
            "transfers_failed": self.counts[TransferState.FAILED],
            "transfers_cancelled": self.counts[TransferState.CANCELLED],
        }
        summary |= _statistics("transfer", self._durations)
        return summary | _statistics("transfer_wait", self._waits)


def _statistics(name: str, values: array) -> dict[str, float | None]:
    if not values:
        return {f"{statistic}_{name}_ms": None for statistic in ("mean", *PERCENTILES)}
    found = np.frombuffer(values, dtype=np.int64)
    quantiles = np.percentile(found, list(PERCENTILES.values())).tolist()
    named = dict(zip(("mean", *PERCENTILES), [float(found.mean()), *quantiles], strict=True))
    return {f"{statistic}_{name}_ms": value * 1e-6 for statistic, value in named.items()}


@dataclass(frozen=True, slots=True)
class DisaggregationReport:
    """The results of a run with two pools."""

    num_prefill: int  # in the end
    num_decode: int
    num_role_changes: int
    prefill_busy_share: float | None  # of the devices, while they had that role
    decode_busy_share: float | None
    out_busy_ns: tuple[int, ...]  # per engine: its port's way out
    in_busy_ns: tuple[int, ...]
    link_busy_share: float | None  # of the ways out of engines, while they computed prompts
    num_bytes: int
    num_retries: int
    num_ignored: int  # late, doubled or senseless messages
    num_moved: int  # requests that went on on another engine after their decode engine was lost
    transfers: dict[str, Any]

    def to_json(self, duration_ns: int) -> dict[str, Any]:
        """Return the numbers for summary.json."""
        ways = [*self.out_busy_ns, *self.in_busy_ns]
        return {
            "prefill_engines": self.num_prefill,
            "decode_engines": self.num_decode,
            "role_changes": self.num_role_changes,
            "prefill_busy_share": self.prefill_busy_share,
            "decode_busy_share": self.decode_busy_share,
            "link_busy_share": self.link_busy_share,
            "link_busy_share_max": share(max(ways, default=0), duration_ns),
            "transferred_bytes": self.num_bytes,
            "transfer_retries": self.num_retries,
            "transfer_messages_ignored": self.num_ignored,
            "requests_moved": self.num_moved,
            **self.transfers,
        }
