"""The reference executor behind the executor contract, and what wrappers of our executors share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from ....core.algorithm.algorithm import Drafter
from ....core.algorithm.registry import get_algorithm
from ....core.contract.handoff_batch import DraftInput, HandoffBatch
from ....core.contract.hidden import merge_hidden
from ....core.contract.step import Step, StepResult
from ...accept.expected import best_nodes
from ..contract import HIDDEN_STATES, ExecutorCapabilities, ExecutorConfig
from ..oracle import After, Drafts, RecurrentState, looked_up
from . import HashDraft, HashLanguageModel, ReferenceExecutor
from .language_model import HIDDEN_SIZE, extend_hash, hidden_of, namespace_salt

AGREEMENT = 0.7


class WrappedExecutor:
    """Run steps on `executor`, whose hidden states have `hidden_size` numbers."""

    hidden_size: ClassVar[int]
    executor: Any

    def launch(self, step: Step) -> None:
        self.executor.launch(step)

    def collect(self) -> StepResult:
        return self.executor.collect()

    def request_stop(self, last_step_id: int) -> None:
        self.executor.request_stop(last_step_id)

    def restart(self) -> None:
        self.executor.restart()

    def advance(self, rounds: int) -> bool:
        return self.executor.advance(rounds)

    def relay_fields(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(field.name, field.shape_suffix) for field in self.executor.future_map.fields]

    def roots(self) -> Sequence[object]:
        return (self.executor,)

    def merge(self, first: list[list[float]] | None, second: list[list[float]] | None) -> Any:
        shape = (-1, self.hidden_size)
        batches = [None if rows is None else np.array(rows, np.float32).reshape(shape) for rows in (first, second)]
        return merge_hidden(*batches)

    def draft_input(self, batch: HandoffBatch, last_tokens: np.ndarray) -> DraftInput | None:
        return self.executor.algorithm.build_disagg_draft_input(batch, last_tokens, None)


class ReferenceAdapter(WrappedExecutor):
    """Run steps on a `ReferenceExecutor`."""

    hidden_size = HIDDEN_SIZE
    capabilities = replace(
        ExecutorCapabilities.all(),
        **dict.fromkeys(("accounting", "samples", "shaped", "keyed", "proposals", "look_ups"), False),
    )

    def __init__(self, config: ExecutorConfig) -> None:
        looks_up = get_algorithm(config.algorithm).drafter is Drafter.LOOKUP
        cycles = {"regularity": 0.85, "period": 4} if looks_up else {}
        model = HashLanguageModel(seed=1, vocab_size=config.vocab_size, **cycles)
        self.draft = HashDraft(model, AGREEMENT)
        self.executor = ReferenceExecutor(config.make_engine(), self.draft, recurrent=config.is_recurrent)
        self._hashes: dict[tuple[int, ...], int] = {}

    def hidden_sizes(self) -> tuple[int, ...]:
        return (HIDDEN_SIZE,)

    def shown(self) -> tuple[str, ...]:
        return (HIDDEN_STATES,)

    def after(self, text: Sequence[int], first: int) -> After:
        hashes = np.array([self._hash(tuple(text[:end])) for end in range(first + 1, len(text) + 1)], np.uint64)
        logits = self.draft.target.logits(hashes, np.array(text[first:]))
        return After(logits, {HIDDEN_STATES: hidden_of(hashes)}, hashes[-1:])

    def state_room(self) -> int:
        states = self.executor.states
        return 0 if states is None else len(states.hashes) - 1

    def states(self, rows: Sequence[int]) -> list[RecurrentState]:
        states = self.executor.states
        return [RecurrentState(int(states.lengths[row]), states.hashes[row : row + 1]) for row in rows]

    def drafted(self, text: Sequence[int], steps: int, topk: int, num_draft_tokens: int, noise: int) -> Drafts | None:
        drafter = self.executor.algorithm.drafter
        if drafter is Drafter.LOOKUP:
            if self.executor.algorithm.name != "NGRAM":
                return None  # only its plugin knows
            return looked_up(text, num_draft_tokens, max(1, min(topk, num_draft_tokens - 1)))

        def after(level: int, path: tuple[int, ...]) -> list[tuple[int, np.float32]]:
            whole = (*text, *path)
            hashes, head = np.array([self._hash(whole)], np.uint64), level if drafter is Drafter.HEADS else 0
            tokens, shares = self.draft.top_k(hashes, np.array(whole[-1:]), topk, head)
            return list(zip(tokens[0].tolist(), shares[0], strict=True))

        return best_nodes(after, steps, topk, num_draft_tokens)

    def confidences(self, text: Sequence[int], steps: int) -> list[float] | None:
        if self.executor.algorithm.drafter is Drafter.LOOKUP:
            return None
        whole, found = list(text), []
        for level in range(steps):
            head = level if self.executor.algorithm.drafter is Drafter.HEADS else 0
            hashes = np.array([self._hash(tuple(whole))], np.uint64)
            tokens, shares = self.draft.top_k(hashes, np.array(whole[-1:]), 1, head)
            found.append(float(shares[0, 0]))
            whole.append(int(tokens[0, 0]))
        return found

    def _hash(self, text: tuple[int, ...]) -> int:
        found = self._hashes.get(text)
        if found is None:
            before = self._hash(text[:-1]) if len(text) > 1 else namespace_salt("")
            found = self._hashes[text] = int(extend_hash(before, text[-1]))
        return found

    def weights(self) -> tuple[object, ...]:
        return (self.draft.target,)


make = ReferenceAdapter
