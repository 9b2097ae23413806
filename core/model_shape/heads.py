"""The reader of the `config.json` of a draft head: its own layers, and what they take from the target.

Published heads have their keys in one of three places: at top level, in `transformer_layer_config` (the format of
vLLM's speculators), or in `model` beside the keys of EAGLE. `flat_head` puts them in one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..parsing import ConfigReader
from .families import ARCHITECTURES, family_of_type, read_model_shape
from .layers import Experts, Mlp
from .mixers import replace_missing
from .shape import ModelShape

AUX_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
SPECULATORS_KEY = "speculators_model_type"
USUAL_FUSED = 3  # hidden states of the target that an EAGLE-3 head takes, if its file does not say
PARALLEL = "P_EAGLE"
_SPECULATORS = {"EAGLE3": "eagle3", PARALLEL: "peagle"}
_OTHERS = re.compile(r"dflash|dspark|domino|pard|medusa|mlp_?speculator|hydra|redrafter", re.IGNORECASE)
_ONE_PASS = re.compile(rf"{_OTHERS.pattern}|p_?eagle", re.IGNORECASE)
COMPUTED_SWITCHES = (  # that are read, follow from the tensors, or are on in every head
    "attention_bias", "fusion_bias", "bias", "use_aux_hidden_state", "tie_word_embeddings", "use_sliding_window",
    "norm_topk_prob", "has_own_embed_tokens", "has_own_lm_head", "has_lm_head", "reuse_target_lm_head",
    "use_input_layernorm_in_first_layer", "use_last_layernorm", "next_layer_regular",
)  # fmt: skip
SAYS_NOTHING = re.compile(
    r"^_|cache|output_|return_|grad|torch|parallel_size|pretrain|is_decoder|remote|(?:^|_)tp_|initial"
)
"""In the names of switches on which the numbers of a head do not depend."""
_SMALL = re.compile(r"norm|bias|rope|temperature|interleave|cap|scal")
"""In the names of switches that add next to no weights."""
_LAYERS_AT = ("transformer_layer_config", "model")
_MARKS = ("Eagle3", "Peagle", "Eagle")
_COUNTS_OF_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
_DENSE = {  # families of experts, and those whose layers their EAGLE-3 heads have
    "llama4": "llama", "qwen3_moe": "qwen3", "qwen2_moe": "qwen2", "mixtral": "mistral", "gpt_oss": "llama",
    "glm4_moe": "llama", "minimax_m2": "llama",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What a head's configuration says.

    Attributes:
        body: Its decoder layers; `vocab` are the tokens of its LM head.
        fused: How many hidden states of the target are joined in front of them.
        fused_size: The size of each.
        count: The heads of a multi-layer draft, one for each step; None if the file does not say.
        has_lm_head: Whether it has an LM head of its own.
    """

    body: ModelShape
    fused: int
    fused_size: int
    count: int | None
    has_lm_head: bool


def flat_head(reader: ConfigReader) -> ConfigReader:
    """Return a reader that finds the keys of a head at top level, wherever the file has them. Keys that its layers have
    in an object of their own are those of the layers; `eagle_config` keeps the numbers of layers, which count otherwise
    there."""
    data = dict(reader.data)
    for key in _LAYERS_AT:
        if isinstance(data.get(key), Mapping):
            own = {name: value for name, value in data.items() if name not in (key, "model_type", "architectures")}
            data = {**data[key], **own} | {"architectures": data[key].get("architectures")}
    inner = reader.under("eagle_config")
    data |= {key: value for key, value in inner.data.items() if key != AUX_LAYERS_KEY}
    return reader.with_data(data)


def read_head(
    config: Mapping[str, Any], source: str, name: str, target: ModelShape, algorithm: str, *, is_single: bool = True
) -> HeadShape:
    """Read a parsed `config.json` of a head for `target`. `algorithm`: the heads of EAGLE3 and P_EAGLE have one
    form, others that of EAGLE. `is_single`: it has one head for all steps. Raises ConfigError for sizes that are not
    those of the target."""
    whole = ConfigReader(config, source)
    is_eagle3, expected = algorithm in ("EAGLE3", PARALLEL), _SPECULATORS.get(algorithm, "eagle")
    if (kind := config.get(SPECULATORS_KEY, expected)) != expected:
        whole.problem(SPECULATORS_KEY, f"expected {expected}, found {kind!r}: the head is made for another algorithm")
    reader = flat_head(whole)
    _refuse_others(reader, is_eagle3, algorithm == PARALLEL)
    whole.raise_problems()
    reader = replace_missing(reader, max_position_embeddings=target.max_context, vocab_size=target.vocab)
    vocab, hidden = reader.integer("vocab_size"), reader.integer("hidden_size")
    own_vocab = reader.integer("draft_vocab_size", None) if is_eagle3 else None
    size_key = "target_hidden_size" if is_eagle3 and reader.get("target_hidden_size") is not None else "hidden_size"
    size, fused = reader.integer(size_key), _fused(reader, target) if is_eagle3 else 0
    reader.raise_problems()
    if vocab != target.vocab:
        reader.problem("vocab_size", f"the head drafts {vocab} tokens, {target.name} has {target.vocab}")
    if own_vocab is not None and own_vocab > vocab:
        reader.problem("draft_vocab_size", f"{own_vocab} of {vocab} tokens")
    if size != target.hidden:
        reader.problem(
            size_key, f"the head takes hidden states of size {size}, those of {target.name} have {target.hidden}"
        )
    reader.raise_problems()
    data = _layers(reader, target, is_single)
    family = family_of_type(data.get("model_type"))
    if is_eagle3:
        data |= {
            "model_type": _DENSE.get(family or "", data.get("model_type")),
            "intermediate_size": data.get("intermediate_size_mlp") or data.get("intermediate_size"),
        }
        if data["intermediate_size"]:
            data = {key: value for key, value in data.items() if key not in _COUNTS_OF_EXPERTS}
    body = read_model_shape(data, source, name, is_whole=False)
    if is_eagle3:  # its MLP is dense, also where the file repeats the keys of a sparse target
        width = reader.integer("intermediate_size", None)
        mlps = [(Mlp(width) if isinstance(part, Experts) and width else part, n) for part, n in body.mlps]
        body = replace(body, mlps=tuple(mlps))
    has_lm_head = not reader.flag("reuse_target_lm_head") and (own_vocab is not None or body.tied_embeddings)
    body = replace(body, vocab=own_vocab or vocab, tied_embeddings=False, kv_dtype=target.kv_dtype, config=None)
    count = reader.integer("num_nextn_predict_layers", None)
    return HeadShape(body, fused, size if is_eagle3 else hidden, None if is_single else count, has_lm_head)


def _refuse_others(reader: ConfigReader, is_eagle3: bool, is_parallel: bool) -> None:
    """Note what says that a draft works otherwise than a head of the algorithm: its price would be another one."""
    others = _OTHERS if is_parallel else _ONE_PASS
    names = reader.get("architectures")
    marks = [str(name) for name in (*(names if isinstance(names, list) else ()), reader.get("model_type"))]
    other = next((mark for mark in marks if others.search(mark)), None)
    if other is not None or reader.get("dflash_config") or reader.get("medusa_num_heads"):
        key = "architectures" if other in (names or ()) or other is None else "model_type"
        found = other or ("DFlash" if reader.get("dflash_config") else "Medusa")
        reader.problem(key, f"{found} drafts in another way than heads of EAGLE and EAGLE-3, which are modelled")
    elif not is_eagle3 and any("Eagle3" in mark for mark in marks):
        reader.problem("architectures", f"{marks[0]} is made for EAGLE3")
    refuse_switches(reader, "parallel_drafting")
    drafts_in_one_pass = reader.flag("parallel_drafting") or reader.integer("parallel_draft_step", 1) > 1
    if drafts_in_one_pass and not is_parallel:
        reader.problem("parallel_drafting", f"a head that drafts several tokens in one pass is one of {PARALLEL}")


def refuse_switches(reader: ConfigReader, *known: str) -> None:
    """Note the switches of a head that are on and not read: it may have other weights. `known`: those that are read."""
    for key, value in reader.data.items():
        is_known = key in (*COMPUTED_SWITCHES, *known) or SAYS_NOTHING.search(key) or _SMALL.search(key)
        if value is True and not is_known:
            reader.problem(key, "true: a head with this switch is not modelled; it may have other weights")


def _layers(reader: ConfigReader, target: ModelShape, is_single: bool) -> dict[str, Any]:
    """Return the configuration of the head's layers as that of a model. The official heads repeat the number of their
    target's layers and have one; servers load 16-bit weights in the target's type."""
    data = dict(reader.data)
    names = data.get("architectures")
    known = {architecture: family for family, architecture in ARCHITECTURES.items()}
    for whole in map(str, names if isinstance(names, list) else ()):
        name = whole
        for mark in _MARKS:
            name = name.removeprefix(mark).removesuffix(mark)
        # Servers go by the architecture: published files repeat the target's `model_type`.
        if name in known and (name != whole or family_of_type(data.get("model_type")) is None):
            data["model_type"] = known[name]
    if not is_single or data.get("num_hidden_layers") in (None, target.layers):
        data["num_hidden_layers"] = 1
    for key in ("torch_dtype", "dtype"):
        if data.get(key) == "float32":
            data[key] = None
    return data


def _fused(reader: ConfigReader, target: ModelShape) -> int:
    """Return how many of the target's hidden states an EAGLE-3 head joins; 0 if it takes the last one as it is."""
    if not reader.flag("use_aux_hidden_state", True):
        return 0
    inner = reader.under("eagle_config")
    holder = inner if inner.get(AUX_LAYERS_KEY) else reader
    ids = holder.get(AUX_LAYERS_KEY)
    if ids is not None and not (isinstance(ids, list) and all(type(one) is int for one in ids)):
        holder.problem(AUX_LAYERS_KEY, f"must be a list of layers, got {ids!r}")
    elif ids and not all(-1 <= one <= target.layers for one in ids):
        holder.problem(AUX_LAYERS_KEY, f"{ids} are not all among the {target.layers} layers of {target.name}")
    elif ids:
        return len(ids)
    return reader.integer("num_aux_hidden_states", USUAL_FUSED)
