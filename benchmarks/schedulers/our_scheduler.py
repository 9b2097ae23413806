"""Our engine as the simulator assembles it for `hardware.server`, on the same device and in the same loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from foredraft.core.contract.events import Event, Planned
from foredraft.core.contract.request import Request, first_stop_token
from foredraft.core.contract.step import DecodeResult, DecodeStep, MultiStepEnd, PrefillResult, Step, StepResult
from foredraft.core.prompt import Prompt
from foredraft.core.scheduler.engine import Engine
from foredraft.core.scheduler.rules import ServerRules, settings_of
from foredraft.core.scheduler.rules.admission_state import PauseEnd
from foredraft.sim.assembly import assemble
from foredraft.sim.scenario_file import scenario_from_dict

from .workloads import BLOCK, CONTEXT, STOP_TOKEN, Decision, Device, DrawnArrivals, DrawnCall, DrawnWorkload

ALGORITHMS = {"none": "NONE", "eagle3": "EAGLE3", "ngram": "NGRAM"}


RULES: tuple[str, ...] = tuple(name for name, value in vars(ServerRules).items() if isinstance(value, bool | PauseEnd))
"""The rules that are constants of a server, by their names."""


def make_engine(server: str, workload: DrawnWorkload, **changes: Any) -> Engine:
    """Make the engine of a scenario with this server and the settings of a workload.

    `changes`: other keys of the table `engine`, and other values of RULES. The engine keeps the tokens of outputs.
    """
    constants = {name: changes.pop(name) for name in RULES if name in changes}
    engine = {
        "mode": "overlap" if workload.is_async else "synchronous",
        "page_size": BLOCK,
        "kv_slots": workload.blocks * BLOCK,
        "max_running": workload.max_running,
        "chunk_size": workload.budget,
        "max_step_tokens": workload.budget,
        "prefix_cache": workload.caches,
        "multi_step_rounds": 1,
    }
    speculation = {"algorithm": ALGORITHMS[workload.method], "policy": "fixed", "steps": workload.steps}
    scenario = scenario_from_dict(
        {
            "hardware": {"gpu": "H100", "server": server, "kernels": "roofline"},
            "model": {"target": "llama-3.1-8b", "context_len": CONTEXT},
            "engine": engine | changes,
            "speculation": speculation,
        },
        "workload",
    )
    spec = assemble(scenario).spec.with_config(track_tokens=True)
    rules = spec.config.rules
    changed = type("ChangedRules", (type(rules),), constants)
    return spec.with_config(rules=changed(**settings_of(rules))).make_engine()


class OurRun:
    """One workload on a fresh engine."""

    def __init__(self, server: str, workload: DrawnWorkload, **changes: Any) -> None:
        self.workload = workload
        self.notes: set[str] = set()
        self.engine = make_engine(server, workload, **changes)
        self.engine._events = self._on_event
        self.device = Device(workload)
        self.arrivals = DrawnArrivals(workload)
        self._names: dict[int, str] = {}  # by row
        self._contexts: dict[str, int] = {}  # output tokens that are part of the prefill, by request
        self._retracted: tuple[str, ...] = ()

    def decisions(self) -> Iterator[Decision]:
        """Run the loop until no request is left."""
        queue: deque[StepResult | None] = deque()
        plan = 0
        engine = self.engine
        while not self.arrivals.is_over or engine.requests.live:
            for call in self.arrivals.before_plan(plan):
                outcome = engine.submit(self._request(call), plan)
                assert not outcome.refusal, outcome.refusal
            for name in self.arrivals.given_up():
                engine.abort(name, plan)
                self.arrivals.end(name)
            self._retracted = ()
            step = engine.plan(plan)
            yield self._decision(step)
            queue.append(None if step is None else self._execute(step))
            plan += 1
            if len(queue) == engine.pipeline_depth:
                result = queue.popleft()
                if result is not None:
                    for finished in sorted(engine.commit(result, plan).finished, key=lambda end: end.request_id):
                        self.arrivals.end(finished.request_id)

    def _request(self, call: DrawnCall) -> Request:
        prompt = Prompt.of_tokens(self.workload.full_prompt(call.name))
        return Request(call.name, prompt, call.max_tokens, stop_tokens=(STOP_TOKEN,))

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Planned):
            self._retracted = event.retracted

    def _decision(self, step: Step | None) -> Decision:
        prefill, decode, cached = [], [], []
        if step is not None:
            for join in step.joins:
                self._names[join.row] = join.request.request_id
                self._contexts[join.request.request_id] = join.num_emitted
                cached.append((join.request.request_id, join.num_cached))
            if step.prefill is not None:
                chunks = self.engine.requests.in_flight[-1].chunks
                prefill = [(chunk.record.request.request_id, chunk.length + chunk.padding) for chunk in chunks]
            if step.decode is not None:
                nodes = step.decode.shape.nodes
                decode = [(self._names[row], nodes) for row in step.decode.rows.tolist()]
        store = self.engine.store
        evictable = store.cache.evictable_slots
        blocks = (store.allocator.num_held_slots - evictable) // BLOCK
        return Decision(tuple(prefill), tuple(decode), tuple(sorted(self._retracted)), tuple(cached), blocks)

    def _execute(self, step: Step) -> StepResult:
        prefill = decode = None
        if step.prefill is not None:
            tokens = np.zeros(len(step.prefill.rows), dtype=np.int64)
            for i in np.flatnonzero(step.prefill.is_last).tolist():
                name = self._names[int(step.prefill.rows[i])]
                tokens[i] = self.device.end_prompt(name, self._contexts[name])
            prefill = PrefillResult(tokens, tokens == STOP_TOKEN)
        if step.decode is not None:
            decode = self._verify(step.decode)
        return StepResult(step.step_id, prefill, decode, np.zeros(1, dtype=np.int64))

    def _verify(self, step: DecodeStep) -> DecodeResult:
        width = step.shape.nodes
        tokens = np.full((1, len(step.rows), width), -1, dtype=np.int64)
        lens = np.ones((1, len(step.rows)), dtype=np.int32)
        stops = np.full((1, len(step.rows)), -1, dtype=np.int32)
        for i, row in enumerate(step.rows.tolist()):
            run = self.device.verify(self._names[row], width - 1)
            lens[0, i], tokens[0, i, : len(run)] = len(run), run
            stops[0, i] = first_stop_token(np.array(run), (STOP_TOKEN,))
        ended = np.zeros(len(step.rows), dtype=bool)
        return DecodeResult(1, lens, stops if (stops >= 0).any() else None, ended, MultiStepEnd.MAX_ROUNDS, tokens)
