"""Mixtures of experts: which way a pass takes through them, and that all ways give the same sum."""

from __future__ import annotations

import pytest
import torch
from foredraft.gpu.models.checkpoint import load_target, save_target
from foredraft.gpu.models.config import QWEN3_MOE, ModelConfig, MoeConfig
from foredraft.gpu.models.mlps import ExpertMlp, ExpertWays
from foredraft.gpu.models.stored.tensor_files import CheckpointError
from foredraft.gpu.models.weights import initialize
from foredraft.gpu.ops.torch_ops import TorchOps
from foredraft.gpu.tiny.dense import DenseAttention
from safetensors.torch import save_file
from test_models import FAMILIES, model_of_transformers, randomize, tokens_of
from wide_recurrence import wide_recurrence


def expert_mlp(dtype: torch.dtype = torch.float64, num_experts: int = 12, top_k: int = 2) -> ExpertMlp:
    config = ModelConfig(QWEN3_MOE, 10, 32, 48, 1, 2, 2, 16, moe=MoeConfig(num_experts, top_k, 24, norm_topk_prob=True))
    mlp = ExpertMlp(config, TorchOps(), "cpu", dtype)
    initialize(mlp, seed=3, std=0.3)
    return mlp


def test_a_round_of_many_tokens_takes_the_experts_way_that_a_graph_can_hold_before_it_is_captured():
    for device, most, in_rounds in (("cpu", 4, False), ("meta", 2048, True), ("cuda:1", 2048, True)):
        ways = ExpertWays.on(device, num_experts=12)
        assert ways.as_they_stand(most, in_round=False) and not ways.as_they_stand(most + 1, in_round=False)
        assert ways.as_they_stand(most + 1, in_round=True) == in_rounds
    taken = []
    mlp = expert_mlp()
    mlp._as_they_stand, mlp._sorted = (lambda x, *_, way=way: taken.append(way) or x for way in ("stand", "sort"))
    for ways in (mlp.ways, ExpertWays.on("meta", 12)):
        mlp.ways = ways
        for n, in_round in ((2, False), (3, False), (3, True), (1025, False), (1025, True)):
            mlp.run(torch.zeros(n, 32, dtype=torch.float64), in_round)
    assert taken == ["stand", "sort", "sort", "sort", "sort", "stand", "stand", "stand", "sort", "stand"]


@pytest.mark.parametrize("n", [1, 2, 3, 40])
def test_all_ways_through_the_experts_give_the_same_sum(n: int):
    mlp = expert_mlp()
    x = torch.randn(n, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    weights, experts = mlp.route(x)
    expected = torch.zeros_like(x)
    for i in range(n):
        for weight, expert in zip(weights[i], experts[i], strict=True):
            gate, up = (mlp.gate_up_weight[expert] @ x[i]).chunk(2)
            expected[i] += weight * (mlp.down_weight[expert] @ (torch.nn.functional.silu(gate) * up))
    for way in (mlp._as_they_stand, mlp._sorted):
        torch.testing.assert_close(way(x, weights, experts), expected)
    out, chosen = mlp.run(x)
    torch.testing.assert_close(out, expected)
    assert torch.equal(chosen, experts)


def test_few_tokens_read_only_the_experts_that_they_chose():
    """At batch 1 the others' weights are never touched: not-a-number in them stays there."""
    mlp = expert_mlp()
    x = torch.randn(2, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _, experts = mlp.route(x)
    before, _ = mlp.run(x)
    unused = [e for e in range(12) if e not in experts.flatten().tolist()]
    mlp.gate_up_weight[unused] = torch.nan
    mlp.down_weight[unused] = torch.nan
    torch.testing.assert_close(mlp.run(x)[0], before)
    mlp.down_weight[experts[0, 0]] = torch.nan
    assert mlp.run(x)[0].isnan().any()


@pytest.mark.ci
@pytest.mark.xdist_group("transformers")
@torch.no_grad()
def test_experts_of_a_layer_may_be_one_tensor(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """As Qwen3.5 is published, a language model beside what sees."""
    architecture, fields = FAMILIES["qwen3.5 moe"]
    theirs = model_of_transformers(architecture, **fields)
    theirs.set_experts_implementation("eager")
    randomize(theirs, seed=11)
    theirs.save_pretrained(tmp_path)  # a tensor of each expert
    own = {name.replace("model.", "model.language_model.", 1): value for name, value in theirs.state_dict().items()}
    name = "model.language_model.layers.1.mlp.experts.down_proj"
    assert own[name].shape == (6, 48, 24)
    save_file(own, tmp_path / "model.safetensors")
    ours, tokens = load_target(tmp_path, TorchOps(), dtype=torch.float64), tokens_of(100)
    save_target(ours, tmp_path / "again")
    again = type(theirs).from_pretrained(tmp_path / "again").state_dict()
    assert all(torch.equal(again[name], value.to(again[name].dtype)) for name, value in theirs.state_dict().items())
    with wide_recurrence(monkeypatch, theirs):
        expected = theirs.double()(tokens[None]).logits[0]
    found = ours.logits(ours(tokens, DenseAttention([100])).hidden)
    assert (found - expected).abs().max() <= 1e-5  # the tables of the rotation have 32 bits
    save_file(own | {name: own[name].float().transpose(1, 2).contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.experts.down_proj: has shape \[6, 24, 48\]"):
        load_target(tmp_path, TorchOps())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_all_ways_through_the_experts_on_a_gpu(dtype: torch.dtype):
    on_gpu, exact = expert_mlp(dtype).cuda(), expert_mlp(dtype).double()
    for n in (1, 2, 40, 300):
        x = torch.randn(n, 32, generator=torch.Generator().manual_seed(n)).to(dtype)
        weights, experts = on_gpu.route(x.cuda())
        expected = exact._sorted(x.double(), weights.cpu().double(), experts.cpu())
        for way in (on_gpu._as_they_stand, on_gpu._sorted):
            out = way(x.cuda(), weights, experts).cpu().double()
            torch.testing.assert_close(out, expected, rtol=0.05, atol=0.02 if dtype is torch.float32 else 0.1)
