"""Planted defects of the simulated executor, for the executor contract's kill matrix."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...properties.harness.mutants import Mutant
from ..executor.simulated_subject import SimulatedExecutor

BYTES_PER_VALUE = 2
TOKENS_PER_STEP = 64


class SetsRoomAsideForAll(SimulatedExecutor):
    """The memory plan sets room aside for hidden states whatever the draft is."""

    def hidden_bytes(self):
        return super().hidden_bytes() or TOKENS_PER_STEP * self.assembly.target.hidden * BYTES_PER_VALUE


class SetsNoRoomAside(SimulatedExecutor):
    """The memory plan forgets the hidden states of drafts that read them."""

    def hidden_bytes(self):
        return 0


class SimulatesTheRelay(SimulatedExecutor):
    """The device keeps a hidden state per row, to have the traffic of any algorithm."""

    def __init__(self, config):
        super().__init__(config)
        self.device.relayed = np.zeros((config.max_running + 1, self.assembly.target.hidden), np.float16)


class AnswersWithAPlaceholder(SimulatedExecutor):
    """A result has zeros where a real one would have hidden states."""

    def collect(self):
        result = super().collect()
        if result.decode is None:
            return result
        shape = (*result.decode.accept_lens.shape[1:], 1, self.assembly.target.hidden)
        outputs = ({"hidden_states": np.zeros(shape, np.float16)},) * result.decode.rounds
        return replace(result, decode=replace(result.decode, outputs=outputs))


class DrawsOneRoundMore(SimulatedExecutor):
    """A block is drawn one round longer than it was certified."""

    def collect(self):
        step = self._queue[0]
        if step.decode is not None:
            self._queue[0] = replace(step, decode=replace(step.decode, max_rounds=step.decode.max_rounds + 1))
        return super().collect()


class ForgetsTheStop(SimulatedExecutor):
    """A stop that comes between launch and run is lost."""

    def request_stop(self, last_step_id):
        pass


class EndsAreLate(SimulatedExecutor):
    """Who ends in a round is said in the next one."""

    def collect(self):
        result = super().collect()
        if result.decode is None:
            return result
        return replace(result, decode=replace(result.decode, ended=np.zeros_like(result.decode.ended)))


_DEFECTS = (
    (SetsRoomAsideForAll, ("ACCEPT-17",)),
    (SetsNoRoomAside, ("ACCEPT-17",)),
    (SimulatesTheRelay, ("ACCEPT-17",)),
    (AnswersWithAPlaceholder, ("ACCEPT-17",)),
    (DrawsOneRoundMore, ("ANSWER",)),
    (ForgetsTheStop, ("ANSWER",)),
    (EndsAreLate, ("ANSWER",)),
)

MUTANTS = tuple(
    Mutant(f"sim:{kind.__name__}", kind.__doc__, "executor", kind, caught_by) for kind, caught_by in _DEFECTS
)
