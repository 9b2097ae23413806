"""A decode round asks the device for nothing: on the meta device, where tensors have no values, it runs to its end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from foredraft.core.adaptive.graphs import GraphKey
from foredraft.core.algorithm.algorithm import AlgorithmShape
from foredraft.core.algorithm.registry import get_algorithm
from foredraft.core.contract.step import RoundShape
from foredraft.core.tree.chains import AcceptRule
from foredraft.gpu.batch.pools import KVPool
from foredraft.gpu.draft.branches import BranchDraft, _SingleBranch
from foredraft.gpu.draft.heads import HeadsDraft
from foredraft.gpu.draft.network import HeadNetwork, LanguageModelNetwork
from foredraft.gpu.draft.port import NoDraft, RoundLimits, SamplingInputs
from foredraft.gpu.executor.build import carried_size
from foredraft.gpu.executor.round import DecodeRound, unmeasured
from foredraft.gpu.models.decoder import Decoder
from foredraft.gpu.models.eagle import Eagle3Head, EagleHead, MultiLayerEagleHeads
from foredraft.gpu.models.heads.config import EAGLE, EAGLE3, MULTI_LAYER_EAGLE, HeadConfig
from matrix_cells import OPS, small_config

META = torch.device("meta")
BATCH, SLOTS = 3, 128
SHAPES = (
    (0, 1, 1),
    (3, 1, 4),
    (3, 4, 9),
    (4, 2, 3),
)  # steps, top-k, nodes; of the last fewer nodes than a path could have
DRAFTED = ("STANDALONE", EAGLE, EAGLE3, MULTI_LAYER_EAGLE)
CASES = [("NONE", 0, 1, 1), *((algorithm, *shape) for algorithm in DRAFTED for shape in SHAPES)]


@pytest.fixture(autouse=True)
def distributions_are_one_kernel(monkeypatch):
    """On a CPU the distribution of sampling looks at values. On a GPU it is one kernel, whose launch does not."""

    def launched(logits, *_, **__):
        return torch.empty(logits.shape, dtype=torch.float32, device=logits.device)

    monkeypatch.setattr(type(OPS), "target_probs", staticmethod(launched))


def draft_on_meta(algorithm: str, target: Decoder, topk: int, draws: bool):
    if algorithm == "NONE":
        return NoDraft(OPS)
    if algorithm == "STANDALONE":
        model = Decoder(small_config(num_layers=1), OPS, META, torch.float32)
        return BranchDraft(OPS, LanguageModelNetwork(model, model.vocab_size), pool_of(model), topk, 4, draws)
    head_config = HeadConfig(
        algorithm=algorithm,
        model=small_config(num_layers=1),
        target_hidden_size=16,
        draft_vocab_size=20 if algorithm == EAGLE3 else 24,
        aux_layers=(0, 1, 2) if algorithm == EAGLE3 else (),
        num_heads=4 if algorithm == MULTI_LAYER_EAGLE else 1,
    )
    kind = {EAGLE: EagleHead, EAGLE3: Eagle3Head, MULTI_LAYER_EAGLE: MultiLayerEagleHeads}[algorithm]
    head = kind(head_config, target)
    if algorithm == EAGLE3:
        head.set_vocabulary(torch.arange(20))
    if algorithm == MULTI_LAYER_EAGLE:
        return HeadsDraft(OPS, head, pool_of(head), topk, num_rows=BATCH)
    return BranchDraft(OPS, HeadNetwork(head), pool_of(head), topk, 4, draws)


def pool_of(model) -> KVPool:
    return KVPool(model.kv_shapes, SLOTS, torch.float32, META)


@pytest.mark.fast("NONE-0-1-1-*", "*-3-4-9-True", ci=("*-True", "NONE-*", "STANDALONE-3-4-9-False"))
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(("algorithm", "steps", "topk", "nodes"), CASES)
def test_nothing_in_a_round_looks_at_a_value(algorithm, steps, topk, nodes, sampled):
    run_on_meta(algorithm, RoundShape(steps, topk, nodes), sampled)


@pytest.mark.parametrize("rule", [AcceptRule.REJECTION, AcceptRule.BLOCK])
@pytest.mark.parametrize("algorithm", ["STANDALONE", EAGLE3])
def test_nothing_in_a_round_of_drawn_drafts_looks_at_a_value(algorithm, rule):
    run_on_meta(algorithm, RoundShape.chain(3), True, rule)


def run_on_meta(algorithm: str, round_shape: RoundShape, sampled: bool, rule: AcceptRule = AcceptRule.TARGET) -> None:
    steps, topk, _ = round_shape
    target, relayed_topk = Decoder(small_config(), OPS, META, torch.float32), 8 if rule.draws_drafts else topk
    draft = draft_on_meta(algorithm, target, relayed_topk, rule.draws_drafts)
    width = steps + 1
    table = torch.zeros((BATCH + 1, 64), dtype=torch.int32, device=META)
    batch = replace(
        RoundLimits(table, max_len=41, max_nodes=9, max_position=40).padding(GraphKey(round_shape, BATCH)),
        row_numbers=np.arange(1, BATCH + 1),
    )
    hidden_size = 16
    if algorithm == MULTI_LAYER_EAGLE:
        hidden_size = carried_size(draft._heads)
    shape = AlgorithmShape(4 if algorithm == MULTI_LAYER_EAGLE else max(steps, 1), relayed_topk, hidden_size)
    relayed = {
        field.name: torch.zeros((BATCH, *field.shape_suffix), dtype=getattr(torch, field.dtype), device=META)
        for field in get_algorithm(algorithm).relay_fields(shape)
    }
    sampling = None
    if sampled:
        reals = torch.ones(BATCH, dtype=torch.float64, device=META)
        ints = torch.ones(BATCH, dtype=torch.int64, device=META)
        sampling = SamplingInputs(reals, reals, ints, ints, True, 0)
    wanted = frozenset({"logprobs", "top_logprobs", "hidden_states"})
    result = DecodeRound(OPS, target, pool_of(target), draft, accept_rule=rule).run(
        batch, relayed, sampling, wanted, None, width, unmeasured
    )
    assert result.emitted.shape == (BATCH, width)
    assert set(result.relay) == set(relayed)
    assert {name: value.shape for name, value in result.relay.items()} == {n: v.shape for n, v in relayed.items()}
    assert result.outputs["hidden_states"].shape == (BATCH, width, 16)


@pytest.mark.parametrize("shifted", [False, True])
def test_kernels_find_the_places_of_a_chain_one_behind_the_other(shifted):
    """They read index tensors without strides."""
    pool = pool_of(Decoder(small_config(num_layers=1), OPS, META, torch.float32))
    table = torch.zeros((BATCH + 1, 64), dtype=torch.int32, device=META)
    batch = RoundLimits(table, max_len=41, max_nodes=9, max_position=40).padding(GraphKey(RoundShape.chain(4), BATCH))
    branch = _SingleBranch(OPS, pool, batch, shifted)
    for step in (1, 2, 3):
        tokens = torch.zeros((BATCH, 1), dtype=torch.int64, device=META)
        tokens, attention = branch.at_step(step, tokens, with_root=step == 1 and not shifted)
        for places in (attention.batch.lens, attention.positions, attention.slots):
            assert places.shape == tokens.shape and places.is_contiguous()


def test_nothing_in_the_relay_looks_at_a_value():
    cells, rows = torch.zeros((3, 2), device=META), torch.zeros(2, dtype=torch.int64, device=META)
    OPS.relay_scatter_([cells], rows, [torch.zeros((2, 2), device=META)])
    assert OPS.relay_gather([cells], rows)[0].shape == (2, 2)
    with pytest.raises(RuntimeError):
        rows.sum().item()
