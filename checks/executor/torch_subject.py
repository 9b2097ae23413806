"""The real executor, on a CPU, behind the executor contract: `foretoken check executor foretoken.checks.executor.torch_subject:make`.

Its models have random weights and a few thousand parameters, made in memory. The contract's config is taken as it comes
(`checks/executor/contract.py`); this file imports nothing of it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from ...core.algorithm.algorithm import Drafter
from ...core.algorithm.registry import get_algorithm
from ...core.contract.handoff_batch import DraftInput, HandoffBatch
from ...core.contract.hidden import merge_hidden
from ...core.contract.step import Step, StepResult
from ...gpu.executor.build import DraftModel, build_executor
from ...gpu.executor.executor import TorchExecutor
from ...gpu.models.config import LLAMA, ModelConfig
from ...gpu.models.decoder import Decoder
from ...gpu.models.eagle import Eagle3Head, EagleHead, MultiLayerEagle
from ...gpu.models.head_config import EAGLE, EAGLE3, MULTI_LAYER_EAGLE, HeadConfig
from ...gpu.models.weights import initialize
from ...gpu.ops.host_ops import HostOps

# Widths that nothing else in these models has: projections are 16 + 2 · 8 and 2 · 24 wide.
HIDDEN = 44
DRAFT_HIDDEN = 52
NUM_HEADS = 7
CONTEXT_LEN = 256
SHARPNESS = 12.0  # a fresh model says nearly the same everywhere
OPS = HostOps()


class CheckedExecutor:
    """Run steps on a `TorchExecutor` in debug mode."""

    capabilities = ("tokens", "trees", "hidden_states", "relay", "inspection", "rounds", "merging", "handoff")

    def __init__(self, config: Any) -> None:
        target, draft = target_model(config.vocab_size), draft_model(config.algorithm, config.vocab_size)
        self.models = (target, draft)
        self.executor: TorchExecutor = build_executor(config.make_engine(), target, draft, OPS, debug=True)

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
        return (HIDDEN, DRAFT_HIDDEN)

    def roots(self) -> tuple[object, ...]:
        return (self.executor,)

    def weights(self) -> tuple[object, ...]:
        modules = [module for model in self.models if model is not None for module in model.modules()]
        return (*modules, OPS)

    def merge(self, first: list[list[float]] | None, second: list[list[float]] | None) -> Any:
        batches = [None if rows is None else np.array(rows, np.float32).reshape(-1, HIDDEN) for rows in (first, second)]
        return merge_hidden(*batches)

    def draft_input(self, batch: HandoffBatch, last_tokens: np.ndarray) -> DraftInput | None:
        return self.executor.algorithm.build_disagg_draft_input(batch, last_tokens, None)


@cache
def target_model(vocab_size: int) -> Decoder:
    return _sharpened(Decoder(_config(vocab_size, HIDDEN, 2), OPS, "cpu", torch.float32), 0)


@cache
def draft_model(algorithm: str, vocab_size: int) -> DraftModel | None:
    """What the algorithm drafts with: None, a small language model, or a head on the target."""
    drafter, form = get_algorithm(algorithm).drafter, get_algorithm(algorithm).draft_form
    if drafter in (Drafter.NONE, Drafter.LOOKUP):
        return None
    if drafter is Drafter.MODEL:
        return _sharpened(Decoder(_config(vocab_size, DRAFT_HIDDEN, 1), OPS, "cpu", torch.float32), 1)
    config = HeadConfig(
        algorithm=form,
        model=_config(vocab_size, HIDDEN, 1),
        target_hidden_size=HIDDEN,
        draft_vocab_size=vocab_size,
        aux_layers=(0, 1, 2) if form == EAGLE3 else (),
        num_heads=NUM_HEADS if form == MULTI_LAYER_EAGLE else 1,
    )
    kinds = {EAGLE: EagleHead, EAGLE3: Eagle3Head, MULTI_LAYER_EAGLE: MultiLayerEagle}
    head = _sharpened(kinds[form](config, target_model(vocab_size)), 2)
    if form == EAGLE3:
        head.set_vocabulary(torch.arange(vocab_size))
    return head


def _config(vocab_size: int, hidden_size: int, num_layers: int) -> ModelConfig:
    return ModelConfig(
        architecture=LLAMA,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=24,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        max_position_embeddings=CONTEXT_LEN,
    )


def _sharpened(model: Any, seed: int) -> Any:
    initialize(model, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter *= SHARPNESS
    return model


make = CheckedExecutor
