"""Small models served by the real executor on a CPU, with whatever shape and configuration a test is about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from foredraft.core.acceptance.process import AcceptanceProcess
from foredraft.core.adaptive import AdaptiveController, fixed_controller
from foredraft.core.algorithm.algorithm import Drafter
from foredraft.core.algorithm.registry import get_algorithm
from foredraft.core.contract.request import FinishedRequest, Request
from foredraft.core.scheduler.config import EngineConfig
from foredraft.core.scheduler.driver import Driver
from foredraft.core.scheduler.engine import Engine
from foredraft.core.scheduler.rules import OurRules
from foredraft.core.tree.chains import AcceptRule
from foredraft.gpu.executor.build import build_executor
from foredraft.gpu.executor.executor import TorchExecutor
from foredraft.gpu.executor.outputs import NodeProducer
from foredraft.gpu.executor.parts import DraftModel, ExecutorOptions
from foredraft.gpu.executor.shaping import MakeMatcher
from foredraft.gpu.models.decoder import Decoder
from foredraft.gpu.types.ops import Ops
from hostile_driver import CALM, Dice, Disturbance, HostileDriver
from matrix_cells import OPS, count_retractions, noisy_copy, small_head, small_model
from serving_matrix import LetterDecoder

CONFIG = {
    "num_pages": 400,
    "context_len": 96,
    "max_running": 4,
    "chunk_size": 8,
    "multi_step_rounds": 4,
    "rules": OurRules(watermark=0.0),
    "track_tokens": True,
}


@dataclass(frozen=True, slots=True)
class Way:
    """One way to serve: which algorithm with which draft, the shape of its trees, and what differs from `CONFIG`."""

    algorithm: str = "NONE"
    draft: DraftModel | None = None
    shape: dict | None = None  # of `fixed_controller`, `steps` among it
    config: dict | None = None
    rule: AcceptRule = AcceptRule.TARGET

    def controller(self) -> AdaptiveController:
        shape = {"steps": 0, **(self.shape or {})}
        return fixed_controller(
            shape.pop("steps"), **shape, depth_limited=get_algorithm(self.algorithm).drafter is not Drafter.LOOKUP
        )


def chain(algorithm: str, steps: int, noise: float = 0.05, seed: int = 0, **config) -> Way:
    """A chain of the algorithm's usual draft for `small_model(seed)`."""
    return Way(algorithm, draft_for(algorithm, noise, seed), {"steps": steps}, config)


def tree(algorithm: str, steps: int, topk: int, nodes: int, noise: float = 0.05, seed: int = 0, **config) -> Way:
    shape = {"steps": steps, "topk": topk, "num_draft_tokens": nodes}
    return Way(algorithm, draft_for(algorithm, noise, seed), shape, config)


def draft_for(algorithm: str, noise: float, seed: int) -> DraftModel | None:
    if get_algorithm(algorithm).drafter in (Drafter.NONE, Drafter.LOOKUP):
        return None
    return (
        noisy_copy(seed, noise) if algorithm == "STANDALONE" else small_head(seed, get_algorithm(algorithm).draft_form)
    )


@dataclass(slots=True)
class Served:
    """The outputs and counters of a run, with its engine and executor."""

    finished: dict[str, FinishedRequest]
    engine: Engine
    executor: TorchExecutor
    events: list

    @property
    def tokens(self) -> dict[str, list[int]]:
        return {name: end.tokens.tolist() for name, end in self.finished.items()}

    @property
    def retractions(self) -> int:
        return count_retractions(self.events)


def serve(
    way: Way,
    requests: Sequence[Request],
    *,
    target: Decoder | None = None,
    disturbance: Disturbance | None = CALM,
    acceptance: AcceptanceProcess | None = None,
    controller: AdaptiveController | None = None,
    before: Callable[[TorchExecutor], None] = lambda executor: None,
    ops: Ops = OPS,
    seed: int = 0,
    dice: int = 0,
    debug: bool = True,
    producers: Mapping[str, NodeProducer] | None = None,
    make_matcher: MakeMatcher | None = None,
    graph_sizes: Sequence[int] | None = None,
) -> Served:
    """Serve `requests` under `disturbance`; `before` is shown the executor before the first step.

    None for `disturbance` is the plain loop, without the checks after every move.
    """
    events: list = []
    engine = Engine(
        EngineConfig(**{**CONFIG, **(way.config or {})}),
        get_algorithm(way.algorithm),
        controller or way.controller(),
        events=events.append,
        text_decoder=LetterDecoder(),
    )
    executor = build_executor(
        engine,
        target or small_model(0),
        way.draft,
        ops,
        ExecutorOptions(
            acceptance=acceptance,
            seed=seed,
            debug=debug,
            producers=producers or {},
            make_matcher=make_matcher,
            graph_sizes=graph_sizes,
            accept_rule=way.rule,
        ),
    )
    before(executor)
    if disturbance is None:
        finished = _run_undisturbed(engine, executor, requests)
    else:
        finished = HostileDriver(engine, executor, list(requests), Dice(dice), disturbance).run()
    return Served(finished, engine, executor, events)


def _run_undisturbed(
    engine: Engine, executor: TorchExecutor, requests: Sequence[Request]
) -> dict[str, FinishedRequest]:
    driver = Driver(engine, executor)
    for request in requests:
        assert driver.submit(request).refusal == ""
    return driver.run_until_idle()
