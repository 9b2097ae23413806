"""Draft heads against their published definition, written out from the tensors of a checkpoint by their
published names."""

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
from foredraft.gpu.models import projection
from foredraft.gpu.models.checkpoint import (
    load_draft,
    load_target,
    random_head,
    random_weights,
    save_draft,
    save_target,
)
from foredraft.gpu.models.config import LLAMA, ModelConfig
from foredraft.gpu.models.decoder import Capture, Decoder
from foredraft.gpu.models.eagle import DraftHead, Eagle3Head, EagleHead, PredictionLayer
from foredraft.gpu.models.head_config import EAGLE, EAGLE3, MULTI_LAYER_EAGLE, HeadConfig
from foredraft.gpu.models.projection import BLOCKS, pack_projections
from foredraft.gpu.models.stored.tensor_files import SINGLE, CheckpointError
from foredraft.gpu.models.weights import initialize
from foredraft.gpu.ops.torch_ops import TorchOps
from foredraft.gpu.session.plan import recognise_draft
from foredraft.gpu.tiny.dense import DenseAttention, rotate
from safetensors.torch import load_file, save_file
from small_checkpoint import SHAPE, VOCAB_SIZE, write_target
from torch import Tensor

MIMO = "MiMoForCausalLM"
MODEL = ModelConfig(LLAMA, 50, 32, 40, 5, 4, 2, 8, max_position_embeddings=64)
LAYER = replace(MODEL, num_layers=1)
TOKENS = torch.tensor([3, 14, 15, 9, 26, 5, 35])


@pytest.fixture(scope="module")
def target() -> Decoder:
    decoder = Decoder(MODEL, TorchOps(), "cpu", torch.float64)
    initialize(decoder, seed=1, std=0.3)
    return decoder


def filled(head: DraftHead, seed: int = 2) -> DraftHead:
    initialize(head, seed=seed, std=0.3)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
    return head


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + MODEL.rms_norm_eps) * weight


def attention_of(x: Tensor, tensors: dict[str, Tensor], prefix: str, cos_sin: Tensor) -> Tensor:
    q, k, v = (x @ tensors[f"{prefix}self_attn.{p}_proj.weight"].T for p in "qkv")
    rows = cos_sin[: len(x)].double()
    q, k = rotate(q.view(-1, 4, 8), rows), rotate(k.view(-1, 2, 8), rows)
    heads = []
    for h in range(4):
        scores = q[:, h] @ k[:, h // 2].T / 8**0.5
        weights = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -torch.inf).softmax(-1)
        heads.append(weights @ v.view(-1, 2, 8)[:, h // 2])
    return torch.cat(heads, -1) @ tensors[f"{prefix}self_attn.o_proj.weight"].T


def mlp_of(x: Tensor, tensors: dict[str, Tensor], prefix: str) -> Tensor:
    normed = norm(x, tensors[f"{prefix}post_attention_layernorm.weight"])
    gate, up = (normed @ tensors[f"{prefix}mlp.{p}_proj.weight"].T for p in ("gate", "up"))
    return (F.silu(gate) * up) @ tensors[f"{prefix}mlp.down_proj.weight"].T


def eagle_by_hand(
    tensors: dict[str, Tensor], prefix: str, embedded: Tensor, hidden: Tensor, cos_sin: Tensor, n: int = 1
):
    x = torch.cat([embedded, hidden], -1) @ tensors[f"{prefix}fc.weight"].T + tensors.get(f"{prefix}fc.bias", 0)
    for i in range(n):
        layer = f"{prefix}layers.{i}."
        # The first layer has no input norm.
        normed = norm(x, tensors[f"{layer}input_layernorm.weight"]) if i else x
        x = x + attention_of(normed, tensors, layer, cos_sin)
        x = x + mlp_of(x, tensors, layer)
    return x


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("fc_bias", [False, True])
def test_eagle(target: Decoder, tmp_path: Path, num_layers: int, fc_bias: bool):
    config = HeadConfig(EAGLE, replace(MODEL, num_layers=num_layers), 32, 50)
    save_draft(filled(EagleHead(config, target, fc_bias=fc_bias)), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert ("fc.bias" in tensors) is fc_bias and "lm_head.weight" not in tensors
    head = load_draft(tmp_path, EAGLE, target)
    hidden = target(TOKENS, DenseAttention([7])).hidden
    assert head.aux_layers == () and torch.equal(head.prepare_hidden(hidden), hidden)
    out = head(TOKENS.roll(-1), hidden, DenseAttention([7]))
    expected = eagle_by_hand(tensors, "", target.embed_weight[TOKENS.roll(-1)], hidden, head.cos_sin, num_layers)
    torch.testing.assert_close(out.hidden, expected)
    torch.testing.assert_close(head.logits(out.logits_hidden), expected @ target.lm_head_weight.T)
    assert torch.equal(head.to_target_ids(TOKENS), TOKENS) and head.num_layers == num_layers


def test_multi_layer_eagle_has_a_head_and_a_pool_layer_per_step(target: Decoder, tmp_path: Path):
    config = HeadConfig(MULTI_LAYER_EAGLE, LAYER, 32, 50, num_heads=3)
    save_draft(filled(random_head(config, target)), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    heads = load_draft(tmp_path, MULTI_LAYER_EAGLE, target)
    assert (heads.num_layers, heads.num_heads, heads.vocab_size) == (3, 3, 50)
    hidden = target(TOKENS, DenseAttention([7])).hidden
    asked: list[int] = []

    class Recorded(DenseAttention):
        def attend(self, layer, q, k, v, cos_sin, softmax):
            asked.append(layer)
            return super().attend(layer, q, k, v, cos_sin)

    outputs = [heads(TOKENS, hidden, Recorded([7]), s) for s in range(3)]
    assert asked == [0, 1, 2]
    for s, out in enumerate(outputs):
        expected = eagle_by_hand(tensors, f"heads.{s}.", target.embed_weight[TOKENS], hidden, heads.cos_sin)
        torch.testing.assert_close(out.hidden, expected)


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_eagle3(target: Decoder, tmp_path: Path, norm_before_residual: bool):
    config = HeadConfig(EAGLE3, LAYER, 32, 20, (1, 2, 4), norm_before_residual)
    head = filled(Eagle3Head(config, target))
    target_ids = torch.arange(20) * 2 + 5
    head.set_vocabulary(target_ids)
    save_draft(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert torch.equal(tensors["d2t"] + torch.arange(20), target_ids)
    assert tensors["t2d"].shape == (50,) and torch.equal(tensors["t2d"].nonzero().flatten(), target_ids)

    head = load_draft(tmp_path, EAGLE3, target)
    captured = target(TOKENS, DenseAttention([7]), Capture(head.aux_layers)).aux
    hidden = head.prepare_hidden(captured)
    torch.testing.assert_close(hidden, captured @ tensors["fc.weight"].T)
    out = head(TOKENS.roll(-1), hidden, DenseAttention([7]))

    embedded = norm(target.embed_weight[TOKENS.roll(-1)], tensors["midlayer.input_layernorm.weight"])
    normed = norm(hidden, tensors["midlayer.hidden_norm.weight"])
    x = normed if norm_before_residual else hidden
    x = x + attention_of(torch.cat([embedded, normed], -1), tensors, "midlayer.", head.cos_sin)
    x = x + mlp_of(x, tensors, "midlayer.")
    torch.testing.assert_close(out.hidden, x)
    logits = head.logits(out.logits_hidden)
    torch.testing.assert_close(logits, norm(x, tensors["norm.weight"]) @ tensors["lm_head.weight"].T)
    assert logits.shape == (7, 20)
    assert torch.equal(head.to_target_ids(logits.argmax(-1)), target_ids[logits.argmax(-1)])


@pytest.mark.parametrize("form", ["top", "eagle_config", "speculators", "SGLang's former names"])
def test_the_norms_of_eagle_3_1(target: Decoder, tmp_path: Path, form: str):
    switches = {"norm_before_fc": True, "fc_norm": True, "norm_output": True}
    config = replace(HeadConfig(EAGLE3, LAYER, 32, 50, (1, 2, 4)), **switches)
    save_draft(filled(Eagle3Head(config, target)), tmp_path)
    data, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / SINGLE)
    assert {key: data[key] for key in switches} == switches
    assert tensors["input_norm.weight"].shape == (96,) and tensors["fc_norm.2.weight"].shape == (32,)
    plain = {key: value for key, value in data.items() if key not in switches}
    if form == "eagle_config":
        data = plain | {"eagle_config": data["eagle_config"] | switches}
    elif form == "speculators":
        own = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "draft_vocab_size": 50, **switches}
        layer = {key: value for key, value in plain.items() if key not in (*own, "architectures", "eagle_config")}
        data = {"speculators_model_type": "eagle3", "architectures": ["X"], "transformer_layer_config": layer, **own}
    elif form == "SGLang's former names":
        data = plain | {"norm_before_fc": True, "norm_output": True, "use_aux_norm": True}
        for place, name in enumerate(("low", "mid", "high")):
            tensors[f"aux_norm_{name}.weight"] = tensors.pop(f"fc_norm.{place}.weight")
        save_file(tensors, tmp_path / SINGLE)
    (tmp_path / "config.json").write_text(json.dumps(data))

    head = load_draft(tmp_path, EAGLE3, target)
    captured = target(TOKENS, DenseAttention([7]), Capture(head.aux_layers)).aux
    states = norm(captured, head.input_norm).chunk(3, -1)
    fused = torch.cat([norm(x, w) for x, w in zip(states, head.fc_norm, strict=True)], -1) @ tensors["fc.weight"].T
    torch.testing.assert_close(head.prepare_hidden(captured), fused)
    out = head(TOKENS.roll(-1), fused, DenseAttention([7]))
    torch.testing.assert_close(out.hidden, out.logits_hidden)  # the normed output, for the next step as well
    without = replace(config, norm_output=False, norm_before_fc=False)
    (tmp_path / "config.json").write_text(json.dumps(without.to_dict()))
    with pytest.raises(CheckpointError, match=r"input_norm.weight: belongs to nothing in the model"):
        load_draft(tmp_path, EAGLE3, target)


def test_a_narrower_eagle3_head_has_embeddings_of_its_own(target: Decoder, tmp_path: Path):
    layer = replace(LAYER, hidden_size=16, num_heads=2)
    config = HeadConfig(EAGLE3, layer, 32, 50, (1, 2, 4))
    head = filled(Eagle3Head(config, target, own_embeddings=True))
    save_draft(head, tmp_path)
    again = load_draft(tmp_path, EAGLE3, target)
    hidden = again.prepare_hidden(torch.randn(7, 96, dtype=torch.float64))
    assert hidden.shape == (7, 16) and again.hidden_size == 16
    out = again(TOKENS, hidden, DenseAttention([7]))
    torch.testing.assert_close(out.hidden, head(TOKENS, hidden, DenseAttention([7])).hidden)
    assert again.logits(out.logits_hidden).shape == (7, 50)
    tensors = load_file(tmp_path / SINGLE)
    save_file({name: tensor for name, tensor in tensors.items() if "embed_tokens" not in name}, tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight.*is missing.*another width"):
        load_draft(tmp_path, EAGLE3, target)


@pytest.mark.parametrize("algorithm", [EAGLE, EAGLE3, MULTI_LAYER_EAGLE])
def test_a_head_learns_and_the_target_stays(target: Decoder, algorithm: str):
    aux_layers = (1, 2, 4) if algorithm == EAGLE3 else ()
    config = HeadConfig(algorithm, LAYER, 32, 20 if algorithm == EAGLE3 else 50, aux_layers)
    head = filled(random_head(config, target)).requires_grad_()
    captured = torch.randn(7, 96 if aux_layers else 32, dtype=torch.float64)
    out = head(TOKENS, head.prepare_hidden(captured), DenseAttention([7]))
    head.logits(out.logits_hidden).logsumexp(-1).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in head.parameters())
    assert target.embed_weight.grad is None and target.lm_head_weight.grad is None
    owned = {id(parameter) for parameter in head.parameters()}
    assert not owned & {id(parameter) for parameter in target.parameters()}
    assert head.weight_bytes == sum(parameter.numel() * 8 for parameter in head.parameters())


def test_the_rotary_table_of_a_head_covers_the_targets_context(target: Decoder):
    config = HeadConfig(EAGLE, replace(LAYER, max_position_embeddings=8), 32, 50)
    assert len(EagleHead(config, target).cos_sin) == 64


def test_a_tied_target_lends_its_embeddings_as_lm_head():
    tied = random_weights(replace(MODEL, tied_embeddings=True), TorchOps(), "cpu", torch.float64)
    head = random_head(HeadConfig(EAGLE, LAYER, 32, 50), tied)
    x = torch.randn(3, 32, dtype=torch.float64)
    torch.testing.assert_close(head.logits(x), x @ tied.embed_weight.T)


@pytest.mark.parametrize("algorithm", [EAGLE, EAGLE3, MULTI_LAYER_EAGLE])
@torch.no_grad()
def test_packed_heads_draft_the_same(algorithm: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(projection, "MIN_PACKED_ELEMENTS", 0)
    monkeypatch.setattr(projection, "layout_for", lambda *_: BLOCKS)
    narrow = random_weights(MODEL, TorchOps(), "cpu", torch.float32)
    aux_layers = (1, 2, 4) if algorithm == EAGLE3 else ()
    head = filled(random_head(HeadConfig(algorithm, LAYER, 32, 50, aux_layers), narrow))
    captured = torch.randn(7, 96 if aux_layers else 32, generator=torch.Generator().manual_seed(0))
    plain = head(TOKENS, head.prepare_hidden(captured), DenseAttention([7]))
    logits = head.logits(plain.logits_hidden)
    pack_projections(head)
    packed = head(TOKENS, head.prepare_hidden(captured), DenseAttention([7]))
    torch.testing.assert_close(packed.hidden, plain.hidden)
    torch.testing.assert_close(head.logits(packed.logits_hidden), logits)
    owned = [p for module in head.modules() for p in getattr(module, "projections", ())]
    assert all(p.layout == BLOCKS for p in owned)
    # The target's LM head is the target's to pack.
    assert len(owned) == {EAGLE: 5, EAGLE3: 6, MULTI_LAYER_EAGLE: 5}[algorithm]


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
