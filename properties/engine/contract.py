"""The contract of an engine: a scheduler that plans the next step on request, and takes the result of each step.

The suite is the client and the device. It submits and aborts, asks for steps, runs them on a toy language model over a
shadow pool, and hands the answers back. The engine does no I/O here: it decides who runs, owns the KV slots, and says
which tokens were delivered.

```
submit, abort ──► plan() ──► a step in plain values ──► the suite's device ──► commit(answer) ──► events
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol

from ..harness.contract import Capabilities, needs
from ..harness.letters import Choices
from .groups import UNITS as UNITS
from .groups import LayerGroup, UnitTable, draw_groups

# (candidates, top-k, nodes of a tree or 0 for a chain), the simplest first; a tree's nodes are not S + 1.
SHAPES: tuple[tuple[tuple[int, ...], int, int], ...] = (
    *(((0,), 1, 0), ((0,), 1, 0), ((0,), 1, 0), ((0,), 1, 0), ((1,), 1, 0), ((2,), 1, 0), ((3,), 1, 0)),
    *(((5,), 1, 0), ((8,), 1, 0), ((0, 2), 1, 0), ((1, 3), 1, 0), ((2, 8), 1, 0), ((0, 1, 4), 1, 0), ((2,), 2, 4)),
    *(((3,), 4, 8), ((1, 3), 2, 3), ((0, 3), 2, 6), ((1,), 16, 9), ((2,), 16, 20)),
)
CHAINS: tuple[tuple[tuple[int, ...], int, int], ...] = tuple(((steps,), 1, 0) for steps in (1, 2, 3, 5, 0))
"""The shapes of rounds with a budget. Without steps there is none."""


@dataclass(frozen=True)
class ServingConfig:
    """What `make(config)` builds. Sizes in tokens (= KV slots), pools of few pages.
    `model`, `accept` and `losses` are the suite's own."""

    num_pages: int  # without the padding page
    page_size: int
    # positions that the model can see: prompt and output; what a round writes past them is in the row's reserve
    context_len: int
    max_running: int
    max_queue: int  # waiting requests; 0: no bound
    chunk_size: int  # prefill tokens of a step
    step_tokens: int  # prefill and verify tokens of a step; 0: no bound beside chunk_size
    algorithm: str  # "none"; "draft": a draft model; "head": draft KV that looks one token ahead
    candidates: tuple[int, ...]  # draft steps that may be asked for, ascending; the last is in force at the start
    topk: int = 1
    tree_nodes: int = 0  # nodes of a verify tree, its root included; 0: a chain, steps + 1
    overlap: bool = False  # two steps in flight, else one
    multi_step_rounds: int = 1  # most decode rounds of one step
    mixed: bool = False  # prefill and decode in one step
    prefix_cache: bool = False
    preempt: bool = False  # a waiting request may push out one of smaller priority
    ageing: int = 64  # how often a request may be overtaken by later ones of greater priority
    accept: int = 4  # of 8: how often a draft token is right
    model: int = 0  # which toy language model
    losses: bool = False  # steps may fail as a whole; an engine works with reduced limits long after one has
    lookahead: bool = False  # slots for drafts behind the verify window, where a draft head goes on after it
    host_pages: int = 0  # pages of host memory, to which what requests hand over to the prefix cache is copied
    rules: int = 0  # 0 … 3: which of its rules for little memory, if it declares rules of its own and has several
    # (plans, eighths): newcomers wait for so many plans beside rows that decode, while a step with all of them would
    # have fewer tokens, verified ones included, than so many eighths of `chunk_size`
    waits: tuple[int, int] = (0, 0)
    groups: tuple[int, ...] = ()  # of layers that keep the last tokens of a request, or a state (`layer_groups`)
    # (of a pass, of each token in it): the time of a round, by which the drafts that are worth it are verified; no
    # times: each row verifies all its drafts
    costs: tuple[int, int] = (0, 0)

    @cached_property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        return tuple(LayerGroup(*self.groups[i : i + 4]) for i in range(0, len(self.groups), 4))

    @property
    def enough_tokens(self) -> float:
        """The tokens of a step for which no newcomer waits."""
        return self.waits[1] / 8 * self.chunk_size

    @cached_property
    def depth(self) -> int:
        """Steps that may be in flight."""
        return 2 if self.overlap else 1

    @cached_property
    def max_steps(self) -> int:
        return self.candidates[-1]

    @cached_property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    def nodes(self, steps: int) -> int:
        """Return the nodes of the verify tree of a round of so many steps."""
        return 1 if steps == 0 else self.tree_nodes or steps + 1

    def reach(self, length: int, drafts: int) -> int:
        """Return the end of what a round writes with so many drafts of a row that has this length."""
        stop = length + self.ahead.get(drafts, drafts + 1 + self.lookahead * self.max_steps)
        return min(stop, max(length + drafts + 1, self.context_len)) if self.lookahead else stop

    def whole_pages(self, num_tokens: int) -> int:
        """Return the slots of the pages that so many tokens need."""
        return -(-num_tokens // self.page_size) * self.page_size

    @cached_property
    def ahead(self) -> dict[int, int]:
        """Candidate -> the slots past the committed length that one of its rounds writes.

        Drafts and verify window begin there both, or with `lookahead` the next drafts behind the verify window. Each
        branch of a tree fills whole pages of its own.
        """
        paged = self.page_size > 1 and self.topk > 1
        ahead = {}
        for steps in self.candidates:
            branch = self.whole_pages(self.page_size - 1 + steps) if paged and steps else steps
            ahead[steps] = max(branch * self.topk, self.nodes(steps)) + self.lookahead * self.max_steps
        return ahead

    @cached_property
    def round_slots(self) -> int:
        """L: the most slots past the committed length that a round writes, over all candidates."""
        return self.ahead[self.max_steps]

    @cached_property
    def reserve(self) -> int:
        """R: the number of slots that a request may reserve past its committed length for a single round."""
        return self.round_slots * self.depth

    @classmethod
    def draw(cls, choose: Choices, has: EngineCapabilities) -> ServingConfig:
        """Choose a configuration in which one request fits, and two may not."""
        page_size = choose((1, 1, 2, 2, 3, 4, 8, 16))
        is_budgeted = has.budgets and choose((True, True, True, False))
        candidates, topk, tree_nodes = choose(CHAINS if is_budgeted else SHAPES)
        if topk > 4 or (topk > 1 and len(candidates) == 1):
            page_size = min(page_size, 4)  # every branch fills pages of its own: larger ones only cost time
        candidates = candidates if has.adaptive else candidates[-1:]
        multi_step_rounds = choose((1, 1, 3, 8)) if has.multi_steps else 1
        # Multi-steps meet the end of the pool where no second step and no cache has its share of it.
        often = (False, True) if multi_step_rounds > 1 else (False, True, True)
        config = cls(
            num_pages=1,
            page_size=page_size,
            context_len=1,
            max_running=choose((2, 3, 4) if is_budgeted else (1, 2, 3, 4, 4)),
            max_queue=choose((0, 0, 0, 2)),
            chunk_size=1,
            step_tokens=0,
            algorithm=choose(("none", "draft", "draft", "head") if candidates == (0,) else ("draft", "head")),
            candidates=candidates,
            topk=topk,
            tree_nodes=tree_nodes,
            overlap=has.overlap and choose(often),
            multi_step_rounds=multi_step_rounds,
            mixed=has.mixed and choose((False, True, True)),
            prefix_cache=has.prefix_cache and choose(often),
            preempt=has.priorities and choose((False, True)),
            ageing=choose((1, 2, 16)),
            accept=choose((0, 2, 4) if is_budgeted else (0, 4, 6, 8)),  # few, so that a request has many rounds
            model=choose((0, 1, 2)),
            lookahead=has.lookahead,
            losses=has.losses and choose((False, False, False, True)),
            rules=choose((0, 1, 2, 3)) if has.own_rules else 0,
        )
        limit = choose((16, 30, 40) if is_budgeted else (6, 10, 16, 30))
        smallest = config.whole_pages(limit + config.reserve) + page_size
        # Several requests, so many that multi-steps fit, two and a half, one and a half, one, or barely one.
        few = (*(smallest * half // 2 for half in (5, 5, 3, 3, 2)), smallest - limit // 2)
        many = (smallest * 16,) * (4 if multi_step_rounds > 1 else 1)
        slots = choose((smallest * 5, *many, *few))
        chunk_size = choose((64, 64, 8, 3, 2)) if has.chunked_prefill else limit
        spare = choose((0, 0, 0, 1, 2, 5)) if config.mixed else 0
        host_pages = choose((4, 32, 32) if config.losses else (0, 4, 32)) if has.host and config.prefix_cache else 0
        verify = config.max_running * max(map(config.nodes, candidates))
        if spare and config.losses:
            chunk_size = min(chunk_size, verify + spare)  # after a loss an engine with one budget has less of that
        rows = config.max_running, config.whole_pages(limit + config.reserve) // page_size + 1
        # A pool of which units take pages holds the longest request.
        groups = draw_groups(choose, *rows, page_size, slots >= smallest) if has.groups else ()
        config = replace(config, groups=() if config.losses or host_pages else groups)
        may_wait = has.waits and not config.preempt
        return replace(
            config,
            waits=choose(((0, 0), (0, 0), (0, 0), (2, 1), (3, 4), (4, 8))) if may_wait else (0, 0),
            num_pages=max(-(-slots // page_size), 1) + sum(each.most_pages for each in config.layer_groups),
            context_len=limit,
            chunk_size=chunk_size,
            step_tokens=verify + spare if spare else 0,
            host_pages=host_pages,
            costs=choose(((100, 10), (100, 20), (100, 40), (10, 10))) if is_budgeted and config.max_steps else (0, 0),
        )


@dataclass(frozen=True, slots=True)
class EngineCapabilities(Capabilities):
    """What an engine declares. Each flag adds methods of `SchedulingEngine`, values of the configuration,
    operations, and invariants."""

    overlap: bool = False  # two steps in flight: `config.overlap` may be set
    multi_steps: bool = False  # steps of several rounds, and `interrupts()`
    chunked_prefill: bool = False  # prompts in chunks of `config.chunk_size`, which is else as large as the context
    mixed: bool = False  # prefill and decode in one step: `config.mixed` and `config.step_tokens` may be set
    prefix_cache: bool = False  # `config.prefix_cache` may be set, and `cached_pages()`; needs `slots`
    host: bool = False  # `config.host_pages` may be set, and a step of `plan` has `loads`
    priorities: bool = False  # a greater `Wish.priority` goes first, and `config.preempt` may be set
    waits: bool = False  # `config.waits` may be set, without `config.preempt`
    adaptive: bool = False  # `set_steps(steps)`: several candidates
    slots: bool = False  # `slots_of(request)` and `free_pages()`: who owns which KV slot
    table: bool = False  # a step of `plan` has `writes`: what it changes in the device's table of slots
    # `config.costs` may be set: a step has a budget of drafts for all its rows, of which the device takes those of
    # greatest survival; `lengths(…)` and `confidences_of(request)`
    budgets: bool = False
    invalid_confidences: bool = False  # confidences may be no probabilities: `num_invalid()` counts such rows
    groups: bool = False  # `config.groups` may be set; and the methods in `UNITS` are there
    marks: bool = False  # per-token outputs: `Wish.marks`, `Answer.marks`, and the marks in the end event
    failures: bool = False  # `Answer.failed`: the device reports an error of one request alone
    retraction: bool = False  # `retract(request)`: a running request gives everything back and waits again
    denial: bool = False  # `deny(count)`: the next attempts to allocate find nothing
    losses: bool = False  # `lose(step)` and `resume()`: a step fails as a whole
    restarts: bool = False  # `restart()`: it goes on after a loss with a new device, which has no KV
    isolation: bool = (
        False  # after a lost step it plans smaller steps and runs suspects apart (properties/engine/recovery.py)
    )
    # What enters leaves each that runs its reserve, and rows go in multi-steps where no plan could differ.
    reserves: bool = False
    counters: bool = False  # `counters()`: what was verified and accepted so far
    lessons: bool = False  # `lessons()`: the results that its choice of draft steps got
    stop_strings: bool = False  # `Wish.stop_strings`: the engine reads the text of an output by `language.text`
    # A refused `submit` raises an error whose text has the limit that the request exceeds, as a number.
    reasons: bool = False
    # it refuses what no caller should do: a live name, a request that can never run, an answer twice or too early
    misuse: bool = False
    # The device runs steps in order: a page that a step may still write can go to a later step.
    ordered_reuse: bool = False
    own_victims: bool = False  # memory pressure retracts by a rule of its own, not the lowest priority that came last
    to_tail: bool = False  # a request that is retracted waits behind the others of its priority
    # How much a newcomer leaves free, when a refused one is tried again, and how long none enters after a retraction.
    estimates: bool = False
    strict_priorities: bool = False  # greater priorities always go first, so that a stream of them can starve others
    # A page is in the cache from its allocation on: a request of the same step, or a later one, may start from it
    # before it is computed, as the device runs the chunks of a step in order.
    caches_at_allocation: bool = False
    # What a step in flight computes for a request that is retracted meanwhile may still be delivered: the device runs
    # steps in order.
    late_tokens: bool = False
    # Rows of one step may have fewer drafts than `steps`: a row of the view may have its own number at its end.
    ragged_drafts: bool = False
    # Each row has slots for the next drafts behind its verify window, up to the end of the context: the draft head goes
    # on there. `config.lookahead` is set.
    lookahead: bool = False
    own_ties: bool = False  # of drafts of equal survival any may be verified

    FOUNDATIONS: ClassVar = {
        "prefix_cache": ("slots",),
        "host": ("prefix_cache",),
        "table": ("slots",),
        "groups": ("slots",),
        "invalid_confidences": ("budgets",),
        "own_ties": ("budgets",),
        "ordered_reuse": ("slots",),
        "strict_priorities": ("priorities",),
        "caches_at_allocation": ("prefix_cache",),
        "late_tokens": ("ordered_reuse",),
        "isolation": ("losses",),
        "restarts": ("losses",),
        "lessons": ("counters",),
        "reserves": ("slots",),
    }
    RELAXES: ClassVar = (
        *("ordered_reuse", "own_victims", "to_tail", "estimates"),
        *("strict_priorities", "caches_at_allocation", "late_tokens", "ragged_drafts", "lookahead"),
        "own_ties",
    )

    @property
    def own_rules(self) -> bool:
        return self.own_victims or self.to_tail or self.estimates


class Wish(NamedTuple):
    """What a client asks for."""

    request: str
    prompt: Sequence[int]
    max_tokens: int
    priority: int = 0  # greater goes first
    seed: int = 0  # 0: greedy; else what its tokens are drawn from, together with their position
    stop_tokens: Sequence[int] = ()
    marks: bool = False  # one more integer per token is wanted
    stop_strings: Sequence[str] = ()  # the token that completes one of them in the output's text is the last one


class StepAnswer(NamedTuple):
    """The result of a step. Rows and chunks in the order of the step."""

    step: int
    first: Sequence[int]  # per chunk: the token after a prompt's last chunk, -1 after another
    runs: Sequence[Sequence[Sequence[int]]]  # per round and row: the accepted tokens, then the bonus token
    first_marks: Sequence[int] = ()  # with `marks`: beside `first`
    marks: Sequence[Sequence[Sequence[int]]] = ()  # with `marks`: beside `runs`
    failed: Sequence[str] = ()  # with `failures`: requests whose computation went wrong
    # With `config.costs`, per chunk and then per row: the confidences of the drafts that the request proposes next,
    # behind a middle chunk, too
    proposed: Sequence[Sequence[float]] = ()


StepView = Mapping[str, Any]
"""What `plan` returns, a mapping with these keys:

    step     int, 1, 2, 3, …
    enters   requests that are admitted with this step, or again
    prefill  per chunk (request, start, tokens, tail, key): computes positions start … start + len(tokens) − 1 of the
             context, which is the prompt and, after a retraction, what was delivered before. `tail` is the token after
             the chunk, -1 after the last one
    decode   per row (request, length, root, key): `length` positions have KV as far as the engine knows; `root` is the
             token at position `length` if the engine hands it over, None if the device keeps it. With `ragged_drafts`
             also (request, length, root, key, drafts): the row drafts so many tokens, `steps` at most
    steps    int, the draft steps of its rounds
    rounds   int, how many rounds it may run; 1 if it has chunks
    loads    with `host`, per request that enters with KV from host memory (request, tokens): before the step computes,
             the device copies that of so many positions, the last ones before the request's chunk, into its slots
    budget   with `config.costs`, if it has rows: how many drafts it verifies in each round, over all rows
    curve    with `budget`, (slope, biases): a draft at position k is accepted, if those before it are, with the
             probability 1 / (1 + exp(−(slope · x + biases[k]))), x the log-odds of its confidence within ±40
    writes   with `table`, in order (request, position, slots): before the step runs, the device notes that the
             request's KV from this position on is in these slots. Of a request that enters it knows no slot

`key` is the key of the device's random draws (`Wish.seed`). Either list may be empty, not both.
"""

Event = tuple[Any, ...]
"""("tokens", request, tokens) for what was delivered; ("end", request, reason, tokens, marks) at the end, with all that
was delivered.

The reason is "stop", "length", "abort" or "error"; marks are None unless they were wanted."""


class SchedulingEngine(Protocol):
    """A scheduler. It refuses by returning None or False, or by raising one of `REFUSALS`, and has then
    changed nothing."""

    def submit(self, wish: Wish) -> int | None:
        """Queue a request. Returns how many tokens it gets at most: `max_tokens`, or less where context or pool are
        smaller. Refuses by raising an error whose text is the reason."""

    def abort(self, request: str) -> Sequence[Event]:
        """Give up a request. Its end event comes now, or with the commit of a step of several rounds that is running.
        An unknown request has no events."""

    def plan(self) -> StepView | None:
        """Decide and launch the next step. Returns None if there is none, or none before a step is committed."""

    def commit(self, answer: StepAnswer) -> Sequence[Event]:
        """Apply the answer of the oldest step in flight, and refuse any other."""

    def waiting(self) -> Sequence[str]:
        """Return the requests in the queue."""

    def running(self) -> Sequence[str]:
        """Return the requests that have been admitted and have not ended."""

    @needs("multi_steps")
    def interrupts(self) -> int:
        """Return the newest step that must end at its next round, since a new plan could differ; 0 if none must."""

    @needs("adaptive")
    def set_steps(self, steps: int) -> None:
        """Draft this number of steps, one of the candidates, from the next plan on."""

    @needs("slots")
    def slots_of(self, request: str) -> Sequence[int]:
        """Return all allocated slots of a running request by position;
        slot = page · page_size + offset, page 0 is padding."""

    @needs("slots")
    def free_pages(self) -> Sequence[int]:
        """Return the pages of the free list."""

    @needs("prefix_cache")
    def cached_pages(self) -> Sequence[int]:
        """Return the pages that the prefix cache owns, whether or not a request uses them."""

    @needs("budgets")
    def lengths(self, step: int, confidences: Sequence[Sequence[float]]) -> Sequence[int]:
        """Choose for each row of the oldest step in flight how many of its drafts the next round verifies, the first
        ones. This is the device's part, for which it has the confidences of all drafts of the round, row by row."""

    @needs("budgets")
    def confidences_of(self, request: str) -> Sequence[float] | None:
        """Return by which confidences the next budget takes the drafts of a running request: those of the last
        committed round that it was in. Returns None, or ones, if it has none yet, or one of them is no probability."""

    @needs("invalid_confidences")
    def num_invalid(self) -> int:
        """Return in how many rows of committed rounds a confidence was no probability. Rows that had left do not
        count."""

    @needs("groups")
    def units_of(self, request: str) -> Sequence[UnitTable]:
        """Return what a running request holds of each group."""

    @needs("groups")
    def cached_units(self) -> Sequence[Sequence[int]]:
        """Return the units of each group that the prefix cache has, whether or not a request reads them."""

    @needs("groups")
    def free_units(self) -> Sequence[int]:
        """Count the units of each group that have no owner."""

    @needs("groups")
    def unit_pages(self) -> Sequence[Sequence[int]]:
        """Return the pages of the pool that the units of each group take together."""

    @needs("retraction")
    def retract(self, request: str) -> None:
        """Retract this request with the next plan that can."""

    @needs("denial")
    def deny(self, count: int) -> None:
        """Let the next `count` attempts to allocate find nothing."""

    @needs("losses")
    def lose(self, step: int) -> Sequence[Event]:
        """Give up the oldest step in flight, which has failed, and those behind it. Their requests wait again, with the
        tokens delivered before; at most one ends ("error"). Until `resume`, plan nothing and give away none of their
        pages."""

    @needs("losses")
    def resume(self) -> None:
        """Plan again: the device is quiet. The next steps may have fewer draft steps, fewer rows, another order."""

    @needs("restarts")
    def restart(self) -> None:
        """Plan again, in place of `resume`: with a new device, without any KV. Every request waits, in its place."""

    @needs("counters")
    def counters(self) -> Sequence[int]:
        """Return (rows verified, drafts proposed, drafts accepted) in all, without rows that had left."""

    @needs("lessons")
    def lessons(self) -> Sequence[Sequence[int]]:
        """Return the results that the choice of draft steps got since the last call: per round that was committed (rows
        of its step, draft steps)."""


REASONS = ("stop", "length", "abort", "error")
