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
FORMS = [  # architecture and kind of layer of heads as servers know them, with the bytes of a token's KV
    ({"architectures": ["Eagle3LlamaForCausalLM"], "model_type": "llama", "norm_before_residual": True}, 4096),
    ({"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}, 4096),
    ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama4_text", "intermediate_size_mlp": 1000}, 4096),
    ({"architectures": ["Qwen3MoeForCausalLMEagle3"], "model_type": "qwen3_moe"}, 4096),
    (LATENT, 2 * (512 + 32)),
    (LATENT | {"model_type": "kimi_k2", "n_routed_experts": 384, "moe_intermediate_size": 2048}, 2 * (512 + 32)),
]


@pytest.mark.parametrize(("keys", "kv"), FORMS)
def test_heads_as_servers_know_them(tmp_path: Path, keys: dict[str, Any], kv: int):
    draft = run_with(tmp_path, {**TOP, "intermediate_size": 1000, **keys}).draft
    assert draft is not None and draft.body is not None and draft.body.experts is None
    assert (draft.kv_bytes_per_token, draft.body.mlps[0][0].activated) == (kv, 1000)


def published(
    sizes: tuple[int, int, int, int, int], vocab: int, draft_vocab: int | None = 32000, **others: Any
) -> dict[str, Any]:
    """A published configuration. `sizes`: hidden, heads, key-value heads, channels of a head, width of the MLP."""
    keys = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    known = {
        "num_hidden_layers": 1,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab,
        **LLAMA,
    }
    return {**known, **dict(zip(keys, sizes, strict=True)), "draft_vocab_size": draft_vocab, **others}


def aux(*layers: int) -> dict[str, Any]:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers), "use_aux_hidden_state": True}}


SPECULATORS = {
    "speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], "draft_vocab_size": 32000,
    "norm_before_residual": True, "target_hidden_size": None, "eagle_aux_hidden_state_layer_ids": None,
    "transformer_layer_config": {
        "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 12288, "num_hidden_layers": 1, "vocab_size": 151936, "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
    },
}  # fmt: skip
MODELOPT = {
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [], "use_aux_hidden_state": True, "use_last_layernorm": True,
        "use_input_layernorm_in_first_layer": True, "use_mtp_layernorm": False, "next_layer_regular": True,
        "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1,
    },
}  # fmt: skip
DEFAULT_KIMI = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 384, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1,
}  # fmt: skip
# Target: hidden size, tokens, layers; the head's configuration; bytes of a token's KV. The sizes are those of the files
# in `configs/` of sgl-project/SpecForge, of the defaults of nvidia-modelopt 0.47 and of the form of speculators 0.9.
PUBLISHED: dict[str, tuple[tuple[int, int, int], dict[str, Any], int]] = {
    "Llama-3.3-70B": ((8192, 128256, 80), published((8192, 64, 8, 128, 28672), 128256), 4096),
    "Llama-4-Scout": ((5120, 202048, 48), published((5120, 40, 8, 128, 32768), 202048), 4096),
    "Qwen3-235B-A22B": ((4096, 151936, 94), published((4096, 64, 4, 128, 24576), 151936, **aux(1, 46, 90)), 2048),
    "Qwen3-30B-A3B, EAGLE-3.1": (
        (2048, 151936, 48), published((2048, 32, 4, 128, 12288), 151936, fc_norm=True, norm_output=True), 2048),
    "DeepSeek-V3": ((7168, 129280, 61), published((7168, 56, 8, 128, 40960), 129280, **aux(1, 29, 57)), 4096),
    "Kimi-K2": (
        (7168, 163840, 61), published((7168, 64, 64, 128, 18432), 163840, model_type="kimi_k2", **aux(2, 30, 58)), 32768),
    "gpt-oss-20b": (
        (2880, 201088, 24),
        published((2880, 64, 8, 64, 17280), 201088, architectures=["GptOssForCausalLMEagle3"], model_type="gpt_oss",
                  num_local_experts=16, experts_per_token=4, **aux(1, 11, 21)), 2048),
    "Gemma 3 27B, the target's LM head": (
        (5376, 262208, 62),
        published((5376, 32, 16, 128, 21504), 262208, None, reuse_target_lm_head=True, sliding_window=512,
                  use_sliding_window=False, target_model_type="gemma3_text", **aux(1, 29, 61)), 8192),
    "Qwen3-8B, speculators": ((4096, 151936, 36), SPECULATORS, 4096),
    "ModelOpt's default": ((4096, 128256, 32), published((4096, 32, 8, 128, 14336), 128256, **MODELOPT), 4096),
    "ModelOpt's Kimi-K2": (
        (7168, 163840, 61), published((7168, 64, 64, 128, 18432), 163840, **(MODELOPT | DEFAULT_KIMI)), 1152),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_heads(tmp_path: Path, name: str):
    (hidden, vocab, layers), config, kv = PUBLISHED[name]
    about = {**LAYER, "hidden_size": hidden, "vocab_size": vocab, "num_hidden_layers": layers, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(about))
    draft = run_with(tmp_path, config, "EAGLE3", f"model.target={tmp_path}").draft
    layer = config.get("transformer_layer_config", config)
    heads, kv_heads, dim = (layer[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    attention = 2 * hidden * (heads + 2 * kv_heads) * dim + heads * dim * hidden
    if "kv_lora_rank" in layer:
        attention = 2 * hidden * (1536 + 512 + 64) + 1536 * 64 * 192 + 512 * 64 * 256 + 64 * 128 * hidden
    others = 3 * hidden * layer["intermediate_size"] + 3 * hidden**2 + (config["draft_vocab_size"] or 0) * hidden
    assert draft is not None and draft.kv_bytes_per_token == kv
    assert draft.parameters == pytest.approx(attention + others, rel=1e-4)  # and norms


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"architectures": ["DFlashDraftModel"]}, "architectures: DFlashDraftModel drafts in another way"),
        ({"architectures": ["DSparkDraftModel"], "block_size": 16}, "architectures: DSparkDraftModel drafts"),
        ({"architectures": ["PEagleDraftModel"]}, "architectures: PEagleDraftModel drafts"),
        ({"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 9]}}, "architectures: DFlash drafts"),
        ({"architectures": None, "model_type": "mlp_speculator"}, "model_type: mlp_speculator drafts"),
        ({"medusa_num_heads": 4}, "architectures: Medusa drafts"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "parallel_drafting: a head that drafts several tokens"),
        ({"use_cross_attention": True}, "use_cross_attention: true: a head with this switch is not modelled"),
        ({"eagle_config": {"gate_residual": True}}, "gate_residual: true"),
        ({"transformer_layer_config": {"attention_gating": True}}, "attention_gating: true"),
    ],
)
def test_drafts_that_work_in_another_way_are_refused(tmp_path: Path, keys: dict[str, Any], found: str):
    with pytest.raises(ConfigError, match=found):
        run_with(tmp_path, TOP | keys)


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
