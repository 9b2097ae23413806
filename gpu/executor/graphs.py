"""Captured rounds: the device work of a whole decode round as one CUDA graph per (steps, nodes, padded batch size, kind),
with user outputs and without.

A graph reads and writes the same memory every time, so a round's inputs are copied to their places, the rows beyond the batch are padding
(row 0, length 0: they read nothing and write to the sink), and what comes out is valid until the graph runs again. That is enough: the
stream passes the results on before the next round begins. Without a GPU a "graph" runs its function anew over the same memory, so that
everything but the capture itself is the same code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import torch
from torch import Tensor

from ...core.adaptive.graph_plan import GraphKey, GraphTable
from ...core.contract.future_map import RelayField
from ..draft.port import RoundBatch
from .round import DecodeRound, NoClock, RoundResult, SamplingInputs

WARM_UP_RUNS = 2  # kernels are compiled and libraries initialised before anything is captured


class RoundKind(StrEnum):
    """How a captured round turns logits into tokens. A filtered one sorts the vocabulary at every node, so it is one of its own."""

    GREEDY = "greedy"
    SAMPLED = "sampled"
    FILTERED = "filtered"  # some row has top-p or top-k

    @classmethod
    def of(cls, sampling: SamplingInputs | None) -> RoundKind:
        if sampling is None:
            return cls.GREEDY
        return cls.FILTERED if sampling.filtered else cls.SAMPLED


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What one graph cost."""

    steps: int
    num_draft_tokens: int
    batch_size: int
    kind: RoundKind
    seconds: float
    num_bytes: int
    with_outputs: bool = False


class CapturedRound:
    """One graph: `size` rows of one shape. `kind` and `forced` say which inputs beside the relayed values it has.

    `outputs` are the user outputs that it computes, all of them for all rows; a round takes those that some row has asked for.
    """

    def __init__(
        self,
        decode_round: DecodeRound,
        shape: RoundBatch,
        fields: tuple[RelayField, ...],
        width: int,
        kind: RoundKind,
        forced: bool,
        seed: int,
        memory_pool: object | None,
        outputs: frozenset[str] = frozenset(),
    ) -> None:
        size, device = len(shape.row_numbers), shape.table.device
        zeros = torch.zeros(size, dtype=torch.int64, device=device)
        self._rows, self._lengths = zeros, zeros.clone()
        self._relayed = {
            field.name: torch.zeros((size, *field.shape_suffix), dtype=getattr(torch, field.dtype), device=device)
            for field in fields
        }
        self._sampling = None
        if kind is not RoundKind.GREEDY:
            reals = torch.zeros(size, dtype=torch.float64, device=device)
            self._sampling = SamplingInputs(
                reals, reals + 1.0, zeros.clone(), zeros.clone(), kind is RoundKind.FILTERED, seed
            )
        self._runs = zeros.clone() if forced else None
        batch = replace(shape, rows=self._rows, lengths=self._lengths, roots=self._relayed["bonus_tokens"])

        def run() -> RoundResult:
            return decode_round.run(batch, self._relayed, self._sampling, outputs, self._runs, width, NoClock())

        self._replay = _capture(run, memory_pool) if device.type == "cuda" else run

    def run(
        self,
        batch: RoundBatch,
        relayed: Mapping[str, Tensor],
        sampling: SamplingInputs | None,
        forced_runs: Tensor | None,
        wanted: frozenset[str] = frozenset(),
    ) -> RoundResult:
        """Return the round of `batch`, at most as many rows as the graph has, with the `wanted` outputs."""
        bs = len(batch.row_numbers)
        _fill(self._rows, batch.rows)
        _fill(self._lengths, batch.lengths)
        for name, place in self._relayed.items():
            _fill(place, relayed[name])
        if self._sampling is not None and sampling is not None:
            for name in ("temperature", "top_p", "top_k", "keys"):
                _fill(getattr(self._sampling, name), getattr(sampling, name))
        if self._runs is not None:
            _fill(self._runs, forced_runs)
        result = self._replay()
        return RoundResult(
            accept_lens=result.accept_lens[:bs],
            failed=result.failed[:bs],
            emitted=result.emitted[:bs],
            lengths=result.lengths[:bs],
            relay={name: values[:bs] for name, values in result.relay.items()},
            outputs={name: result.outputs[name][:bs] for name in sorted(wanted)},
        )


def _fill(place: Tensor, values: Tensor) -> None:
    """Write `values` in front and padding (zeros) behind them."""
    place[: len(values)].copy_(values)
    if len(values) < len(place):
        place[len(values) :].zero_()


def _capture(run: Callable[[], RoundResult], memory_pool: object | None) -> Callable[[], RoundResult]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_RUNS):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory_pool):
        result = run()

    def replay() -> RoundResult:
        graph.replay()
        return result

    return replay


class RoundGraphs:
    """The graphs of one executor by (steps, nodes, padded batch size, kind, with outputs or without), and what each cost.

    `capture(key, kind, with_outputs)` captures one of them. A round without user outputs has a graph of its own: some of them, such as the
    most likely tokens, take long over a large vocabulary.
    """

    def __init__(self, capture: Callable[[GraphKey, RoundKind, bool], CapturedRound]) -> None:
        self.reports: list[CaptureReport] = []
        self.on_round: Callable[[bool, int], None] | None = None  # is told whether a round of so many rows has a graph
        self._capture = capture
        self._table: GraphTable[Mapping[tuple[RoundKind, bool], CapturedRound]] = GraphTable()

    def build(self, keys: Sequence[GraphKey], sampled: bool, outputs: bool = False) -> None:
        """Capture the graphs of all keys before the first round; `sampled` asks for those of sampling batches too, `outputs` for those with
        user outputs."""
        kinds = tuple(RoundKind) if sampled else (RoundKind.GREEDY,)
        variants = [(kind, with_outputs) for kind in kinds for with_outputs in ((False, True) if outputs else (False,))]
        self._table.build(keys, lambda key: {variant: self._timed(key, *variant) for variant in variants})

    def _timed(self, key: GraphKey, kind: RoundKind, with_outputs: bool) -> CapturedRound:
        begin, before = time.perf_counter(), _reserved_bytes()
        graph = self._capture(key, kind, with_outputs)
        seconds, num_bytes = time.perf_counter() - begin, _reserved_bytes() - before
        self.reports.append(CaptureReport(*key, kind, seconds, num_bytes, with_outputs))
        return graph

    def find(
        self, steps: int, num_draft_tokens: int, batch_size: int, kind: RoundKind, with_outputs: bool = False
    ) -> CapturedRound | None:
        """Return the smallest graph that the batch fits into, or None if none was captured for such a batch."""
        graphs = self._table.find(steps, num_draft_tokens, batch_size)
        return None if graphs is None else graphs.get((kind, with_outputs))


def padded_shape(
    table: Tensor, key: GraphKey, topk: int, max_position: int, max_len: int, max_nodes: int
) -> RoundBatch:
    """Return a batch of padding rows; a graph must hold for every length, so the bound `max_len` is that of all."""
    padding = torch.zeros(key.batch_size, dtype=torch.int64, device=table.device)
    return RoundBatch(
        row_numbers=np.zeros(key.batch_size, np.int64),
        rows=padding,
        lengths=padding,
        roots=padding,
        table=table,
        steps=key.steps,
        topk=topk if key.steps else 1,
        num_draft_tokens=key.num_draft_tokens,
        max_len=max_len,
        padded_rows=key.batch_size,
        max_nodes=max_nodes,
        max_position=max_position,
    )


def _reserved_bytes() -> int:
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
