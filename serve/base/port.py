"""What stands between HTTP and a body: the body that decodes a checkpoint, or the one that simulates a deployment.

```
HTTP (asyncio)  ── Order, abort ─►  SchedulerThread  ── submit, abort ─►  Body
                ◄── pieces ───────                   ◄── turn ─────────
```

Only the scheduler's thread calls the methods of a body; its attributes, `check_grammar`, and `encode` and `decode` of
its tokenizer, any thread may use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ...core.contract.request import FinishedRequest, Grammar, SamplingParams
from ...core.contract.text import ChatEnd, PromptScores
from ...core.scheduler.config import EngineConfig
from ...core.scheduler.engine import Engine
from .pace import ClockPace


def namespace_of(adapter: str, salt: str) -> str:
    """Return the namespace of prompts with a `cache_salt`, for an adapter or for the model itself (""): prompts of
    different ones share no prefix."""
    return f"\0{adapter}\0{salt}" if adapter or salt.startswith("\0") else salt


def adapter_and_salt(namespace: str) -> tuple[str, str]:
    """Return the adapter and the salt of a namespace."""
    _, adapter, salt = namespace.split("\0", 2) if namespace.startswith("\0") else ("", "", namespace)
    return adapter, salt


@dataclass(frozen=True, slots=True)
class Order:
    """One output that a client asks for. `number` counts the orders of a server from 0;
    ids in engines follow from it."""

    number: int
    prompt: np.ndarray  # int64 [n]
    max_tokens: int
    at_s: float  # when it came, by time.monotonic
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    outputs: tuple[str, ...] = ()  # of `Request.outputs`
    priority: int = 0
    min_tokens: int = 0  # no end of text and no stop token ends the output before
    stop_tokens: frozenset[int] = frozenset()  # of the request; each ends the output
    adapter: str = ""  # of the model, by its name
    namespace: str = ""  # of `namespace_of`
    engine: int | None = None  # that serves it, past the router
    has_kv: bool = False  # another server has computed the prompt and sends its KV
    # For metrics alone: outputs with each prompt, whether this is the first of its request, whether they are streamed.
    num_outputs: int = 1
    is_first: bool = False
    streams: bool = False
    # For spans: the id of the answer, and the headers that name the client's trace.
    name: str = ""
    trace: tuple[tuple[str, str], ...] = ()

    @property
    def request_id(self) -> str:
        return f"r{self.number}"


@dataclass(slots=True)
class RemoteEngine:
    """An engine in another process. `gauges`: its newest numbers, as `observe.measuring.gauges` names them."""

    name: str
    config: EngineConfig
    gauges: Mapping[str, float] = field(default_factory=dict)
    loss: str = ""  # how its process ended; empty while it lives


@dataclass(slots=True)
class Piece:
    """What one round brought to one request; all pieces together are its output."""

    request_id: str
    at_ns: int  # by the clock of the body
    tokens: list[int]
    outputs: Mapping[str, list[Any]] = field(default_factory=dict)  # one entry per token: a float, or an array
    finished: FinishedRequest | None = None  # in the last piece


def longest_request(engines: Sequence[Engine]) -> int:
    """Return the tokens of a prompt with its output that context and pool of every engine take."""
    return min(min(one.config.context_len, one.sizes.pool_limit(one.config)) for one in engines)


def body_clock(body: Body) -> Callable[[int], int]:
    """Return what makes Unix time in ns of a time of the body."""
    ns_per_s = body.at_ns(1.0) - body.at_ns(0.0)
    begin_ns = time.time_ns() - (body.at_ns(time.monotonic()) / ns_per_s) * 1e9  # at time 0 of the body
    return lambda at_ns: round(begin_ns + at_ns / ns_per_s * 1e9)


class TextCodec(Protocol):
    """The tokenizer of a body, as `gpu.session.text.Tokenizer` is one."""

    byte_ids: Mapping[int, int]  # the tokens that stand for single bytes
    special_ids: Container[int]  # the tokens without text

    @property
    def most_bytes_per_token(self) -> int:
        """How many bytes of a text one token may stand for."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> np.ndarray: ...
    def decode(self, tokens: np.ndarray) -> str: ...
    def bytes_of(self, token: int) -> bytes: ...
    def text_of(self, token: int) -> str: ...
    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], end: ChatEnd = "answer", tools: Sequence[Mapping[str, Any]] = ()
    ) -> np.ndarray: ...


class TokenText(Protocol):
    """Text as its tokens come, as `core.contract.text.StreamDecoder` is one:
    it ends before the first stop string, which `stop` is then."""

    @property
    def stop(self) -> str | None: ...
    def push(self, tokens: Sequence[int]) -> str: ...
    def finish(self) -> str: ...


class Outlet(Protocol):
    """Takes the pieces of a body for its requests, on the thread that drives the body."""

    def deliver(self, pieces: list[Piece]) -> None:
        """Take the pieces that requests have got."""

    def prepare(self, pieces: list[Piece]) -> None:
        """Take pieces for one later time. Requests get them when `release` reaches that time, unless an abort comes
        first."""

    def release(self, now_ns: int) -> None:
        """Note that it is `now_ns`: requests get the pieces that were prepared for this time or earlier."""


@runtime_checkable
class ScoresPrompts(Protocol):
    """A body that can tell how likely the tokens of a prompt are."""

    def score(self, prompt: np.ndarray, num_top: int) -> Future[PromptScores]:
        """Begin to compute the log-probabilities of a prompt's tokens. Called between two turns, on their thread."""


class Body(Protocol):
    """Serves orders. `unsupported`: parameter of a request → why this body cannot honour it. `without_effect`:
    parameter that changes nothing here, and may be left out → why."""

    name: str  # of the model, for clients
    vocab_size: int  # token ids below it are prompts
    context_len: int  # tokens of a prompt with its output, at least 1
    unsupported: Mapping[str, str]
    without_effect: Mapping[str, str]
    hand_over_s: float  # how long it may wait after each delivery until the loop has sent that
    pace: ClockPace | None  # of a simulation
    defaults: Mapping[str, Any]  # of sampling parameters that a request leaves out, where they are not OpenAI's
    make_codec: Callable[[], TextCodec]  # makes the same tokenizer in another process

    @property
    def tokenizer(self) -> TextCodec:
        """What turns texts of clients into tokens, and tokens into text."""

    @property
    def engines(self) -> Sequence[Engine | RemoteEngine]:
        """The engines of the body, each of this process or of another one."""

    @property
    def failure(self) -> str:
        """Why no request can be served any more; empty if it can."""

    def wake(self) -> None:
        """End a turn that waits, because an order has come. Any thread may call this."""

    def at_ns(self, at_s: float) -> int:
        """Return the time of the body, real or simulated, at a time of `time.monotonic`."""

    def check_grammar(self, grammar: Grammar) -> None:
        """Raise ForedraftError if outputs cannot be made to follow `grammar`."""

    def make_decoder(self, order: Order) -> TokenText:
        """Return the object that makes text from the tokens of an order."""

    def submit(self, order: Order) -> str:
        """Queue an order; return why it is refused, or an empty text. A refusal may also come as a piece."""

    def abort(self, request_id: str) -> None:
        """Give a request up: its last piece comes with one of the next turns.
        An id that is not live changes nothing."""

    def wait_s(self) -> float | None:
        """Return how long nothing happens by itself, in real seconds; 0: take a turn now, None:
        nothing until an order comes."""

    def turn(self, outlet: Outlet) -> None:
        """Advance by at most one round, or to the present; `outlet` gets the pieces before the next round is
        planned."""

    def reload(self, table: str, source: str) -> None:
        """Use another adaptive table (JSON text).
        Raises ConfigError, and the last one goes on, if it is invalid here."""
