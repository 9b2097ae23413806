"""The outputs of one request as they come from the body, until its client has them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...core.contract.request import FinishReason
from ..base.errors import ApiError, refused
from ..base.port import Order, Piece, TokenText
from ..base.turns import LoopTurns
from ..metrics.counts import Life

FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}
TOKENS_PER_TURN = 1024
"""Tokens of one reply that become text in one turn of the event loop: more wait where a client reads slowly."""
SHOWN_OF_TOKEN = {0: 1, 1: 4}
"""Outputs beside a token → what is written of it, in tokens without any: its log-probability, …"""
SHOWN_WITH_TOPS = 32
"""… and those of the likeliest tokens at its place."""
TOKENS_PER_UNIT = 2


@dataclass(slots=True)
class ChoiceDelta:
    """What a choice has gained since the last look."""

    text: str
    tokens: list[int]
    outputs: Mapping[str, list[Any]]
    finish: str | None
    at_ns: int  # of its first piece, by the clock of the body


class Choice:
    """One output of a reply: the part of its text that is final, and the pieces that have come since the last call."""

    def __init__(self, index: int, order: Order, decoder: TokenText, life: Life) -> None:
        self.index = index
        self.order = order
        self.life = life
        self.num_tokens: int = 0  # that are text
        self.num_received: int = 0
        self.finish: str | None = None
        self.error: str = ""
        self.is_live = True  # the body has it
        self.shown_of_token: int = SHOWN_OF_TOKEN.get(len(order.outputs), SHOWN_WITH_TOPS)
        self._decoder = decoder
        self._pieces: list[Piece] = []
        self._has_stopped = False  # at a stop string or a stop token, which the body does not know of

    def add(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self.num_received += len(piece.tokens)

    def units_of(self, num_tokens: int) -> int:
        """Return the units of work for so many tokens, as `LoopTurns` counts them."""
        return 1 + num_tokens * self.shown_of_token // TOKENS_PER_UNIT

    @property
    def stop(self) -> str | None:
        """The stop string at which the text has ended."""
        return self._decoder.stop

    @property
    def has_news(self) -> bool:
        return bool(self._pieces) and self.finish is None and not self.error

    def take(self, most: int) -> ChoiceDelta | None:
        """Return what has come since the last call, as one piece, up to the piece with which it has `most` tokens; None
        if nothing has come or the choice is over."""
        if not self.has_news:
            self._pieces = []
            return None
        count = num_tokens = 0
        for piece in self._pieces:
            count, num_tokens = count + 1, num_tokens + len(piece.tokens)
            if num_tokens >= most:
                break
        pieces, self._pieces = self._pieces[:count], self._pieces[count:]
        tokens, outputs = pieces[0].tokens, pieces[0].outputs
        if count > 1:
            tokens = [token for piece in pieces for token in piece.tokens]
            names = dict.fromkeys(name for piece in pieces for name in piece.outputs)
            outputs = {name: [value for piece in pieces for value in piece.outputs.get(name, ())] for name in names}
        text, shown = self._text_of(tokens)
        if shown < len(tokens):
            tokens, outputs = tokens[:shown], {name: values[:shown] for name, values in outputs.items()}
        self.num_tokens += len(tokens)
        end = pieces[-1].finished
        if self._has_stopped:
            self.finish = "stop"
        elif end is not None:
            text += self._decoder.finish()
            self.finish = "stop" if self._decoder.stop is not None else FINISH.get(end.reason)
            if self.finish is None:
                self.error = end.message or "the request failed"
        return ChoiceDelta(text, tokens, outputs, self.finish, pieces[0].at_ns)

    def _text_of(self, tokens: list[int]) -> tuple[str, int]:
        """Return the text of the next tokens, and how many of them it took: those after a stop string or a stop token
        are none of the output. A stop token has no text."""
        order = self.order
        if not order.stop and not order.stop_tokens:
            return self._decoder.push(tokens), len(tokens)
        text = ""
        for count, token in enumerate(tokens, 1):
            if token in order.stop_tokens and self.num_tokens + count > order.min_tokens:
                self._has_stopped = True
                return text + self._decoder.finish(), count
            text += self._decoder.push((token,))
            if self._decoder.stop is not None:
                self._has_stopped = True
                return text, count
        return text, len(tokens)


class Writer(Protocol):
    """Writes a stream in the place of the task that sends it, while that task waits for news."""

    @property
    def is_ready(self) -> bool:
        """Whether the client has read all written bytes."""

    def prepare(self) -> bool:
        """Make the bytes of the pieces that have come. Returns False if the reply is over, has failed or has more
        news than fit into a turn: then the task sends the rest."""

    def flush(self) -> None:
        """Write the prepared bytes; wake the reply if the task is to go on."""


class Reply:
    """The choices of one request. `take` waits for news of any of them."""

    def __init__(
        self, reply_id: str, choices: Sequence[Choice], num_prompt_tokens: int, deadline_s: float, turns: LoopTurns
    ) -> None:
        self.id = reply_id
        self.choices = choices
        self.num_prompt_tokens = num_prompt_tokens
        self.created: int = int(time.time())
        self.writer: Writer | None = None  # once the stream has begun
        self._has_news = False
        self._waiter: asyncio.Future[None] | None = None
        self._is_beginning = False  # a stream that waits for its first news
        self._is_reminded = False
        self._turns = turns
        self._most_per_choice = max(TOKENS_PER_TURN // choices[0].shown_of_token // len(choices), 1)
        self._failure: ApiError | None = None
        self.deadline: float = asyncio.get_running_loop().time() + deadline_s

    @property
    def has_news(self) -> bool:
        return self._has_news

    @property
    def is_over(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompts that a prefix cache had: of each prompt for the first of its outputs."""
        each = self.choices[0].order.num_outputs
        return sum(choice.life.num_cached for choice in self.choices[::each])

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    def fail(self, error: ApiError) -> None:
        """Let `take` raise `error`."""
        self._failure = error
        self.tell()

    def prepare(self) -> bool:
        """Let the writer make the bytes of the pieces that have come. Returns False if it cannot, or if the reply is
        over."""
        writer = self.ready_writer
        return writer is not None and writer.prepare()

    def tell(self) -> None:
        """Let the writer write these bytes. If it cannot, or the reply is over, wake `take`, which fetches it."""
        self._has_news = True
        if not self.prepare():
            self.wake()
        if self.writer is not None:
            self.writer.flush()

    def wake(self) -> None:
        """Let `take` return."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def remind(self) -> None:
        """Let `begin` or `take` return without news, if the sending task waits there: the client has heard nothing for
        some time."""
        if self._is_awaited:
            self._is_reminded = True
            self.wake()

    def was_reminded(self) -> bool:
        """Return whether `remind` ended the last waiting."""
        was, self._is_reminded = self._is_reminded, False
        return was

    @property
    def ready_writer(self) -> Writer | None:
        """The writer, or None if it may not write now. It may write while the sending task waits, once the client has
        read all earlier bytes."""
        writer = self.writer
        may_write = self._is_awaited and self._failure is None and writer is not None and writer.is_ready
        return writer if may_write else None

    @property
    def _is_awaited(self) -> bool:
        return self._waiter is not None and not self._waiter.done()

    async def begin(self) -> list[tuple[Choice, ChoiceDelta]]:
        """Wait until the stream may begin. Return the first news, or none if they are certain but not due yet;
        raise as `take` does."""
        if not self._has_news:
            self._is_beginning = True
            await self._wait()
            self._is_beginning = False
        return self.news() if self._has_news else []

    def expect(self) -> bool:
        """Let a stream begin before its first news are due, because they are certain.
        Returns whether a stream waits for them."""
        if not (self._is_beginning and self._is_awaited):
            return False
        self.wake()
        return True

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    async def take(self) -> list[tuple[Choice, ChoiceDelta]]:
        """Wait for news and return them; an empty list once all choices are over, or after `remind`.
        Raises ApiError if one failed, or the reply did."""
        if self._has_news:
            await self._turns.take(TOKENS_PER_TURN // TOKENS_PER_UNIT)  # more than fits into a turn: others are next
        while not self.is_over:
            if not self._has_news:
                await self._wait()
            if (deltas := self.news()) or self._is_reminded:
                return deltas
        return []

    def news(self) -> list[tuple[Choice, ChoiceDelta]]:
        """Return the pieces that have come since the last call, about TOKENS_PER_TURN tokens at most. Raises ApiError
        as `take` does; pieces that came with the failure are then dropped."""
        deltas = []
        for choice in self.choices:
            if (delta := choice.take(self._most_per_choice)) is not None:
                deltas.append((choice, delta))
            if choice.error and self._failure is None:
                self._failure = refused(choice.error, 1)
        self._has_news = any(choice.has_news for choice in self.choices)
        if self._failure is not None:
            raise self._failure
        return deltas
