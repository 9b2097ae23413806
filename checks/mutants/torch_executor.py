"""Planted defects of the real executor, for the executor contract's kill matrix."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ...core.contract.future_map import FutureMap, RelayField
from ...properties.harness.mutants import Mutant
from ..executor.torch_subject import HIDDEN, CheckedExecutor

FIELD = "hidden_states"


class RelaysHiddenStatesAlways(CheckedExecutor):
    """The relay has a hidden state for every algorithm; where there is none it relays zeros."""

    def __init__(self, config):
        super().__init__(config)
        executor = self.executor
        given = [field for field in executor.future_map.fields if field.name != FIELD]
        fields = [*given, RelayField(FIELD, (HIDDEN,), "float32")]
        executor.future_map = FutureMap(config.max_running, fields, executor.relay_storage, debug_poison=True)
        publish = executor._publish
        executor._publish = lambda rows, epochs, lengths, relay: publish(
            rows, epochs, lengths, {FIELD: torch.zeros(len(rows), HIDDEN), **relay}
        )


class AllocatesForTheWidestAlgorithm(CheckedExecutor):
    """The inputs of a captured round are allocated once, for any algorithm."""

    def __init__(self, config):
        super().__init__(config)
        self.executor.graph_inputs = {
            "rows": torch.zeros(config.max_running),
            FIELD: torch.zeros(config.max_running, HIDDEN),
        }


class KeepsTheVerifyPass(CheckedExecutor):
    """The verify pass's hidden states live until the next one: a closure holds them."""

    def __init__(self, config):
        super().__init__(config)
        decode_round = self.executor._round
        forward = decode_round._verify_forward

        def keeping(*arguments):
            out = forward(*arguments)
            self.executor.last_pass = lambda: out
            return out

        decode_round._verify_forward = keeping


class ShowsHiddenStatesToAll(CheckedExecutor):
    """Hidden states are computed, compacted and copied to the host even if no request asked for them."""

    def __init__(self, config):
        super().__init__(config)
        rows = self.executor._rows
        wanted = rows.wanted
        rows.wanted = lambda numbers: wanted(numbers) | {FIELD}


class MergesNoneAsZeros(CheckedExecutor):
    """A batch without hidden states is filled up with zeros where it meets one that has some."""

    def merge(self, first, second):
        first, second = (
            [[0.0] * HIDDEN] if one is None and other is not None else one
            for one, other in ((first, second), (second, first))
        )
        return super().merge(first, second)


class StopsLate(CheckedExecutor):
    """A stop takes effect one round later than asked."""

    def request_stop(self, last_step_id):
        for running in self.executor._queue:
            running.limit = min(running.limit, running.decoded.rounds + 2)


class ReusesTheHostBuffer(CheckedExecutor):
    """All results are copied into one buffer on the host, and the next one overwrites the last."""

    buffer: np.ndarray | None = None

    def collect(self):
        result = super().collect()
        if result.decode is None:
            return result
        lens = result.decode.accept_lens
        if self.buffer is None or self.buffer.shape != lens.shape:
            self.buffer = np.empty_like(lens)
        self.buffer[:] = lens
        return replace(result, decode=replace(result.decode, accept_lens=self.buffer))


class SamplesLikeItsNeighbour(CheckedExecutor):
    """Each row is sampled with the cut-offs of the row before it."""

    def __init__(self, config):
        super().__init__(config)
        rows = self.executor._rows
        sampling = rows.sampling

        def shifted(numbers):
            found = sampling(numbers)
            return found and replace(found, top_k=found.top_k.roll(1), top_p=found.top_p.roll(1))

        rows.sampling = shifted


class LeavesExpertsBehind(CheckedExecutor):
    """Compaction takes along what is floating point; routed experts stay where their nodes were."""

    def __init__(self, config):
        super().__init__(config)
        ops = self.executor._ops
        compact = ops.compact
        ops.compact = lambda values, *where: values if values.dtype == torch.int32 else compact(values, *where)


class HidesTheRoot(CheckedExecutor):
    """Nodes of the second level and below do not see the root of their tree."""

    def __init__(self, config):
        super().__init__(config)
        decode_round = self.executor._round
        forward = decode_round._verify_forward

        def without_root(batch, tree, *rest):
            bits = torch.where(tree.depths >= 2, tree.ancestor_bits & ~1, tree.ancestor_bits)
            return forward(batch, replace(tree, ancestor_bits=bits), *rest)

        decode_round._verify_forward = without_root


_DEFECTS = (
    (RelaysHiddenStatesAlways, ("ACCEPT-17",)),
    (AllocatesForTheWidestAlgorithm, ("ACCEPT-17",)),
    (KeepsTheVerifyPass, ("ACCEPT-17",)),
    (ShowsHiddenStatesToAll, ("ACCEPT-17",)),
    (MergesNoneAsZeros, ("ACCEPT-17",)),
    (StopsLate, ("ANSWER",)),
    (ReusesTheHostBuffer, ("ANSWER",)),
    (SamplesLikeItsNeighbour, ("ANSWER",)),
    (LeavesExpertsBehind, ("ANSWER",)),
    (HidesTheRoot, ("ANSWER",)),
)

MUTANTS = tuple(
    Mutant(f"gpu:{kind.__name__}", kind.__doc__, "executor", kind, caught_by) for kind, caught_by in _DEFECTS
)
