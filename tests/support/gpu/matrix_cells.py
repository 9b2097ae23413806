"""Cells of the reference executor's matrix, served by the real executor on a CPU in float64 and compared with plain
greedy decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from cells import MatrixCell
from foredraft.core.algorithm.algorithm import Drafter
from foredraft.core.contract.events import Committed
from foredraft.core.contract.request import FinishReason, Request
from foredraft.core.model_shape.block_heads import DFLASH2, DSPARK, USUAL_PARTS
from foredraft.core.scheduler.engine import Engine
from foredraft.gpu.executor.build import build_executor
from foredraft.gpu.executor.parts import ExecutorOptions
from foredraft.gpu.models.checkpoint import new_head
from foredraft.gpu.models.config import LLAMA, ModelConfig
from foredraft.gpu.models.decoder import Decoder
from foredraft.gpu.models.eagle import DraftHead
from foredraft.gpu.models.heads.block_config import BLOCKS, QWEN3
from foredraft.gpu.models.heads.config import FUSING, MULTI_LAYER_EAGLE, P_EAGLE, HeadConfig
from foredraft.gpu.models.weights import initialize
from foredraft.gpu.ops.host_ops import HostOps
from foredraft.gpu.tiny.dense import DenseAttention
from foredraft.gpu.types.ops import Ops
from hostile_driver import Dice, HostileDriver, check_feedback
from serving_matrix import (
    VOCAB_SIZE,
    LetterDecoder,
    algorithm_of,
    config_of,
    controller_of,
    disturbance_of,
    requests_of,
)

OPS = HostOps()


def small_config(**changes) -> ModelConfig:
    sizes = {
        "architecture": LLAMA,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "max_position_embeddings": 512,
    }
    return ModelConfig(**(sizes | changes))


@cache
def small_model(seed: int, **changes) -> Decoder:
    model = Decoder(small_config(**changes), OPS, "cpu", torch.float64)
    initialize(model, seed)
    with torch.no_grad():
        # Sharper than a fresh model, so that greedy text is no constant.
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter *= 12.0
    return model


@cache
def noisy_copy(seed: int, noise: float) -> Decoder:
    """A draft that often agrees with `small_model(seed)`."""
    source, copy = small_model(seed), Decoder(small_config(mask_token=VOCAB_SIZE - 1), OPS, "cpu", torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for mine, theirs in zip(copy.parameters(), source.parameters(), strict=True):
            mine.copy_(theirs * (1 + noise * torch.randn(theirs.shape, generator=generator, dtype=theirs.dtype)))
    return copy


@cache
def small_head(seed: int, algorithm: str, num_heads: int = 7) -> DraftHead:
    """A random head of the given algorithm on `small_model(seed)`; EAGLE-3 with a draft vocabulary of its own.
    `num_heads`: of multi-layer EAGLE."""
    target = small_model(seed)
    if algorithm in BLOCKS:
        return sharpened(new_head(block_config(algorithm), target), seed)
    draft_vocab = 20 if algorithm in FUSING else VOCAB_SIZE
    config = HeadConfig(
        algorithm=algorithm,
        model=small_config(num_layers=2 if algorithm == P_EAGLE else 1),
        target_hidden_size=16,
        draft_vocab_size=draft_vocab,
        aux_layers=(0, 1, 2) if algorithm in FUSING else (),
        mask_token=VOCAB_SIZE - 1,
        num_heads=num_heads if algorithm == MULTI_LAYER_EAGLE else 1,
    )
    head = sharpened(new_head(config, target), seed)
    if algorithm in FUSING:
        head.set_vocabulary(torch.arange(draft_vocab) + 4)
    return head


def block_config(algorithm: str, parts: dict | None = None, **changes) -> HeadConfig:
    """A block drafter for `small_model`. `parts`: what its block has otherwise than usual, `changes`: its layers."""
    sizes = {"conv_group": 4, "selector_rank": 3, "selector_top_k": 6} if algorithm == DFLASH2 else {}
    sizes |= {"markov_rank": 3} if algorithm == DSPARK else {}
    block = replace(USUAL_PARTS[algorithm], block_size=8, mask_token=VOCAB_SIZE - 1, **sizes | (parts or {}))
    model = small_config(architecture=QWEN3, qk_norm=True, **{"num_layers": 2, **changes})
    return HeadConfig(algorithm, model, 16, VOCAB_SIZE, aux_layers=(1, 2), block=block)


def sharpened(head: DraftHead, seed: int) -> DraftHead:
    """The head with weights that make it choose."""
    initialize(head, seed)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim > 1:
                parameter *= 12.0
    return head


def draft_of(cell: MatrixCell) -> Decoder | DraftHead | None:
    """A draft for the cell's algorithm; for a language model `agreement` 0 is a stranger and 1 the target itself."""
    seed, algorithm = cell.seed % 3, algorithm_of(cell)
    if algorithm.drafter in (Drafter.NONE, Drafter.LOOKUP):
        return None
    if algorithm.drafter is not Drafter.MODEL:
        return small_head(seed, algorithm.draft_form)
    if cell.agreement == 0.0:
        return small_model(9, hidden_size=8, head_dim=2, num_layers=1, mask_token=VOCAB_SIZE - 1)
    return noisy_copy(seed, 0.0 if cell.agreement == 1.0 else 0.05)


class PlainGreedy:
    """The target alone, one token at a time over the whole text; texts with one prompt share their work."""

    def __init__(self, target: Decoder) -> None:
        self._target = target
        self._known: dict[tuple[int, ...], list[int]] = {}

    def continuation(self, prompt: list[int], length: int) -> list[int]:
        known = self._known.setdefault(tuple(prompt), [])
        with torch.no_grad():
            while len(known) < length:
                text = torch.tensor(prompt + known)
                hidden = self._target.forward(text, DenseAttention([len(text)])).hidden
                known.append(int(self._target.logits(hidden[-1:]).argmax()))
        return known[:length]

    def expected(self, engine: Engine, request: Request, decode_text) -> tuple[list[int], bool]:
        """The output of `request`, and whether it ends with a stop."""
        cap = engine.sizes.max_tokens(engine.config, request.prompt.length, request.max_tokens)
        wanted = self.continuation(request.prompt.materialize().tolist(), cap)
        for i in range(1, len(wanted) + 1):
            text = decode_text(np.array(wanted[:i]))
            if wanted[i - 1] in request.stop_tokens or any(stop in text for stop in request.stop_strings):
                return wanted[:i], True
        return wanted, False


@cache
def oracle(seed: int) -> PlainGreedy:
    return PlainGreedy(small_model(seed))


def check_greedy(engine: Engine, plain: PlainGreedy, requests, finished, refused) -> int:
    """Compare every output with the plain one; returns the number of tokens compared."""
    compared = 0
    for request in requests:
        if request.request_id in refused:
            continue
        end = finished[request.request_id]
        wanted, stopped = plain.expected(engine, request, LetterDecoder().decode)
        if end.reason in (FinishReason.ABORT, FinishReason.ERROR):
            wanted = wanted[: len(end.tokens)]
        else:
            assert (end.reason is FinishReason.STOP) == stopped, (request.request_id, end.reason, wanted)
        assert end.tokens.tolist() == wanted, f"{request.request_id}: {end.tokens.tolist()}, not {wanted}"
        compared += len(wanted)
    return compared


@dataclass(frozen=True, slots=True)
class CellReport:
    """What serving one cell did; the numbers say that it was not vacuous."""

    tokens: int  # compared with plain decoding
    rounds: int
    blocks: int
    drafted: int
    correct_drafts: int
    retractions: int
    disturbances: int
    refused: int


def applicable(cell: MatrixCell) -> MatrixCell:
    """The cell without what only the reference executor can do.
    A cover of all pairs stays one in the dimensions left."""
    return replace(cell, drafts="model", outputs=False, faults="none" if cell.faults == "target" else cell.faults)


def run_real_cell(
    cell: MatrixCell, ops: Ops = OPS, graph_sizes: tuple[int, ...] | None = None, **options
) -> CellReport:
    """Serve one cell on the real executor, with captured rounds for `graph_sizes`;
    raises at the first contradiction."""
    dice = Dice(cell.seed * 1_000_003 + 17)
    algorithm, controller = algorithm_of(cell), controller_of(cell)
    events: list = []
    engine = Engine(
        config_of(cell, algorithm, controller),
        algorithm,
        controller,
        events=events.append,
        text_decoder=LetterDecoder(),
    )
    seed = cell.seed % 3
    made = ExecutorOptions(debug=True, graph_sizes=graph_sizes, **options)
    executor = build_executor(engine, small_model(seed), draft_of(cell), ops, made)
    requests = requests_of(cell, dice)
    driver = HostileDriver(engine, executor, requests, dice, disturbance_of(cell))
    finished = driver.run()
    check_feedback(engine, events)
    compared = check_greedy(engine, oracle(seed), requests, finished, driver.refused)
    return CellReport(
        tokens=compared,
        rounds=executor.counters.rounds,
        blocks=count_blocks(events),
        drafted=controller.metrics().proposed_drafts,
        correct_drafts=controller.metrics().correct_drafts,
        retractions=count_retractions(events),
        disturbances=driver.num_disturbances,
        refused=len(driver.refused),
    )


def count_blocks(events: list) -> int:
    """Steps of more than one round."""
    results = (event.result.decode for event in events if isinstance(event, Committed))
    return sum(decode is not None and decode.rounds > 1 for decode in results)


def count_retractions(events: list) -> int:
    return sum(len(getattr(event, "retracted", ())) for event in events)


def total(reports: Sequence[CellReport]) -> dict[str, int]:
    return {name: sum(getattr(report, name) for report in reports) for name in CellReport.__slots__}


def in_words(counts: dict[str, int]) -> str:
    return ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in counts.items())
