"""Checkpoints of heads: spellings of their names, forms in which they are published, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from damaged_checkpoint import OPS, change, refused
from foredraft.core.errors import ConfigError
from foredraft.gpu.models.checkpoint import load_draft, random_head, random_weights, save_draft
from foredraft.gpu.models.config import LLAMA, ModelConfig
from foredraft.gpu.models.decoder import Decoder
from foredraft.gpu.models.heads.config import EAGLE, EAGLE3, MULTI_LAYER_EAGLE, HeadConfig, default_aux_layers
from foredraft.gpu.models.heads.forms import HEADS
from foredraft.gpu.models.stored.tensor_files import SINGLE
from foredraft.gpu.models.weights import initialize
from foredraft.gpu.session.plan import recognise_draft
from foredraft.gpu.tiny.dense import DenseAttention
from safetensors.torch import load_file, save_file

MODEL = ModelConfig(LLAMA, 50, 32, 40, 3, 4, 2, 8, max_position_embeddings=64)
LAYER = replace(MODEL, num_layers=1)
TOKENS = torch.tensor([3, 14, 15, 9])


@pytest.fixture(scope="module")
def target() -> Decoder:
    return random_weights(MODEL, OPS, "cpu", torch.float32, seed=1)


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
def test_spellings_of_eagle3_names(target: Decoder, tmp_path: Path, prefix: str, layer: str):
    config = HeadConfig(EAGLE3, LAYER, 32, 20, (0, 1, 3))
    head = random_head(config, target)
    save_draft(head, tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    respelt = {}
    for name, value in tensors.items():
        name = name.replace("midlayer.", layer)
        respelt[name if name in ("d2t", "t2d", "lm_head.weight") else prefix + name] = value
    save_file(respelt, tmp_path / SINGLE)
    loaded = load_draft(tmp_path, EAGLE3, target)
    for name, parameter in head.named_parameters():
        assert torch.equal(parameter, dict(loaded.named_parameters())[name]), name


def speculators_config(config: HeadConfig, kind: str) -> dict:
    """As vLLM's speculators writes it: the layer's own configuration inside."""
    layer = config.model.to_dict()
    own = {"draft_vocab_size": config.draft_vocab_size, "norm_before_residual": config.norm_before_residual}
    own |= {"eagle_aux_hidden_state_layer_ids": list(config.aux_layers), "norm_before_fc": False} if kind == "eagle3" else {
        "layernorms": False, "fusion_bias": True,
    }  # fmt: skip
    return {
        "architectures": ["Eagle3DraftModel" if kind == "eagle3" else "EagleSpeculator"],
        "speculators_model_type": kind,
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "org/model"}},
        "transformer_layer_config": {k: v for k, v in layer.items() if k not in ("architectures",)},
        "target_hidden_size": None,
        **own,
    }


def rewrite(directory: Path, form: str, config: HeadConfig, embeddings: torch.Tensor) -> None:
    """Make of a head in our layout one in another published form."""
    tensors, path = load_file(directory / SINGLE), directory / "config.json"
    data = json.loads(path.read_text())
    if form == "SafeAILab":  # the configuration names the layers' family alone, the weights are a pickle
        for key in ("eagle_config", "eagle_aux_hidden_state_layer_ids", "target_hidden_size", "norm_before_residual"):
            data.pop(key, None)
        data |= {"architectures": [LLAMA], "bias": True}
        torch.save(tensors, directory / "pytorch_model.bin")
        (directory / SINGLE).unlink()
    elif form == "SpecForge":
        data |= {"architectures": ["LlamaForCausalLMEagle3"], "sliding_window": None, "max_window_layers": 1}
        tensors["embed_tokens.weight"] = embeddings.clone()
        save_file(tensors, directory / SINGLE)
    elif form == "ModelOpt":
        switches = (
            "use_aux_hidden_state",
            "use_input_layernorm_in_first_layer",
            "use_last_layernorm",
            "next_layer_regular",
        )
        for key in ("eagle_aux_hidden_state_layer_ids", "target_hidden_size", "norm_before_residual"):
            data.pop(key, None)
        data["eagle_config"] = {
            **dict.fromkeys(switches, True), "eagle_aux_hidden_state_layer_ids": [], "use_mtp_layernorm": False,
            "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1,
        }  # fmt: skip
        save_file({name.replace("midlayer.", "layers.0."): tensors[name] for name in tensors}, directory / SINGLE)
    else:
        data = speculators_config(config, "eagle3" if config.algorithm == EAGLE3 else "eagle")
        names = (
            {"midlayer.": "layers.0."}
            if config.algorithm == EAGLE3
            else {"fc.": "fusion_fc.", "layers.0.": "transformer."}
        )
        for name in list(tensors):
            for ours, theirs in names.items():
                if name.startswith(ours):
                    tensors[theirs + name.removeprefix(ours)] = tensors.pop(name)
        tensors["verifier_norm.weight"] = torch.ones(32)
        save_file(tensors, directory / SINGLE)
    path.write_text(json.dumps(data))


HEAD_FORMS = [
    ("SafeAILab", EAGLE),
    ("SafeAILab", EAGLE3),
    ("speculators", EAGLE),
    ("speculators", EAGLE3),
    ("SpecForge", EAGLE3),
    ("ModelOpt", EAGLE3),
]


@pytest.mark.parametrize(
    ("key", "value"), [("use_last_layernorm", False), ("parallel_draft_step", 4), ("use_mtp_layernorm", True)]
)
def test_a_switch_of_modelopt_that_is_not_implemented_is_named(
    target: Decoder, tmp_path: Path, key: str, value: object
):
    save_draft(random_head(HeadConfig(EAGLE3, LAYER, 32, 20, default_aux_layers(3)), target), tmp_path)
    path = tmp_path / "config.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"eagle_config": data["eagle_config"] | {key: value}}))
    with pytest.raises(ConfigError, match=rf"{key}: .*not implemented"):
        load_draft(tmp_path, EAGLE3, target)


@pytest.mark.parametrize(("form", "algorithm"), HEAD_FORMS)
def test_forms_of_published_heads_draft_alike(target: Decoder, tmp_path: Path, form: str, algorithm: str):
    vocab, aux = (20, default_aux_layers(3)) if algorithm == EAGLE3 else (50, ())
    config = HeadConfig(algorithm, LAYER, 32, vocab, aux)
    head = HEADS[algorithm](config, target, fc_bias=algorithm == EAGLE)
    initialize(head, seed=5, std=0.3)
    if algorithm == EAGLE3:
        head.set_vocabulary(torch.arange(20) * 2)
    save_draft(head, tmp_path)
    assert recognise_draft(tmp_path) == algorithm
    rewrite(tmp_path, form, config, target.embed_weight)
    assert recognise_draft(tmp_path) == algorithm
    loaded = load_draft(tmp_path, algorithm, target)
    captured = torch.randn(4, 32 * max(1, len(aux)), generator=torch.Generator().manual_seed(0))
    drafts = []
    for each in (head, loaded):
        out = each(TOKENS, each.prepare_hidden(captured), DenseAttention([4]))
        drafts.append(each.logits(out.logits_hidden))
        assert torch.equal(each.to_target_ids(torch.arange(20)), head.to_target_ids(torch.arange(20)))
    assert loaded.aux_layers == head.aux_layers
    assert (loaded.embed_weight is not None) == (form == "SpecForge")
    torch.testing.assert_close(*drafts)


def test_heads_of_other_forms_are_named(target: Decoder, tmp_path: Path):
    save_draft(random_head(HeadConfig(EAGLE3, LAYER, 32, 20, (0, 1, 3)), target), tmp_path)
    path = tmp_path / "config.json"
    ours = json.loads(path.read_text())
    for data, part in (
        (ours | {"speculators_model_type": "mlp"}, "found 'mlp'"),
        ({"medusa_num_heads": 3, "medusa_num_layers": 1}, "Medusa"),
    ):
        path.write_text(json.dumps(data))
        with pytest.raises(ConfigError, match=part):
            recognise_draft(tmp_path)
    path.write_text("{}")
    save_file({"0.0.linear.weight": torch.zeros(2, 2)}, tmp_path / SINGLE)
    with pytest.raises(ConfigError, match="Medusa"):
        recognise_draft(tmp_path)


def test_a_head_with_the_targets_own_vocabulary_needs_no_map(target: Decoder, tmp_path: Path):
    save_draft(random_head(HeadConfig(EAGLE3, LAYER, 32, 50, (0, 1, 3)), target), tmp_path)
    assert "d2t" not in load_file(tmp_path / SINGLE)
    head = load_draft(tmp_path, EAGLE3, target)
    assert torch.equal(head.to_target_ids(TOKENS), TOKENS)
    # Without an LM head of its own it takes the target's.
    change(tmp_path, lm_head__weight=None)
    head = load_draft(tmp_path, EAGLE3, target)
    x = torch.randn(2, 32)
    torch.testing.assert_close(head.logits(x), target.logits(x))


@pytest.mark.parametrize("algorithm", [EAGLE3, EAGLE, MULTI_LAYER_EAGLE])
@pytest.mark.parametrize("form", ["ours", "layers.0.", "model.layers.0."])
def test_the_layers_of_a_head_are_counted_in_its_files(target: Decoder, tmp_path: Path, algorithm: str, form: str):
    """As published for Vicuna 13B: config.json is the target's."""
    shape = {EAGLE3: (20, (0, 1, 3)), EAGLE: (50, ()), MULTI_LAYER_EAGLE: (50, (), False, 2)}[algorithm]
    layer = replace(MODEL, num_layers=2) if algorithm == EAGLE else LAYER
    head = random_head(HeadConfig(algorithm, layer, 32, *shape), target)
    save_draft(head, tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    if form != "ours":
        old = ("midlayer.", form) if algorithm == EAGLE3 else ("layers.", form.removesuffix("0."))
        save_file(
            {name.replace(*old) if name.startswith(old[0]) else name: t for name, t in tensors.items()},
            tmp_path / SINGLE,
        )
    ours = json.loads((tmp_path / "config.json").read_text())
    theirs = {"num_hidden_layers": 40, "layer_types": ["full_attention"] * 40, "num_nextn_predict_layers": 7}
    (tmp_path / "config.json").write_text(json.dumps(ours | theirs))
    assert load_draft(tmp_path, algorithm, target).config == head.config


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        (None, "d2t: is missing, but draft_vocab_size is 20, vocab_size 50"),
        (torch.zeros(19, dtype=torch.int64), "must be whole numbers [20]"),
        (torch.zeros(20), "must be whole numbers [20]"),
        (torch.full((20,), 31), "different tokens of the target, 0 … 49"),
        (torch.full((20,), -1), "different tokens of the target, 0 … 49"),
        (-torch.arange(20), "different tokens of the target, 0 … 49"),
    ],
)
def test_maps_of_the_draft_vocabulary_that_are_wrong(target: Decoder, tmp_path: Path, d2t, message: str):
    save_draft(random_head(HeadConfig(EAGLE3, LAYER, 32, 20, (0, 1, 3)), target), tmp_path)
    change(tmp_path, d2t=d2t)
    refused(tmp_path, message, draft=EAGLE3, target=target)


@pytest.mark.parametrize("t2d", [torch.arange(50) < 21, torch.arange(50) >= 30, torch.arange(49) < 20], ids=str)
def test_a_map_back_that_marks_other_tokens_is_refused(target: Decoder, tmp_path: Path, t2d):
    save_draft(random_head(HeadConfig(EAGLE3, LAYER, 32, 20, (0, 1, 3)), target), tmp_path)
    change(tmp_path, t2d=t2d)
    refused(tmp_path, "t2d: marks", "are not those of d2t", draft=EAGLE3, target=target)


def test_a_head_that_needs_tables_of_its_own(target: Decoder, tmp_path: Path):
    save_draft(random_head(HeadConfig(EAGLE3, LAYER, 32, 20, (0, 1, 3)), target), tmp_path)
    change(tmp_path, lm_head__weight=None)
    refused(tmp_path, "lm_head.weight: is missing, and the target's has another shape", draft=EAGLE3, target=target)
    change(tmp_path, fc__weight=None, lm_head__weight=torch.zeros(20, 32))
    refused(tmp_path, "fc.weight: is missing", draft=EAGLE3, target=target)
