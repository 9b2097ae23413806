"""Drafts that propose all tokens of a round in one pass: their sizes, in the forms in which they are published, and
their price."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from foredraft.core.contract.step import RoundShape
from foredraft.core.errors import ConfigError
from foredraft.planning.servers.launch import read_launch
from foredraft.sim.assembly import Assembly, assemble
from foredraft.sim.cost.draft import BLOCK_DRAFTERS
from foredraft.sim.cost.passes.decode_work import InvalidRound
from foredraft.sim.effects.notices import notices_of
from foredraft.sim.scenario_file import load_scenario

HIDDEN, VOCAB = 4096, 128256  # of llama-3.1-8b
LAYER: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": HIDDEN, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 1000, "vocab_size": VOCAB, "num_hidden_layers": 3, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
ONE_LAYER = HIDDEN * (16 + 2 * 4) * 64 + 16 * 64 * HIDDEN + 2 * 64 + 3 * HIDDEN * 1000 + 2 * HIDDEN
LAYERS = 3 * ONE_LAYER
DFLASH: dict[str, Any] = {
    **LAYER, "architectures": ["DFlashDraftModel"], "block_size": 16, "num_target_layers": 32,
    "dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 9, 17, 25, 31]},
}  # fmt: skip
SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 16}
SPECULATORS: dict[str, Any] = {
    "transformer_layer_config": LAYER, "mask_token_id": 5, "block_size": 8, "draft_vocab_size": 8192,
    "target_hidden_size": HIDDEN, "aux_hidden_state_layer_ids": [2, 16, 32], "sliding_window_non_causal": True,
}  # fmt: skip
MARKOV = {"markov_rank": 8, "markov_head_type": "vanilla", "enable_confidence_head": True}
ALL = ("P_EAGLE", "PARD", *BLOCK_DRAFTERS)


def run_with(algorithm: str, config: dict[str, Any] | None = None, folder: Path | None = None, *more: str) -> Assembly:
    settings = [f"speculation.algorithm={algorithm}", "speculation.policy=fixed", "speculation.steps=5", *more]
    if config is not None:
        assert folder is not None
        (folder / "config.json").write_text(json.dumps(config))
        settings.append(f"model.draft={folder}")
    return assemble(load_scenario(None, settings)[0])


FORMS = [  # the algorithm, the configuration, the hidden states that are fused, and what it has beside the layers
    ("DFLASH", DFLASH, 5, 0),
    ("DFLASH", {**DFLASH, "dflash_config": {"mask_token_id": 5}}, 3, 0),  # as many as it has layers
    ("DFLASH", {**SPECULATORS, "speculators_model_type": "dflash"}, 3, 8192 * HIDDEN),
    (
        "DFLASH2", {**DFLASH, "architectures": ["DFlash2DraftModel"], "dflash_config": {**SELECTOR}},
        3, 2 * 3 * (HIDDEN * 4 * HIDDEN // 16 + 4 * HIDDEN) + 8 * (2 * VOCAB + HIDDEN),
    ),
    (
        "DFLASH2", {**SPECULATORS, **SELECTOR, "speculators_model_type": "dflash2"},
        3, 2 * 3 * (HIDDEN * 4 * HIDDEN // 16 + 4 * HIDDEN) + 8 * (2 * VOCAB + HIDDEN) + 8192 * HIDDEN,
    ),
    (
        "DSPARK", {**SPECULATORS, **MARKOV, "speculators_model_type": "dspark"},
        3, 8 * (VOCAB + 8192) + HIDDEN + 8 + 8192 * HIDDEN,
    ),
    (
        "DSPARK", {**LAYER, **MARKOV, "architectures": ["Qwen3DSparkModel"], "markov_head_type": "gated",
                   "target_layer_ids": [0, 31], "block_size": 7},
        2, 8 * 2 * VOCAB + (HIDDEN + 8) * 8 + HIDDEN + 8,
    ),
    (
        "DSPARK", {**LAYER, "architectures": ["DSparkDraftModel"], "dspark_block_size": 7, "dspark_markov_rank": 8,
                   "dspark_noise_token_id": 9, "dspark_target_layer_ids": [3], "dspark_markov_head_type": "rnn"},
        1, 8 * 2 * VOCAB + (16 + HIDDEN) * 24 + HIDDEN + 8,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("algorithm", "config", "fused", "beside"), FORMS)
def test_a_block_drafter_has_the_sizes_of_its_file(
    tmp_path: Path, algorithm: str, config: dict[str, Any], fused: int, beside: int
):
    draft = run_with(algorithm, config, tmp_path).draft
    assert draft is not None and draft.unknown is None
    assert draft.parameters == LAYERS + fused * HIDDEN * HIDDEN + beside
    assert draft.kv_bytes_per_token == 3 * 2 * 4 * 64 * 2
    assert draft.source == str(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("algorithm", "changes", "message"),
    [
        ("DFLASH", {"dflash_config": SELECTOR}, "is made for DFLASH2, not for DFLASH"),
        ("DFLASH2", {}, "is made for DFLASH, not for DFLASH2"),
        ("DFLASH", {"architectures": ["LlamaForCausalLM"], "dflash_config": None}, "made for another algorithm"),
        ("DFLASH", {"block_size": 1}, "block_size: must be at least 2"),
        ("DFLASH", {"dflash_config": {"mask_token_id": VOCAB}}, "mask_token_id: must be a token from 0 to 128255"),
        ("DFLASH", {"dflash_config": {"target_layer_ids": [1, 32]}}, r"target_layer_ids: .* 0 to 31 .* \[1, 32\]"),
        ("DFLASH", {"dflash_config": {"target_layer_ids": []}}, "target_layer_ids: must be a list of layers"),
        ("DFLASH", {"vocab_size": 32000}, "vocab_size: the drafter has 32000 tokens, llama-3.1-8b has 128256"),
        ("DFLASH", {"hidden_size": 2048}, "hidden_size: the drafter takes hidden states of size 2048"),
        ("DFLASH", {"num_target_layers": 36}, "num_target_layers: made for a target of 36 layers"),
        ("DFLASH", {"draft_vocab_size": 200_000}, "draft_vocab_size: 200000 of 128256"),
        ("DFLASH", {"architectures": ["DFlashDraftModel", "XPressModel"]}, "architectures: XPressModel refines"),
        ("DFLASH", {"dflash_config": {"projector_type": "domino"}}, "projector_type: domino refines"),
        ("DFLASH", {"use_cross_gate": True}, "use_cross_gate: true: a head with this switch is not modelled"),
        ("DSPARK", {"dspark_config": {**MARKOV, "markov_head_type": "deep"}}, "markov_head_type: expected vanilla"),
        ("DFLASH2", {"dflash_config": {**SELECTOR, "conv_group_size": 7}}, "7 does not divide the hidden size of 4096"),
    ],
)
def test_a_block_drafter_that_does_not_fit(tmp_path: Path, algorithm: str, changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        run_with(algorithm, DFLASH | changes, tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_the_head_of_p_eagle_is_that_of_eagle3_with_embeddings(tmp_path: Path):
    layer = {key: value for key, value in LAYER.items() if key != "num_hidden_layers"}
    config = {
        "speculators_model_type": "peagle", "transformer_layer_config": {**layer, "model_type": "llama"},
        "draft_vocab_size": 8192, "mask_token_id": 7,
    }  # fmt: skip
    parallel = run_with("P_EAGLE", config, tmp_path).draft
    single = run_with("EAGLE3", {**config, "speculators_model_type": "eagle3"}, tmp_path).draft
    assert parallel is not None and single is not None
    assert parallel.parameters == single.parameters + VOCAB * HIDDEN
    others = {"parallel_drafting": True, "architectures": ["LlamaForCausalLMEagle3"], **LAYER, "model_type": "llama"}
    assert run_with("P_EAGLE", others, tmp_path).draft is not None
    with pytest.raises(
        ConfigError, match="parallel_drafting: a head that drafts several tokens in one pass is one of P_"
    ):
        run_with("EAGLE3", others, tmp_path)


@pytest.mark.parametrize("algorithm", ALL)
def test_drafting_in_one_pass_costs_less_than_in_steps(algorithm: str):
    """More drafts of one pass cost less than as many passes of one layer."""
    steps = run_with("STANDALONE" if algorithm == "PARD" else "EAGLE3")
    once = run_with(algorithm)
    extra = []
    for run in (steps, once):
        few, many = (run.cost.decode_parts(1, RoundShape.chain(count), 1000) for count in (2, 12))
        extra.append(sum(many[name] - few.get(name, 0) for name in many if name.startswith("draft")))
    assert extra[1] < extra[0] / 2


@pytest.mark.parametrize("algorithm", BLOCK_DRAFTERS)
def test_a_block_drafter_reads_its_context_once_and_projects_accepted_tokens(algorithm: str):
    run = run_with(algorithm)
    assert run.draft is not None and run.draft.body is not None
    short, long = (run.cost.decode_parts(8, RoundShape.chain(7), kv) for kv in (8_000, 800_000))
    assert long["draft_attention"] > 10 * short["draft_attention"]  # the draft's KV grows with the context
    assert long["draft_catch_up"] == short["draft_catch_up"]  # keys and values from hidden states alone
    # Prompts cost the projection, and no layer of the draft.
    plain = run_with("NONE")
    prompt = run.cost.step_ns([(4096, 0)]) - plain.cost.step_ns([(4096, 0)])
    assert 0 < prompt < 0.2 * plain.cost.step_ns([(4096, 0)])


def test_the_heads_of_a_block_are_paid_for(tmp_path: Path):
    """DFlash2's convolutions and walk, and DSpark's bias for each position, come on top of the same layers."""
    times = {name: run_with(name).cost.decode_ns(8, RoundShape.chain(7), 8_000) for name in BLOCK_DRAFTERS}
    assert times["DFLASH"] < times["DFLASH2"] and times["DFLASH"] < times["DSPARK"]
    narrow = {**SPECULATORS, **MARKOV, "speculators_model_type": "dspark"}
    wide = narrow | {"draft_vocab_size": None}
    small, large = (
        run_with("DSPARK", one, tmp_path).cost.decode_ns(8, RoundShape.chain(7), 8_000) for one in (narrow, wide)
    )
    assert small < large


def test_every_device_has_the_heads_of_a_block_whole():
    one, four = (run_with("DSPARK", None, None, f"hardware.tensor_parallel={tp}") for tp in (1, 4))
    assert one.draft is not None and four.draft is not None
    whole = 2 * one.draft.whole_parameters
    held = four.draft.weight_bytes_per_device(four.deployment.parallel)
    assert held == pytest.approx((one.draft.weight_bytes - whole) / 4 + whole, rel=1e-6)
    assert run_with("DSPARK").memory.draft_slot_bytes == one.draft.kv_bytes_per_token


@pytest.mark.parametrize("algorithm", ALL)
def test_blocks_are_chains(algorithm: str):
    run = run_with(algorithm)
    with pytest.raises(InvalidRound, match="drafts chains"):
        run.cost.decode_ns(1, RoundShape(3, 2, 6), 100)
    with pytest.raises(ConfigError, match=f"{algorithm} drafts no trees"):
        run_with(algorithm, None, None, "speculation.topk=2")


def test_more_drafts_than_a_trained_block_has_are_said(tmp_path: Path):
    config = {**SPECULATORS, "speculators_model_type": "dflash", "block_size": 4}
    run = run_with("DFLASH", config, tmp_path)
    text = "rounds draft up to 5 tokens, and the drafter was trained for blocks of 4 (3 drafts)"
    assert any(text in notice for notice in notices_of(run, {}))
    assert not any(
        "was trained" in notice for notice in notices_of(run_with("DFLASH", config | {"block_size": 6}, tmp_path), {})
    )


def test_published_acceptance_of_block_drafters():
    run = run_with("DFLASH2", None, None, "model.target=qwen3-8b", "acceptance.preset=math", "speculation.steps=7")
    assert run.preset.preset.name == "dflash2-qwen3-math" and not run.preset.differs
    assert replace(run.preset.preset).conditional == (0.9296,)


OWN = {
    "model_type": "deepseek_v3", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
    "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "intermediate_size": 512, "moe_intermediate_size": 64, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "vocab_size": 1000, "max_position_embeddings": 4096,
    "dspark_block_size": 5, "dspark_markov_rank": 8, "dspark_noise_token_id": 3, "dspark_target_layer_ids": [1, 3],
}  # fmt: skip


def test_a_target_that_brings_its_block_drafter(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(OWN))
    launch = read_launch("vllm", f"vllm serve {tmp_path} --speculative-config.method dspark", "--from", "H100")
    assert launch.settings["speculation"] == {"algorithm": "DSPARK", "policy": "fixed", "steps": 5}
    draft = assemble(load_scenario(None, ["engine.kv_slots=1000"], {"--from": launch.settings})[0]).draft
    assert draft is not None and draft.body is not None and draft.body.experts is not None
    assert (draft.body.layers, draft.fusion_inputs, draft.parts.most_drafts) == (3, 2, 5)
    assert draft.kv_bytes_per_token == 3 * (64 + 16) * 2
    named = load_scenario(None, ["engine.kv_slots=1000", f"model.draft={tmp_path}"], {"--from": launch.settings})[0]
    assert assemble(named).draft == draft  # the checkpoint of the target is named as the draft's, too
    (tmp_path / "config.json").write_text(json.dumps(OWN | {"dspark_target_layer_ids": [1, 4]}))
    with pytest.raises(ConfigError, match=r"target_layer_ids: .* 0 to 3 of .*, got \[1, 4\]"):
        assemble(load_scenario(None, ["engine.kv_slots=1000"], {"--from": launch.settings})[0])
