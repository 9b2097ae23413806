"""The ranks' processes, as the parent sees them, and the executor that runs an engine's steps on all of them.

A rank that dies, hangs or differs ends them all: each waits for the others twice per layer, and none has the whole
model. The error names the rank that was the cause.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.algorithm.algorithm import AlgorithmShape
from ...core.contract.step import Step, StepResult
from ...core.contract.text import PromptScores
from ...core.errors import ForedraftError
from ...core.scheduler.config import EngineRole
from ..executor.executor import ExecutorCounters
from ..executor.graphs import CaptureBounds
from .processes import HOST, RankProcesses, WorkerFailed, WorkerPlace, WorkerProcess, backend_for
from .wire import arrays_from_json, engine_to_json, result_from_json, step_to_json

if TYPE_CHECKING:
    from ...core.scheduler.spec import EngineSpec

LISTEN_S = 1.0
OWN, SPARE = 0, 1
"""The executors of a session's ranks."""
GRACE_S = 2.0
"""How long the parent looks for the cause when a rank says that an exchange has failed."""


class RankFailed(ForedraftError):
    """A rank has died, hangs, has failed or differs from the others; the message names it. No rank runs any more."""


@dataclass(frozen=True, slots=True)
class RankWorld:
    """The ranks of all workers of a disaggregated session, and the `place` of the worker whose ranks these are.
    `peers`: places and names of the workers that exchange KV with it."""

    host: str
    port: int
    place: int
    num_workers: int
    backend: str
    peers: list[tuple[int, str]]


@dataclass(frozen=True, slots=True)
class RankPlace(WorkerPlace):
    """One rank."""

    @property
    def title(self) -> str:
        return f"rank {self.rank}"


class Ranks(RankProcesses):
    """Processes that have a part of one model each.
    They serve one session after the other; leaving the context ends them."""

    def __init__(self, devices: Sequence[str], world: RankWorld | None = None) -> None:
        """`world`: of ranks that exchange KV with those of other workers; else they are alone."""
        self._world = world
        self._found: dict[str, dict[str, Any]] = {}  # answers of ranks to the last question, by name
        super().__init__([RankPlace(f"rank{i}", EngineRole.BOTH, i) for i in range(len(devices))], devices)

    def hear(self, wait_s: float) -> list[tuple[WorkerProcess, dict[str, Any] | None]]:
        """Wait up to `wait_s` for messages and return them; None: the rank is dead."""
        heard = [said for worker in self._ready(wait_s, EngineRole.BOTH) for said in self._listen(worker)]
        self._watch(heard)
        return heard

    def open(self, orders: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Have every rank load its part by its order; return what rank 0 has answered. Raises RankFailed."""
        self.num_sessions += 1
        for worker, order in zip(self.all.values(), orders, strict=True):
            worker.say({"do": "open", "session": self.num_sessions, "order": order})
        answers = list(self.gather("opened").values())
        for worker, answer in zip(self.all.values(), answers, strict=True):
            for what, value in answer["identity"].items():
                if value != answers[0]["identity"][what]:
                    self.fail(
                        f"{worker.place.title} differs in the {what}: {value}; rank 0 has {answers[0]['identity'][what]}"
                    )
        return answers[0]

    def tell(self, message: Mapping[str, Any]) -> None:
        for worker in self.all.values():
            worker.say(message)

    def gather(self, wanted: str, must_progress: bool = False) -> dict[str, dict[str, Any]]:
        """Wait for the answers of all ranks, and return them by name, in the order of the ranks.

        Raises RankFailed, and ends all processes, if a rank dies or fails, or if with `must_progress` for `silence_s`
        no rank has begun an exchange. If a signal's handler interrupts it, the next call continues.
        """
        found = self._found
        begun, since_s = -1, time.monotonic()
        while len(found) < len(self.all):
            for worker, said in sorted(self.hear(LISTEN_S), key=_has_waited):
                if said is None:
                    self.fail(f"{worker.place.title} {worker.report}")
                elif said["say"] == "failed":
                    self._fail_for(worker, said)
                elif said["say"] == wanted:
                    found[worker.name] = said
            total = sum(worker.exchanges for worker in self.all.values()) + len(found)
            if total != begun or not must_progress:
                begun, since_s = total, time.monotonic()
            elif time.monotonic() - since_s > self.silence_s:
                self._fail_for_nothing(found)
        self._found = {}
        return {name: found[name] for name in self.all}

    def fail(self, message: str) -> None:
        """End all processes. Raises RankFailed."""
        self.close(at_once=True)
        raise RankFailed(f"{message}; the session is over, and all {len(self.all)} ranks have ended")

    # -- inside -----------------------------------------------------------------------------------------------------

    def _fail_for(self, worker: WorkerProcess, said: Mapping[str, Any]) -> None:
        """Find the cause of a rank's failure: if an exchange has failed, another rank is."""
        first, until_s = f"{worker.place.title}: {said['message']}", time.monotonic() + GRACE_S
        while said["waited"] and time.monotonic() < until_s:
            for other, news in self.hear(GRACE_S / 10):
                if news is None:
                    self.fail(f"{other.place.title} {other.report}")
                elif news["say"] == "failed" and not news["waited"]:
                    self.fail(f"{other.place.title}: {news['message']}")
        self.fail(first)

    def _fail_for_nothing(self, found: Mapping[str, Any]) -> None:
        late = [worker for worker in self.all.values() if worker.name not in found]
        fewest = min(worker.exchanges for worker in late)
        names = " and ".join(worker.place.title for worker in late if worker.exchanges == fewest)
        self.fail(f"{names} did not go on for {self.silence_s:.0f} s in a step, after {fewest} exchanges")

    def _connect(self) -> None:
        size = len(self.all)
        world = self._world or RankWorld(HOST, self._port, 0, 1, backend_for(self.devices), [])
        for worker in self.all.values():
            number = worker.place.rank
            worker.say(
                {
                    "do": "connect",
                    "host": world.host,
                    "port": world.port,
                    "number": number,
                    "place": world.place,
                    "size": size,
                    "num_workers": world.num_workers,
                    "backend": world.backend,
                    "device": worker.device,
                    "peers": [[place * size + number, name] for place, name in world.peers],
                }
            )
        self.gather("connected")
        for worker in self.all.values():
            worker.is_up = True


class RankedExecutor:
    """Runs the steps of an engine on all ranks, as `core.scheduler.driver.Executor`: each rank runs each step, and all
    must give the same result."""

    def __init__(self, ranks: Ranks, number: int = OWN, described: Mapping[str, Any] | None = None) -> None:
        """`number`: of the executor of each rank that runs the steps, if ranks have several. `described`: what rank 0
        has said of it, for handoffs: its pages, and what it relays."""
        self.ranks: Ranks = ranks
        self.page_format: dict[str, Any] = {} if described is None else described["page_format"]
        self.relayed: AlgorithmShape | None = None if described is None else AlgorithmShape(**described["relayed"])
        self.counters: ExecutorCounters = ExecutorCounters()
        self._number = number
        self.clock: SimpleNamespace = SimpleNamespace(seconds={})  # of rank 0, by phase
        self._is_asked = False  # for the oldest step's result

    def launch(self, step: Step) -> None:
        if step.prefill is not None:
            self.counters.prefilled += int(step.prefill.lens.sum())
        self.ranks.tell({"do": "launch", "executor": self._number, "step": step_to_json(step)})

    def collect(self) -> StepResult:
        """Wait for the oldest step's result. Raises RankFailed."""
        if not self._is_asked:
            self._is_asked = True
            self.ranks.tell({"do": "collect", "executor": self._number})
        answers = list(self.ranks.gather("result", must_progress=True).values())
        self._is_asked = False
        for number, answer in enumerate(answers):
            if answer["digest"] != answers[0]["digest"]:
                self.ranks.fail(f"rank {number} computed another result of step {_step_of(answers[0])} than rank 0")
        self.clock.seconds = answers[0]["seconds"]
        return result_from_json(answers[0]["result"])

    def advance(self, rounds: int) -> bool:
        """Return True: a step of ranks has one round, which `collect` waits for."""
        return True

    def request_stop(self, last_step_id: int) -> None:
        """Do nothing: a step of ranks has one round."""

    def relay_cell(self, row: int, epoch: int) -> dict[str, np.ndarray]:
        """Do what `TorchExecutor.relay_cell` does. All ranks relay the same."""
        self.ranks.tell({"do": "relay_cell", "row": int(row), "epoch": int(epoch)})
        (first, *_) = self.ranks.gather("cell").values()
        return arrays_from_json(first["cell"])

    def score(self, prompt: np.ndarray, num_top: int) -> PromptScores:
        """Do what `score_prompt` does, with all ranks, behind the steps that were launched. Raises RankFailed."""
        self.ranks.tell({"do": "score", "prompt": prompt.tolist(), "num_top": num_top})
        (first, *_) = self.ranks.gather("scored", must_progress=True).values()
        return PromptScores.from_json(first["scores"])

    def restart(self) -> None:
        """Raise RankFailed: ranks that have failed have ended."""
        self.ranks.fail("a step has failed")

    @contextmanager
    def spare(self, spec: EngineSpec) -> Iterator[RankedExecutor]:
        """Have all ranks make an executor more with the same models, for an engine of this `spec`, and free it at the
        end."""
        self.ranks.tell({"do": "make_spare", "engine": engine_to_json(spec)})
        self.ranks.gather("made")
        yield RankedExecutor(self.ranks, SPARE)
        self.ranks.tell({"do": "free_spare"})

    def capture_all(self, on_line: Callable[[str], None], bounds: CaptureBounds) -> tuple[int, list[str]]:
        """Have all ranks do what `RoundGraphs.capture_all` does, until one of them reaches a bound; `on_line` gets the
        lines of rank 0. Returns the number of graphs, and the names of the rounds without one. Raises RankFailed."""
        self.ranks.on_progress = lambda rank, line: on_line(line)
        self.ranks.tell({"do": "capture_all", **asdict(bounds)})
        found = list(self.ranks.gather("captured", must_progress=True).values())
        for number, answer in enumerate(found):
            if answer["captured"] != found[0]["captured"]:
                self.ranks.fail(f"rank {number} has captured other rounds than rank 0")
        num_graphs, left_out = found[0]["captured"]
        return num_graphs, left_out

    def close(self) -> None:
        """End the ranks."""
        self.ranks.close()


def _has_waited(news: tuple[WorkerProcess, dict[str, Any] | None]) -> bool:
    """Return whether a rank says that it failed because another did: what is heard with it may be the cause."""
    said = news[1]
    return said is not None and said["say"] == "failed" and said["waited"]


def _step_of(answer: Mapping[str, Any]) -> int:
    step_id: int = answer["result"]["value"]["step_id"]
    return step_id


__all__ = ["RankFailed", "RankedExecutor", "Ranks", "WorkerFailed"]
