"""The contract of an engine: a scheduler that is asked what to do next, and told what came of it.

The suite is the client and the device. It submits and aborts, asks for steps, runs them on a toy language model over a shadow pool, and
hands the answers back. The engine does no I/O here: it decides who runs, owns the KV slots, and says which tokens were delivered.

```
submit, abort ──► plan() ──► a step in plain values ──► the suite's device ──► commit(answer) ──► events
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol

from ...core.kv.sizing import get_alloc_len_per_decode, reserve_per_decode
from ..harness.contract import Capabilities


@dataclass(frozen=True)
class ServingConfig:
    """What `make(config)` builds. Sizes in tokens (= KV slots), pools of few pages. `model` and `accept` are the suite's own."""

    num_pages: int  # the padding page not counted
    page_size: int
    context_len: int  # positions that the model can see: prompt, output, and what a round writes past them
    max_running: int
    max_queue: int  # waiting requests; 0: no bound
    chunk_size: int  # prefill tokens of a step
    step_tokens: int  # prefill and verify tokens of a step; 0: no bound beside chunk_size
    algorithm: str  # "none"; "draft": a draft model; "head": draft KV that looks one token ahead
    candidates: tuple[int, ...]  # draft steps that may be asked for, ascending; the last is in force at the start
    topk: int = 1
    tree_nodes: int = 0  # nodes of a verify tree, its root included; 0: a chain, steps + 1
    overlap: bool = False  # two steps in flight, else one
    block_rounds: int = 1  # most decode rounds of one step
    mixed: bool = False  # prefill and decode in one step
    prefix_cache: bool = False
    preempt: bool = False  # a greater priority that waits may push a smaller one out
    ageing: int = 64  # how often a request may be overtaken by later ones of greater priority
    accept: int = 4  # of 8: how often a draft token is right
    model: int = 0  # which toy language model

    @cached_property
    def depth(self) -> int:
        """Steps that may be in flight."""
        return 2 if self.overlap else 1

    @cached_property
    def max_steps(self) -> int:
        return self.candidates[-1]

    def nodes(self, steps: int) -> int:
        """Nodes of the verify tree of a round of so many steps."""
        return 1 if steps == 0 else self.tree_nodes or steps + 1

    @cached_property
    def round_slots(self) -> int:
        """L: the most slots past the committed length that a round writes, over all candidates."""
        nodes = self.nodes(self.max_steps)
        return get_alloc_len_per_decode(self.max_steps, self.topk, nodes if nodes > 1 else None, self.page_size)

    @cached_property
    def reserve(self) -> int:
        """R: what a request may reserve past its committed length for a single round."""
        return reserve_per_decode(self.round_slots, self.overlap)

    @cached_property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size


@dataclass(frozen=True, slots=True)
class EngineCapabilities(Capabilities):
    """What an engine declares. Each flag adds methods of `Engine`, values of the configuration, operations, and invariants."""

    overlap: bool = False
    """Two steps in flight: `config.overlap` may be set."""
    blocks: bool = False
    """Steps of several rounds, and `interrupts()`."""
    chunked_prefill: bool = False
    """Prompts in chunks of `config.chunk_size`; without it the chunk size is as large as the context."""
    mixed: bool = False
    """Prefill and decode in one step: `config.mixed` and `config.step_tokens` may be set."""
    prefix_cache: bool = False
    """`config.prefix_cache` may be set, and `cached_pages()`; needs `slots`."""
    priorities: bool = False
    """A greater `Wish.priority` goes first, and `config.preempt` may be set."""
    adaptive: bool = False
    """`set_steps(steps)`: several candidates."""
    slots: bool = False
    """`slots_of(request)` and `free_pages()`: who owns which KV slot."""
    marks: bool = False
    """Per-token outputs: `Wish.marks`, `Answer.marks`, and the marks in the end event."""
    failures: bool = False
    """`Answer.failed`: the device reports an error of one request alone."""
    retraction: bool = False
    """`retract(request)`: the next plan takes everything from a running request, which waits again."""
    denial: bool = False
    """`deny(count)`: the next attempts to allocate find nothing."""
    losses: bool = False
    """`lose(step)` and `resume()`: a step fails as a whole."""
    counters: bool = False
    """`counters()`: what was verified and accepted so far."""

    FOUNDATIONS: ClassVar = {"prefix_cache": ("slots",)}


class Wish(NamedTuple):
    """What a client asks for."""

    request: str
    prompt: Sequence[int]
    max_tokens: int
    priority: int = 0  # greater goes first
    seed: int = 0  # 0: greedy; else what its tokens are drawn from, together with their position
    stop_tokens: Sequence[int] = ()
    marks: bool = False  # one more integer per token is wanted


class Answer(NamedTuple):
    """What a step came to. Rows and chunks in the order of the step."""

    step: int
    first: Sequence[int]  # per chunk: the token after a prompt's last chunk, -1 after another
    runs: Sequence[Sequence[Sequence[int]]]  # per round and row: the accepted tokens, the bonus token last
    first_marks: Sequence[int] = ()  # with `marks`: beside `first`
    marks: Sequence[Sequence[Sequence[int]]] = ()  # with `marks`: beside `runs`
    failed: Sequence[str] = ()  # with `failures`: requests whose computation went wrong


StepView = Mapping[str, Any]
"""What `plan` returns, a mapping with these keys:

    step     int, 1, 2, 3, …
    enters   requests that are admitted with this step, or again
    prefill  per chunk (request, start, tokens, tail, key): computes positions start … start + len(tokens) − 1 of the context, which is
             the prompt and, after a retraction, what was delivered before. `tail` is the token after the chunk, -1 after the last one
    decode   per row (request, length, root, key): `length` positions have KV as far as the engine knows; `root` is the token at
             position `length` if the engine hands it over, None if the device keeps it
    steps    int, the draft steps of its rounds
    rounds   int, how many rounds it may run; 1 if it has chunks

`key` is what the device draws from (`Wish.seed`). Either list may be empty, not both.
"""

Event = tuple[Any, ...]
"""("tokens", request, tokens) for what was delivered; ("end", request, reason, tokens, marks) at the end, with all that was delivered.

The reason is "stop", "length", "abort" or "error"; marks are None unless they were wanted."""


class Engine(Protocol):
    """A scheduler. To refuse is to return None or False, or to raise one of `REFUSALS`; nothing may have changed then."""

    def submit(self, wish: Wish) -> int | None:
        """Queue a request; returns how many tokens it gets at most: `max_tokens`, or less where context or pool are smaller."""

    def abort(self, request: str) -> Sequence[Event]:
        """The client is gone. The end event comes now, or, if a step of several rounds is running, when that is committed; a
        request that is not there has no events."""

    def plan(self) -> StepView | None:
        """The next step, launched at once; None if there is nothing to do, or nothing before a step is committed."""

    def commit(self, answer: Answer) -> Sequence[Event]:
        """The oldest step in flight is done. Any other answer is refused."""

    def waiting(self) -> Sequence[str]:
        """Requests in the queue."""

    def running(self) -> Sequence[str]:
        """Requests that have been admitted and not ended."""

    # blocks
    def interrupts(self) -> int:
        """The newest step that must end at its next round, since a new plan could differ; 0 if none must."""

    # adaptive
    def set_steps(self, steps: int) -> None:
        """From the next plan on, rounds draft so many steps, one of the candidates."""

    # slots
    def slots_of(self, request: str) -> Sequence[int]:
        """The slots of a running request by position, all that are allocated; slot = page · page_size + offset, page 0 is padding."""

    def free_pages(self) -> Sequence[int]:
        """Pages of the free list."""

    # prefix_cache
    def cached_pages(self) -> Sequence[int]:
        """Pages that the prefix cache owns, whether or not a request uses them."""

    # retraction
    def retract(self, request: str) -> None:
        """Memory is wanted back; the next plan that can takes it."""

    # denial
    def deny(self, count: int) -> None:
        """The next `count` attempts to allocate find nothing."""

    # losses
    def lose(self, step: int) -> Sequence[Event]:
        """The oldest step in flight has failed; neither it nor those behind it will be committed. Their requests wait again, with what was
        delivered before; at most one ends ("error"). Nothing is planned, and none of their pages are given away, until `resume`."""

    def resume(self) -> None:
        """The device is quiet. What is planned next may be smaller than asked for: fewer steps, fewer rows, another order."""

    # counters
    def counters(self) -> Sequence[int]:
        """(rows verified, drafts proposed, drafts accepted) in all, rows that had left aside."""


MakeEngine = Callable[[ServingConfig], Engine]

METHODS: dict[str, tuple[str, ...]] = {
    "": ("submit", "abort", "plan", "commit", "waiting", "running"),
    "blocks": ("interrupts",),
    "adaptive": ("set_steps",),
    "slots": ("slots_of", "free_pages"),
    "prefix_cache": ("cached_pages",),
    "retraction": ("retract",),
    "denial": ("deny",),
    "losses": ("lose", "resume"),
    "counters": ("counters",),
}
"""Capability -> the methods of an engine that it promises; "" is what every engine has."""

REASONS = ("stop", "length", "abort", "error")
