"""The reference executor behind the executor contract."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...core.contract.handoff_batch import DraftInput, HandoffBatch
from ...core.contract.hidden import merge_hidden
from ...core.contract.step import Step, StepResult
from ...properties.reference import HashDraft, HashLanguageModel, ReferenceExecutor
from ...properties.reference.language_model import HIDDEN_SIZE
from .contract import ExecutorCapabilities, ExecutorConfig

AGREEMENT = 0.7


class ReferenceAdapter:
    """Run steps on a `ReferenceExecutor`."""

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

    def hidden_sizes(self) -> tuple[int, ...]:
        return (HIDDEN_SIZE,)

    def toy_draft(self) -> HashDraft:
        return self.draft

    def roots(self) -> tuple[object, ...]:
        return (self.executor,)

    def weights(self) -> tuple[object, ...]:
        return (self.executor.model,)

    def merge(self, first: list[list[float]] | None, second: list[list[float]] | None) -> Any:
        return merge_hidden(*(None if rows is None else _array(rows) for rows in (first, second)))

    def draft_input(self, batch: HandoffBatch, last_tokens: np.ndarray) -> DraftInput | None:
        return self.executor.algorithm.build_disagg_draft_input(batch, last_tokens, None)


def _array(rows: list[list[float]]) -> np.ndarray:
    return np.array(rows, np.float32).reshape(len(rows), HIDDEN_SIZE)


make = ReferenceAdapter
