"""Compares the tokens and outputs of results with plain passes of the subject's model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ...core.contract.request import SamplingParams
from .contract import ExecutorCapabilities, ExecutorConfig, InspectedExecutor
from .oracle import (
    SLACK,
    After,
    Drafts,
    Draw,
    LookedUp,
    accepted,
    beside_drafts,
    drafts_at_end,
    edge_of,
    is_close,
    kept_tokens,
    place_of,
    probabilities,
    shaped,
    unfairness,
)

MOST_PROPOSALS = 20
"""Rounds of a run whose accept lengths are compared: a proposal from the whole text costs some passes."""


MOST_TIES = 24
"""Choices among nearly equal candidates that are tried before a proposal is wrong."""


class WrongResult(Exception):
    """What a result says, what it should say, and whether its form ("TYPE") or its content ("ANSWER") is wrong."""

    def __init__(self, was: str, should: str, id: str = "ANSWER") -> None:
        super().__init__(was, should, id)
        self.was, self.should, self.id = was, should, id


class JudgedRow(Protocol):
    """The facts about a row that the judge needs."""

    request_id: str
    sampling: SamplingParams
    num_prompt: int  # length of the prompt, at the front of `text`
    text: list[int]
    was_alone: bool  # its last round could draft, and the draft model took no part in it


class RunJudge:
    """Judges one run. Each method raises Wrong; `draws` are the sampled tokens since `forget`."""

    def __init__(self, subject: InspectedExecutor, config: ExecutorConfig, has: ExecutorCapabilities) -> None:
        self._subject, self._config, self._has_drafts = subject, config, has.drafts
        self._has_proposals = has.proposals
        self._proposals_left = MOST_PROPOSALS
        self._emitted: dict[str, int] = {}
        self._draws: list[tuple[Any, ...]] = []  # request, and the other fields of a `Draw`
        self._beside: list[tuple[float, float]] = []  # for `unfairness`
        self._is_collecting = False
        self._after_roots_alone: list[tuple[str, str] | None] = []
        self._has_confidences = has.confidences
        self._confidences: list[tuple[str, str] | None] = []

    def take_confidences(self) -> tuple[tuple[str, str] | None, ...]:
        """Return how the confidences of rows differ from those of the draft for their texts, and forget them."""
        found, self._confidences = tuple(self._confidences), []
        return found

    def confidences(self, row: JudgedRow, steps: int, found: Sequence[float], what: str) -> None:
        """Compare how sure a row's drafts are with what the draft alone says behind the row's text."""
        if not self._has_confidences or len(row.text) + steps + 1 >= self._config.context_len:
            return
        wanted = self._subject.confidences(row.text, steps)
        if wanted is None:
            return
        is_same = is_close(np.asarray(found), np.asarray(wanted))
        was, should = f"{what} has confidences {_short(found)}", f"{_short(wanted)}: those of its own drafts"
        self._confidences.append(None if is_same else (was, should))

    def compare_again(self) -> None:
        """Compare as many proposals from here on as from the beginning."""
        self._proposals_left = MOST_PROPOSALS

    def take_after_roots_alone(self) -> tuple[tuple[str, str] | None, ...]:
        """Return how the drafts of rows that had verified their root alone differ from the draft's own, and forget
        them."""
        found, self._after_roots_alone = tuple(self._after_roots_alone), []
        return found

    def forget(self) -> None:
        """Begin to collect draws."""
        self._is_collecting = True
        self._beside.clear()
        self._draws.clear()
        self._emitted.clear()

    def unfairness(self) -> str | None:
        """Say how the collected draws differ from independent ones of the exact distribution; None if they do not."""
        requests = {name: number for number, name in enumerate(dict.fromkeys(draw[0] for draw in self._draws))}
        draws = [Draw(requests[draw[0]], *draw[1:]) for draw in self._draws]
        return unfairness(draws, np.array(self._beside).reshape(-1, 2))

    def first_token(self, row: JudgedRow, token: int, shown: Mapping[str, Any], what: str) -> None:
        self._emitted[row.request_id] = 0
        self._tokens(row, [token], shown, what)

    def round(
        self,
        row: JudgedRow,
        run: Sequence[int],
        tree: tuple[int, int, int],
        shown: Mapping[str, Any],
        what: str,
        place: tuple[int, int],
    ) -> bool:
        """Judge a round. `run` is what it emitted behind the row's text; `tree` are its steps, top-k and nodes, `place`
        its round and row. Returns whether a look-up has drafted in the place of the draft model."""
        # What stands behind the context is cut off: all of it has the context's last position.
        self._tokens(row, run[: max(self._config.context_len + 1 - len(row.text), 1)], shown, what)
        steps, topk, nodes = tree
        if not self._has_drafts or steps == 0 or nodes == 1 or len(row.text) + steps + 1 >= self._config.context_len:
            return False
        found = self._subject.proposed()[place[0]][place[1]] if self._has_proposals else None
        if isinstance(found, LookedUp):
            if not row.sampling.is_greedy and self._is_collecting:
                self._note_token_beside(row, run, drafts_at_end(found, run))
            return True
        if found is not None and self._config.has_look_ups:  # chains of the model may be shorter than was planned
            steps = max(map(len, found), default=0)
            nodes = steps + 1
        self._drafts(row, run, (steps, topk, nodes), found, what)
        return False

    def _drafts(
        self, row: JudgedRow, run: Sequence[int], tree: tuple[int, int, int], found: Drafts | None, what: str
    ) -> None:
        """Judge what the draft model has drafted for a row: by `found` if the executor shows it, else by what was
        accepted."""
        steps, topk, nodes = tree
        if found is not None and (self._proposals_left > 0 or row.was_alone):
            self._proposals_left -= not row.was_alone
            wrong = self._proposal(row.text, tree, found, what)
            if row.was_alone:
                self._after_roots_alone.append(wrong)
            elif wrong is not None:
                raise WrongResult(*wrong)
        if not row.sampling.is_greedy:
            if self._is_collecting:
                drafted = self._subject.drafted(row.text, steps, topk, nodes, 0)
                if drafted is not None:
                    self._note_token_beside(row, run, drafts_at_end(drafted, run))
            return
        if self._has_proposals or (self._proposals_left == 0 and not row.was_alone):
            return
        self._proposals_left -= not row.was_alone
        wanted = []
        # Among nearly equal candidates either may have been drafted.
        for noise in range(5):
            drafted = self._subject.drafted(row.text, steps, topk, nodes, noise)
            if drafted is None:
                return
            wanted.append(accepted(drafted, run))
            if wanted[-1] == len(run):
                self._after_roots_alone += [None] * row.was_alone
                return
        should = f"{wanted[0]}: that many follow the draft's own proposal for its text"
        was = f"{what} emits {len(run)} tokens, {list(run)}, with {steps} steps of {topk} and {nodes} nodes"
        if not row.was_alone:
            raise WrongResult(was, should)
        self._after_roots_alone.append((was, should))

    def _proposal(
        self, text: Sequence[int], tree: tuple[int, int, int], found: Drafts, what: str
    ) -> tuple[str, str] | None:
        """Compare the drafts of a round with those that the draft model alone has for the row's text. Return what was
        wrong with them, and what should have been."""
        steps, topk, nodes = tree
        wanted: Drafts | None = None
        for noise in range(MOST_TIES):
            wanted = self._subject.drafted(text, steps, topk, nodes, noise)
            if wanted is None or wanted == found:
                return None
        own, others = sorted(found - wanted)[:3], sorted(wanted - found)[:3]
        was = f"{what} drafts {own} behind {len(text)} tokens, with {steps} steps of {topk} and {nodes} nodes"
        return was, f"{others}: what the draft says of that text and branch alone"

    def _note_token_beside(self, row: JudgedRow, run: Sequence[int], drafts: Sequence[int]) -> None:
        """Note where a run's last token stands among those that `drafts`, which it could have been
        accepted as, leave."""
        text = [*row.text, *run[:-1]]
        plain = self._subject.after(text, len(text) - 1)
        probs = probabilities(_shaped(row, plain.logits[0], text), row.sampling)
        if drafts and run[-1] not in drafts:
            self._beside.append(beside_drafts(probs, drafts, run[-1]))

    def _tokens(self, row: JudgedRow, run: Sequence[int], shown: Mapping[str, Any], what: str) -> None:
        text, sampling = [*row.text, *run[:-1]], row.sampling
        plain: After = self._subject.after(text, len(row.text) - 1)
        for depth, (token, logits) in enumerate(zip(run, plain.logits, strict=True)):
            logits = _shaped(row, logits, text[: len(row.text) + depth])
            kept = kept_tokens(logits, sampling, SLACK)
            if token not in kept:
                where = f"{what}: token {depth + 1} is {token}"
                should = f"one of {sorted(kept.tolist())}: {_words(sampling)}, after {len(row.text) + depth} tokens"
                raise WrongResult(where, should)
            if not sampling.is_greedy:
                number = self._emitted.get(row.request_id, 0) + depth
                probs = probabilities(logits, sampling)
                place = place_of(probs, token, len(self._draws))
                self._draws.append((row.request_id, _words(sampling), number, depth, place, *edge_of(probs, token)))
        self._emitted[row.request_id] = self._emitted.get(row.request_id, 0) + len(run)
        for name, found in shown.items():
            for depth, token in enumerate(run):
                wanted = plain.outputs[name][depth]
                if name == "logprobs":
                    wanted = wanted[token]
                if name == "top_logprob_ids":
                    same = is_close(
                        plain.outputs["logprobs"][depth][np.asarray(found[depth])], plain.outputs["top_logprobs"][depth]
                    )
                else:
                    same = is_close(found[depth], wanted)
                if not same:
                    where = f"{what}: {name} of token {depth + 1} is {_short(found[depth])}"
                    raise WrongResult(where, f"{_short(wanted)}, after {len(row.text) + depth} tokens")


def _shaped(row: JudgedRow, logits: np.ndarray, text: list[int]) -> np.ndarray:
    return shaped(logits, row.sampling, text[: row.num_prompt], text[row.num_prompt :])


def _words(sampling: SamplingParams) -> str:
    if sampling.is_greedy:
        return f"greedy{', shaped' if sampling.is_shaped else ''}"
    return f"temperature {sampling.temperature}, top-k {sampling.top_k}, top-p {sampling.top_p}"


def _short(values: Any) -> str:
    flat = np.asarray(values).ravel()
    return f"{np.round(flat[:4], 4).tolist()}{' …' if len(flat) > 4 else ''}"
