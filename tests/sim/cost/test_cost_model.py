"""Model and draft shapes against the totals that their checkpoints state."""

import pytest
from foredraft.core.model_shape import Mlp, UnknownModel, known_models, lookup_model
from foredraft.sim.cost.draft import DraftMismatch, eagle3_head, eagle_head, multi_layer_eagle, standalone

# Totals of the safetensors metadata on the model pages (Qwen3-0.6B: the tied LM head counted once).
STATED_PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-2-7b": 6_738_415_616,
    "qwen3-8b": 8_190_735_360,
    "qwen3-0.6b": 596_049_920,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen2.5-7b": 7_615_616_512,
    "llama-3.3-70b": 70_553_706_496,
    "qwen3-4b": 4_022_468_096,
    "qwen3-14b": 14_768_307_200,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "mistral-7b": 7_248_023_552,
    "smollm2-135m": 134_515_008,
    "llama-160m": 162_417_408,
}
# Of these the checkpoint has layers for drafting beside, so its total is no measure: billions, all and of a token, of
# the model cards and arXiv 2508.06471.
ROUNDED = {"qwen3-next-80b-a3b": (80, 3), "glm-4.5": (355, 32), "glm-4.5-air": (106, 12)}


def test_every_built_in_model_is_held_against_its_total():
    assert {*STATED_PARAMETERS, *ROUNDED} == set(known_models())
    for name, (all_, active) in ROUNDED.items():
        shape = lookup_model(name)
        assert shape.parameters / 1e9 == pytest.approx(all_, rel=0.01), name
        assert active <= shape.active_parameters / 1e9 < active + 2, name


@pytest.mark.parametrize("name", STATED_PARAMETERS)
def test_parameters_are_exact(name):
    assert lookup_model(name).parameters == STATED_PARAMETERS[name]
    assert lookup_model(name).source


def test_kv_bytes_per_token():
    assert lookup_model("llama-3.1-8b").kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert lookup_model("llama-3.1-8b").with_dtypes(kv_dtype="fp8").kv_bytes_per_token == 32 * 8 * 128 * 2


def test_eight_bit_weights_keep_the_embeddings_wide():
    shape = lookup_model("llama-3.1-8b")
    wide = 2 * 128256 * 4096
    assert shape.weight_bytes == 2 * shape.parameters
    assert shape.with_dtypes(weight_dtype="fp8").weight_bytes == shape.parameters - wide + 2 * wide


def test_unknown_names():
    with pytest.raises(UnknownModel, match=r"did you mean 'llama-3.1-8b'.*config.json"):
        lookup_model("llama-3.1-8")
    with pytest.raises(UnknownModel, match="'int3' is none of bf16, fp16, fp8"):
        lookup_model("qwen3-8b").with_dtypes(weight_dtype="int3")


def test_eagle_head_sizes_of_the_paper():
    # arXiv 2401.15077 states 0.24 B for a 7B target and 0.99 B for a 70B target.
    assert eagle_head(lookup_model("llama-2-7b")).parameters == pytest.approx(0.24e9, rel=0.02)
    assert eagle_head(lookup_model("llama-3.1-70b")).parameters == pytest.approx(0.99e9, rel=0.01)


def test_eagle3_head_by_hand():
    h, i, kv = 4096, 14336, 2 * 8 * 128
    layer = 2 * h * (h + kv) + h * h + 3 * h * i + 2 * h
    assert eagle3_head(lookup_model("llama-3.1-8b")).parameters == 3 * h * h + layer + 32_000 * h
    wide = eagle3_head(lookup_model("llama-3.1-8b"), draft_vocab=128256)
    assert wide.parameters - eagle3_head(lookup_model("llama-3.1-8b")).parameters == (128256 - 32_000) * h


def test_the_head_of_a_sparse_model_is_dense():
    head = eagle_head(lookup_model("qwen3-30b-a3b"))
    assert head.body.mlps == ((Mlp(8 * 768), 1),)


def test_drafts_that_do_not_fit_are_refused():
    with pytest.raises(DraftMismatch, match=r"qwen3-0.6b has 151936 tokens, llama-3.1-8b has 128256"):
        standalone(lookup_model("qwen3-0.6b"), lookup_model("llama-3.1-8b"))
    with pytest.raises(DraftMismatch, match="draft_vocab must be 1 … 128256"):
        eagle3_head(lookup_model("llama-3.1-8b"), draft_vocab=200_000)
    with pytest.raises(DraftMismatch, match="at least one head"):
        multi_layer_eagle(lookup_model("llama-3.1-8b"), 0)
