"""What a client asks for, what it gets, and the rule that says when its request ends.

Every executor uses this rule to end a multi-step, and the engine uses it to finish the request. A verify round
emits a *run* of `accept_lens` tokens for a row. The run is cut by the first stop inside it and by what is left of
`max_tokens`, whichever comes first; a stop on the very last allowed token is a stop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from ..errors import InvalidRequest
from ..prompt import NO_TOKENS, Prompt
from .arrays import Int64Array


class FinishReason(IntEnum):
    """Why a request ended. The first stop wins: a stop exactly at the length cap is a STOP."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    TRANSFERRED = 5  # on a prefill worker: a decode worker has the request now
    MOVED = 6  # a worker of it was lost: its router places it anew, or fails it


GRAMMAR_KINDS = ("json_schema", "lark")


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output may be: the text of a JSON schema, or of a grammar in Lark's notation."""

    kind: str
    text: str

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            raise InvalidRequest(f"a grammar is one of {', '.join(GRAMMAR_KINDS)}, not {self.kind!r}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's distribution is turned into tokens. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p`
    0 are off.

    `min_p` leaves out every token whose probability at this temperature is below that share of the greatest
    probability. `presence_penalty` is subtracted once from the logit of each token in the output, `frequency_penalty`
    once for each occurrence. `repetition_penalty` divides positive logits of tokens in prompt or output, and multiplies
    negative ones. `logit_bias` has pairs of a token and the number that is added to its logit, before the penalties.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        # `not (a <= x)` instead of `x < a`: the first is also true of NaN.
        if not (0.0 <= self.temperature < float("inf")):
            raise InvalidRequest(f"temperature must be a finite number >= 0, got {self.temperature}")
        if not (0.0 < self.top_p <= 1.0):
            raise InvalidRequest(f"top_p must be in (0, 1], got {self.top_p}")
        if not isinstance(self.top_k, int | np.integer) or self.top_k < 0:
            raise InvalidRequest(f"top_k must be an integer >= 0 (0 is off), got {self.top_k}")
        if not (0.0 <= self.min_p <= 1.0):
            raise InvalidRequest(f"min_p must be in [0, 1] (0 is off), got {self.min_p}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not (abs(getattr(self, name)) < float("inf")):
                raise InvalidRequest(f"{name} must be a finite number (0 is off), got {getattr(self, name)}")
        if not (0.0 < self.repetition_penalty < float("inf")):
            raise InvalidRequest(f"repetition_penalty must be above 0 (1 is off), got {self.repetition_penalty}")
        for token, bias in self.logit_bias:
            if not (abs(bias) < float("inf")) or token < 0:
                raise InvalidRequest(f"logit_bias must be a finite number for a token id, got {bias} for {token}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def is_shaped(self) -> bool:
        """Whether the target's logits are changed before a token is drawn from them."""
        return (
            self.has_penalties
            or bool(self.logit_bias)
            or self.grammar is not None
            or (self.min_p > 0.0 and not self.is_greedy)
        )

    def to_json(self) -> list[Any]:
        """Return a list that `from_json` reads back:
        temperature, top_p, top_k, seed, and an object of what else is not off."""
        values: list[Any] = [self.temperature, self.top_p, self.top_k, self.seed]
        others = {name: getattr(self, name) for name in SHAPING if getattr(self, name) != getattr(GREEDY, name)}
        if self.grammar is not None:
            others["grammar"] = [self.grammar.kind, self.grammar.text]
        return [*values, others] if others else values

    @classmethod
    def from_json(cls, value: Any) -> SamplingParams:
        """Read what `to_json` wrote. Raises TypeError or ValueError for anything else, InvalidRequest for
        values out of range."""
        temperature, top_p, top_k, seed, *rest = value
        others = dict(rest[0]) if rest else {}
        if "grammar" in others:
            kind, text = others["grammar"]
            others["grammar"] = Grammar(str(kind), str(text))
        if "logit_bias" in others:
            others["logit_bias"] = tuple((int(token), float(bias)) for token, bias in others["logit_bias"])
        return cls(float(temperature), float(top_p), top_k, seed, **others)


SHAPING = ("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")


GREEDY = SamplingParams()


def biases(by_token: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """Return `SamplingParams.logit_bias` of a JSON object, whose keys are texts of token ids."""
    return tuple(sorted((int(token), float(bias)) for token, bias in by_token.items()))


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asks for. Immutable; the engine keeps a `RequestRecord` beside it.

    `max_tokens` bounds the output; the length that the model really produces is known to the executor alone. `outputs`
    names per-node outputs to return ("logprobs", "hidden_states", …). `namespace` separates prefix caches. `shown` is
    the output that the client has already, from a worker that was lost. The request continues after it as without the
    loss: the next decode round starts from the last token of `shown`. `max_tokens` and the number of tokens that is
    reported at the end count it; what is delivered, and the outputs, begin behind it. `fixed_length`: the client wants
    all `max_tokens` tokens, and no token ends the output before (`ignore_eos` of other servers). `min_tokens`: behind
    fewer tokens no stop token can be drawn, and no stop string ends the output. `answer`: what the
    model is going to say, or the beginning of it, where that is known and the executor has no tokens; its KV can then
    be cached. `arrived_ns` is for metrics alone.
    """

    request_id: str
    prompt: Prompt
    max_tokens: int
    priority: int = 0
    namespace: str = ""
    sampling: SamplingParams = GREEDY
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    shown: Prompt = NO_TOKENS  # only its length is known where the executor has no tokens
    fixed_length: bool = False
    answer: Prompt = NO_TOKENS
    arrived_ns: int | None = None  # when it reached the server, by the clock of the events; None: when it is submitted
    min_tokens: int = 0

    def __post_init__(self) -> None:
        if self.prompt.length < 1:
            raise InvalidRequest(f"request {self.request_id!r}: the prompt is empty; at least 1 token is needed")
        if not isinstance(self.max_tokens, int | np.integer):
            message = f"request {self.request_id!r}: max_tokens must be an integer >= 1, got {self.max_tokens!r}"
            raise InvalidRequest(message)
        if not isinstance(self.priority, int | np.integer):
            message = f"request {self.request_id!r}: priority must be an integer (0 is usual), got {self.priority!r}"
            raise InvalidRequest(message)
        if self.max_tokens < 1:
            raise InvalidRequest(f"request {self.request_id!r}: max_tokens must be >= 1, got {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            message = f"min_tokens must be 0 … {self.max_tokens} (max_tokens), got {self.min_tokens}"
            raise InvalidRequest(f"request {self.request_id!r}: {message}")
        if self.min_tokens and self.sampling.grammar is not None:
            message = "min_tokens contradicts a grammar, which decides where the text ends"
            raise InvalidRequest(f"request {self.request_id!r}: {message}")
        if any(not text for text in self.stop_strings):
            raise InvalidRequest(f"request {self.request_id!r}: a stop string is empty")
        if self.shown.length >= self.max_tokens:
            raise InvalidRequest(
                f"request {self.request_id!r}: {self.shown.length} tokens were shown, and max_tokens is {self.max_tokens}"
            )

    @property
    def holds_ends(self) -> bool:
        """Whether stop tokens are masked for some time."""
        return bool(self.min_tokens and self.stop_tokens)

    @property
    def prefill_len(self) -> int:
        """The tokens that are computed before decode rounds: the prompt, and what was shown but its last token."""
        return self.prompt.length + max(self.shown.length - 1, 0)

    def context(self) -> np.ndarray | None:
        """Return prompt and shown tokens, int64 [n]; only the prompt where no more is known, None if that is not."""
        tokens = self.prompt.materialize()
        shown = self.shown.materialize()
        return tokens if tokens is None or shown is None or not len(shown) else np.concatenate([tokens, shown])

    def continued(self, length: int) -> np.ndarray | None:
        """Return the first `length` tokens of prompt and output, int64 [length], by the description of the prompt.

        A prompt that is known by its tokens does not say what follows: then the prompt and as much of `answer`.
        """
        if self.prompt.hash_ids is not None:
            return self.prompt.continued(length).materialize()
        tokens, answer = self.prompt.materialize(), self.answer.materialize()
        if tokens is None or answer is None:
            return tokens
        return np.concatenate([tokens, answer[: length - len(tokens)]])


@dataclass(slots=True)
class FinishedRequest:
    """One ended request, as `Engine.commit` and `Engine.abort` report it."""

    request_id: str
    reason: FinishReason
    num_output: int  # tokens delivered
    tokens: Int64Array | None = None  # int64 [num_output]; None where the executor has no tokens
    outputs: dict[str, list[Any]] | None = None  # what `Request.outputs` asked for, one entry per token
    message: str = ""  # for ERROR: what happened; for LENGTH: what limits the output if it is not `max_tokens`


# -- when a request ends ----------------------------------------------------------------------------------------------


class CutRuns(NamedTuple):
    """The part of each row's run that is kept, as arrays [bs]."""

    kept: np.ndarray  # int64: tokens delivered, 1 … accept_lens
    ended: np.ndarray  # bool: the request is over
    stopped: np.ndarray  # bool: … because of a stop (else: length)


def cut_runs(accept_lens: np.ndarray, stop_index: np.ndarray | None, remaining: np.ndarray) -> CutRuns:
    """Cut each run at its first stop and at the length cap.

    accept_lens: int [bs], 1 … width. stop_index: int [bs], index inside the run of the first stop, −1 for none (None:
    no row has one).
    remaining: int [bs], tokens the request may still emit, ≥ 1 for a live row.
    """
    kept = np.minimum(accept_lens, remaining)
    stopped = np.zeros(len(kept), dtype=bool)
    if stop_index is not None:
        for i in (stop_index >= 0).nonzero()[0].tolist():  # a row stops once
            if stop_index[i] < kept[i]:
                kept[i] = stop_index[i] + 1
                stopped[i] = True
    ended = kept == remaining
    if stop_index is not None:
        ended |= stopped
    return CutRuns(kept, ended, stopped)


def finish_reason(stopped: bool) -> FinishReason:
    return FinishReason.STOP if stopped else FinishReason.LENGTH


def first_stop_token(run: np.ndarray, stop_tokens: tuple[int, ...]) -> int:
    """Return the index in `run` (int [n]) of the first stop token, −1 if there is none."""
    if not stop_tokens:
        return -1
    hits = np.flatnonzero(np.isin(run, stop_tokens))
    return int(hits[0]) if len(hits) else -1
