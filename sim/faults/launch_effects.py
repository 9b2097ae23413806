"""The faults of one engine that begin when a step is launched: of its device, its drafts, its pool, its clock and its
table of steps."""

from __future__ import annotations

import json
from collections.abc import Callable

from ...core.adaptive.slot import InvalidObservation
from ...core.contract.step import Step
from ...core.errors import ConfigError
from ..actors.engine import EngineActor
from .clock import HostClock
from .plan import Ledger


class LaunchEffects:
    """Begins and ends them. `check` takes a promise, whether it is kept, and a message."""

    def __init__(self, replica: int, ledger: Ledger, clock: HostClock, check: Callable[[str, bool, str], None]) -> None:
        self._replica = replica
        self._ledger = ledger
        self._clock = clock
        self._check = check
        self._poisoned_rows: set[int] = set()  # only asked, never iterated
        self._memory_until_ns = self._slow_until_ns = self._drafts_until_ns = 0
        self._memory_limit = 0
        self._nan_rows: dict[int, int] = {}  # step -> the row for which the target has no numbers
        self._beginnings: dict[str, Callable[[Step, EngineActor], None]] = {
            "device.out_of_memory": self._run_short_of_memory,
            "device.slow": self._slow_down,
            "device.nan": self._lose_numbers,
            "draft.right": self._draft_right,
            "draft.wrong": self._draft_wrong,
            "draft.nan": self._feed_nonsense,
            "pool.denied": self._deny,
            "pool.retraction": self._retract,
            "clock.jump": self._jump,
            "clock.freeze": self._freeze,
            "config.half_written": self._reload_half,
        }

    def knows(self, kind: str) -> bool:
        """Return whether faults of this kind begin when a step is launched."""
        return kind in self._beginnings

    def begin(self, kind: str, step: Step, actor: EngineActor) -> None:
        """Let a fault begin with a step that was launched now."""
        self._beginnings[kind](step, actor)

    def set_device(self, actor: EngineActor) -> None:
        """End what has lasted long enough."""
        device, now_ns = actor.device, actor.env.now
        device.slowdown = self._ledger.plan.device.slow.factor if now_ns < self._slow_until_ns else 1.0
        if now_ns >= self._drafts_until_ns:
            device.forced_drafts = ""

    def note_poison(self, row: int, is_poisoned: bool) -> None:
        """Note whether the request that gets a row is one that the device cannot bear."""
        if is_poisoned:
            self._poisoned_rows.add(row)
        else:
            self._poisoned_rows.discard(row)

    def failure_of(self, step: Step, now_ns: int) -> str:
        """Return the kind of fault by which a step fails that was not chosen to fail; empty if by none."""
        if now_ns < self._memory_until_ns and _num_tokens(step) > self._memory_limit:
            return "device.out_of_memory"
        if self._is_poisoned(step):
            self._ledger.note("device.poison", now_ns)
            return "device.poison"
        return ""

    def take_failed_row(self, step_id: int) -> int:
        """Return the row for which the target had no numbers in a step, once; 0 if there is none."""
        return self._nan_rows.pop(step_id, 0)

    def _is_poisoned(self, step: Step) -> bool:
        if not self._poisoned_rows:
            return False
        parts = [part for part in (step.prefill, step.decode) if part is not None]
        return any(row in self._poisoned_rows for part in parts for row in part.rows.tolist())

    def _run_short_of_memory(self, step: Step, actor: EngineActor) -> None:
        """Let only half of this step's tokens fit for a while, but never less than one request alone needs."""
        controller = actor.engine.controller
        alone = max(actor.engine.config.chunk_size // 8, controller.round_shape(controller.fewest_steps(1), 1).nodes)
        self._memory_limit = max(_num_tokens(step) // 2, alone)
        self._memory_until_ns = actor.env.now + round(self._ledger.plan.device.out_of_memory.lasts_s * 1e9)

    def _lose_numbers(self, step: Step, actor: EngineActor) -> None:
        part = step.decode if step.decode is not None else step.prefill
        assert part is not None, "a step has one part at least"
        rows = part.rows
        share = self._ledger.draws.amount("device.nan", self._replica, step.step_id)
        self._nan_rows[step.step_id] = int(rows[int(share * len(rows))])

    def _slow_down(self, step: Step, actor: EngineActor) -> None:
        self._slow_until_ns = actor.env.now + round(self._ledger.plan.device.slow.lasts_s * 1e9)

    def _draft_right(self, step: Step, actor: EngineActor) -> None:
        self._force_drafts("right", actor, self._ledger.plan.draft.right.lasts_s)

    def _draft_wrong(self, step: Step, actor: EngineActor) -> None:
        self._force_drafts("wrong", actor, self._ledger.plan.draft.wrong.lasts_s)

    def _force_drafts(self, how: str, actor: EngineActor, lasts_s: float) -> None:
        actor.device.forced_drafts = how
        self._drafts_until_ns = actor.env.now + round(lasts_s * 1e9)

    def _feed_nonsense(self, step: Step, actor: EngineActor) -> None:
        controller = actor.engine.controller
        before = controller.snapshot()
        most = controller.max_num_draft_tokens
        for nonsense in ([float("nan")], [float("inf")], [-1], [most + 5], [1e300], [0.0, float("-inf")]):
            try:
                controller.on_verify_complete(nonsense, 1, controller.max_steps)
                refused = False
            except InvalidObservation:
                refused = True
            kept = refused and controller.snapshot() == before
            self._check("steps_valid", kept, f"feedback of {nonsense} was taken")

    def _deny(self, step: Step, actor: EngineActor) -> None:
        actor.engine.deny_allocations(self._ledger.plan.pool.denied.count, self._clock.stamp(actor.env.now))

    def _retract(self, step: Step, actor: EngineActor) -> None:
        running = actor.engine.requests.running_ids
        if running:
            share = self._ledger.draws.amount("pool.retraction", self._replica, step.step_id)
            if actor.engine.request_retraction(running[int(share * len(running))], self._clock.stamp(actor.env.now)):
                actor.stop_launched_steps()

    def _jump(self, step: Step, actor: EngineActor) -> None:
        share = 2 * self._ledger.draws.amount("clock.jump", self._replica, step.step_id) - 1
        self._clock.jump(actor.env.now, int(share * self._ledger.plan.clock.jump.jump_s * 1e9))

    def _freeze(self, step: Step, actor: EngineActor) -> None:
        self._clock.freeze(actor.env.now, round(self._ledger.plan.clock.freeze.lasts_s * 1e9))

    def _reload_half(self, step: Step, actor: EngineActor) -> None:
        """Reload a table that was cut off while it was written."""
        controller = actor.engine.controller
        before, config = controller.snapshot(), controller.policy.config
        slots = zip(config.bounds, config.slots, strict=True)
        text = json.dumps({str(bound): {"candidate_steps": list(slot.candidate_steps)} for bound, slot in slots})
        share = self._ledger.draws.amount("config.half_written", self._replica, step.step_id)
        try:
            controller.reload(text[: 1 + int(share * (len(text) - 1))], "reload")
            refused = False
        except ConfigError:
            refused = True
        kept = refused and controller.snapshot() == before and controller.policy.config is config
        self._check("last_good_config", kept, "half a table was taken")


def _num_tokens(step: Step) -> int:
    """Return how many tokens a step computes in its largest pass."""
    tokens = 0 if step.prefill is None else int(step.prefill.lens.sum())
    return tokens + (0 if step.decode is None else step.decode.num_verify_tokens)
