"""Shapes read from config.json: the same as the built-in ones, and every problem of a bad file at once."""

import json
from dataclasses import replace

import pytest
from foredraft.core.errors import ConfigError
from foredraft.core.model_shape import UnknownModel, lookup_model, read_model_shape
from foredraft.core.parsing import read_json_object
from foredraft.observe.input_files import read_text

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def read(tmp_path):
    def write_and_read(config, name="model"):
        file = tmp_path / "config.json"
        file.write_text(json.dumps(config) if not isinstance(config, str) else config)
        return read_model_shape(read_json_object(str(file), read_text), str(file), name)

    return write_and_read


def windows(shape):
    """The number of layers for each window."""
    return {mixer.window: count for mixer, count in shape.mixers}


@pytest.mark.parametrize(("config", "name"), [(LLAMA, "llama-3.1-8b"), (QWEN3_MOE, "qwen3-30b-a3b")])
def test_equal_to_the_built_in_shape(read, config, name):
    assert read(config, name) == lookup_model(name)


def test_qwen2_has_biases_and_ignores_an_unused_window(read):
    config = {
        "model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28,
        "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "max_position_embeddings": 131072,
        "sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28, "torch_dtype": "bfloat16",
    }  # fmt: skip
    assert read(config, "qwen2.5-7b") == lookup_model("qwen2.5-7b")
    assert read({**config, "max_window_layers": 20}).attention_window is None
    windowed = read({**config, "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20})
    assert windows(windowed) == {None: 20, 4096: 8}


def test_mistral_window_covers_all_layers_and_null_none(read):
    config = {**LLAMA, "model_type": "mistral", "sliding_window": 4096}
    assert windows(read(config)) == {4096: 32}
    assert windows(read({**config, "sliding_window": None})) == {None: 32}


def test_dense_layers_of_a_sparse_model(read):
    assert read({**QWEN3_MOE, "mlp_only_layers": [0, 1]}).moe_layers == 46
    assert read({**QWEN3_MOE, "decoder_sparse_step": 2}).moe_layers == 24


def test_text_config_of_a_multimodal_file(read):
    nested = {"model_type": "vision_something", "tie_word_embeddings": True, "text_config": dict(LLAMA)}
    assert not read(nested, "llama-3.1-8b").tied_embeddings
    del nested["text_config"]["tie_word_embeddings"]
    assert read(nested).tied_embeddings
    nested["text_config"]["hidden_size"] = "4096"
    with pytest.raises(ConfigError, match=r"text_config.hidden_size: must be a whole number, got '4096'"):
        read(nested)


def test_all_problems_at_once_with_file_and_key(read, tmp_path):
    bad = {**LLAMA, "num_hidden_layers": 0, "vocab_size": True, "num_key_value_heads": 7, "torch_dtype": "int4"}
    del bad["intermediate_size"]
    with pytest.raises(ConfigError) as caught:
        read(bad)
    keys = {problem.key for problem in caught.value.problems}
    assert keys == {"num_hidden_layers", "vocab_size", "num_key_value_heads", "torch_dtype", "intermediate_size"}
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize(("key", "value"), [("torch_dtype", ["bfloat16"]), ("num_hidden_layers", 10**12)])
def test_a_damaged_value_is_a_problem_and_no_crash(read, key, value):
    with pytest.raises(ConfigError, match=key):
        read({**LLAMA, key: value})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "must hold a JSON object, not list"),
        ('{"model_type": "qwen33"}', r"model_type: expected a family out of .*did you mean 'qwen3'"),
        ('{"model_type": 3}', "found 3"),
        ("{}", "found None"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_files_that_are_no_model(read, text, message):
    with pytest.raises(ConfigError, match=message):
        read(text)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.*cannot be read"):
        read_json_object(str(tmp_path / "nowhere" / "config.json"), read_text)


def test_the_context_has_no_default(read):
    with pytest.raises(ConfigError, match="max_position_embeddings: is missing"):
        read({key: value for key, value in LLAMA.items() if key != "max_position_embeddings"})


def test_indivisible_hidden_size_needs_a_head_dim(read):
    with pytest.raises(ConfigError, match="hidden_size: 4097 is no multiple"):
        read({**LLAMA, "hidden_size": 4097})
    assert read({**LLAMA, "hidden_size": 4097, "head_dim": 128}).hidden == 4097


def test_heads_default_to_full_attention(read):
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    shape = lookup_model("llama-3.1-8b")
    ((attention, _),) = shape.mixers
    assert read(config, "llama-3.1-8b") == replace(shape, mixers=((replace(attention, kv_heads=32), 32),))


@pytest.mark.parametrize(
    ("repository", "name"),
    [
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-70B", "llama-3.1-70b"),
        ("Llama-3.2-1B-Instruct", "llama-3.2-1b"),
        ("qwen/qwen3-8b", "qwen3-8b"),
    ],
)
def test_names_on_hugging_face_are_models(repository, name):
    assert lookup_model(repository) == lookup_model(name)
    assert lookup_model(repository).name == name


def test_a_repository_that_differs_has_its_own_numbers():
    assert lookup_model("Qwen/Qwen3-8B-FP8").weight_dtype == "fp8"
    assert lookup_model("Qwen/Qwen2.5-7B-Instruct").max_context == 32768 < lookup_model("qwen2.5-7b").max_context
    assert "Qwen2.5-7B-Instruct" in lookup_model("Qwen/Qwen2.5-7B-Instruct").source


@pytest.mark.parametrize(
    "name", ["meta-llama/Llama-3.4-70B-Instruct", "Qwen/Qwen3-33B", "qwen3-5b", "llama-3-8b", "qwen3-next"]
)
def test_another_model_is_no_misspelt_one(name):
    with pytest.raises(UnknownModel) as unknown:
        lookup_model(name)
    assert "did you mean" not in str(unknown.value) and "config.json" in str(unknown.value)


@pytest.mark.parametrize("family", ["qwen4", "qwen2_audio", "llama5", "gemma7", "mistral3"])
def test_another_family_is_no_misspelt_one(read, family):
    with pytest.raises(ConfigError, match="model_type: expected a family") as unknown:
        read({**LLAMA, "model_type": family})
    assert "did you mean" not in str(unknown.value)


QWEN_VL = {**LLAMA, "model_type": "qwen2_5_vl", "vision_config": {"hidden_size": 1280, "depth": 32}}


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config", "thinker_config"])
def test_the_language_model_of_a_multimodal_file(read, key):
    """Qwen2.5-VL publishes the keys of its language model beside the others; InternVL, DeepSeek-VL and Qwen-Omni under
    names of their own."""
    flat, part = read(QWEN_VL), {**LLAMA, "model_type": "qwen2"}
    inside = {"text_config": part} if key == "thinker_config" else part
    nested = read({"model_type": "other", key: inside})
    assert (flat.parameters, flat.kv_bytes_per_token) == (nested.parameters, nested.kv_bytes_per_token)
    assert flat.family == nested.family == "qwen2"
    assert flat.weight_bytes - nested.weight_bytes == 2 * flat.tower_parameters > 1e9
    assert flat.read_bytes == nested.read_bytes
    halves = [shape.weight_bytes_per_device(2, 2) for shape in (flat, nested)]
    assert halves[0] - halves[1] == flat.tower_parameters


def test_lists_with_the_same_entry_for_each_layer(read):
    """Hunyuan writes the sizes of its experts for each layer."""
    layers = LLAMA["num_hidden_layers"]
    experts = {"model_type": "hunyuan_v1_moe", "num_experts": 8, "moe_topk": [2] * layers, "use_qk_norm": True}
    lists = {"num_shared_expert": [1] * layers, "moe_intermediate_size": [512] * layers, "attention_head_dim": 128}
    plain = {"num_shared_expert": 1, "moe_intermediate_size": 512, "head_dim": 128}
    assert read({**LLAMA, **experts, **lists}).parameters == read({**LLAMA, **experts, **plain}).parameters
    with pytest.raises(ConfigError, match="num_experts_per_tok"):
        read({**LLAMA, **experts, **lists, "moe_topk": [1, *[2] * (layers - 1)]})


@pytest.mark.parametrize("pattern", [4, "LLLG", None])
def test_every_fourth_layer_of_exaone_sees_everything(read, pattern):
    sized = {**LLAMA, "model_type": "exaone4", "num_hidden_layers": 8, "sliding_window": 64}
    shape = read(sized if pattern is None else {**sized, "sliding_window_pattern": pattern})
    assert shape.token_bytes(windowed=True) == 3 * shape.token_bytes(windowed=False) > 0


def test_longcat_flash_has_two_attentions_and_two_mlps_beside_its_experts(read):
    """560 billion weights, of which a token uses 27 on the average (arXiv 2509.01322)."""
    shape = read({
        "model_type": "longcat_flash", "vocab_size": 131_072, "hidden_size": 6144, "num_layers": 28,
        "num_attention_heads": 64, "ffn_hidden_size": 12_288, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_topk": 12, "n_routed_experts": 512,
        "zero_expert_num": 256, "expert_ffn_hidden_size": 2048, "max_position_embeddings": 131_072,
    })  # fmt: skip
    assert shape.parameters == pytest.approx(560e9, rel=0.005)
    assert shape.active_parameters == pytest.approx(27e9, rel=0.05)
    assert shape.token_bytes(windowed=False) == 28 * 2 * (512 + 64) * 2


def test_the_recurrences_of_lfm2_and_jamba_keep_a_state_and_no_kv(read):
    sized = {**LLAMA, "num_hidden_layers": 8, "head_dim": None}
    attention = read(sized).token_bytes(windowed=False) // 8
    conv = read({**sized, "model_type": "lfm2", "full_attn_idxs": [2, 5], "conv_L_cache": 3})
    assert conv.token_bytes(windowed=False) == 2 * attention
    assert conv.recurrent_state_bytes == 6 * 2 * sized["hidden_size"] * 2  # the last two inputs of each convolution
    jamba = read({**sized, "model_type": "jamba", "num_experts": 1, "mamba_d_state": 16, "mamba_d_conv": 4})
    inner = 2 * sized["hidden_size"]
    assert jamba.token_bytes(windowed=False) == attention and jamba.recurrent_state_bytes == 7 * inner * (
        16 * 4 + 3 * 2
    )


@pytest.mark.parametrize("ratio", [1e308, -4, "4", None])
def test_a_tower_whose_width_is_no_number_has_the_usual_one(read, ratio):
    tower = {"hidden_size": 1024, "depth": 24, "mlp_ratio": ratio}
    usual = read({**QWEN_VL, "vision_config": {"hidden_size": 1024, "depth": 24}})
    assert read({**QWEN_VL, "vision_config": tower}).tower_parameters == usual.tower_parameters > 0
    assert read({**QWEN_VL, "vision_config": {"hidden_size": "1024", "depth": []}}).tower_parameters >= 0
