"""The simulated executor behind the executor contract:
`foredraft check executor foredraft.checks.adapters.simulated_executor:make`.

What `actors/engine.py` does with a device on simulated time, without the time: launch, draw, apply. The contract's
config is taken as it comes (`properties/executor/contract.py`); this file imports nothing of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from ...core.contract.step import Step, StepResult
from ...core.draws import request_key
from ...sim.actors.device import SimulatedDevice, Truth
from ...sim.assembly import Assembly, assemble
from ...sim.scenario import Acceptance, EngineTable, Hardware, Scenario, Speculation
from ...sim.scenario.model import Model

LONGEST_OUTPUT = 25
PLAIN, RECURRENT = Model(), Model(target="qwen3-next-80b-a3b")
DRAFTS = {(RECURRENT, "STANDALONE"): "qwen3-0.6b"}  # others have their usual one


class SimulatedExecutor:
    """Run steps on one device. The true length of an output follows from the request's id, some beyond
    what it may emit."""

    capabilities = ("trees", "hidden_states", "inspection", "accounting", "states", "lengths", "parking")

    def __init__(self, config: Any) -> None:
        controller = config.make_controller()
        nodes = controller.max_num_draft_tokens
        model = RECURRENT if config.is_recurrent else PLAIN
        self.assembly = _assembly(model, config.algorithm, config.steps, config.topk, nodes, config.page_size)
        acceptance, rank_ratio = self.assembly.acceptance, self.assembly.scenario.acceptance.rank_ratio
        self.device = SimulatedDevice(
            self.assembly.cost,
            config.max_running,
            acceptance,
            lambda shape: acceptance.for_tree(shape, rank_ratio),
        )
        self._queue: deque[Step] = deque()
        self._stop_through = 0
        self._now_ns = 0

    def launch(self, step: Step) -> None:
        for join in step.joins:
            key = request_key(join.request.request_id)
            self.device.truths[join.request.request_id] = Truth(1 + key % LONGEST_OUTPUT, key)
        self._queue.append(step)

    def collect(self) -> StepResult:
        step = self._queue.popleft()
        device = self.device
        device.open_rows(step.joins)
        decode = prefill = drawn = None
        device_ns = device.step_ns(step) if step.prefill is not None else 0
        if step.decode is not None:
            limit = 1 if step.step_id <= self._stop_through else step.max_rounds
            drawn = device.draw(step.decode, limit, timed=step.prefill is None)
        if step.prefill is not None:
            prefill = device.prefill(step)
        rounds_ns = np.array([device_ns])
        if drawn is not None:
            rounds = drawn.rounds
            decode = device.apply(step.decode, drawn, rounds, asked=rounds < step.max_rounds)
            if step.prefill is None:
                rounds_ns = drawn.device_ns[:rounds]
        ends_ns = self._now_ns + np.add.accumulate(rounds_ns.astype(np.int64))
        self._now_ns = int(ends_ns[-1])
        return StepResult(step.step_id, prefill, decode, ends_ns)

    def request_stop(self, last_step_id: int) -> None:
        self._stop_through = max(self._stop_through, last_step_id)

    def hidden_sizes(self) -> tuple[int, ...]:
        shapes = [self.assembly.target]
        if self.assembly.draft is not None and self.assembly.draft.body is not None:
            shapes.append(self.assembly.draft.body)
        return tuple(shape.hidden for shape in shapes)

    def roots(self) -> tuple[object, ...]:
        return (self.device, self._queue)

    def weights(self) -> tuple[object, ...]:
        return (self.device.cost,)  # tables of times

    def hidden_bytes(self) -> int:
        if self.assembly.algorithm.reads_hidden_states:
            return 0  # those of a pass, which no round is given
        return self.assembly.memory.hidden_states_bytes

    def state_room(self) -> int:
        each = self.assembly.target.recurrent_state_bytes
        memory = self.assembly.memory
        return memory.recurrent_states_bytes // each if each and memory is not None else 0

    def states(self, rows: Sequence[int]) -> list[tuple[int, None]]:
        return [(length, None) for length in self.device.kv_lengths(np.array(rows, np.intp)).tolist()]


@cache
def _assembly(model: Model, algorithm: str, steps: int, topk: int, num_draft_tokens: int, page_size: int) -> Assembly:
    """Assemble a model on a B300, with whatever draft the algorithm has."""
    nodes = num_draft_tokens if topk > 1 else None
    return assemble(
        Scenario(
            model=model.model_copy(update={"draft": DRAFTS.get((model, algorithm))}),
            hardware=Hardware(gpu="B300"),
            speculation=Speculation(
                algorithm=algorithm, policy="fixed", steps=steps, topk=topk, num_draft_tokens=nodes
            ),
            engine=EngineTable(page_size=page_size, max_running=8, chunk_size=64),
            acceptance=Acceptance(preset="chat"),
        )
    )


make = SimulatedExecutor
