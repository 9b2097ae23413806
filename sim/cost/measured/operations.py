"""The operations of a model's passes as one server's kernels take them, checked against the same operations under other servers.

Two servers take about the same for an operation in one format on one GPU: in passes of 16 models on H200, B200 and L40S 98 of 100 are less
than a factor of 2 apart. What takes more than SLOW times as long was measured with the host's launches (vLLM's products of FP8 in
blocks: 57 to 430 us however small) or without the tuning that servers do as they start (its experts in FP8 on Hopper). There the least
of the servers' times is taken, and the provenance says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

SLOW = 3.0
MEASURED = ("silicon", "mixed")  # the database's words for a table, and for points between those of a table
_KERNELS = (
    "gemm",
    "moe",
    "attention",
    "mla_block",
)  # in names of operations: the others are small or move data between devices
_PROBED_ROWS, _PROBED_PROMPTS = (1, 8, 32, 128, 512), (1024, 8192)
_REDUCED_TWICE = "tp_allreduce"
"""All-reduces that vLLM's passes with latent attention have beside those around their experts, which are already two for each layer."""


class Operation(NamedTuple):
    """One operation of all layers: its time, and how the database knows it."""

    ns: float
    known: str


Pass = dict[str, Operation]


def _decode(rows: int, context: int, handle: Any) -> Pass:
    return _pass(handle.decode_step_per_op(rows, context, 2))


def _prompt(rows: int, new: int, past: int, handle: Any) -> Pass:
    return _pass(handle._engine.run_static_per_op(rows, 1, new + past, 1, past, 1.0, 1.0, "static_ctx", 32)[0])


def _pass(operations: Sequence[tuple[str, float, float, str]]) -> Pass:
    return {
        short: Operation(milliseconds * 1e6, known)
        for name, milliseconds, _, known in operations
        if (short := name.removeprefix("generation_").removeprefix("context_")) != _REDUCED_TWICE
    }


class Operations:
    """Prices passes by operation, from the database's handle of a server and, by name, those of others.

    `corrected`: the operations that are too slow, and what is taken for them.
    """

    def __init__(self, own: Any, others: Mapping[str, Any]) -> None:
        self._own, self._others = own, tuple(others.values())
        self.corrected: dict[str, str] = {}
        probes = [partial(_decode, rows, 1024) for rows in _PROBED_ROWS]
        for ask in (*probes, *(partial(_prompt, 1, new, 0) for new in _PROBED_PROMPTS)):
            own_pass = ask(own)
            for name, ns in self._least_elsewhere(ask).items():
                is_kernel = any(mark in name for mark in _KERNELS) and "dispatch" not in name
                if is_kernel and name in own_pass and own_pass[name].ns > SLOW * ns:
                    self.corrected[name] = f"{own_pass[name].known}, at most that of {' and '.join(others)}"

    def decode(self, rows: int, context: int) -> Pass:
        """Return the operations of a decode pass of so many rows behind `context` tokens each."""
        return self._corrected(partial(_decode, rows, context))

    def prompt(self, rows: int, new: int, past: int) -> Pass:
        """Return the operations of a pass over `new` tokens of each row behind `past`."""
        return self._corrected(partial(_prompt, rows, new, past))

    def _corrected(self, ask: Callable[[Any], Pass]) -> Pass:
        found = ask(self._own)
        if self.corrected:
            for name, ns in self._least_elsewhere(ask).items():
                if name in self.corrected and name in found:
                    found[name] = found[name]._replace(ns=min(found[name].ns, ns))
        return found

    def _least_elsewhere(self, ask: Callable[[Any], Pass]) -> dict[str, float]:
        """Return the least time that was measured under other servers of each operation of a pass."""
        least: dict[str, float] = {}
        for other in self._others:
            for name, (ns, known) in ask(other).items():
                if known in MEASURED and ns > 0:
                    least[name] = min(ns, least.get(name, ns))
        return least
