"""The reference executor behind the executor contract, and what wrappers of our executors share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from ...core.contract.handoff_batch import DraftInput, HandoffBatch
from ...core.contract.hidden import merge_hidden
from ...core.contract.step import Step, StepResult
from ...properties.reference import HashDraft, HashLanguageModel, ReferenceExecutor
from ...properties.reference.language_model import HIDDEN_SIZE
from .contract import ExecutorCapabilities, ExecutorConfig

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
    capabilities = ExecutorCapabilities(
        tokens=True,
        trees=True,
        hidden_states=True,
        relay=True,
        inspection=True,
        rounds=True,
        merging=True,
        handoff=True,
        toy=True,
    )

    def __init__(self, config: ExecutorConfig) -> None:
        regularity = 0.8 if config.algorithm == "NGRAM" else 0.0
        model = HashLanguageModel(seed=1, vocab_size=config.vocab_size, regularity=regularity)
        self.draft = HashDraft(model, AGREEMENT)
        self.executor = ReferenceExecutor(config.make_engine(), self.draft)

    def hidden_sizes(self) -> tuple[int, ...]:
        return (HIDDEN_SIZE,)

    def toy_draft(self) -> HashDraft:
        return self.draft

    def weights(self) -> tuple[object, ...]:
        return (self.executor.model,)


make = ReferenceAdapter
