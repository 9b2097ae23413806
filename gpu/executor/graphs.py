"""Captured rounds: the device work of a whole decode round as one CUDA graph per (steps, nodes, padded batch size,
kind), with user outputs and without. Rows of unequal lengths have one for each of four numbers of tokens, for any mix.
Each is captured when the first round needs it, so that a session pays for those that its batches have.

A graph reads and writes the same memory every time. So a round's inputs are copied to their places, and the rows beyond
the batch are padding (row 0, length 0: they read nothing and write to the sink). Results are valid until any graph
runs, since all share one memory pool; they are copied in the stream before that. Relay cells are read and written
inside, by row: a round is one copy to the device, one launch, and the copies of its results.
Without a GPU a "graph" runs its function anew over the same memory, so that all but the capture is the same code.

If some row has a grammar, the round is two graphs: the first ends with the logits of all nodes, and the second begins
with the masks that the host makes of the drafted tokens. Other changes of logits are a part of the one graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, partial
from itertools import product

import numpy as np
import torch
from torch import Tensor

from ...core.adaptive.graphs import GraphKey, GraphTable
from ...core.contract.future_map import LENGTH_FIELD
from ...core.contract.step import DraftBudget, RoundShape
from ..batch.uploads import layout, on_device, uploads_to, views
from ..draft.port import BudgetInputs, RoundBatch, SamplingInputs
from ..types.ops import DeviceTree, LogitTables, Ops
from ..types.shards import WHOLE
from .capture import MakeMasks, capture, capture_halves, without_masks
from .parts import ExecutorModels, ExecutorOptions, RowParts
from .round import DecodeRound, Passed, RoundResult, unmeasured
from .rows import HostBudget, HostSampling
from .running import pack
from .shaping import Changed, Changes, MaskPlace


class RoundKind(StrEnum):
    """How a captured round turns logits into tokens.
    A filtered one looks for a threshold at every node, so it is one of its own."""

    GREEDY = "greedy"
    SAMPLED = "sampled"
    FILTERED = "filtered"  # some row has top-p or top-k

    @classmethod
    def of(cls, sampling: HostSampling | None) -> RoundKind:
        if sampling is None:
            return cls.GREEDY
        return cls.FILTERED if sampling.filtered else cls.SAMPLED


@dataclass(frozen=True, slots=True)
class CaptureBounds:
    """What capturing may take before the first request: seconds, and bytes of the device's memory."""

    seconds: float
    num_bytes: int


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
    changed: Changed = Changed.NOWHERE
    num_tokens: int | None = None  # of the target's pass, of rows of unequal lengths


def no_masks(tree: DeviceTree) -> tuple[np.ndarray, np.ndarray]:
    raise AssertionError("a graph without masks asks for none")


@dataclass(frozen=True, slots=True)
class GraphSurroundings:
    """What all graphs of an executor share. `forced`: acceptance is simulated."""

    decode_round: DecodeRound
    cells: RelayCells
    forced: bool
    seed: int


@dataclass(frozen=True, slots=True)
class GraphContents:
    """What one graph computes.

    `width`: the most tokens that a row accepts. `outputs`: user outputs, all of them for all rows; a round takes those
    that some row has asked for. `proposed`: padding trees, if they come from the host (`Draft.propose_on_host`).
    `tables`: by which the logits change; `masks`: where the host's come.
    """

    kind: RoundKind
    width: int
    outputs: frozenset[str]
    proposed: Mapping[str, np.ndarray]
    tables: LogitTables | None
    masks: MaskPlace | None
    has_budget: bool = False


class CapturedRound:
    """One graph: `size` rows of one shape, from their relay cells to their relay cells. The host sends one copy: which
    rows, how they are sampled, and how many drafts are accepted if that is simulated.
    """

    def __init__(
        self, around: GraphSurroundings, padding: RoundBatch, contents: GraphContents, memory_pool: object | None
    ) -> None:
        """Allocate the tensors that the graph reads and writes."""
        decode_round, cells, seed = around.decode_round, around.cells, around.seed
        kind, outputs, tables, masks = contents.kind, contents.outputs, contents.tables, contents.masks
        self.size = size = len(padding.row_numbers)
        device = padding.table.device
        self._host = {"rows": np.zeros(size, np.int64)}
        if kind is not RoundKind.GREEDY:
            self._host |= {name: np.zeros(size, dtype) for name, dtype in HostSampling.DTYPES.items()}
        if around.forced:
            self._host["runs"] = np.zeros(size, np.int64)
        if padding.num_tokens:
            self._host["row_nodes"] = np.zeros(size, np.int64)
        if contents.has_budget:
            self._host |= HostBudget.of(
                DraftBudget(0, 0.0, (0.0,) * padding.shape.steps), padding.shape.steps
            )._asdict()
        names = tuple(contents.proposed)
        self._host |= {name: np.ascontiguousarray(array) for name, array in contents.proposed.items()}
        begins, end = layout([*self._host.values()])
        self._place = torch.zeros(end, dtype=torch.uint8, device=device)
        self._uploads = uploads_to(device)
        inputs = dict(zip(self._host, views(self._place, [*self._host.values()], begins), strict=True))
        trees = {name: inputs.pop(name) for name in names} or None
        if trees is not None:
            self._uploads.fill(self._place, [*self._host.values()])  # zeros would be no trees
        rows, runs, sampling = inputs.pop("rows"), inputs.pop("runs", None), None
        row_nodes = inputs.pop("row_nodes", None)
        budget = BudgetInputs(inputs.pop("drafts"), inputs.pop("weights")) if contents.has_budget else None
        if inputs:
            sampling = SamplingInputs(**inputs, filtered=kind is RoundKind.FILTERED, seed=seed)

        changes = None if tables is None else Changes(tables, None if masks is None else masks.masks)

        # Without `self`, which would be a cycle that keeps the pools.
        def begin() -> Passed:
            lengths, relayed = cells.gather(rows)
            roots = relayed["bonus_tokens"]
            batch = replace(padding, rows=rows, lengths=lengths, roots=roots, proposed=trees)
            batch = replace(batch, row_nodes=row_nodes, budget=budget, sampling=sampling)
            return decode_round.begin(batch, relayed, outputs, unmeasured)

        def finish(passed: Passed) -> RoundResult:
            result = decode_round.finish(passed, changes, sampling, outputs, runs, contents.width, unmeasured)
            cells.scatter(rows, result)
            if device.type == "cpu":
                return result
            return replace(result, packed=pack(result.copied))

        def run() -> RoundResult:
            return finish(begin())

        def run_masked(make_masks: MakeMasks) -> RoundResult:
            assert masks is not None
            passed = begin()
            masks.fill(*make_masks(passed.tree))
            return finish(passed)

        self.replay: Callable[[MakeMasks], RoundResult] = without_masks(run) if masks is None else run_masked
        if device.type == "cuda":
            one = partial(capture, memory_pool=memory_pool, device=device)
            self.replay = without_masks(one(run)) if masks is None else capture_halves(begin, finish, one, masks)

    def run(
        self,
        rows: np.ndarray,
        sampling: HostSampling | None,
        forced_runs: np.ndarray | None,
        wanted: frozenset[str] = frozenset(),
        proposed: Mapping[str, np.ndarray] | None = None,
        make_masks: MakeMasks = no_masks,
        row_nodes: np.ndarray | None = None,
        budget: HostBudget | None = None,
    ) -> RoundResult:
        """Return the round of `rows` int64 [bs], at most as many as the graph has, with the `wanted` outputs: its first
        rows, padding behind them. What it relays is in the cells. `make_masks`: the masks of the round's trees, if the
        graph is one with masks. `row_nodes` int64 [bs]: what rows verify, in a graph of rows of unequal lengths."""
        bs = len(rows)
        trees = dict(proposed or {}) if budget is None else budget._asdict()
        given = {"rows": rows} | ({} if sampling is None else sampling.arrays)
        if forced_runs is not None:
            given["runs"] = forced_runs
        if row_nodes is not None:
            given["row_nodes"] = row_nodes
        for name, array in self._host.items():
            if name in trees:
                array[:] = trees[name]
            else:
                array[:bs] = given[name]
                array[bs:] = 0  # padding
        self._uploads.fill(self._place, [*self._host.values()])
        result = self.replay(make_masks)
        return replace(result, relay={}, outputs={name: result.outputs[name] for name in sorted(wanted)})


@dataclass(frozen=True, slots=True)
class RelayCells:
    """The relay's cells in device memory: what a round begins with, and where it leaves what the next one needs."""

    ops: Ops
    buffers: Mapping[str, Tensor]  # by field, [num_rows + 1, …]; row 0 is padding

    def gather(self, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the rows' lengths and the other fields."""
        found = dict(zip(self.buffers, self.ops.relay_gather([*self.buffers.values()], rows), strict=True))
        return found.pop(LENGTH_FIELD.name), found

    def scatter(self, rows: Tensor, result: RoundResult) -> None:
        values = {LENGTH_FIELD.name: result.lengths, **result.relay}
        self.ops.relay_scatter_([self.buffers[name] for name in values], rows, [*values.values()])


Variant = tuple[RoundKind, bool, Changed]
"""Kind, whether user outputs are computed (some, such as the most likely tokens, take long over a large vocabulary),
and who changes logits."""


def variants_of(sampled: bool = True, outputs: bool = True) -> frozenset[Variant]:
    """Return the variants of each graph: those of sampling batches if `sampled`, those with user outputs if
    `outputs`."""
    kinds = tuple(RoundKind) if sampled else (RoundKind.GREEDY,)
    return frozenset(product(kinds, (False, True) if outputs else (False,), Changed))


def _rarity(variant: Variant) -> tuple[int, bool, int]:
    """Order variants, the likeliest first: plain requests, then those with outputs, then those that change logits."""
    kind, shown, changed = variant
    return list(Changed).index(changed), shown, list(RoundKind).index(kind)


def _name(key: GraphKey, variant: Variant) -> str:
    kind, shown, changed = variant
    more = "" if key.num_tokens is None else f", {key.num_tokens} tokens"
    more += (", with outputs" if shown else "") + ("" if changed is Changed.NOWHERE else f", logits changed {changed}")
    return f"batch {key.batch_size}, {key.shape.steps} steps, {kind}{more}"


class RoundGraphs:
    """The graphs of one executor by (steps, nodes, padded batch size) and variant, captured when they are first asked
    for.

    A variant that does not fit into memory is not tried again: its rounds run without a graph.
    """

    def __init__(
        self, decode_round: DecodeRound, parts: RowParts, models: ExecutorModels, options: ExecutorOptions
    ) -> None:
        """Capture nothing yet. A round has a graph on all ranks of the target or on none."""
        self.reports: list[CaptureReport] = []
        self.on_round: Callable[[bool, int], None] | None = (
            None  # called with whether a round of so many rows has a graph
        )
        self.on_capture: Callable[[CaptureReport], None] | None = None
        self.are_on: bool = False  # whether any round may have a graph
        self.num_missed: int = 0  # rounds that ran without one then
        self._limits, self._shaping = parts.limits, parts.shaping
        cells = RelayCells(models.ops, parts.future_map.buffers)
        self._around = GraphSurroundings(decode_round, cells, options.acceptance is not None, options.seed)
        self._accept_width, self._outputs = parts.algorithm.accept_width, frozenset(options.outputs)
        table = parts.limits.table
        self._shard = WHOLE if table.is_meta else models.target.shard
        # All share one: what one round needs for a while, another does.
        self._memory_pool = torch.cuda.graph_pool_handle() if table.is_cuda else None
        self._variants: frozenset[Variant] = frozenset()
        self._keys: tuple[GraphKey, ...] = ()
        self._table: GraphTable[GraphKey] = GraphTable()
        self._captured: dict[tuple[GraphKey, Variant], CapturedRound | None] = {}

    def allow(
        self, keys: Sequence[GraphKey], sampled: bool, outputs: bool, unequal: bool = False, budgets: bool = False
    ) -> None:
        """Let rounds of these keys have graphs, those of sampling batches if `sampled`, those with user
        outputs if `outputs`, those of rows of unequal lengths if `unequal`, those with a budget if `budgets`, which
        come first."""
        self._variants = variants_of(sampled, outputs)
        packed = tuple(one for key in keys if key.shape.nodes > 1 for one in key.all_packed)
        with_budget = tuple(key._replace(has_budget=True) for key in packed)
        self._keys = (with_budget if budgets else ()) + tuple(keys) + (packed if unequal else ())
        self._table.build(keys, lambda key: key)
        self.are_on = bool(keys)

    def find(
        self,
        shape: RoundShape,
        batch_size: int,
        kind: RoundKind,
        with_outputs: bool = False,
        changed: Changed = Changed.NOWHERE,
        num_tokens: int | None = None,
        has_budget: bool = False,
    ) -> CapturedRound | None:
        """Return the smallest graph that holds the batch; capture it if no round has needed it yet.
        None: the round runs without one. `num_tokens`: of the target's pass, of rows of unequal lengths."""
        key, variant = self._table.find(shape, batch_size), (kind, with_outputs, changed)
        if key is None or variant not in self._variants:
            return None
        if num_tokens is not None:
            key = key.packed(num_tokens)._replace(has_budget=has_budget)
        if (key, variant) not in self._captured:
            self._captured[key, variant] = self._timed(key, variant)
        return self._captured[key, variant]

    def capture_all(self, on_line: Callable[[str], None], bounds: CaptureBounds) -> list[str]:
        """Capture the graphs of all rounds that may come, the likeliest first, until a bound is reached. `on_line` gets
        the name of each one first.

        Returns the names of those that have no graph. Their rounds run without one from now on, so that no stream waits
        for a capture.
        """
        begin, left_out = time.monotonic(), []
        for variant in sorted(self._variants, key=_rarity):
            for key in self._keys:
                name = _name(key, variant)
                if (key, variant) not in self._captured:
                    spent = time.monotonic() - begin, sum(report.num_bytes for report in self.reports)
                    is_over = spent[0] >= bounds.seconds or spent[1] >= bounds.num_bytes
                    if self._shard.on_any(is_over):
                        self._captured[key, variant] = None
                    else:
                        on_line(f"capturing: {name}")
                        with on_device(self._limits.table.device):
                            self._captured[key, variant] = self._timed(key, variant)
                if self._captured[key, variant] is None:
                    left_out.append(name)
        return left_out

    def _capture(self, key: GraphKey, kind: RoundKind, with_outputs: bool, changed: Changed) -> CapturedRound:
        padding, masks = self._limits.padding(key), None
        if changed is Changed.WITH_MASKS:
            nodes = key.batch_size * key.shape.nodes
            masks = MaskPlace(nodes, self._shaping.mask_words, self._mask_memory)
        with torch.no_grad():
            draft = self._around.decode_round.draft
            contents = GraphContents(
                kind,
                self._accept_width(key.shape.steps, key.shape.nodes),
                self._outputs if with_outputs else frozenset(),
                draft.propose_on_host(padding.row_numbers[:0], padding.shape, key.batch_size),
                None if changed is Changed.NOWHERE else self._shaping.tables,
                masks,
                key.has_budget,
            )
            return CapturedRound(self._around, padding, contents, self._memory_pool)

    @cached_property
    def _mask_memory(self) -> Tensor:
        """The masks of any round: all graphs read the same memory."""
        nodes = max(key.batch_size * key.shape.nodes for key in self._keys)
        size = MaskPlace.size(nodes, self._shaping.mask_words)
        return torch.zeros(size, dtype=torch.uint8, device=self._limits.table.device)

    def _timed(self, key: GraphKey, variant: Variant) -> CapturedRound | None:
        begin, before = time.perf_counter(), _reserved_bytes()
        graph = None
        try:
            graph = self._capture(key, *variant)
        except RuntimeError as error:  # torch's OutOfMemoryError, or the driver's own as it makes the graph
            if "out of memory" not in str(error):
                raise
            if not self.reports and self._memory_pool is not None:
                self._memory_pool = torch.cuda.graph_pool_handle()  # torch refuses a pool without graphs
        if self._shard.on_any(graph is None):
            return None
        steps, _, nodes = key.shape
        spent = time.perf_counter() - begin, _reserved_bytes() - before
        report = CaptureReport(steps, nodes, key.batch_size, variant[0], *spent, *variant[1:], key.num_tokens)
        self.reports.append(report)
        if self.on_capture is not None:
            self.on_capture(report)
        return graph


def _reserved_bytes() -> int:
    """Return the memory that torch holds and cannot give back.
    A capture gives back the rest, which is none of its cost."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()
