"""The contract of an executor: it runs the steps of a `core.Engine`, in order, and answers each with a `StepResult`.

It speaks in types of `core`: a configuration makes the engine, and an adapter gets its steps as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np

from ...core.adaptive import AdaptiveController
from ...core.algorithm.registry import get_algorithm
from ...core.contract.events import EventSink, ignore
from ...core.contract.handoff_batch import DraftInput, HandoffBatch
from ...core.contract.step import Step, StepResult
from ...core.errors import ConfigError
from ...core.scheduler.config import EngineConfig
from ...core.scheduler.engine import Engine
from ...core.scheduler.rules import OurRules
from ...core.scheduler.spec import EngineSpec, SpeculationChoice, resolve_spec
from ..harness.contract import Capabilities, needs
from ..harness.letters import Choices
from .oracle import After, Drafts, RecurrentState

VOCAB_SIZE = 24
TEXT_LEN = 48  # of the longest drawn request
ALGORITHMS = (*["STANDALONE"] * 4, "NONE", "NONE", "NGRAM", "NGRAM")
WITH_HEADS = (*["STANDALONE"] * 2, "NONE", "NGRAM", *["EAGLE", "EAGLE3", "MULTI_LAYER_EAGLE"] * 2)
WITH_LOOK_UPS = "HYBRID"  # of which rows draft by a head or by look-up: an executor is checked with it alone
STOP_TOKENS = (5, 11)
SHAPES_TRIED = 20
MANY = 8  # rows of an engine in which many requests are sampled
HIDDEN_STATES = "hidden_states"
"""The per-token output by which a user asks to see the target's hidden states; it belongs to no draft."""


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """The engine that the executor serves, small on purpose. `make_engine` builds one of the same sizes as the trial's
    own.

    `steps` is the greatest candidate; with `adaptive`, 0 and 1 are candidates too. A tree (`topk` > 1) has
    `num_draft_tokens` nodes, or as many as a single step fills; for chains it is 0. `tokens`: the executor delivers
    tokens, so the engine tracks them.

    Steps are never 3 or 4, topk never 2 or 4, and their product never 4. The reference's hidden states are 4 wide, and
    no row of candidates, drafts or accepted tokens may be as wide.
    """

    algorithm: str = "STANDALONE"
    steps: int = 1
    topk: int = 1
    num_draft_tokens: int = 0
    adaptive: bool = False
    num_pages: int = 64
    page_size: int = 1
    context_len: int = 48
    max_running: int = 3
    chunk_size: int = 64
    multi_step_rounds: int = 1
    overlap: bool = False
    mixed: bool = True
    prefix_cache: bool = False
    tokens: bool = True
    vocab_size: int = VOCAB_SIZE
    mixture: bool = False  # the target may be a mixture of experts, and have recurrent layers: `is_recurrent`
    windows: bool = False  # layers of the target may see a window only, and have other heads than those without one

    @property
    def is_recurrent(self) -> bool:
        """Whether the target has recurrent layers, where the executor runs any: behind a cached prefix no state is
        known."""
        return self.mixture and not self.prefix_cache

    @property
    def has_look_ups(self) -> bool:
        """Whether drafts depend on what earlier requests got."""
        return get_algorithm(self.algorithm).looks_up_past_outputs

    @classmethod
    def draw(cls, choose: Choices, has: ExecutorCapabilities, algorithm: str = "") -> ExecutorConfig:
        """Choose an engine of a few rows, steps and branches; `algorithm` is the one that all have, if not any."""
        algorithm = algorithm or (WITH_LOOK_UPS if has.look_ups else "")
        algorithm = algorithm or choose(WITH_HEADS if has.hidden_states else ALGORITHMS)
        # Where proposals are compared, most of them are deep: what a draft has kept of its own passes shows from the
        # third step on.
        depths = (1, 2, 5, 5, 5, 5, 0, 7) if has.drafts else (1, 1, 2, 2, 5, 5, 0, 7)
        steps = 0 if algorithm == "NONE" else choose(depths)
        kind = get_algorithm(algorithm)
        trees = has.trees and kind.supports_trees
        topk = choose((1, 3, 3, 5) if has.drafts else (1, 1, 3, 5)) if trees and steps > 0 else 1
        nodes = min(choose((3, 6, 9, 13)), 1 + topk + (steps - 1) * topk**2) if topk > 1 else 0
        config = cls(
            algorithm=algorithm,
            steps=steps,
            topk=topk,
            num_draft_tokens=nodes,
            adaptive=steps > 0 and choose((False, False, False, True)),
            page_size=(page_size := choose((1, 2, 4, 16))),
            max_running=choose((1, 1, 2, 3)),
            chunk_size=choose((64, 5, 8)),
            multi_step_rounds=choose((1, 3, 8)),
            overlap=choose((False, True)) and kind.supports_overlap,
            mixed=choose((True, False)),
            # Behind a cached prefix there is no plain model of what several heads say: most runs of these have none.
            prefix_cache=choose((False, True, True) if has.look_ups else (False, True))
            and (algorithm != WITH_HEADS[-1] or page_size == 1),
            tokens=has.tokens,
        )
        if has.samples or has.states:
            mixture = choose((False, True))
            config = replace(config, mixture=mixture, windows=not mixture and choose((False, True)))
        if has.states and config.is_recurrent:  # rows rest while another one's prompt runs alone
            config = replace(config, max_running=max(config.max_running, 2), mixed=config.mixed and config.overlap)
        if has.samples and choose((False, False, False, False, True)):
            drafting = config if config.steps or algorithm == "NONE" else replace(config, steps=choose((0, 1, 2)))
            return replace(drafting, max_running=MANY)._with_pool(3)
        return config._with_pool(choose((0, 1, 2, 3)))

    def _with_pool(self, pool: int) -> ExecutorConfig:
        """Return the context with a KV pool of this kind for it: for several of the longest requests, for two of them,
        for hardly more than one, or so large that multi-steps fit."""
        spec = replace(self, num_pages=1 << 16, context_len=TEXT_LEN).make_spec()
        longest = TEXT_LEN + spec.resolve_sizes().reserve + 2 * self.page_size
        slots = (4 * longest, 2 * longest, longest + 8, 30 * longest)[pool]
        return replace(self, num_pages=-(-slots // self.page_size), context_len=spec.config.context_len)

    def make_spec(self) -> EngineSpec:
        """Return the engine's specification. Raises ConfigError if the settings contradict each other."""
        settings: dict[str, Any] = {"steps": self.steps}
        if self.adaptive:
            candidates = sorted({0, 1, self.steps})
            entry = {"candidate_steps": candidates, "ema_alpha": 0.6, "update_interval": 2, "warmup_batches": 1}
            settings = {"adaptive": {"1": entry}}
        if self.topk > 1:
            nodes = {str(self.steps): self.num_draft_tokens, "1": min(self.num_draft_tokens, 1 + self.topk)}
            settings |= {"topk": self.topk, "num_draft_tokens": nodes if self.adaptive else self.num_draft_tokens}
        config = EngineConfig(
            num_pages=self.num_pages,
            context_len=self.context_len,
            page_size=self.page_size,
            max_running=self.max_running,
            chunk_size=self.chunk_size,
            mixed=self.mixed,
            prefix_cache=self.prefix_cache,
            rules=OurRules(watermark=0.0),
            multi_step_rounds=self.multi_step_rounds,
            track_tokens=self.tokens,
        )
        mode = "overlap" if self.overlap else "synchronous"
        return resolve_spec(config, get_algorithm(self.algorithm), SpeculationChoice(mode=mode, **settings))

    def make_engine(self, events: EventSink = ignore) -> Engine:
        """Make a fresh engine. Raises ConfigError if the sizes contradict each other."""
        return self.make_spec().make_engine(events)

    def make_controller(self) -> AdaptiveController:
        return self.make_spec().make_controller()


@dataclass(frozen=True, slots=True)
class ExecutorCapabilities(Capabilities):
    """What an executor declares. Each flag adds methods of `InspectedExecutor`, operations that call them, and
    invariants."""

    tokens: bool = False  # results carry tokens; without it only how many there are
    trees: bool = False  # more than one branch
    hidden_states: bool = False  # algorithms whose draft reads the target's hidden states run too: the positive control
    relay: bool = False  # `relay_fields()`
    # `hidden_sizes()`, `roots()` and `weights()`: without them what it keeps cannot be searched
    inspection: bool = False
    accounting: bool = False  # `hidden_bytes()`
    rounds: bool = False  # `advance(rounds)`
    merging: bool = False  # `merge(first, second)`
    handoff: bool = False  # `draft_input(batch, last_tokens)`
    # `shown()` and `after(text, first)`: what its model gives, to compare tokens and outputs with; needs `tokens`
    plain: bool = False
    drafts: bool = False  # `drafted(…)`: what its draft proposes, to compare accept lengths with; needs `plain`
    proposals: bool = False  # `proposed()`: what it has drafted, to be the same; needs `drafts`
    samples: bool = False  # requests sample, too; needs `plain`
    # The coins of a request follow from its seed, or its id, and their position: it gets the same tokens alone; needs
    # `samples`
    keyed: bool = False
    parking: bool = False  # no pass of the draft runs in rounds without branches (`RoundShape.is_parked`)
    lengths: bool = False  # rows of a round may verify unequal numbers of nodes (`DecodeStep.row_nodes`)
    budgets: bool = False  # the device chooses the lengths of rows, by `DecodeStep.budget`; needs `lengths`
    confidences: bool = False  # `confidences(…)`: how sure its draft is, to compare results with; needs `budgets`
    look_ups: bool = False  # every engine has `WITH_LOOK_UPS`; `waiting()`; needs `proposals`
    restarts: bool = False  # `restart()`: steps fail as a whole
    states: bool = False  # models with recurrent layers run; `state_room()` and `states(rows)`
    # Requests have penalties, biases and the grammar of `oracle.is_allowed`, under any text; needs `plain`
    shaped: bool = False

    FOUNDATIONS: ClassVar = {
        "plain": ("tokens",),
        "drafts": ("plain",),
        "proposals": ("drafts",),
        "look_ups": ("proposals",),
        "budgets": ("lengths",),
        "confidences": ("budgets", "drafts"),
        "samples": ("plain",),
        "shaped": ("plain",),
        "keyed": ("samples",),
    }


class InspectedExecutor(Protocol):
    """`core.executor.Executor`, and what can be looked at.
    Steps are `core.step.Step`, results `core.step.StepResult`."""

    def launch(self, step: Step) -> None:
        """Begin `step`, behind those in flight. Its arrays are read-only."""

    def collect(self) -> StepResult:
        """Return the result of the oldest launched step."""

    def request_stop(self, last_step_id: int) -> None:
        """End every step up to `last_step_id` at its next round boundary."""

    @needs("relay")
    def relay_fields(self) -> Sequence[tuple[str, Sequence[int]]]:
        """Return (name, shape of one row) of everything that one step hands to the next on the device."""

    @needs("inspection")
    def hidden_sizes(self) -> Sequence[int]:
        """Return how many values a hidden state of the target or the draft has;
        nothing else that is kept is as wide."""

    @needs("inspection")
    def roots(self) -> Sequence[object]:
        """Return the objects that lead to everything the executor keeps between steps. They are searched for arrays."""

    @needs("inspection")
    def weights(self) -> Sequence[object]:
        """Return the models: they are not searched."""

    @needs("accounting")
    def hidden_bytes(self) -> int:
        """Return the memory reserved for hidden states on the way from target to draft."""

    @needs("rounds")
    def advance(self, rounds: int) -> bool:
        """Run at most `rounds` rounds of the oldest step now. Returns whether it is over."""

    @needs("restarts")
    def restart(self) -> None:
        """Forget all rows and steps in flight, since one has failed: the engine has given them up, and all KV."""

    @needs("merging")
    def merge(self, first: list[list[float]] | None, second: list[list[float]] | None) -> Any:
        """Join the draft's hidden states of two batches: rows of numbers, or None.
        Refuses those of different algorithms."""

    @needs("handoff")
    def draft_input(self, batch: HandoffBatch, last_tokens: np.ndarray) -> DraftInput | None:
        """Return what the first round of handed over requests drafts from, None if it needs nothing but
        their last tokens."""

    @needs("states")
    def state_room(self) -> int:
        """Return how many requests can have a recurrent state at once; 0 if the model has no recurrent layers."""

    @needs("states")
    def states(self, rows: Sequence[int]) -> Sequence[RecurrentState]:
        """Return the recurrent states of rows after the step that was collected last."""

    @needs("plain")
    def shown(self) -> Sequence[str]:
        """Return the per-token outputs that a request may ask to see."""

    @needs("plain")
    def after(self, text: Sequence[int], first: int) -> After:
        """Return what the target gives after tokens `first` … of `text`, computed without a batch, a
        tree or KV pages."""

    @needs("drafts")
    def drafted(self, text: Sequence[int], steps: int, topk: int, num_draft_tokens: int, noise: int) -> Drafts | None:
        """Return the drafts behind `text`; None if more than the text decides them.

        `noise` other than 0 stands for another choice among nearly equal candidates.
        """

    @needs("confidences")
    def confidences(self, text: Sequence[int], steps: int) -> Sequence[float] | None:
        """Return the greatest probabilities of the draft after `text` and after each of its own first choices, for a
        chain of `steps`; None if more than the text decides them."""

    @needs("proposals")
    def proposed(self) -> Sequence[Sequence[Drafts]]:
        """Return the drafts of every row in every round of the result that was collected last: `LookedUp` if the draft
        model did not make them."""

    @needs("look_ups")
    def waiting(self) -> tuple[int, Sequence[int]]:
        """Return how many tokens of a row may wait for the draft at most, and how many of each row do: look-ups drafted
        in their rounds, and the draft has not taken them in yet."""


def drawn_with(algorithm: str) -> type[ExecutorConfig]:
    """Return what draws configurations of one algorithm, for example of a plugin. Raises ConfigError for an unknown
    one."""
    name = get_algorithm(algorithm).name

    def draw(cls: type, choose: Choices, has: ExecutorCapabilities) -> ExecutorConfig:
        for _ in range(SHAPES_TRIED):
            with suppress(ConfigError):  # a shape that the algorithm does not take
                return ExecutorConfig.draw(choose, has, name)
        return ExecutorConfig.draw(choose, has, name)

    return type(f"{name}Config", (ExecutorConfig,), {"draw": classmethod(draw), "__slots__": ()})


MakeExecutor = Callable[[ExecutorConfig], InspectedExecutor]
