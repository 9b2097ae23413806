"""A session over workers, with the interface of `DecodeSession`: requests in, text out. The parent is client and
router.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ...core.algorithm.registry import is_known_everywhere
from ...core.contract.request import Request
from ...core.errors import ConfigError, ForedraftError
from ...core.handoff import HandoffTiming
from ...core.scheduler.config import EngineRole
from ...core.scheduler.spec import EngineSpec
from ...observe.children.cores import idle_cores
from ...observe.engine_lines import active_level
from ..session.devices import ARGUMENTS
from ..session.loop import RequestDelta
from ..session.memory import has_states
from ..session.plan import SessionPlan, plan_session
from ..session.ready import READY_S, Ready, capture_bounds
from ..session.session import check_vocabulary
from ..session.text import Tokenizer
from ..session.text_session import REFUSED, SessionStats, TextDelta, TextSession
from ..types.session_options import RING, SessionOptions
from .loop import LISTEN_S, WorkerLoop
from .topology import WorkerCounts
from .worker import SessionOrder, spec_for
from .workers import Workers

SECOND_NS = 1_000_000_000
TIMING = HandoffTiming(lease_ns=60 * SECOND_NS, hold_ns=180 * SECOND_NS, fence_ns=5 * SECOND_NS)
"""Between real processes: a worker answers between two rounds or chunks, which may take long;
a death is found at once, without them."""
DRAIN_S = 300.0  # longer than any lease, hold and fence: what is still held then will never be released


class NotDrained(ForedraftError):
    """Workers still hold something although every request is over."""


class DisaggregatedSession(TextSession):
    """See `open`. Not thread-safe. `plan` is the decode workers'."""

    def __init__(self, workers: Workers, plan: SessionPlan, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.workers = workers
        self.plan = plan
        self.loop: WorkerLoop = WorkerLoop(workers)
        self._reports: dict[str, dict[str, Any]] = {}  # the last ones
        self._is_open = True

    @classmethod
    def open(
        cls,
        plan: SessionPlan,
        workers: Workers,
        *,
        tokenizer: Tokenizer | None = None,
        timing: HandoffTiming = TIMING,
        faults: Mapping[str, Mapping[str, Any]] | None = None,
        logs: Mapping[str, Path] | None = None,
        log_part_bytes: int | None = None,
        run: Mapping[str, Any] | None = None,
    ) -> DisaggregatedSession:
        """Have every worker load the models of `plan` and make its engine (see `plan_disaggregated`).

        `faults` are injected on the links, `logs` are the event logs to write, both by worker; a log goes on in another
        file after `log_part_bytes`. Raises WorkerFailed.
        """
        options = plan.options
        tokenizer = tokenizer or Tokenizer.load(options.model)
        check_vocabulary(tokenizer, plan)
        workers.num_sessions += 1
        for worker in workers.living():
            order = SessionOrder(
                session=workers.num_sessions,
                options=replace(options, device=worker.device),
                engine=spec_for(worker.place.role, plan.spec),
                dtype=str(plan.dtype).removeprefix("torch."),
                device=worker.device,
                weight_bytes=plan.weight_bytes,
                kv_bytes=plan.kv_bytes,
                timing=timing,
                log=str(logs[worker.name]) if logs is not None else None,
                log_part_bytes=log_part_bytes,
                run=run,
                faults=dict((faults or {}).get(worker.name, {})),
                log_level=active_level(),
            )
            worker.say({"do": "open", "order": order.to_json()})
        opened = workers.answers("opened")
        for worker in workers.living():
            if worker.place.role is EngineRole.DECODE:
                described = EngineSpec.from_json(opened[worker.name]["engine"], f"the engine of {worker.name}")
                plan = replace(plan, spec=described)
                break
        return cls(workers, plan, tokenizer)

    def __enter__(self) -> DisaggregatedSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            # after an error the state of the workers is unknown: they end, or the next session resets them
            self.close()

    # -- numbers ------------------------------------------------------------------------------------------------------

    def reports(self) -> dict[str, dict[str, Any]]:
        """Return the held rows and slots of each living worker, and its work so far. Requests go on meanwhile, and
        their deltas are kept."""
        self._reports = self.loop.await_reports()
        return self._reports

    def drain(self) -> dict[str, dict[str, Any]]:
        """Wait until no worker holds anything for a request, and report. NotDrained after five minutes."""
        deadline_s = time.monotonic() + DRAIN_S
        while not all(report["is_idle"] for report in self.reports().values()):
            if time.monotonic() > deadline_s:
                raise NotDrained(f"after {DRAIN_S:.0f} s without a request workers still hold: {self._reports}")
            time.sleep(LISTEN_S)
        return self._reports

    def stats(self) -> SessionStats:
        """Return the numbers since the session was opened, of the workers that live."""
        reports = self.reports() if self._is_open else self._reports
        totals = {
            key: sum(report[key] for report in reports.values())
            for key in ("rounds", "verified_rows", "drafted", "correct_drafts", "switches")
        }
        phases = {
            f"{name}_{phase}": seconds
            for name, report in reports.items()
            for phase, seconds in report["phase_seconds"].items()
        }
        return self._stats(
            phase_seconds=phases,
            ema_accept_len={
                name: {int(bound): ema for bound, ema in report["ema_accept_len"].items()}
                for name, report in reports.items()
                if report["ema_accept_len"] and self.workers[name].place.role is EngineRole.DECODE
            },
            **totals,
        )

    def make_ready(self, on_line: Callable[[str], None], seconds: float = READY_S) -> Ready:
        """Have every worker compile and capture what its requests would wait for, each within `seconds` and the memory
        that the plan has for captured rounds. Raises WorkerFailed."""
        self.workers.on_progress = lambda worker, line: on_line(f"{worker.name}: {line}")
        for worker in self.workers.living():
            own = replace(self.plan, spec=spec_for(worker.place.role, self.plan.spec))
            worker.say({"do": "make_ready", **asdict(capture_bounds(own, seconds))})
        answers = self.workers.answers("ready")
        left_out = [f"{name}: {kind}" for name, answer in answers.items() for kind in answer["left_out"]]
        return Ready(sum(answer["num_graphs"] for answer in answers.values()), tuple(left_out))

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self, complete: bool = False) -> None:
        """End the session; the workers stay, for another one. `complete`: the logs say that the run came to its end."""
        if not self._is_open:
            return
        self.reports()
        self._is_open = False
        self.workers.ask_all("closed", {"do": "close", "complete": complete})

    # -- inside -------------------------------------------------------------------------------------------------------

    def _begin(self, request: Request) -> str:
        return self.loop.submit(request)

    def _serve(self) -> list[TextDelta]:
        return [self._told(delta) for delta in self.loop.turn()]

    def _told(self, delta: RequestDelta) -> TextDelta:
        text = self._as_text(delta)
        if delta.request_id in self.loop.refused:
            self.loop.refused.discard(delta.request_id)
            return replace(text, finish=REFUSED)
        return text

    @property
    def _is_serving(self) -> bool:
        return not self.loop.is_idle

    def _abort_all(self) -> None:
        self.loop.abort_all()


def plan_disaggregated(
    options: SessionOptions, topology: WorkerCounts, longest_request: int | None = None
) -> SessionPlan:
    """Return the plan of each worker: all of them have the same sizes, so that whatever one has computed fits into
    another.

    Workers on one device share its memory, and on a CPU its cores. Raises as `plan_session` does.
    """
    if options.window_kv == RING:
        message = f"{RING}; workers hand whole KV on, and a ring keeps a window of it: leave disaggregate out"
        raise ConfigError.of(ARGUMENTS, "window_kv", message)
    ranks = options.tensor_parallel
    devices = topology.devices(options.device, ranks)
    sharing = max(devices.count(device) for device in devices)
    threads = options.threads
    if devices[0] == "cpu" and threads is None:
        threads = max(1, idle_cores() // sharing)
    fraction = options.memory_fraction / max(1, sharing // ranks)
    device = devices[0] if ranks == 1 else options.device
    plan = plan_session(replace(options, device=device, threads=threads, memory_fraction=fraction), longest_request)
    if has_states(plan.target, plan.draft):
        message = "a handoff carries KV and no recurrent state; a model with recurrent layers decodes where it prefills"
        raise ConfigError.of(ARGUMENTS, "disaggregate", message)
    if not is_known_everywhere(plan.algorithm.name):
        message = (
            f"{plan.algorithm.name} was registered in this process alone; workers are processes of their own and know the entry "
            "points of group foredraft.algorithms"
        )
        raise ConfigError.of(ARGUMENTS, "algorithm", message)
    return plan
