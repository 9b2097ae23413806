"""Draft heads against their published definition, written out from the tensors of a checkpoint by their
published names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from foredraft.gpu.models import projection
from foredraft.gpu.models.checkpoint import load_draft, random_head, random_weights, save_draft
from foredraft.gpu.models.decoder import Capture, Decoder
from foredraft.gpu.models.eagle import Eagle3Head, EagleHead
from foredraft.gpu.models.heads.config import EAGLE, EAGLE3, MULTI_LAYER_EAGLE, HeadConfig
from foredraft.gpu.models.projection import BLOCKS, pack_projections
from foredraft.gpu.models.stored.tensor_files import SINGLE, CheckpointError
from foredraft.gpu.models.weights import initialize
from foredraft.gpu.ops.torch_ops import TorchOps
from foredraft.gpu.tiny.dense import DenseAttention
from heads_by_hand import LAYER, MODEL, TOKENS, attention_of, filled, mlp_of, norm
from safetensors.torch import load_file, save_file
from torch import Tensor


@pytest.fixture(scope="module")
def target() -> Decoder:
    decoder = Decoder(MODEL, TorchOps(), "cpu", torch.float64)
    initialize(decoder, seed=1, std=0.3)
    return decoder


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
