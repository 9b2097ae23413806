"""Compares two endpoints on many prompts, tells errors from noise by asking again, and looks for the smallest
prompt that shows one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from .difference import AnswerDifference, first_difference, follows, greatest_shift, num_unlikely
from .endpoint import Completion, Endpoint, EndpointError

MAX_CHECKED = 50
"""Differences that are asked again, one after another; those beyond count as errors."""
TRIES_AGAIN = 2
MAX_FAILURES = 3
"""Requests without an answer, after which the run is given up."""
MAX_SEARCH_REQUESTS = 80


@dataclass
class PromptDifference:
    """A prompt, by its number from 0, whose answers differ, and how many `times`. `verdict`: tie, noise or error.

    `plain_gives_other`: when the plain endpoint gave the other token ("alone", "together"), which is noise; `alone`:
    how often the prompt, asked alone, differed again, of TRIES_AGAIN; None if it was not asked again.
    """

    number: int
    prompt: str
    plain: Completion
    speculative: Completion
    difference: AnswerDifference
    verdict: str
    plain_gives_other: tuple[str, ...] = ()
    alone: int | None = None
    times: int = 1


@dataclass
class SmallestPrompt:
    prompt: str
    max_tokens: int
    difference: AnswerDifference
    num_requests: int


@dataclass
class LosslessOutcome:
    """What was compared; the counts are of answers.
    `greatest_shift`: of the log-probability of a token that both sides give."""

    num_compared: int = 0
    num_same: int = 0
    num_tokens: int = 0
    num_unlikely: int = 0
    greatest_shift: float = 0.0
    findings: list[PromptDifference] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    smallest: SmallestPrompt | None = None

    def count(self, verdict: str) -> int:
        return sum(finding.times for finding in self.findings if finding.verdict == verdict)


@dataclass
class LosslessTrial:
    """One comparison. Where `plain` is `speculative` it tells how much one endpoint differs from itself, asked
    alone and together."""

    plain: Endpoint
    speculative: Endpoint
    prompts: Sequence[str]
    max_tokens: int
    repeat: int
    tie_margin: float
    progress: Callable[[str], None] = lambda text: None
    outcome: LosslessOutcome = field(default_factory=LosslessOutcome)

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        both = {"plain": self.plain, "speculative": self.speculative}
        return both if self.plain is not self.speculative else {"endpoint": self.plain}

    async def run(self) -> None:
        """Ask both servers, compare the answers, and examine the differences. Raises EndpointError if an endpoint does
        not answer, or stops to."""
        for endpoint in self.endpoints.values():
            self.progress(f"asking {endpoint.url}")
            await endpoint.open()
        numbers = range(len(self.prompts))
        jobs = [(self.speculative, number) for _ in range(self.repeat) for number in numbers]
        if len(self.endpoints) == 1:
            plain = [await self._ask(self.plain, number) for number in numbers]
            self._compare(plain, await self._ask_together(jobs))
            return
        answers = await self._ask_together([(self.plain, number) for number in numbers] + jobs)
        self._compare(answers[: len(numbers)], answers[len(numbers) :])
        for finding in [one for one in self.outcome.findings if one.verdict == "error"][:MAX_CHECKED]:
            await self._examine(finding)
        repeating = [one for one in self.outcome.findings if one.verdict == "error" and one.alone]
        if repeating:
            self.outcome.smallest = await self._smallest(min(repeating, key=lambda one: len(one.prompt)))

    async def _ask(self, endpoint: Endpoint, number: int) -> Completion | None:
        """Return the answer to a prompt, or None and note the failure.
        Raises EndpointError once there were too many."""
        try:
            answer = await endpoint.complete(self.prompts[number], self.max_tokens)
        except EndpointError as error:
            self.outcome.failures.append(f"prompt {number + 1}: {error}")
            if len(self.outcome.failures) >= MAX_FAILURES:
                raise EndpointError(f"stopped after {MAX_FAILURES} requests without an answer: {error}") from None
            return None
        asked = ", ".join(f"{one.num_requests:,} of {name}" for name, one in self.endpoints.items())
        self.progress(f"prompt {number + 1} of {len(self.prompts):,}; requests: {asked}")
        return answer

    async def _ask_together(self, jobs: Iterable[tuple[Endpoint, int]]) -> list[Completion | None]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._ask(*job)) for job in jobs]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def _compare(self, plain: Sequence[Completion | None], speculative: Sequence[Completion | None]) -> None:
        """Compare every answer with the plain endpoint's one to the same prompt."""
        outcome = self.outcome
        found: dict[tuple[int, int, str | None], PromptDifference] = {}
        for i, answer in enumerate(speculative):
            number = i % len(plain)
            reference = plain[number]
            if reference is None or answer is None:
                continue
            outcome.num_compared += 1
            outcome.num_tokens += len(answer.tokens)
            outcome.num_unlikely += num_unlikely(answer, self.tie_margin)
            outcome.greatest_shift = max(outcome.greatest_shift, greatest_shift(reference, answer))
            if (difference := first_difference(reference, answer)) is None:
                outcome.num_same += 1
            elif (key := (number, difference.position, difference.speculative)) in found:
                found[key].times += 1
            else:
                verdict = "tie" if difference.is_tie(self.tie_margin) else "error"
                found[key] = PromptDifference(number, self.prompts[number], reference, answer, difference, verdict)
        outcome.findings = list(found.values())

    async def _examine(self, finding: PromptDifference) -> None:
        """Ask again: does the plain endpoint give the other token, alone or in a batch, and does the
        difference repeat?"""
        number, again = finding.number, range(TRIES_AGAIN)
        others = [i for i in range(len(self.prompts)) if i != number] or [number] * self.plain.concurrency
        batch = [(self.plain, i) for i in [number, *others[: self.plain.concurrency - 1]]]
        answers = {
            "alone": [await self._ask(self.plain, number) for _ in again],
            "together": [(await self._ask_together(batch))[0] for _ in again],
        }
        finding.plain_gives_other = tuple(
            when
            for when, given in answers.items()
            if any(answer and follows(answer, finding.speculative, finding.difference) for answer in given)
        )
        alone = [await self._ask(self.speculative, number) for _ in again]
        finding.alone = sum(self._error(finding.plain, answer) is not None for answer in alone if answer)
        finding.verdict = "noise" if finding.plain_gives_other else "error"

    def _error(self, plain: Completion, speculative: Completion) -> AnswerDifference | None:
        difference = first_difference(plain, speculative)
        return None if difference is None or difference.is_tie(self.tie_margin) else difference

    async def _smallest(self, finding: PromptDifference) -> SmallestPrompt | None:
        """Drop runs of words, long ones first, while the answers still differ; None if they do not differ once more."""
        num_requests = 0

        async def error_of(words: Sequence[str], max_tokens: int) -> AnswerDifference | None:
            nonlocal num_requests
            text = "".join(words)
            if not text.strip() or num_requests + 2 > MAX_SEARCH_REQUESTS:
                return None
            num_requests += 2
            self.progress(f"smallest prompt: {len(words)} words, {num_requests} of {MAX_SEARCH_REQUESTS} requests")
            try:
                answers = [await one.complete(text, max_tokens) for one in (self.plain, self.speculative)]
            except EndpointError:
                return None
            return self._error(*answers)

        words = re.findall(r"\s*\S+|\s+$", finding.prompt)
        words = words if len(words) > 1 else list(finding.prompt)
        if (best := await error_of(words, self.max_tokens)) is None:
            return None
        size = len(words) // 2
        while size:
            begin = 0
            while begin < len(words):
                fewer = words[:begin] + words[begin + size :]
                if (error := await error_of(fewer, self.max_tokens)) is not None:
                    words, best = fewer, error
                else:
                    begin += size
            size //= 2
        max_tokens = self.max_tokens
        if best.unit == "token" and (error := await error_of(words, best.position + 1)) is not None:
            max_tokens, best = best.position + 1, error
        return SmallestPrompt("".join(words), max_tokens, best, num_requests)
