"""Planted defects of the simulated executor, for the executor contract's kill matrix."""

from dataclasses import replace

import numpy as np

from ...sim.actors.device import SimulatedDevice
from ..adapters.simulated_executor import SimulatedExecutor
from .planting import Defects

SIMULATED = Defects("executor", SimulatedExecutor, prefix="sim:")


@SIMULATED.breaks("ACCEPT-17")
class SetsRoomAsideForAll(SimulatedExecutor):
    """The memory plan sets room aside for hidden states whatever the draft is."""

    def hidden_bytes(self):
        return super().hidden_bytes() or 64 * self.assembly.target.hidden * 2


@SIMULATED.breaks("ACCEPT-17")
class SetsNoRoomAside(SimulatedExecutor):
    """The memory plan forgets the hidden states of drafts that read them."""

    def hidden_bytes(self):
        return 0


@SIMULATED.breaks("ACCEPT-17")
class SimulatesTheRelay(SimulatedExecutor):
    """The device keeps a hidden state per row, to have the traffic of any algorithm."""

    def __init__(self, config):
        super().__init__(config)
        self.device.relayed = np.zeros((config.max_running + 1, self.assembly.target.hidden), np.float16)


@SIMULATED.breaks("ANSWER")
class DrawsOneRoundMore(SimulatedExecutor):
    """A block is drawn one round longer than it was certified."""

    def collect(self):
        step = self._queue[0]
        if step.decode is not None:
            self._queue[0] = replace(step, decode=replace(step.decode, max_rounds=step.decode.max_rounds + 1))
        return super().collect()


@SIMULATED.breaks("ANSWER")
class ForgetsTheStop(SimulatedExecutor):
    """A stop that comes between launch and run is lost."""

    def request_stop(self, last_step_id):
        pass


@SIMULATED.breaks("STATE-04")
class SetsNoStatesAside(SimulatedExecutor):
    """The memory plan forgets the states of a model with recurrent layers."""

    def state_room(self):
        return 0


@SIMULATED.breaks("STATE-04")
class SetsStatesAsideForAll(SimulatedExecutor):
    """The memory plan sets states aside for every model."""

    def state_room(self):
        return super().state_room() or 1


@SIMULATED.breaks("STATE-01", "STATE-02")
class GoesOnFromTheOldLength(SimulatedDevice):
    """A row that begins again has at least the length of the request before."""

    def prefill(self, step):
        rows = step.prefill.rows
        before = self._kv_end[rows]
        result = super().prefill(step)
        self._kv_end[rows] = np.maximum(self._kv_end[rows], before)
        return result


@SIMULATED.breaks("ANSWER")
class EndsAreLate(SimulatedExecutor):
    """Who ends in a round is said in the next one."""

    def collect(self):
        result = super().collect()
        if result.decode is None:
            return result
        return replace(result, decode=replace(result.decode, ended=np.zeros_like(result.decode.ended)))


MUTANTS = tuple(SIMULATED.mutants)
