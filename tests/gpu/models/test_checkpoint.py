"""Checkpoints: round trips, shards, dtypes, and every way in which files can be wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from family_shapes import SHAPES
from foredraft.core.errors import ConfigError
from foredraft.gpu.models.checkpoint import (
    HEADS,
    file_notes,
    load_draft,
    load_target,
    random_head,
    random_weights,
    required_bytes,
    save_draft,
    save_target,
)
from foredraft.gpu.models.config import LLAMA, QWEN3_MOE, ModelConfig, MoeConfig
from foredraft.gpu.models.decoder import Decoder
from foredraft.gpu.models.head_config import EAGLE, EAGLE3, MULTI_LAYER_EAGLE, HeadConfig, default_aux_layers
from foredraft.gpu.models.stored import tensor_files
from foredraft.gpu.models.stored.tensor_files import INDEX, SINGLE, CheckpointError
from foredraft.gpu.models.weights import initialize
from foredraft.gpu.ops.torch_ops import TorchOps
from foredraft.gpu.session.plan import recognise_draft
from foredraft.gpu.tiny.dense import DenseAttention
from safetensors.torch import load_file, save_file

OPS = TorchOps()
MODEL = ModelConfig(LLAMA, 50, 32, 40, 3, 4, 2, 8, max_position_embeddings=64)
LAYER = replace(MODEL, num_layers=1)
TOKENS = torch.tensor([3, 14, 15, 9])


@pytest.fixture(scope="module")
def target() -> Decoder:
    return random_weights(MODEL, OPS, "cpu", torch.float32, seed=1)


@pytest.fixture
def directory(target: Decoder, tmp_path: Path) -> Path:
    save_target(target, tmp_path)
    return tmp_path


def change(directory: Path, **changes: torch.Tensor | None) -> None:
    """Rewrite the single file; dots in names are written as __, None removes."""
    tensors = load_file(directory / SINGLE)
    for key, value in changes.items():
        name = key.replace("__", ".")
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, directory / SINGLE)


def refused(directory: Path, *parts: str, draft: str | None = None, target: Decoder | None = None) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load_draft(directory, draft, target) if draft else load_target(directory, OPS)
    for part in (str(directory), *parts):
        assert part in str(caught.value)
    return caught.value


def same(a: Decoder, b: Decoder) -> None:
    torch.testing.assert_close(a(TOKENS, DenseAttention([4])).hidden, b(TOKENS, DenseAttention([4])).hidden)


# -- what works --------------------------------------------------------------------------------------------------------


def test_round_trip(target: Decoder, directory: Path):
    again = load_target(directory, OPS)
    assert again.config == target.config
    for name, parameter in target.named_parameters():
        assert torch.equal(parameter, dict(again.named_parameters())[name]), name


def test_shards(target: Decoder, directory: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tensor_files, "MAX_SHARD_BYTES", 8000)
    sharded = directory / "sharded"
    save_target(target, sharded)
    index = json.loads((sharded / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3 and not (sharded / SINGLE).exists()
    assert index["metadata"]["total_size"] == target.weight_bytes
    assert all((sharded / name).stat().st_size < 8000 + 3000 for name in files)
    same(load_target(sharded, OPS), target)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_are_converted(target: Decoder, tmp_path: Path, stored: torch.dtype):
    other = random_weights(MODEL, OPS, "cpu", stored, seed=1)
    save_target(other, tmp_path)
    assert load_target(tmp_path, OPS).dtype is stored
    loaded = load_target(tmp_path, OPS, dtype=torch.float32)
    assert loaded.dtype is torch.float32
    assert torch.equal(loaded.layers[1].mixer.qkv_weight, other.layers[1].mixer.qkv_weight.float())


def test_tensors_that_a_model_does_not_need(target: Decoder, directory: Path):
    change(directory, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    same(load_target(directory, OPS), target)
    tie(directory)
    change(directory, lm_head__weight=target.embed_weight.detach().clone())
    tied = load_target(directory, OPS)
    assert tied.lm_head_weight is None and tied.output_embedding is tied.embed_weight
    assert file_notes(directory, tied.config) == ()


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_a_head_in_the_files_is_used_whatever_the_configuration_ties(target: Decoder, directory: Path, prefix: str):
    tie(directory)
    save_file({prefix + name: t for name, t in load_file(directory / SINGLE).items()}, directory / SINGLE)
    loaded = load_target(directory, OPS)
    x = torch.randn(2, 32)
    torch.testing.assert_close(loaded.logits(x), target.logits(x))
    assert not loaded.config.tied_embeddings and loaded.config == ModelConfig.from_directory(directory)
    (note,) = file_notes(directory, loaded.config)
    assert str(directory) in note and "LM head that is not the embeddings" in note


def tie(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text()) | {"tie_word_embeddings": True}
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_of_a_model_that_sees_the_language_model_is_loaded(target: Decoder, directory: Path, prefix: str):
    tensors = {name.replace("model.", prefix, 1): tensor for name, tensor in load_file(directory / SINGLE).items()}
    tensors |= {"vision_tower.patches.weight": torch.ones(2), "multi_modal_projector.linear.weight": torch.ones(2)}
    save_file(tensors, directory / SINGLE)
    text = json.loads((directory / "config.json").read_text()) | {"model_type": "mistral"}
    del text["architectures"]
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text}
    (directory / "config.json").write_text(json.dumps(whole))
    same(load_target(directory, OPS), target)
    (note,) = file_notes(directory, ModelConfig.from_directory(directory))
    assert note.endswith("are not read: multi_modal_projector.linear.weight, vision_tower.patches.weight")
    change(directory, **{f"vision_tower__{i}": torch.ones(1) for i in range(9)})
    (note,) = file_notes(directory, ModelConfig.from_directory(directory))
    assert note.endswith("vision_tower.6 and 3 more")


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


@pytest.mark.parametrize("label", ["deepseek_v3", "llama"])
def test_layers_behind_the_models_own_are_left_out_where_a_family_has_them(tmp_path: Path, label: str):
    """DeepSeek-V3's files have one more, which predicts the token after next."""
    model = random_weights(SHAPES[label], OPS, "cpu", torch.float32)
    save_target(model, tmp_path)
    behind = {f"model.layers.{model.num_layers}.eh_proj.weight": torch.ones(2, 2)}
    save_file({**load_file(tmp_path / SINGLE), **behind}, tmp_path / SINGLE)
    if label == "llama":
        with pytest.raises(CheckpointError, match=r"layers\.4\.eh_proj\.weight: belongs to nothing"):
            load_target(tmp_path, OPS)
    else:
        same(load_target(tmp_path, OPS), model)
        assert file_notes(tmp_path, model.config)[0].endswith(f"are not read: {next(iter(behind))}")
        assert file_notes(tmp_path, model.config, drafts_itself=True) == ()


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


@pytest.mark.parametrize("moe", [None, MoeConfig(4, 2, 16, mlp_only_layers=(0,))])
@pytest.mark.parametrize("tied", [False, True])
def test_required_bytes_are_those_of_the_loaded_model(moe: MoeConfig | None, tied: bool):
    config = replace(MODEL, tied_embeddings=tied)
    if moe is not None:
        config = replace(config, architecture=QWEN3_MOE, moe=moe, qk_norm=True)
    sizes = required_bytes(config, torch.bfloat16)
    model = random_weights(config, OPS, "cpu", torch.bfloat16)
    assert sum(sizes.values()) == model.weight_bytes
    assert sizes["embeddings"] == 50 * 32 * 2 * (1 if tied else 2)
    assert sizes["attention"] == 3 * 2 * (32 * (4 + 2 + 2) * 8 + 32 * 32)


def test_required_bytes_of_a_model_that_fits_nowhere_take_no_memory():
    """Llama 3.1 405B: 405.9 billion parameters."""
    config = ModelConfig(LLAMA, 128256, 16384, 53248, 126, 128, 8, 128)
    assert sum(required_bytes(config, torch.bfloat16).values()) == pytest.approx(2 * 405.85e9, rel=1e-4)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_missing_directories_and_files(tmp_path: Path, directory: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_target(tmp_path / "nowhere", OPS)
    (directory / SINGLE).unlink()
    refused(directory, "has neither model.safetensors nor")


class Payload:
    """What a pickle may ask for that is no tensor."""


def test_pickles_hold_tensors_alone(target: Decoder, directory: Path):
    """As published heads are; what else a pickle asks for is not built, and a damaged one is said to be."""
    tensors = load_file(directory / SINGLE)
    (directory / SINGLE).unlink()
    for legacy in (False, True):
        torch.save(tensors, directory / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
        same(load_target(directory, OPS), target)
    torch.save({**tensors, "other": Payload()}, directory / "pytorch_model.bin")
    refused(directory, "pytorch_model.bin", "nothing else is unpickled", "Payload")
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04damaged")
    refused(directory, "pytorch_model.bin", "nothing else is unpickled")
    (directory / "pytorch_model.bin").rename(directory / "weights.pt")
    refused(directory, "weights.pt", "can run code")


@pytest.mark.parametrize("keep", [4, 100, 20_000])
def test_truncated_files(directory: Path, keep: int):
    data = (directory / SINGLE).read_bytes()
    assert len(data) > keep
    (directory / SINGLE).write_bytes(data[:keep])
    refused(directory, SINGLE, "truncated")


def test_shards_that_are_missing_truncated_or_elsewhere(
    target: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tensor_files, "MAX_SHARD_BYTES", 8000)
    save_target(target, tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    first, second, third, *_ = sorted(set(index["weight_map"].values()))
    (tmp_path / first).unlink()
    (tmp_path / second).write_bytes((tmp_path / second).read_bytes()[:-1])
    error = refused(tmp_path, f"{first}: this shard is missing (", f"{second}: is truncated")
    assert len(error.problems) == 2

    save_target(target, tmp_path)
    name = next(name for name, file in index["weight_map"].items() if file == first)
    index["weight_map"][name] = third
    (tmp_path / INDEX).write_text(json.dumps(index))
    refused(tmp_path, f"{name}: is not in {third}")
    index["weight_map"][name] = "../elsewhere.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    refused(tmp_path, "is not a file name")
    (tmp_path / INDEX).write_text("{}")
    refused(tmp_path, "weight_map: must map tensor names to files")


def test_missing_and_leftover_tensors_and_wrong_shapes_at_once(directory: Path):
    change(
        directory,
        model__norm__weight=None,
        model__layers__1__mlp__up_proj__weight=torch.zeros(41, 32),
        model__layers__9__mlp__up_proj__weight=torch.zeros(40, 32),
        lm_head__weight=torch.zeros(50, 32, dtype=torch.int8),
    )
    error = refused(
        directory,
        "model.norm.weight: is missing",
        "model.layers.9.mlp.up_proj.weight: belongs to nothing in the model",
        "model.layers.1.mlp.up_proj.weight: has shape [41, 32] in model.safetensors, the configuration makes it [40, 32]",
        "lm_head.weight: has dtype I8",
    )
    assert len(error.problems) == 4


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


def test_problems_are_found_before_memory_is_taken(directory: Path, monkeypatch: pytest.MonkeyPatch):
    """A wrong shape in a large model must not cost the time to allocate and read it."""
    change(directory, model__norm__weight=torch.ones(33))
    devices = []
    create = Decoder.__init__

    def recorded(self, config, ops, device, dtype, *shard):
        devices.append(str(device))
        create(self, config, ops, device, dtype, *shard)

    monkeypatch.setattr(Decoder, "__init__", recorded)
    refused(directory, "has shape [33]")
    assert devices == ["meta"]
