"""Models of the published depths and shapes, without weights: what `transformers` saves of each is read as it is.

Small models of our own miss what only grows with depth: `transformers` writes "05" for a layer once there are ten.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from foredraft.core.errors import ConfigError
from foredraft.core.model_shape import read_model_shape
from foredraft.gpu.models.config import ModelConfig, read_json
from foredraft.gpu.models.decoder import Decoder
from foredraft.gpu.models.families import DECODED, MODEL_TYPES
from foredraft.gpu.ops.torch_ops import TorchOps
from foredraft.gpu.session.text import Tokenizer
from small_checkpoint import train_tokenizer

pytestmark = pytest.mark.xdist_group("transformers")

TIED: dict[str, Any] = {"tie_word_embeddings": True}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [4.0] * 48,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
OLMO3 = {
    "full_attention": {
        "rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192,
        "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.2079441541679836,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
}  # fmt: skip


@dataclass(frozen=True)
class Published:
    """A published model. `sizes`: layers, hidden size, heads, key-value heads, width of the MLPs, vocabulary. `other`:
    keys of its configuration that differ from the defaults of its class."""

    architecture: str
    sizes: tuple[int, int, int, int, int, int]
    other: dict[str, Any] = field(default_factory=dict)
    window: tuple[int, int] = (0, 0)  # positions, and the layers that have it


LLAMA_SIZES = (32, 4096, 32, 8, 14336, 128256)
PUBLISHED = {
    "Llama 3.1 8B": Published("Llama", LLAMA_SIZES, {"max_position_embeddings": 131072, "rope_parameters": LLAMA3}),
    "SmolLM2 135M": Published("Llama", (30, 576, 9, 3, 1536, 49152), TIED),
    "Qwen2.5 7B": Published("Qwen2", (28, 3584, 28, 4, 18944, 152064), {"sliding_window": 131072}),
    "Qwen3 8B": Published("Qwen3", (36, 4096, 32, 8, 12288, 151936), {"head_dim": 128}),
    "Qwen3 30B A3B": Published(
        "Qwen3Moe", (48, 2048, 32, 4, 6144, 151936),
        {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
    ),
    "Mistral 7B v0.1": Published("Mistral", (32, 4096, 32, 8, 14336, 32000), window=(4096, 32)),
    "Mixtral 8x7B": Published("Mixtral", (32, 4096, 32, 8, 14336, 32000)),
    "Phi 3.5 mini": Published(
        "Phi3", (32, 3072, 32, 32, 8192, 32064),
        {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_parameters": LONGROPE,
         "sliding_window": 262144},
    ),
    "Gemma 2 9B": Published("Gemma2", (42, 3584, 16, 8, 14336, 256000), TIED, window=(4096, 21)),
    "Gemma 3 12B": Published("Gemma3", (48, 3840, 16, 8, 15360, 262208), TIED | {"sliding_window": 1024}, window=(1024, 40)),
    "Gemma 4 31B": Published(
        "Gemma4", (60, 5376, 32, 16, 21504, 262144),
        TIED | {"num_global_key_value_heads": 4, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "sliding_window": 1024},
        window=(1024, 50),
    ),
    "gpt-oss 20B": Published("GptOss", (24, 2880, 64, 8, 2880, 201088), {"num_local_experts": 32}, window=(128, 12)),
    "SmolLM3 3B": Published("SmolLM3", (36, 2048, 16, 4, 11008, 128256), TIED),
    "OLMo 2 7B": Published("Olmo2", (32, 4096, 32, 32, 11008, 100352)),
    "OLMo 3 7B": Published(
        "Olmo3", (32, 4096, 32, 32, 11008, 100278), {"max_position_embeddings": 65536, "rope_parameters": OLMO3},
        window=(4096, 24),
    ),
    "Granite 3.3 8B": Published(
        "Granite", (40, 4096, 32, 8, 12800, 49159),
        TIED | {"attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 16.0},
    ),
    "GLM-4 9B": Published("Glm4", (40, 4096, 32, 2, 13696, 151552), {"head_dim": 128}),
    "Ministral 3 8B": Published("Ministral3", (34, 4096, 32, 8, 14336, 131072)),
    "Seed-OSS 36B": Published("SeedOss", (64, 5120, 80, 8, 27648, 155136)),
    "DeepSeek V2 Lite": Published(
        "DeepseekV2", (27, 2048, 16, 16, 10944, 102400),
        {"q_lora_rank": None, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
         "n_routed_experts": 64, "n_shared_experts": 2},
    ),
    "DeepSeek V3": Published("DeepseekV3", (61, 7168, 128, 128, 18432, 129280)),
    "GLM-4.5 Air": Published(
        "Glm4Moe", (46, 4096, 96, 8, 10944, 151552), {"head_dim": 128, "attention_bias": True, "max_position_embeddings": 131072}
    ),
    "Qwen3-Next 80B A3B": Published("Qwen3Next", (48, 2048, 16, 2, 5120, 151936)),
    "Qwen3.5 27B": Published("Qwen3_5", (64, 5120, 24, 4, 17408, 248320), {"linear_num_value_heads": 48}),
    "Qwen3.5 35B A3B": Published("Qwen3_5Moe", (40, 2048, 16, 2, 0, 248320)),
}  # fmt: skip


def saved(name: str, directory) -> tuple[Any, torch.nn.Module]:
    """Return the model of `transformers` without weights, and the configuration, saved as its users save both."""
    transformers = pytest.importorskip("transformers")
    about = PUBLISHED[name]
    model_class = getattr(transformers, f"{about.architecture}ForCausalLM")
    keys = (
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
    )
    sizes = {key: size for key, size in zip(keys, about.sizes, strict=True) if size}
    config = model_class.config_class(**sizes, pad_token_id=0, **about.other, dtype="bfloat16")
    with torch.device("meta"):
        model = model_class(config)
    config.architectures = [model_class.__name__]  # as `PreTrainedModel.save_pretrained` does
    config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(), bos_token="<s>", eos_token="</s>"
    )
    tokenizer.save_pretrained(directory)
    return config, model


@pytest.mark.parametrize(
    ("whole", "name"),
    [
        ("Gemma3", "Gemma 3 12B"), ("Gemma4", "Gemma 4 31B"), ("Mistral3", "Mistral 7B v0.1"),
        ("Mistral3", "Ministral 3 8B"), ("Qwen3_5", "Qwen3.5 27B"), ("Qwen3_5Moe", "Qwen3.5 35B A3B"),
    ],
)  # fmt: skip
def test_the_language_model_inside_a_model_that_sees_is_read_alike(whole: str, name: str, tmp_path):
    transformers = pytest.importorskip("transformers")
    text, _ = saved(name, tmp_path)
    alone = ModelConfig.from_directory(tmp_path)
    shape = read_model_shape(read_json(tmp_path / "config.json"), "config.json", name)
    config = getattr(transformers, f"{whole}Config")(text_config=text, tie_word_embeddings=text.tie_word_embeddings)
    config.architectures = [f"{whole}ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    assert ModelConfig.from_directory(tmp_path) == alone
    seeing = read_model_shape(read_json(tmp_path / "config.json"), "config.json", name)
    assert replace(seeing, tower_parameters=0) == shape
    assert (seeing.tower_parameters > 0) == bool(read_json(tmp_path / "config.json").get("vision_config"))


@pytest.mark.parametrize(("given", "heads"), [({}, (4, 256)), ({"head_dim": 512, "num_key_value_heads": 2}, (2, 512))])
def test_layers_of_gemma4_that_differ_by_any_spelling_of_their_number(given: dict, heads: tuple[int, int], tmp_path):
    """An empty object says that all have the same heads."""
    transformers = pytest.importorskip("transformers")
    transformers.Gemma4TextConfig(num_hidden_layers=12, hidden_size_per_layer_input=0).save_pretrained(tmp_path)
    data = read_json(tmp_path / "config.json") | {"architectures": ["Gemma4ForCausalLM"], "dtype": "bfloat16"}
    for spelt in ("5", "05", "0005"):
        config = data | {"per_layer_config": {spelt: given, "11": given} if given else {}}
        ours = ModelConfig.from_dict(config)
        assert [(ours.heads_of(i).kv, ours.heads_of(i).dim) for i in (0, 5, 11)] == [(4, 256), heads, heads]
        mixers = read_model_shape(config, "config.json", "gemma").mixers
        assert {(mixer.kv_heads, mixer.head_dim) for mixer, _ in mixers} == {(4, 256), heads}


@pytest.mark.parametrize("per_layer", [
    {"05": {"head_dim": 512}}, {"04": {"head_dim": 512}}, {"05": {"head_dim": 512}, "12": {"head_dim": 512}},
    {"05": {"hidden_size": 512}, "11": {"hidden_size": 512}}, {"x": {"head_dim": 512}}, {"05": 512}, [512], {"05": {"head_dim": 0}},
])  # fmt: skip
def test_layers_of_gemma4_that_differ_in_another_way_are_refused(per_layer: Any, tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.Gemma4TextConfig(num_hidden_layers=12, hidden_size_per_layer_input=0).save_pretrained(tmp_path)
    data = read_json(tmp_path / "config.json") | {"architectures": ["Gemma4ForCausalLM"], "dtype": "bfloat16"}
    for read in (ModelConfig.from_dict, lambda data: read_model_shape(data, "config.json", "gemma")):
        with pytest.raises(ConfigError, match="per_layer_config: "):
            read(data | {"per_layer_config": per_layer})


@pytest.mark.parametrize(
    ("keys", "wrong"),
    [
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input: embeddings of each layer"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers: layers that read another one's keys"),
    ],
)
def test_the_small_models_of_gemma4_are_not_decoded_by_the_key_that_makes_them_others(keys: dict, wrong: str, tmp_path):
    transformers = pytest.importorskip("transformers")
    given = {"num_hidden_layers": 18, "hidden_size_per_layer_input": 0} | keys
    transformers.Gemma4TextConfig(**given).save_pretrained(tmp_path)
    data = read_json(tmp_path / "config.json") | {"architectures": ["Gemma4ForCausalLM"], "dtype": "bfloat16"}
    assert read_model_shape(data, "config.json", "gemma").layers == 18  # their sizes are known
    with pytest.raises(ConfigError, match=wrong):
        ModelConfig.from_dict(data)


def test_layers_that_differ_are_refused_for_other_families(tmp_path):
    theirs, _ = saved("Llama 3.1 8B", tmp_path)
    assert not theirs.is_heterogeneous
    data = read_json(tmp_path / "config.json") | {"per_layer_config": {"03": {"num_key_value_heads": 2}}}
    for read in (ModelConfig.from_dict, lambda data: read_model_shape(data, "config.json", "llama")):
        with pytest.raises(ConfigError, match="per_layer_config: layers of different sizes"):
            read(data)


def test_every_family_is_here_but_the_one_that_transformers_lacks():
    assert {MODEL_TYPES[f"{about.architecture}ForCausalLM"] for about in PUBLISHED.values()} == set(DECODED) - {"mimo"}


@pytest.mark.fast("Llama 3.1 8B", "Gemma 4 31B", "DeepSeek V3", "Qwen3.5 27B", ci="*")
@pytest.mark.parametrize("name", PUBLISHED)
def test_what_transformers_saves_is_read(name: str, tmp_path):
    about = PUBLISHED[name]
    theirs, model = saved(name, tmp_path)
    layers, hidden, heads, _, _, vocab = about.sizes
    ours = ModelConfig.from_directory(tmp_path)
    assert (ours.num_layers, ours.hidden_size, ours.num_heads, ours.vocab_size) == (layers, hidden, heads, vocab)
    assert (ours.window, len(ours.windowed_layers)) == about.window
    assert ours.dtype is torch.bfloat16 and ours.max_position_embeddings == theirs.max_position_embeddings
    if ours.latent is None:
        their_heads = [
            (layer.num_key_value_heads, getattr(layer, "head_dim", None) or hidden // heads)
            for layer in (theirs.per_layer_config if theirs.is_heterogeneous else [theirs] * layers)
        ]
        assert [(ours.heads_of(i).kv, ours.heads_of(i).dim) for i in range(layers)] == their_heads
    if kinds := getattr(theirs, "layer_types", None):
        assert tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention") == ours.recurrent_layers
        windowed = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
        assert windowed == ours.windowed_layers
    ends = model.generation_config.eos_token_id
    assert ours.eos_token_ids == (() if ends is None else tuple(ends) if isinstance(ends, list) else (ends,))
    decoder = Decoder(ours, TorchOps(), "meta", ours.dtype)
    # Weights that are no parameters there: a factor of each layer, a bias of each expert.
    beside = (
        part for name, part in model.named_buffers() if name.endswith(("layer_scalar", "e_score_correction_bias"))
    )
    count = sum(part.numel() for part in (*model.parameters(), *beside))
    assert sum(parameter.numel() for parameter in decoder.parameters()) == count
    shape = read_model_shape(read_json(tmp_path / "config.json"), "config.json", name)
    assert shape.layers == layers and shape.parameters == pytest.approx(count, rel=2e-4), "norms of some are left out"
    assert Tokenizer.load(tmp_path).eos_ids


LAYERS = {
    "mimo_v2_flash": ("MiMoV2Flash", ["full_attention", "sliding_attention", "sliding_attention"]),
    "deepseek_v4": (
        "DeepseekV4", ["heavily_compressed_attention", "sliding_attention", "heavily_compressed_attention",
                       "compressed_sparse_attention"]),
    "kimi_linear": ("KimiLinear", ["linear_attention", "full_attention", "linear_attention"]),
    "nemotron_h": ("NemotronH", ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"]),
    "minimax_m3_vl": ("MiniMaxM3VL", ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]),
}  # fmt: skip


@pytest.mark.parametrize("family", LAYERS)
def test_families_that_are_priced_alone_are_read_as_they_are_saved(family: str):
    """Keys of `transformers`, which are not those of the publisher; parameters as it counts them."""
    pytest.importorskip("transformers")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    name, kinds = LAYERS[family]
    model_class = getattr(module, f"{name}ForCausalLM")
    config = model_class.config_class(num_hidden_layers=len(kinds), layer_types=kinds)
    with torch.device("meta"):
        model = model_class(config)
    data = json.loads(config.to_json_string()) | {"architectures": [model_class.__name__]}
    shape = read_model_shape(data, "config.json", family)
    assert shape.layers == len(kinds)
    assert shape.parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=3e-3)
    with_others = read_model_shape({"text_config": data, "vision_config": {}}, "config.json", family)
    assert with_others.parameters == shape.parameters


def test_the_window_of_a_saved_mimo_is_that_of_the_publisher():
    """Which counts the tokens before the query, and names the heads of layers with a window."""
    common = {
        "model_type": "mimo_v2_flash", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 24, "v_head_dim": 16, "intermediate_size": 128, "vocab_size": 100,
        "max_position_embeddings": 1000,
    }  # fmt: skip
    published = {
        "hybrid_layer_pattern": [0, 1, 1], "sliding_window": 128, "swa_num_attention_heads": 8, "swa_head_dim": 24,
        "swa_num_key_value_heads": 4, "swa_v_head_dim": 16,
    }  # fmt: skip
    saved_keys = {"layer_types": ["full_attention", *["sliding_attention"] * 2], "sliding_window": 129}
    shapes = [read_model_shape({**common, **keys}, "config.json", "mimo") for keys in (published, saved_keys)]
    assert shapes[0].mixers == shapes[1].mixers
