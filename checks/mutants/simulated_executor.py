"""Planted defects of the simulated executor, for the executor contract's kill matrix."""

from dataclasses import replace

from ...sim.actors.device import SimulatedDevice
from ..adapters.simulated_executor import SimulatedExecutor
from .planting import defects, lookup

SIMULATED = """
SetsRoomAsideForAll (ACCEPT-17): The memory plan sets room aside for hidden states whatever the draft is.
    SimulatedExecutor.hidden_bytes = good(self) or 64 * self.assembly.target.hidden * 2

SetsNoRoomAside (ACCEPT-17): The memory plan forgets the hidden states of drafts that read them.
    SimulatedExecutor.hidden_bytes = 0

SimulatesTheRelay (ACCEPT-17): The device keeps a hidden state per row, to have the traffic of any algorithm.
    SimulatedExecutor.__init__:
        good(self, config)
        self.device.relayed = np.zeros((config.max_running + 1, self.assembly.target.hidden), np.float16)

DrawsOneRoundMore (ANSWER): A block is drawn one round longer than it was certified.
    SimulatedExecutor.collect:
        step = self._queue[0]
        if step.decode is not None:
            self._queue[0] = replace(step, decode=replace(step.decode, max_rounds=step.decode.max_rounds + 1))
        return good(self)

ForgetsTheStop (ANSWER): A stop that comes between launch and run is lost.
    SimulatedExecutor.request_stop = None

SetsNoStatesAside (STATE-04): The memory plan forgets the states of a model with recurrent layers.
    SimulatedExecutor.state_room = 0

SetsStatesAsideForAll (STATE-04): The memory plan sets states aside for every model.
    SimulatedExecutor.state_room = good(self) or 1

GoesOnFromTheOldLength (STATE-01, STATE-02): A row that begins again has at least the length of the request before.
    SimulatedDevice.prefill
        - self._kv_end[row] = start + length + int(self._left[row])
        + self._kv_end[row] = max(self._kv_end[row], start + length + int(self._left[row]))

EndsAreLate (ANSWER): Who ends in a round is said in the next one.
    SimulatedExecutor.collect:
        result = good(self)
        if result.decode is None:
            return result
        return replace(result, decode=replace(result.decode, ended=np.zeros_like(result.decode.ended)))
"""

MUTANTS = defects(
    "executor", SimulatedExecutor, [SimulatedDevice, SimulatedExecutor, replace], SIMULATED, prefix="sim:"
)
__getattr__ = lookup(MUTANTS)
