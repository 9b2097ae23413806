"""The families that the decoder runs, as data.

A family says what its layers compute, how its checkpoints name their weights, and which keys of `config.json` say the
rest. No other code asks for a family's name: a new one is a row here, and in `core.model_shape`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from ...core.model_shape import ARCHITECTURES as ARCHITECTURE_OF_FAMILY
from ...core.model_shape import family_of_type
from ...core.parsing import ConfigReader

LAYER_TYPES = ("full_attention", "sliding_attention")
RECURRENT = "linear_attention"  # the kind of a layer with a recurrent state
SILU, GELU_TANH, CLAMPED_SWIGLU = "silu", "gelu_pytorch_tanh", "clamped swiglu"


@dataclass(frozen=True, slots=True)
class Norms:
    """The published names of a layer's norms by place; None where a layer has none.

    residual ─┬─ before_attention ─ attention ─ behind_attention ─ + ─┬─ before_mlp ─ MLP ─ behind_mlp ─ +
              └───────────────────────────────────────────────────────┴──────────────────────────────────┘
    """

    before_attention: str | None = "input_layernorm"
    behind_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    behind_mlp: str | None = None


class Routing(Enum):
    """How the experts of a token are chosen, and what weighs them."""

    SOFTMAX = "shares of all experts"
    GROUPED = "shares of all experts, from the groups with the greatest share"  # DeepSeek V2
    CORRECTED = (
        "sigmoids, chosen with a bias for each expert, from the groups with the two greatest"  # DeepSeek V3, GLM
    )


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """How a checkpoint stores a layer's experts.

    `packed`: all of them in one tensor per projection, transposed, with biases, and gate and up in turns; else one
    tensor per expert and projection, with the names given here. `may_be_stacked`: or all in one tensor per projection
    as they are computed with, gate above up. `key`: of their number in `config.json`. `has_own_width`: whether they
    have a width beside the dense MLPs' `intermediate_size`.
    """

    prefix: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    packed: bool = False
    may_be_stacked: bool = False
    key: str = "num_experts"
    has_own_width: bool = True
    routing: Routing = Routing.SOFTMAX
    shared: str = "shared_experts"  # the MLP that every token goes to
    has_shared_gate: bool = False  # a scalar of each token scales it


@dataclass(frozen=True, slots=True)
class PredictionForm:
    """How a checkpoint calls the parts of the layer that predicts the token after next, which drafts for its model.

    `prefix`: of its tensors below "model.", with {layers} for the number of the model's own. `token_first`: whether the
    token's embedding stands before the hidden state in what is projected. `repeated`: tensors of the model that stand
    there again. `root`: what stands before the prefix. `layer`: of the layer's own tensors, behind the prefix. `key`:
    of the number of such layers in `config.json`; `is_counted`: whether every file has it.
    """

    prefix: str = "mtp_layers.0."
    input: str = "input_proj"
    token_norm: str = "token_layernorm"
    hidden_norm: str = "hidden_layernorm"
    final_norm: str = "final_layernorm"
    token_first: bool = False
    repeated: tuple[str, ...] = ()
    root: str = "model."
    layer: str = ""
    key: str = "num_nextn_predict_layers"
    is_counted: bool = True

    def name_within(self, name: str, num_layers: int) -> str | None:
        """Return the name of a tensor below the prefix; None for one that stands elsewhere or is repeated."""
        prefix = f"{self.root}{self.prefix.format(layers=num_layers)}"
        part = name.removeprefix(prefix)
        return None if part == name or part in self.repeated else part


@dataclass(frozen=True, slots=True)
class ScaleKey:
    """The key that gives the factor of query-key products: its value to the given power."""

    name: str
    power: float

    def written(self, scale: float) -> float:
        """Return what the key is for this factor."""
        return scale if self.power == 1.0 else round(scale ** (1 / self.power))


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """One family of models. Where a field is a key of `config.json` or a value, the value holds for all its models."""

    norms: Norms = Norms()
    norm_offset: float = 0.0  # what the weights of norms have beyond the published ones; such norms are 32 bits wide
    has_head_norms: str | bool = False  # RMSNorm of q and k before they are rotated
    joint_head_norms: bool = False  # these over all heads of q, and of k, at once
    has_value_norms: bool = False  # of each head's values, without weights
    has_layer_scalar: bool = False  # of all that leaves the layer
    has_full_heads: bool = False  # layers without a window have heads of their own, see `ModelConfig.full_head_dim`
    scaled_embeddings: bool = False  # by the root of the hidden size
    activation: str = SILU
    qkv_bias: str | bool = "attention_bias"
    output_bias: str | bool = "attention_bias"
    mlp_bias: str | bool = False
    attention_scale: ScaleKey | float | None = None  # None: head_dim^-½
    softcaps: tuple[float, float] | None = None  # of scores and of logits, if the file does not say them; None: no caps
    numbers: Mapping[str, str] = field(default_factory=dict)  # the key of each multiplier of `ModelConfig`
    has_windows: bool = True
    has_sinks: bool = False  # see `Softmax`
    has_latent: bool = False  # attention over a latent vector, see `LatentAttention`
    has_states: bool = False  # recurrent layers, see `DeltaNet`, and attention whose output is gated
    fused_states: bool = False  # their projections as published: two, with the parts of each key head together
    has_unrotated_layers: bool = False  # `no_rope_layers`
    rotated_fraction: float | None = None  # of a head's channels, if the file does not say it; None: all, always
    rotates_neighbours: bool = False  # see `Rope`
    scales_queries: bool = False  # see `Rope.query_beta`
    local_rope_key: str | None = None  # of the base of layers with a window
    unscaled_windows: bool = False  # layers with a window are rotated without the scaling
    experts: ExpertForm | None = None
    fused_qkv: bool = False  # as published
    fused_gate_up: bool = False  # as published
    is_for_heads: bool = False  # draft heads are made of these layers
    prediction: PredictionForm | None = None  # of a layer in its checkpoints that drafts for them


_BEHIND_TOO = Norms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
_GEMMA2 = ModelFamily(
    norms=_BEHIND_TOO, norm_offset=1.0, scaled_embeddings=True, activation=GELU_TANH,
    attention_scale=ScaleKey("query_pre_attn_scalar", -0.5), softcaps=(50.0, 30.0),
)  # fmt: skip
_QWEN2 = ModelFamily(qkv_bias=True, output_bias=False, is_for_heads=True)
_MTP = PredictionForm(
    "mtp.", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", token_first=True, root="", layer="layers.0.",
    key="mtp_num_hidden_layers",
)  # fmt: skip
_QWEN_HYBRID = ModelFamily(
    norm_offset=1.0, has_head_norms=True, has_windows=False, rotated_fraction=0.25, has_states=True, prediction=_MTP
)
_GATED_EXPERTS = ExpertForm(shared="shared_expert", has_shared_gate=True)
_CORRECTED_EXPERTS = ExpertForm(key="n_routed_experts", routing=Routing.CORRECTED)
_BEHIND_LAYERS = PredictionForm(
    "layers.{layers}.", "eh_proj", "enorm", "hnorm", "shared_head.norm", token_first=True,
    repeated=("embed_tokens.weight", "shared_head.head.weight"),
)  # fmt: skip
_OLMO2 = ModelFamily(
    norms=Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm"), has_head_norms=True,
    joint_head_norms=True, has_windows=False,
)  # fmt: skip

DECODED: Mapping[str, ModelFamily] = {
    "llama": ModelFamily(mlp_bias="mlp_bias", has_windows=False, is_for_heads=True),
    "qwen2": _QWEN2,
    "qwen3": ModelFamily(has_head_norms=True, is_for_heads=True),
    "qwen3_moe": ModelFamily(has_head_norms=True, experts=ExpertForm()),
    "mistral": ModelFamily(),
    "mixtral": ModelFamily(
        experts=ExpertForm("block_sparse_moe", "w1", "w3", "w2", key="num_local_experts", has_own_width=False)
    ),
    "phi3": ModelFamily(fused_qkv=True, fused_gate_up=True, rotated_fraction=1.0),
    "gemma2": _GEMMA2,
    "gemma3": replace(_GEMMA2, has_head_norms=True, softcaps=(0.0, 0.0), local_rope_key="rope_local_base_freq"),
    "gemma4": ModelFamily(
        norms=_BEHIND_TOO, has_head_norms=True, has_value_norms=True, has_layer_scalar=True, has_full_heads=True,
        scaled_embeddings=True, activation=GELU_TANH, attention_scale=1.0, softcaps=(0.0, 0.0),
    ),
    "gpt_oss": ModelFamily(
        activation=CLAMPED_SWIGLU, has_sinks=True,
        experts=ExpertForm(packed=True, key="num_local_experts", has_own_width=False),
    ),
    "mimo": replace(_QWEN2, is_for_heads=False, prediction=PredictionForm()),
    "smollm3": ModelFamily(mlp_bias="mlp_bias", has_unrotated_layers=True),
    "olmo2": _OLMO2,
    "olmo3": replace(_OLMO2, has_windows=True, unscaled_windows=True),
    "granite": ModelFamily(
        mlp_bias="mlp_bias", has_windows=False, attention_scale=ScaleKey("attention_multiplier", 1.0),
        numbers={
            "embedding_multiplier": "embedding_multiplier", "residual_multiplier": "residual_multiplier",
            "logit_divisor": "logits_scaling",
        },
    ),
    "glm4": ModelFamily(
        norms=Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        output_bias=False, has_windows=False, rotated_fraction=0.5, rotates_neighbours=True, fused_gate_up=True,
    ),
    "ministral3": ModelFamily(qkv_bias=False, output_bias=False, scales_queries=True),
    "seed_oss": ModelFamily(output_bias="attention_out_bias", mlp_bias="mlp_bias", has_windows=False),
    "deepseek_v2": ModelFamily(
        mlp_bias="mlp_bias", has_latent=True, has_windows=False, rotates_neighbours=True,
        experts=ExpertForm(key="n_routed_experts", routing=Routing.GROUPED),
    ),
    "deepseek_v3": ModelFamily(
        has_latent=True, has_windows=False, rotates_neighbours=True, prediction=_BEHIND_LAYERS,
        experts=_CORRECTED_EXPERTS,
    ),
    "glm4_moe": ModelFamily(
        output_bias=False, has_head_norms="use_qk_norm", has_windows=False, rotated_fraction=0.5,
        prediction=_BEHIND_LAYERS, experts=_CORRECTED_EXPERTS,
    ),
    "qwen3_next": replace(
        _QWEN_HYBRID, fused_states=True, experts=_GATED_EXPERTS,
        prediction=replace(_MTP, key="num_nextn_predict_layers", is_counted=False),
    ),
    "qwen3_5": _QWEN_HYBRID,
    "qwen3_5_moe": replace(_QWEN_HYBRID, experts=replace(_GATED_EXPERTS, may_be_stacked=True)),
}  # fmt: skip
"""By the family's name in `core.model_shape`."""

# Published for the most part with an encoder of images, under whose name `core.model_shape` has it.
_TEXT_ONLY = {
    "gemma4": "Gemma4ForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
}


def architecture_of(family: str) -> str:
    """Return the architecture of a family, by its name in `core.model_shape`."""
    return _TEXT_ONLY.get(family, ARCHITECTURE_OF_FAMILY[family])


def saved_type(family: str) -> str:
    """Return the `model_type` of a family's language model in a file of its own."""
    return f"{family}_text" if family.startswith("qwen3_5") else family


MODEL_TYPES: Mapping[str, str] = {architecture_of(name): name for name in DECODED}
"""The `model_type` of each architecture that the decoder runs."""
ARCHITECTURES = tuple(MODEL_TYPES)
MULTIMODAL: Mapping[str, tuple[str, ...]] = {
    "Gemma3ForConditionalGeneration": ("gemma3",),
    "Gemma4ForConditionalGeneration": ("gemma4",),
    "Mistral3ForConditionalGeneration": ("mistral", "ministral3"),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5",),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe",),
}
"""Models that see, too, of which the decoder runs the language model: its families, that of a file without
`model_type` first."""


def family_of(architecture: str) -> ModelFamily:
    """Return the description of an architecture that the decoder runs."""
    return DECODED[MODEL_TYPES[architecture]]


def read_architecture(reader: ConfigReader) -> str | None:
    """Return the architecture that a `config.json` names, that of the language model inside a model that sees; None if
    the decoder cannot run it, which is noted."""
    names = reader.get("architectures")
    if medusa := medusa_message(reader.data):
        reader.problem("architectures", medusa)
        return None
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        reader.problem("architectures", f"must name one architecture out of {', '.join(ARCHITECTURES)}; got {names!r}")
        return None
    name, kind = names[0], reader.get("model_type")
    if name in MULTIMODAL:
        return _language_model_of(reader, name)
    if name in ARCHITECTURES:
        family = family_of_type(kind)
        if family is not None and architecture_of(family) != name:
            reader.problem(
                "architectures", f"{name} contradicts the model_type {kind!r}: their layers compute other things"
            )
        return name
    if name in ARCHITECTURE_OF_FAMILY.values():
        known = ", ".join(ARCHITECTURES)
        reader.problem(
            "architectures", f"{name}: only `foredraft simulate` knows this family; the decoder has layers of {known}"
        )
    else:
        # No name that is near is suggested: under another family's name a checkpoint may load and compute something
        # else.
        reader.problem(
            "architectures", f"{name} is none of {', '.join(ARCHITECTURES)}, and no other one computes the same"
        )
    return None


def _language_model_of(reader: ConfigReader, name: str) -> str | None:
    """Return the architecture of the language model inside a model that sees, by its own `model_type`."""
    known = MULTIMODAL[name]
    kind = reader.under("text_config").get("model_type")
    family = known[0] if kind is None else family_of_type(kind)
    if family not in known:
        reader.problem("text_config.model_type", f"{kind!r}: inside {name} the decoder runs {', '.join(known)}")
        return None
    return architecture_of(family)


def medusa_message(data: Mapping[str, Any]) -> str | None:
    """Return the message about a configuration of Medusa heads; None for any other configuration."""
    names = data.get("architectures")
    name = names[0] if isinstance(names, list) and names else data.get("model_type")
    if not (isinstance(name, str) and "medusa" in name.lower()) and "medusa_num_heads" not in data:
        return None
    return (
        "these are Medusa heads, each of which guesses a token from the target's last state without looking at the guesses before; "
        "they are not implemented; EAGLE and EAGLE-3 heads are"
    )


def refuse_keys_of_others(reader: ConfigReader, architecture: str) -> None:
    """Note keys with which another family's layers compute something else: this one's would load and leave it out."""
    family, question = family_of(architecture), "is this another model under its name?"
    if not family.has_windows and reader.get("sliding_window") is not None:
        reader.problem("sliding_window", f"{architecture} has none; {question}")
    if not family.has_unrotated_layers and 0 in (reader.get("no_rope_layers") or ()):
        reader.problem("no_rope_layers", f"{architecture} rotates all layers; {question}")
    if not family.has_full_heads and reader.get("per_layer_config"):
        reader.problem("per_layer_config", "layers of different sizes are not implemented for this family")
    kinds = reader.get("layer_types")
    known = (LAYER_TYPES[0], RECURRENT) if family.has_states else LAYER_TYPES
    if isinstance(kinds, list) and (others := [kind for kind in kinds if kind not in known]):
        reader.problem("layer_types", f"expected only {' and '.join(known)}, found {others[0]!r}")
    for key, neutral in _foreign_keys(family).items():
        if reader.get(key) not in (None, neutral):
            reader.problem(key, f"{architecture} has none; {question}")


def _foreign_keys(own: ModelFamily) -> dict[str, float]:
    """Return the keys with which other families change what a layer computes, and the values that change nothing."""
    keys = {name: 1.0 for family in DECODED.values() for name in family.numbers.values()}
    scales = {family.attention_scale for family in DECODED.values()} - {own.attention_scale}
    keys |= {scale.name: 0.0 for scale in scales if isinstance(scale, ScaleKey)}
    if own.softcaps is None:
        keys |= {"attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0}
    return {name: value for name, value in keys.items() if name not in own.numbers.values()}
