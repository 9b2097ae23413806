"""The decoder against `transformers`: same random weights, same tokens, logits within 1e-4 in float32."""

from __future__ import annotations

import pytest
import torch
from foredraft.gpu.models.checkpoint import load_target, random_weights, save_target
from foredraft.gpu.models.config import LLAMA, QWEN3_MOE, ModelConfig, MoeConfig
from foredraft.gpu.models.decoder import Capture, Decoder
from foredraft.gpu.models.weights import initialize
from foredraft.gpu.ops.torch_ops import TorchOps
from foredraft.gpu.tiny.dense import DenseAttention
from wide_recurrence import wide_recurrence

SMALL = dict(  # noqa: C408
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
MOE = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24)  # noqa: C408
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.2, 1.5],
    "long_factor": [1.5, 3.0, 7.0],
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32}

LATENT = {
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
GLM_MOE = {key: value for key, value in LATENT.items() if key.partition("_")[0] in ("n", "num", "moe", "first")}
HYBRID = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
SHARED = MOE | {"shared_expert_intermediate_size": 20}
GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 24,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}

FAMILIES = {
    "llama": ("LlamaForCausalLM", {}),
    "llama, one kv head, tied, other head size": (
        "LlamaForCausalLM",
        {"num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "llama, all biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama, no grouping, llama3 rope": ("LlamaForCausalLM", {"num_key_value_heads": 4, "rope_parameters": LLAMA3}),
    "llama, linear rope": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 100.0}},
    ),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2, tied, yarn": ("Qwen2ForCausalLM", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "qwen3, biases, yarn without truncation": (
        "Qwen3ForCausalLM",
        {
            "head_dim": 32,
            "attention_bias": True,
            "rope_parameters": YARN | {"truncate": False, "beta_fast": 20.0, "beta_slow": 2.0, "attention_factor": 1.2},
        },
    ),
    "qwen3 moe": ("Qwen3MoeForCausalLM", MOE),
    "qwen3 moe, normed, every other layer": (
        "Qwen3MoeForCausalLM",
        MOE | {"norm_topk_prob": True, "decoder_sparse_step": 2},
    ),
    "qwen3 moe, one layer without experts": ("Qwen3MoeForCausalLM", MOE | {"mlp_only_layers": [1]}),
    "qwen2, windows from the second layer on": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "mistral, windows": ("MistralForCausalLM", {"sliding_window": 7}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None, "head_dim": 16}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": 11, "pad_token_id": 0}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24, "final_logit_softcapping": 5.0},
    ),
    "gemma3, two rotations": (
        "Gemma3ForCausalLM",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma4, two kinds of heads": (
        "Gemma4ForCausalLM",
        GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 5.0},
    ),
    "gemma4, projected values": ("Gemma4ForCausalLM", GEMMA4 | {"tie_word_embeddings": False}),
    "gpt-oss": (
        "GptOssForCausalLM",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
    "llama, dynamic rope": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}},
    ),
    "phi3, longrope beyond the original context": (
        "Phi3ForCausalLM",
        {"pad_token_id": 0, "original_max_position_embeddings": 32, "rope_parameters": LONGROPE},
    ),
    "phi3, longrope within the original context": (
        "Phi3ForCausalLM",
        {"pad_token_id": 0, "original_max_position_embeddings": 128, "rope_parameters": LONGROPE},
    ),
    "smollm3": ("SmolLM3ForCausalLM", {"pad_token_id": 0, "no_rope_layer_interval": 2}),
    "smollm3, windows, biases": (
        "SmolLM3ForCausalLM",
        {
            "pad_token_id": 0,
            "no_rope_layers": [1, 0, 0],
            "use_sliding_window": True,
            "sliding_window": 8,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "olmo2, biases, no grouping": ("Olmo2ForCausalLM", {"attention_bias": True, "num_key_value_heads": 4}),
    "olmo3, two rotations": (
        "Olmo3ForCausalLM",
        {
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "olmo3, one rotation": (
        "Olmo3ForCausalLM",
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "granite": (
        "GraniteForCausalLM",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
            "tie_word_embeddings": True,
        },
    ),
    "granite, biases": ("GraniteForCausalLM", {"attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.3}),
    "glm4": ("Glm4ForCausalLM", {"head_dim": 16, "pad_token_id": 0}),
    "glm4, a quarter rotated, no biases": (
        "Glm4ForCausalLM",
        {
            "head_dim": 16,
            "pad_token_id": 0,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25},
        },
    ),
    "ministral3": (
        "Ministral3ForCausalLM",
        {
            "head_dim": 16,
            "rope_parameters": YARN
            | {
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.3,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "deepseek v2, two of four groups": (
        "DeepseekV2ForCausalLM",
        LATENT | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.3},
    ),
    "deepseek v2, no groups, queries at once, biases": (
        "DeepseekV2ForCausalLM",
        LATENT | {"q_lora_rank": None, "attention_bias": True, "mlp_bias": True, "first_k_dense_replace": 0},
    ),
    "deepseek v3": ("DeepseekV3ForCausalLM", LATENT | {"n_group": 4, "topk_group": 2, "rope_parameters": YARN}),
    "deepseek v3, mscale, halves": (
        "DeepseekV3ForCausalLM",
        LATENT
        | {"n_group": 1, "topk_group": 1, "rope_interleave": False, "norm_topk_prob": False, "n_shared_experts": 2}
        | {"rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 1.2}},
    ),
    "glm4 moe, norms of heads, two of four groups": (
        "Glm4MoeForCausalLM",
        GLM_MOE
        | {"head_dim": 16, "num_key_value_heads": 2, "attention_bias": True, "use_qk_norm": True}
        | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    ),
    "glm4 moe, no groups, a quarter rotated, yarn": (
        "Glm4MoeForCausalLM",
        GLM_MOE
        | {"head_dim": 16, "num_key_value_heads": 1, "first_k_dense_replace": 2, "norm_topk_prob": False}
        | {"n_shared_experts": 2, "rope_parameters": YARN | {"partial_rotary_factor": 0.25}},
    ),
    "seed-oss": ("SeedOssForCausalLM", {"head_dim": 16, "attention_out_bias": True, "mlp_bias": True}),
    "seed-oss, biases of q, k and v": ("SeedOssForCausalLM", {"head_dim": 16}),
    "qwen3 next": ("Qwen3NextForCausalLM", HYBRID | SHARED),
    "qwen3 next, every other layer with experts, biases, half of each head rotated": (
        "Qwen3NextForCausalLM",
        HYBRID
        | SHARED
        | {"decoder_sparse_step": 2, "attention_bias": True, "linear_conv_kernel_dim": 3, "linear_num_value_heads": 2}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}},
    ),
    "qwen3.5": ("Qwen3_5ForCausalLM", HYBRID | {"tie_word_embeddings": True}),
    "qwen3.5 moe": ("Qwen3_5MoeForCausalLM", HYBRID | SHARED),
}

pytestmark = pytest.mark.xdist_group("transformers")


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Weights large enough that every part, biases and norms included, moves the logits by much more
    than the tolerance."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.7)
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.15, generator=generator)


def model_of_transformers(name: str, **fields) -> torch.nn.Module:
    """transformers takes seconds to import: not while tests are collected, and in one worker."""
    model = getattr(pytest.importorskip("transformers"), name)
    sizes = SMALL | fields
    if name == "Qwen3_5MoeForCausalLM":  # all of its layers have experts
        del sizes["intermediate_size"]
    config = model.config_class(**sizes)
    config._attn_implementation = "eager"  # attention written out: torch's own knows neither soft caps nor sinks
    return model(config).eval()


@pytest.fixture(params=list(FAMILIES), scope="module")
def pair(request, tmp_path_factory):
    """(transformers' model, ours loaded from what it saved)"""
    name, fields = FAMILIES[request.param]
    theirs = model_of_transformers(name, **fields)
    randomize(theirs, seed=list(FAMILIES).index(request.param))
    directory = tmp_path_factory.mktemp("model")
    theirs.save_pretrained(directory)
    return theirs, load_target(directory, TorchOps())


def tokens_of(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(97, (n,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_logits_and_hidden_states_are_those_of_transformers(pair):
    theirs, ours = pair
    tokens = tokens_of(100)
    # Two sequences of different length in one ragged batch, then each alone.
    out = ours(tokens, DenseAttention([63, 37]), Capture(aux_layers=(0, 1, 3)))
    logits = ours.logits(out.hidden)
    # Of a recurrence both sides sum in other orders.
    bound = 2e-4 if ours.config.state is not None else 1e-4
    assert out.hidden.shape == (100, 48) and logits.dtype is torch.float32
    for part in (slice(0, 63), slice(63, 100)):
        expected = theirs(tokens[None, part], output_hidden_states=True)
        assert (logits[part] - expected.logits[0]).abs().max() <= bound
        # hidden_states[i] enters layer i; the last one of the list is normed, so layer 3's (there are 3) is compared
        # elsewhere.
        entering = torch.cat([expected.hidden_states[0][0], expected.hidden_states[1][0]], -1)
        assert (out.aux[part, : 2 * 48] - entering).abs().max() <= bound
        assert (out.hidden[part] - expected.hidden_states[-1][0]).abs().max() <= bound
    normed = torch.nn.functional.rms_norm(out.aux[:, 2 * 48 :], (48,), ours.norm_weight, ours.config.rms_norm_eps)
    torch.testing.assert_close(normed, out.hidden)


@pytest.mark.ci
@torch.no_grad()
def test_what_is_saved_loads_in_transformers(pair, tmp_path):
    theirs, ours = pair
    save_target(ours, tmp_path)
    again = type(theirs).from_pretrained(tmp_path)
    tokens = tokens_of(20, seed=2)[None]
    atol = 1e-4 if ours.config.state is not None else 1e-5  # a recurrence carries the rounding of norms on
    torch.testing.assert_close(again(tokens).logits, theirs(tokens).logits, atol=atol, rtol=1.3e-6)
    assert ModelConfig.from_directory(tmp_path) == ours.config


@torch.no_grad()
def test_a_context_within_the_original_one_takes_the_short_factors_of_longrope(tmp_path):
    """As `transformers` does for each text; a longer context takes the long ones for all its texts."""
    fields = {"pad_token_id": 0, "original_max_position_embeddings": 32, "rope_parameters": LONGROPE}
    theirs = model_of_transformers("Phi3ForCausalLM", **fields)
    randomize(theirs, seed=8)
    theirs.save_pretrained(tmp_path)
    short, long = tokens_of(32), tokens_of(33)
    for context_len, tokens in ((32, short), (33, long), (None, long)):
        ours = load_target(tmp_path, TorchOps(), context_len=context_len)
        found = ours.logits(ours(tokens, DenseAttention([len(tokens)])).hidden)
        assert (found - theirs(tokens[None]).logits[0]).abs().max() <= 1e-4
    apart = ours.logits(ours(short, DenseAttention([32])).hidden) - theirs(short[None]).logits[0]
    assert apart.abs().max() > 1e-2, "the factors matter"


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3 next", "qwen3.5"])
def test_a_recurrence_in_64_bits_is_that_of_transformers(name: str, tmp_path, monkeypatch: pytest.MonkeyPatch):
    architecture, fields = FAMILIES[name]
    theirs = model_of_transformers(architecture, **fields)
    theirs.set_experts_implementation("eager")
    randomize(theirs, seed=9)
    theirs.save_pretrained(tmp_path)
    ours, tokens = load_target(tmp_path, TorchOps(), dtype=torch.float64), tokens_of(100)
    with wide_recurrence(monkeypatch, theirs):
        expected = theirs.double()(tokens[None]).logits[0]
    found = ours.logits(ours(tokens, DenseAttention([100])).hidden)
    assert expected.dtype is found.dtype is torch.float64
    assert (found - expected).abs().max() <= 1e-5  # the tables of the rotation have 32 bits


@torch.no_grad()
def test_routed_experts_are_those_that_transformers_chooses():
    theirs = model_of_transformers("Qwen3MoeForCausalLM", **MOE, mlp_only_layers=[1], output_router_logits=True)
    randomize(theirs, seed=5)
    config = ModelConfig.from_dict({**theirs.config.to_dict(), "architectures": [QWEN3_MOE]})
    ours = Decoder(config, TorchOps(), "cpu", torch.float32)
    stored = {name: value for name, value in theirs.state_dict().items() if "experts" not in name}
    for weight in ours.checkpoint_weights():
        if "experts" not in weight.name:
            weight.view.copy_(stored[weight.name])
    for layer in (0, 2):
        experts = theirs.model.layers[layer].mlp.experts
        ours.layers[layer].mlp.gate_up_weight.copy_(experts.gate_up_proj)
        ours.layers[layer].mlp.down_weight.copy_(experts.down_proj)
    tokens = tokens_of(30)
    chosen = ours(tokens, DenseAttention([30]), Capture(routed_experts=True)).routed_experts
    assert chosen.dtype is torch.int32 and chosen.shape == (30, 2, 2)
    for i, logits in enumerate(theirs(tokens[None]).router_logits):
        assert torch.equal(chosen[:, i].long(), logits.view(30, 6).topk(2).indices)
    assert ours(tokens, DenseAttention([30])).routed_experts is None


@pytest.mark.parametrize("architecture", [LLAMA, QWEN3_MOE])
def test_gradients_agree_with_finite_differences(architecture: str):
    moe = MoeConfig(4, 2, 8) if architecture == QWEN3_MOE else None
    config = ModelConfig(architecture, 11, 16, 24, 2, 2, 1, 8, qk_norm=moe is not None, moe=moe)
    model = Decoder(config, TorchOps(), "cpu", torch.float64)
    initialize(model, seed=1, std=0.3)
    model.requires_grad_()
    tokens = torch.tensor([1, 4, 2, 9, 9, 0, 3])
    labels = torch.tensor([4, 2, 9, 1, 0, 3, 5])

    def loss() -> torch.Tensor:
        out = model(tokens, DenseAttention([4, 3]), Capture(aux_layers=(1,)))
        fit = torch.nn.functional.cross_entropy(model.logits(out.hidden), labels)
        return fit + 0.01 * out.aux.square().sum()

    loss().backward()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        direction = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        with torch.no_grad():
            parameter.add_(direction, alpha=1e-6)
            above = loss()
            parameter.add_(direction, alpha=-2e-6)
            below = loss()
            parameter.add_(direction, alpha=1e-6)
        torch.testing.assert_close((parameter.grad * direction).sum(), (above - below) / 2e-6, rtol=1e-5, atol=1e-7)


def test_random_weights_depend_on_the_seed_and_on_nothing_else():
    config = ModelConfig(LLAMA, 11, 16, 24, 1, 2, 1, 8)
    torch.manual_seed(1)
    first = random_weights(config, TorchOps(), "cpu", torch.float32, seed=7)
    state = torch.random.get_rng_state()
    torch.manual_seed(2)
    second = random_weights(config, TorchOps(), "cpu", torch.float32, seed=7)
    third = random_weights(config, TorchOps(), "cpu", torch.float32, seed=8)
    assert torch.equal(first.layers[0].mixer.qkv_weight, second.layers[0].mixer.qkv_weight)
    assert not torch.equal(first.layers[0].mixer.qkv_weight, third.layers[0].mixer.qkv_weight)
    torch.manual_seed(1)
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes_of_hidden_states_and_logits(dtype: torch.dtype):
    model = random_weights(ModelConfig(LLAMA, 11, 16, 24, 1, 2, 1, 8), TorchOps(), "cpu", dtype)
    out = model(torch.tensor([1, 2]), DenseAttention([2]))
    assert out.hidden.dtype is dtype
    assert model.logits(out.hidden).dtype is (torch.float64 if dtype is torch.float64 else torch.float32)


def test_dense_attention_keeps_sequences_apart_and_looks_back_only():
    """The masked form for unequal lengths and the batched one agree with each sequence alone."""
    model = random_weights(ModelConfig(LLAMA, 11, 16, 24, 2, 2, 1, 8), TorchOps(), "cpu", torch.float64)
    tokens = torch.tensor([1, 4, 2, 9, 9, 0])
    alone = [model(part, DenseAttention([len(part)])).hidden for part in (tokens[:3], tokens[3:], tokens[:4])]
    torch.testing.assert_close(model(tokens, DenseAttention([3, 3])).hidden, torch.cat(alone[:2]))
    torch.testing.assert_close(model(tokens, DenseAttention([4, 2])).hidden[:4], alone[2])
    torch.testing.assert_close(alone[2][:3], alone[0])
    moved = DenseAttention([3], positions=torch.tensor([5, 9, 10]))
    assert (model(tokens[:3], moved).hidden - alone[0]).abs().max() > 1e-6
