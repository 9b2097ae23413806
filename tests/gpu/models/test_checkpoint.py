"""Checkpoints: round trips, shards, dtypes, and every way in which files can be wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from damaged_checkpoint import OPS, change, refused
from family_shapes import SHAPES
from foredraft.core.errors import ConfigError
from foredraft.gpu.models import projection
from foredraft.gpu.models.checkpoint import file_notes, load_target, random_weights, required_bytes, save_target
from foredraft.gpu.models.config import LLAMA, QWEN3_MOE, ModelConfig, MoeConfig
from foredraft.gpu.models.decoder import Decoder
from foredraft.gpu.models.projection import pack_projections
from foredraft.gpu.models.stored import tensor_files
from foredraft.gpu.models.stored.tensor_files import INDEX, SINGLE, CheckpointError
from foredraft.gpu.tiny.dense import DenseAttention
from safetensors.torch import load_file, save_file

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


def same(a: Decoder, b: Decoder) -> None:
    torch.testing.assert_close(a(TOKENS, DenseAttention([4])).hidden, b(TOKENS, DenseAttention([4])).hidden)


# -- what works --------------------------------------------------------------------------------------------------------


def test_round_trip(target: Decoder, directory: Path):
    again = load_target(directory, OPS)
    assert again.config == target.config
    for name, parameter in target.named_parameters():
        assert torch.equal(parameter, dict(again.named_parameters())[name]), name


def test_layers_rounded_while_they_are_loaded_are_those_rounded_afterwards(
    target: Decoder, directory: Path, monkeypatch
):
    monkeypatch.setattr(projection, "MIN_PACKED_ELEMENTS", 1)
    monkeypatch.setattr(tensor_files, "MAPPED_BYTES", 1)  # each tensor by a reading of its own
    loaded, late = (load_target(directory, OPS, "cpu", torch.float32, in_int8=early) for early in (True, False))
    products = [one for layer in loaded.layers for one in (*layer.mixer.projections, *layer.mlp.projections)]
    assert {one.layout for one in products} == {"int8"} and not loaded.projections[0].layout
    assert all(one.parameter.untyped_storage().nbytes() == 4 for one in products), "no floats are left"
    for model in (loaded, late):
        pack_projections(model, in_int8=True)
    tokens = torch.tensor([1, 2, 3])
    outs = [model(tokens, DenseAttention([3])) for model in (loaded, late)]
    assert torch.equal(outs[0].hidden, outs[1].hidden)
    assert torch.equal(loaded.logits(outs[0].hidden), late.logits(outs[1].hidden))


WATCHED = """
import sys
from pathlib import Path
import torch
from foredraft.gpu.session.devices import ops_for
from foredraft.gpu.models.checkpoint import load_target
from foredraft.gpu.models.projection import pack_projections

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

def load(directory):
    model = load_target(directory, ops_for("cpu"), "cpu", torch.float32, in_int8=True)
    pack_projections(model, in_int8=True)
    return model

torch.set_num_threads(1)
load(sys.argv[2])  # the libraries' own pages
before = memory("VmRSS")
model = load(sys.argv[1])
print(memory("VmHWM") - before)
"""


@pytest.mark.ci
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the peak is read from /proc")
def test_rounding_needs_little_more_memory_than_the_integers(tmp_path: Path):
    for name, layers in (("whole", 16), ("small", 1)):
        config = ModelConfig(LLAMA, 1000, 768, 3072, layers, 12, 12, 64)
        save_target(random_weights(config, OPS, "cpu", torch.float32, seed=1), tmp_path / name)
    kept = 16 * (4 * 768 * 768 + 3 * 768 * 3072) + 4 * 2 * 1000 * 768  # integers, embeddings and an LM head in floats
    command = [sys.executable, "-c", WATCHED, tmp_path / "whole", tmp_path / "small"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    assert kept < int(done.stdout) < 1.3 * kept


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
