"""A head whose config.json is known has the sizes of that file, in the forms in which heads are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from foredraft.core.errors import ConfigError
from foredraft.core.model_shape import built_in_config
from foredraft.planning.servers.launch import read_launch
from foredraft.sim.assembly import Assembly, assemble
from foredraft.sim.effects.notices import notices_of
from foredraft.sim.scenario_file import load_scenario

LAYER: dict[str, Any] = {
    "hidden_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64,
    "intermediate_size": 1000, "vocab_size": 128256, "num_hidden_layers": 1, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
OWN: dict[str, Any] = {"draft_vocab_size": 8192}
LLAMA = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
TOP: dict[str, Any] = {**LAYER, **OWN, **LLAMA, "torch_dtype": "float32"}
ATTENTION = 2 * 4096 * 3 * 16 * 64 + 16 * 64 * 4096  # q, k and v read the embedding beside the hidden state
MLP = 3 * 4096 * 1000


def run_with(folder: Path, config: dict[str, Any], algorithm: str = "EAGLE3", *more: str) -> Assembly:
    (folder / "head").mkdir(exist_ok=True)
    (folder / "head" / "config.json").write_text(json.dumps(config))
    settings = [f"model.draft={folder / 'head'}", f"speculation.algorithm={algorithm}", "engine.kv_slots=1000", *more]
    return assemble(load_scenario(None, settings)[0])


@pytest.mark.parametrize(
    "config",
    [
        TOP,
        {**TOP, "num_hidden_layers": 32},  # the official heads repeat the layers of their target
        {**TOP, "model_type": "eagle3", "architectures": ["Eagle3LlamaForCausalLM"]},
        {
            "speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], "model_type": "speculator_model",
            "transformer_layer_config": {**LAYER, "model_type": "llama"}, **OWN,
        },
        {"model": {**LAYER, **LLAMA}, "model_type": "eagle", **OWN},
    ],
    ids=["top", "layers of the target", "marks", "speculators", "EAGLE's"],
)  # fmt: skip
def test_a_head_has_the_sizes_of_its_own_file(tmp_path: Path, config: dict[str, Any]):
    draft = run_with(tmp_path, config).draft
    assert draft is not None and draft.body is not None
    assert draft.kv_bytes_per_token == 2 * 16 * 64 * 2
    assert draft.parameters == ATTENTION + MLP + 2 * 4096 + 3 * 4096 * 4096 + 8192 * 4096
    assert draft.source == str(tmp_path / "head" / "config.json")


LATENT = {
    "model_type": "deepseek_v3", "architectures": ["Eagle3DeepseekV2ForCausalLM"], "q_lora_rank": 256, "kv_lora_rank": 512,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "fc_norm": True, "norm_output": True,
}  # fmt: skip
PUBLISHED = [  # architecture and kind of layer of heads as servers know them, with the bytes of a token's KV
    ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, 4096),
    ({"architectures": ["Eagle3LlamaForCausalLM"], "model_type": "llama", "norm_before_residual": True}, 4096),
    ({"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}, 4096),
    ({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "bias": False}, 4096),
    ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama4_text", "intermediate_size_mlp": 1000}, 4096),
    ({"architectures": ["Qwen3MoeForCausalLMEagle3"], "model_type": "qwen3_moe"}, 4096),
    (LATENT, 2 * (512 + 32)),
]


@pytest.mark.parametrize(("keys", "kv"), PUBLISHED)
def test_heads_as_servers_know_them(tmp_path: Path, keys: dict[str, Any], kv: int):
    draft = run_with(tmp_path, {**TOP, **keys}).draft
    assert draft is not None and draft.body is not None and draft.body.experts is None
    assert (draft.kv_bytes_per_token, draft.body.mlps[0][0].activated) == (kv, 1000)


@pytest.mark.parametrize("kind", ["peagle", "dflash", "dflash2", "dspark", "mlp_speculator", "medusa"])
def test_other_kinds_of_speculators_are_refused_by_name(tmp_path: Path, kind: str):
    with pytest.raises(ConfigError, match=f"speculators_model_type: expected eagle3, found '{kind}'"):
        run_with(tmp_path, {**TOP, "speculators_model_type": kind})


@pytest.mark.parametrize(
    ("others", "fusion", "lm_head"),
    [
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15]}}, 2, 8192),
        ({"eagle_aux_hidden_state_layer_ids": [2, 10, 20, 30]}, 4, 8192),
        ({"num_aux_hidden_states": 1}, 1, 8192),
        ({"eagle_config": {"use_aux_hidden_state": False}}, 0, 8192),
        ({"draft_vocab_size": None}, 3, 0),  # the target's LM head
    ],
)
def test_what_a_head_joins_and_its_lm_head(tmp_path: Path, others: dict[str, Any], fusion: int, lm_head: int):
    draft = run_with(tmp_path, TOP | others).draft
    assert draft is not None
    assert draft.parameters == ATTENTION + MLP + 2 * 4096 + fusion * 4096 * 4096 + lm_head * 4096
    assert draft.body is not None and draft.body.vocab == (lm_head or 128256)


def test_a_narrow_head_fuses_wide_states_and_has_embeddings_of_its_own(tmp_path: Path):
    draft = run_with(tmp_path, TOP | {"hidden_size": 1024, "target_hidden_size": 4096}).draft
    assert draft is not None
    attention = 2 * 1024 * 3 * 16 * 64 + 16 * 64 * 1024
    fused = 3 * 4096 * 1024 + 8192 * 1024 + 128256 * 1024
    assert draft.parameters == attention + 3 * 1024 * 1000 + 2 * 1024 + fused


def test_the_layers_of_a_head_may_be_several_and_quantized(tmp_path: Path):
    config = {**TOP, "num_hidden_layers": 2, "quantization_config": {"quant_method": "fp8"}}
    draft = run_with(tmp_path, config).draft
    assert draft is not None and draft.body is not None
    layers = 3 * ATTENTION // 2 - 16 * 64 * 4096 // 2 + 16 * 64 * 4096 + 2 * (MLP + 2 * 4096)
    assert draft.parameters == layers + 3 * 4096 * 4096 + 8192 * 4096  # only the first reads the embedding
    assert draft.kv_bytes_per_token == 2 * 2 * 16 * 64 * 2
    assert draft.body.weight_dtype == "fp8"


def test_the_kv_of_a_head_has_the_format_of_the_targets(tmp_path: Path):
    draft = run_with(tmp_path, TOP, "EAGLE3", "model.kv_dtype=fp8").draft
    assert draft is not None and draft.kv_bytes_per_token == 2 * 16 * 64


@pytest.mark.parametrize(
    ("algorithm", "others", "message"),
    [
        ("EAGLE3", {"hidden_size": 1024}, "hidden_size: the head takes hidden states of size 1024"),
        ("EAGLE3", {"target_hidden_size": 5120}, "target_hidden_size: .* size 5120, those of llama-3.1-8b have 4096"),
        ("EAGLE3", {"vocab_size": 32000, "draft_vocab_size": None}, "vocab_size: the head drafts 32000 tokens"),
        ("EAGLE3", {"draft_vocab_size": 200_000}, "draft_vocab_size: 200000 of 128256"),
        ("EAGLE3", {"eagle_aux_hidden_state_layer_ids": [2, 40]}, "eagle_aux_hidden_state_layer_ids: .* the 32 layers"),
        ("EAGLE3", {"speculators_model_type": "dflash"}, "speculators_model_type: expected eagle3, found 'dflash'"),
        ("EAGLE3", {"num_key_value_heads": "8"}, "num_key_value_heads: must be a whole number"),
        ("EAGLE", {}, "architectures: LlamaForCausalLMEagle3 is made for EAGLE3"),
        ("EAGLE", {"architectures": ["LlamaForCausalLMEagle"], "hidden_size": 2048}, "hidden_size: the head takes"),
    ],
)
def test_a_head_that_contradicts_its_target(tmp_path: Path, algorithm: str, others: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        run_with(tmp_path, TOP | others, algorithm)
    assert str(tmp_path / "head" / "config.json") in str(caught.value)


def test_eagle_and_multi_layer_heads(tmp_path: Path):
    plain = {**LAYER, "architectures": ["LlamaForCausalLMEagle"], "model_type": "llama"}
    of_layer = 4096 * 3 * 16 * 64 + 16 * 64 * 4096 + MLP + 2 * 4096 + 2 * 4096 * 4096
    single = run_with(tmp_path, plain, "EAGLE").draft
    assert single is not None and single.parameters == of_layer
    several = run_with(tmp_path, plain | {"num_nextn_predict_layers": 4}, "MULTI_LAYER_EAGLE").draft
    assert several is not None and (several.heads, several.parameters) == (4, 4 * of_layer)


def test_a_head_that_is_not_here_is_assumed_and_said():
    settings = ["model.draft=someone/unknown-eagle3", "engine.kv_slots=1000"]
    scenario, origins = load_scenario(None, settings)[:2]
    run = assemble(scenario)
    assert run.draft is not None and run.draft.kv_bytes_per_token == 4096
    assert any(
        "config.json of someone/unknown-eagle3 is not on this machine" in note for note in notices_of(run, origins)
    )


def test_the_name_of_a_head_is_not_asked_for_where_nothing_drafts_with_a_model():
    """As `doctor` assembles the same command without drafts."""
    settings = ["model.draft=someone/unknown-eagle3", "engine.kv_slots=1000", "speculation.algorithm=NONE"]
    assert assemble(load_scenario(None, settings)[0]).draft is None
    with pytest.raises(ConfigError, match=r"model.draft: unknown model 'someone/unknown-eagle3'"):
        assemble(load_scenario(None, [*settings[:2], "speculation.algorithm=STANDALONE"])[0])


@pytest.mark.parametrize(
    ("server", "command"),
    [
        ("vllm", """vllm serve {target} --speculative-config '{{"method":"eagle3","model":"{head}","num_speculative_tokens":3}}'"""),
        (
            "sglang",
            "sglang serve --model-path {target} --speculative-algorithm EAGLE3 --speculative-num-steps 3 "
            "--speculative-eagle-topk 1 --speculative-draft-model-path {head}",
        ),
        ("trtllm", "trtllm-serve {target} --config {folder}/o.yaml"),
    ],
)  # fmt: skip
def test_the_draft_of_a_command_is_read(tmp_path: Path, server: str, command: str):
    for name, config in (("target", built_in_config("llama-3.1-8b")[1]), ("head", TOP)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    options = {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": str(tmp_path / "head")}
    (tmp_path / "o.yaml").write_text(json.dumps({"speculative_config": options}))
    text = command.format(target=tmp_path / "target", head=tmp_path / "head", folder=tmp_path)
    launch = read_launch(server, text, "--from", "H100")
    run = assemble(load_scenario(None, (), {"--from": launch.settings})[0])
    assert run.draft is not None and run.draft.kv_bytes_per_token == 2 * 16 * 64 * 2
