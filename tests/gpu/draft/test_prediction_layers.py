"""Prediction layers that stand in the checkpoint of their model, against the formulas of their models."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from family_shapes import SHAPES
from foredraft import Session
from foredraft.core.errors import ConfigError
from foredraft.gpu.models.checkpoint import load_draft, load_target, random_weights, save_target
from foredraft.gpu.models.eagle import PredictionLayer
from foredraft.gpu.models.heads.config import EAGLE, HeadConfig
from foredraft.gpu.models.stored.tensor_files import SINGLE
from foredraft.gpu.ops.torch_ops import TorchOps
from foredraft.gpu.session.plan import recognise_draft
from foredraft.gpu.tiny.dense import DenseAttention
from heads_by_hand import MODEL, TOKENS, attention_of, filled, norm
from safetensors.torch import load_file, save_file
from small_checkpoint import SHAPE, VOCAB_SIZE, write_target

MIMO = "MiMoForCausalLM"


def test_the_prediction_layer_of_a_model_drafts_for_it(tmp_path: Path):
    """In MiMo's own layout; the layer is written out, biases of q, k and v included, and loaded from the
    checkpoint of its model."""
    shape = replace(MODEL, architecture=MIMO, qkv_bias=True)
    target = random_weights(shape, TorchOps(), "cpu", torch.float64, seed=1)
    save_target(target, tmp_path)
    config = HeadConfig(EAGLE, replace(shape, num_layers=1), 32, 50, inside_target=True)
    head = filled(PredictionLayer(config, target))
    tensors = {f"model.{weight.name}": weight.published() for weight in head.checkpoint_weights()}
    save_file({**load_file(tmp_path / SINGLE), **tensors}, tmp_path / SINGLE)
    data = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert recognise_draft(tmp_path) == EAGLE
    loaded = load_draft(tmp_path, EAGLE, load_target(tmp_path, TorchOps()))
    hidden = torch.randn(7, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    prefix = "model.mtp_layers.0."
    named = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    embedded = norm(target.embed(TOKENS), named["token_layernorm.weight"])
    x = torch.cat([norm(hidden, named["hidden_layernorm.weight"]), embedded], -1) @ named["input_proj.weight"].T
    normed = norm(x, named["input_layernorm.weight"])
    biased = {**named}
    for part in "qkv":  # a column of ones carries the bias
        biased[f"self_attn.{part}_proj.weight"] = torch.cat(
            [named[f"self_attn.{part}_proj.weight"], named[f"self_attn.{part}_proj.bias"][:, None]], 1
        )
    x = x + attention_of(torch.cat([normed, torch.ones(7, 1)], 1), biased, "", loaded.cos_sin)
    y = norm(x, named["post_attention_layernorm.weight"])
    gated = F.silu(y @ named["mlp.gate_proj.weight"].T) * (y @ named["mlp.up_proj.weight"].T)
    expected = norm(x + gated @ named["mlp.down_proj.weight"].T, named["final_layernorm.weight"])
    out = loaded(TOKENS, hidden, DenseAttention([7]))
    torch.testing.assert_close(out.hidden, expected)
    torch.testing.assert_close(loaded.logits(out.logits_hidden), target.logits(expected))
    with pytest.raises(ConfigError, match="only for the model of its own checkpoint"):
        load_draft(tmp_path, EAGLE, random_weights(MODEL, TorchOps(), "cpu", torch.float64))
    (tmp_path / "config.json").write_text(json.dumps(data | {"architectures": ["MiniMaxM2ForCausalLM"]}))
    with pytest.raises(ConfigError, match=r"implemented for MiMoForCausalLM, DeepseekV3ForCausalLM, .* alone"):
        recognise_draft(tmp_path)


def same_states(head, theirs, reference):
    """Run a prediction layer and `transformers`' over random states, and compare what they make of them. Returns our
    output, and their states [30, H]."""
    tokens = torch.arange(30) * 7 % VOCAB_SIZE
    hidden = torch.randn(30, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = torch.full((30, 30), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    embedded, positions = theirs.model.embed_tokens(tokens)[None], torch.arange(30)[None]
    turns = theirs.model.rotary_emb(embedded, positions)
    expected = reference(embedded, hidden[None], turns, mask, positions, None)[0]
    found = head(tokens, hidden, DenseAttention([30]))
    torch.testing.assert_close(found.hidden, expected, rtol=1e-5, atol=1e-5)
    return found, expected


@pytest.mark.fast("deepseek_v3", ci="*")
@pytest.mark.parametrize("label", ["deepseek_v3", "glm4_moe", "glm4_moe, no norms of heads"])
@torch.no_grad()
def test_a_prediction_layer_behind_the_model_is_that_of_transformers(label: str, tmp_path: Path):
    """Its parts stand behind the model's layers, with copies of the model's embeddings and LM head."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_layers import MtpLayer

    target = write_target(tmp_path, SHAPES[label])
    theirs = getattr(transformers, SHAPES[label].architecture).from_pretrained(
        target, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    model = load_target(target, TorchOps(), dtype=torch.float64)
    shape, prefix = model.config, f"model.layers.{model.num_layers}."
    data = json.loads((target / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (target / "config.json").write_text(json.dumps(data))
    layer = replace(shape, num_layers=1, moe=replace(shape.moe, mlp_only_layers=()))
    made = filled(PredictionLayer(HeadConfig(EAGLE, layer, 32, VOCAB_SIZE, inside_target=True), model))
    tensors = {f"model.{weight.name}": weight.published() for weight in made.checkpoint_weights()}
    copies = {f"{prefix}embed_tokens.weight": torch.ones(2), f"{prefix}shared_head.head.weight": torch.ones(2)}
    save_file({**load_file(target / SINGLE), **tensors, **copies}, target / SINGLE)
    head = load_draft(target, recognise_draft(target), load_target(target, TorchOps(), dtype=torch.float64))

    config = theirs.config.get_mtp_config()
    config._attn_implementation = config._experts_implementation = "eager"
    block = type(theirs.model.layers[-1])
    reference = MtpLayer(config, block, type(theirs.model.norm), 0).double().eval()
    own = {name.removeprefix(prefix): tensor.double() for name, tensor in tensors.items()}
    experts = {"gate_up_proj": [], "down_proj": []}
    for number in range(shape.moe.num_experts):
        gate, up, down = (own.pop(f"mlp.experts.{number}.{part}_proj.weight") for part in ("gate", "up", "down"))
        experts["gate_up_proj"].append(torch.cat([gate, up]))
        experts["down_proj"].append(down)
    own |= {f"mlp.experts.{name}": torch.stack(each) for name, each in experts.items()}
    parts = ("eh_proj.", "enorm.", "hnorm.")
    named = {name if name.startswith(parts) else f"mtp_block.{name}": tensor for name, tensor in own.items()}
    named["post_norm.weight"] = named.pop("mtp_block.shared_head.norm.weight")
    reference.load_state_dict(named)

    found, expected = same_states(head, theirs, reference)
    torch.testing.assert_close(head.logits(found.logits_hidden), theirs.lm_head(expected), rtol=1e-5, atol=1e-5)

    # And it drafts in a session without changing its text.
    plain, drafted = (
        Session(target, draft=d, dtype="float64", **o) for d, o in ((None, {}), (target, {"steps": 3, "topk": 2}))
    )
    assert drafted.generate("def add(", max_tokens=12).tokens == plain.generate("def add(", max_tokens=12).tokens
    assert drafted.stats().drafted


def with_stacked_experts(tensors: dict[str, torch.Tensor], num_experts: int) -> dict[str, torch.Tensor]:
    """Stack the experts of each layer: gate above up in one tensor, down in another."""
    found = dict(tensors)
    for prefix in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        each = [
            [found.pop(f"{prefix}.experts.{i}.{part}_proj.weight") for part in ("gate", "up", "down")]
            for i in range(num_experts)
        ]
        found[f"{prefix}.experts.gate_up_proj"] = torch.stack([torch.cat((gate, up)) for gate, up, _ in each])
        found[f"{prefix}.experts.down_proj"] = torch.stack([down for _, _, down in each])
    return found


@pytest.mark.fast("qwen3_5-False", ci="*")
@pytest.mark.parametrize(
    "label, stacked",
    [
        ("qwen3_5", False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("qwen3_next", False), ("qwen3_5_moe", False))),
        ("qwen3_5_moe", True),
    ],
)
@torch.no_grad()
def test_the_prediction_layer_of_a_hybrid_model_is_that_of_transformers(label: str, stacked: bool, tmp_path: Path):
    """Attention without a state, whatever the model's layers are; beside the model, below `mtp.`."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_layers import MtpLayer

    target = write_target(tmp_path, SHAPES[label])
    theirs = getattr(transformers, SHAPES[label].architecture).from_pretrained(
        target, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    model = load_target(target, TorchOps(), dtype=torch.float64)
    shape, form = model.config, model.config.family.prediction
    data = json.loads((target / "config.json").read_text())
    layer = replace(shape, num_layers=1, recurrent_layers=(), state=None)
    made = filled(PredictionLayer(HeadConfig(EAGLE, layer, 32, VOCAB_SIZE, inside_target=True), model))
    tensors = {weight.name: weight.published() for weight in made.checkpoint_weights()}
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_norm.weight"} <= tensors.keys()
    stored = {**load_file(target / SINGLE), **tensors}
    save_file(with_stacked_experts(stored, shape.moe.num_experts) if stacked else stored, target / SINGLE)
    if form.is_counted:
        with pytest.raises(ConfigError, match="mtp_num_hidden_layers: expected 1"):
            load_draft(target, EAGLE, model)
        data |= {form.key: 1}
        (target / "config.json").write_text(json.dumps(data))
    head = load_draft(target, recognise_draft(target), load_target(target, TorchOps(), dtype=torch.float64))

    config = copy.deepcopy(theirs.config)
    config.layer_types = ["full_attention"]
    config._attn_implementation = config._experts_implementation = "eager"
    reference = MtpLayer(config, type(theirs.model.layers[-1]), type(theirs.model.norm), 0).double().eval()
    own = {name.removeprefix("mtp."): tensor.double() for name, tensor in tensors.items()}
    if shape.moe is not None:
        own = with_stacked_experts(own, shape.moe.num_experts)
    places = {"fc.": "eh_proj.", "pre_fc_norm_embedding.": "enorm.", "pre_fc_norm_hidden.": "hnorm."}
    places |= {"norm.": "post_norm.", "layers.0.": "mtp_block."}
    named = {}
    for name, tensor in own.items():
        first = next(part for part in places if name.startswith(part))
        named[places[first] + name.removeprefix(first)] = tensor
    reference.load_state_dict(named)

    same_states(head, theirs, reference)

    # And it drafts in a session without changing its text.
    plain, drafted = (
        Session(target, draft=d, dtype="float64", **o) for d, o in ((None, {}), (target, {"steps": 3, "topk": 2}))
    )
    assert drafted.generate("def add(", max_tokens=12).tokens == plain.generate("def add(", max_tokens=12).tokens
    assert drafted.stats().drafted


def test_a_session_whose_model_drafts_for_itself(tmp_path: Path):
    target = write_target(tmp_path, replace(SHAPE, architecture=MIMO, qkv_bias=True))
    config = HeadConfig(
        EAGLE, replace(SHAPE, architecture=MIMO, qkv_bias=True, num_layers=1), 32, VOCAB_SIZE, inside_target=True
    )
    head = filled(PredictionLayer(config, load_target(target, TorchOps())))
    tensors = {f"model.{weight.name}": weight.published() for weight in head.checkpoint_weights()}
    save_file({**load_file(target / SINGLE), **tensors}, target / SINGLE)
    data = json.loads((target / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (target / "config.json").write_text(json.dumps(data))
    plain, drafted = (
        Session(target, draft=d, dtype="float64", **o) for d, o in ((None, {}), (target, {"steps": 3, "topk": 2}))
    )
    assert drafted.generate("def add(", max_tokens=12).tokens == plain.generate("def add(", max_tokens=12).tokens
    assert drafted.stats().drafted and drafted._session.plan.weight_bytes < 2 * plain._session.plan.weight_bytes
