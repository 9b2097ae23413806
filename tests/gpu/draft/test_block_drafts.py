"""What block drafters propose in real decode is what their published tensors say when they are read by hand: with
chunks, pages, cached prefixes, retraction, overlap and every accepted length between."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cells import MatrixCell
from foredraft.core.errors import ConfigError
from foredraft.gpu.models.checkpoint import new_head
from foredraft.gpu.models.heads.block import MarkovHead
from foredraft.gpu.models.heads.config import HeadConfig, head_form
from heads_by_hand import BlockByHand
from matrix_cells import VOCAB_SIZE, block_config, sharpened, small_config, small_model
from test_drafts_dense import serve_watched

WINDOWS = {"windowed_layers": (0,), "window": 3}
FORMS = {
    "DFLASH": ("DFLASH", {}, {}),
    "DFLASH from its anchor, scaled": (
        "DFLASH",
        {"samples_anchor": True, "input_scale": 1.5, "logit_softcap": 2.0},
        {},
    ),
    "DFLASH, a causal window": ("DFLASH", {}, WINDOWS),
    "DFLASH, a window over the whole block": ("DFLASH", {"windows_are_causal": False}, WINDOWS),
    "DFLASH, causal": ("DFLASH", {"is_causal": True}, WINDOWS),
    "DFLASH2": ("DFLASH2", {}, {}),
    "DSPARK": ("DSPARK", {}, {}),
    "DSPARK from the first mask": ("DSPARK", {"samples_anchor": False, "has_confidence": False}, {}),
    "DSPARK gated": ("DSPARK", {"markov_head": "gated"}, {}),
    "DSPARK rnn": ("DSPARK", {"markov_head": "rnn"}, {}),
    "DSPARK without a Markov head": ("DSPARK", {"markov_rank": 0, "confidence_with_markov": False}, {}),
}


def block_of(form: str, seed: int):
    algorithm, parts, layers = FORMS[form]
    return sharpened(new_head(block_config(algorithm, parts, **layers), small_model(seed)), seed)


def by_hand(head, target) -> BlockByHand:
    tensors = {weight.name: weight.published() for weight in head.checkpoint_weights()}
    return BlockByHand(tensors, head.config.to_dict(), target.embed_weight, target.output_embedding)


@pytest.mark.fast("DFLASH", ci=["DFLASH2", "DSPARK", "DFLASH, a window over the whole block"])
@pytest.mark.parametrize("form", FORMS)
def test_proposals_are_those_of_the_published_tensors(form):
    common = {"algorithm": FORMS[form][0], "chunk_size": 3, "prefixes": "shared", "page_size": 4}
    cells = [
        MatrixCell(**common, mode="overlap", steps=4, multi_step_rounds=3, pool="tight", disturbance="retract", seed=5),
        MatrixCell(**common, mode="overlap", steps=3, multi_step_rounds=2, drafts="simulated", seed=2),
    ]
    watched = []
    for cell in cells:
        head, target = block_of(form, cell.seed % 3), small_model(cell.seed % 3)
        watched.append(serve_watched(cell, head, by_hand(head, target).drafts))
    counts = {
        name: sum(getattr(watcher, name) for watcher, _ in watched)
        for name in ("proposals", "cached", "partly", "fully")
    }
    assert counts["proposals"] > 50 and min(counts.values()) > 3 and watched[0][1] > 3, (counts, watched[0][1])


def test_confidences_are_those_of_the_confidence_head():
    head = block_of("DSPARK", 0)
    assert isinstance(head, MarkovHead)
    hidden = torch.randn(2, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    roots, drafts = torch.tensor([4, 5]), torch.tensor([[1, 2, 3], [6, 7, 8]])
    tensors = {weight.name: weight.published() for weight in head.checkpoint_weights()}
    before = tensors["markov_head.markov_w1.weight"][torch.tensor([[4, 1, 2], [5, 6, 7]])]
    logits = torch.cat((hidden, before), -1) @ tensors["confidence_head.proj.weight"][0]
    wanted = (logits + tensors["confidence_head.proj.bias"]).sigmoid()
    np.testing.assert_allclose(head.confidences(hidden, roots, drafts), wanted, rtol=1e-12)
    assert head.confidences(hidden, roots, drafts).std() > 0


PUBLISHED = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": VOCAB_SIZE,
    "block_size": 8,
    "num_target_layers": 2,
    "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 1]},
}
SPECULATORS = {
    "speculators_model_type": "dspark",
    "architectures": ["DSparkSpeculator"],
    "transformer_layer_config": {k: v for k, v in PUBLISHED.items() if k.endswith(("size", "s", "dim", "type"))},
    "draft_vocab_size": VOCAB_SIZE,
    "block_size": 7,
    "aux_hidden_state_layer_ids": [1, 2],
    "mask_token_id": 5,
    "markov_rank": 3,
    "markov_head_type": "gated",
    "speculators_config": {"algorithm": "dspark"},
}
SPECULATORS["transformer_layer_config"].pop("architectures")


def test_both_published_forms_say_the_same():
    target = small_config()
    found = HeadConfig.from_dict(PUBLISHED, "DFLASH", target)
    assert (found.aux_layers, found.block.mask_token, found.block.most_drafts) == ((1, 2), 5, 7)
    assert (found.model.architecture, found.model.qk_norm, found.model.num_layers) == ("Qwen3ForCausalLM", True, 2)
    other = HeadConfig.from_dict(SPECULATORS, "DSPARK", target)
    assert (other.aux_layers, other.block.mask_token, other.block.most_drafts) == ((1, 2), 5, 7)
    assert other.model == found.model and other.block.markov_head == "gated" and other.block.samples_anchor
    for algorithm, config in (("DFLASH", PUBLISHED), ("DSPARK", SPECULATORS)):
        assert head_form(config, (), "config.json") == algorithm
    again = HeadConfig.from_dict(other.to_dict(), "DSPARK", target)
    assert replace(again, settings={}) == replace(other, settings={})


@pytest.mark.parametrize(("model_type", "channels"), [(None, 128), ("qwen3", 128), ("llama", 4), ("qwen2", 4)])
def test_heads_without_a_size_have_that_of_the_model_type(model_type, channels):
    config = {key: value for key, value in PUBLISHED.items() if key != "head_dim"} | {"model_type": model_type}
    assert HeadConfig.from_dict(config, "DFLASH", small_config()).model.head_dim == channels
    with pytest.raises(ConfigError, match="hidden_size: 16 is no multiple of the 3 heads, and head_dim is not given"):
        whole = {**config, "model_type": "llama", "num_attention_heads": 3, "num_key_value_heads": 3}
        HeadConfig.from_dict(whole, "DFLASH", small_config())


@pytest.mark.parametrize(
    ("algorithm", "changes", "message"),
    [
        ("DFLASH", {"block_size": None}, "block_size: is missing"),
        ("DFLASH", {"block_size": 1}, "block_size: must be at least 2, got 1"),
        ("DFLASH", {"dflash_config": {"target_layer_ids": [0, 1]}}, "mask_token_id: is missing"),
        ("DFLASH", {"dflash_config": {"mask_token_id": 24}}, "mask_token_id: must be a token from 0 to 23, got 24"),
        ("DFLASH", {"dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 2]}}, "target_layer_ids: must be a list of"),
        ("DFLASH", {"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 0]}}, "target_layer_ids: must be an ascend"),
        ("DFLASH", {"vocab_size": 30}, "vocab_size: the drafter has 30 tokens, the target has 24"),
        ("DFLASH", {"draft_vocab_size": 25}, "draft_vocab_size: 25 of 24 tokens"),
        ("DFLASH", {"hidden_size": 20}, "hidden_size: the drafter takes hidden states of size 20"),
        ("DFLASH", {"num_target_layers": 3}, "num_target_layers: made for a target of 3 layers"),
        ("DFLASH", {"architectures": ["DFlashLagunaForCausalLM"]}, "architectures: DFlashLagunaForCausalLM: block drafters w"),
        ("DFLASH", {"quantization_config": {"quant_method": "hqq"}}, "quantization_config.quant_method"),
        ("DFLASH", {"use_aux_hidden_state": False}, "use_aux_hidden_state: false"),
        ("DSPARK", {}, "architectures: the draft is made for DFLASH, not for DSPARK"),
    ],
)  # fmt: skip
def test_a_drafter_that_does_not_fit_is_one_error_with_file_and_key(algorithm, changes, message):
    config = {key: value for key, value in (PUBLISHED | changes).items() if value is not None}
    with pytest.raises(ConfigError) as raised:
        HeadConfig.from_dict(config, algorithm, small_config(), "draft/config.json")
    assert "draft/config.json" in str(raised.value) and message in str(raised.value)
