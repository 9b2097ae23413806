"""The configuration of a draft head: the shape of its own layers, and whether it fits the target."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ....core.model_shape import (
    AUX_LAYERS_KEY,
    SPECULATORS_KEY,
    BlockParts,
    block_kind,
    brings_block_drafter,
    flat_head,
    language_model,
)
from ....core.model_shape.heads import COMPUTED_SWITCHES, SAYS_NOTHING
from ....core.parsing import ConfigReader
from ..config import LLAMA, ModelConfig, quantization_of, read_config, read_model_config
from ..families import ARCHITECTURES, DECODED, MODEL_TYPES, MULTIMODAL, family_of, medusa_message
from ..stored.quantized import Quantization
from ..stored.read_config import PARD_KEYS
from ..stored.tensor_files import CheckpointError, list_tensors
from .block_config import BLOCKS, block_keys, read_block

NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_NESTED = ("eagle_config",)
_NORMED = ("use_input_layernorm_in_first_layer", "use_last_layernorm")
EAGLE, EAGLE3, MULTI_LAYER_EAGLE, P_EAGLE = "EAGLE", "EAGLE3", "MULTI_LAYER_EAGLE", "P_EAGLE"
FUSING = (EAGLE3, P_EAGLE)  # whose heads fuse hidden states of several target layers
PARD = "PARD"
MASK_KEYS = ("mask_token_id", *PARD_KEYS)
_HEAD_NUMBER, _LAYER_NUMBER = re.compile(r"(?:model\.)?heads\.(\d+)\."), re.compile(r"(?:^|\.)layers\.(\d+)\.")
_ONE_LAYER = ("midlayer.", "transformer.")  # other names of the one layer of a head
# Architectures whose checkpoints have a prediction layer that drafts for them.
PREDICTION_LAYERS = tuple(name for name in ARCHITECTURES if family_of(name).prediction is not None)
_THAT_SEE = tuple(name for name, kinds in MULTIMODAL.items() if any(DECODED[kind].prediction for kind in kinds))
HEAD_LAYERS = tuple(name for name in ARCHITECTURES if family_of(name).is_for_heads)  # whose layers heads are made of
SPECULATORS = {
    "eagle": EAGLE,
    "eagle3": EAGLE3,
    "peagle": P_EAGLE,
}  # `speculators_model_type` of the format of vLLM's speculators


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """`model` is the shape of the head's own decoder layers; its vocabulary is the target's."""

    algorithm: str  # EAGLE, EAGLE3, MULTI_LAYER_EAGLE or one of BLOCKS
    model: ModelConfig
    target_hidden_size: int
    draft_vocab_size: int  # EAGLE-3's own, smaller vocabulary; else the target's
    aux_layers: tuple[int, ...] = ()  # EAGLE-3: ascending; the target's hidden states entering these layers are fused
    norm_before_residual: bool = False  # EAGLE-3: the residual is the normed hidden state
    num_heads: int = 1  # multi-layer EAGLE: one per step
    inside_target: bool = False  # EAGLE: the prediction layer of the target's own checkpoint
    network: type | None = None  # a `DraftHead` of a plugin; None: that of `algorithm`
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False)  # config.json as it was read
    norm_before_fc: bool = False  # EAGLE-3.1: what is fused is normed as a whole
    fc_norm: bool = False  # EAGLE-3.1: each of the target's hidden states is normed before they are fused
    norm_output: bool = False  # EAGLE-3.1: the next step takes the normed output
    block: BlockParts | None = None  # of a block drafter
    mask_token: int | None = None  # P-EAGLE: stands for a token to be drafted
    quantization: Quantization | None = field(default=None, compare=False)  # of the files

    @classmethod
    def from_directory(cls, directory: str | Path, algorithm: str, target: ModelConfig) -> HeadConfig:
        """Read `config.json` of a head for `target`. Raises ConfigError."""
        path = Path(directory) / "config.json"
        return cls.from_dict(read_config(directory), algorithm, target, str(path), _tensor_names(directory))

    @classmethod
    def from_dict(
        cls,
        data: Mapping[str, Any],
        algorithm: str,
        target: ModelConfig,
        source: str = "config.json",
        names: Collection[str] = (),
    ) -> HeadConfig:
        """Read a parsed config.json. The layers are counted in the `names` of the head's tensors, where these are
        given: published heads have config.json of their targets. Raises ConfigError with all problems, or with
        everything that does not fit the target."""
        reader = ConfigReader(data, source)
        if algorithm == EAGLE and data.get("architectures") in [[name] for name in (*PREDICTION_LAYERS, *_THAT_SEE)]:
            return _prediction_layer(reader, target)
        if algorithm in BLOCKS:
            return cls(algorithm, settings=data, **read_block(reader, algorithm, target, names))
        if SPECULATORS_KEY in data:
            reader = reader.with_data(_of_speculators(reader, algorithm))
        reader = flat_head(reader)
        reader = reader.with_data(_with_counted_layers(reader.data, names))
        model = read_model_config(reader, _layer_architecture(reader))
        quantization = None if model is None else quantization_of(reader, model)
        hidden_size = reader.integer("hidden_size")
        vocab_size = reader.integer("vocab_size")
        target_hidden_size = reader.integer("target_hidden_size", hidden_size)
        head = cls(
            algorithm=algorithm,
            model=model or target,
            target_hidden_size=target_hidden_size,
            draft_vocab_size=reader.integer("draft_vocab_size", vocab_size) if algorithm in FUSING else vocab_size,
            aux_layers=_read_aux_layers(reader, target) if algorithm in FUSING else (),
            mask_token=read_mask_token(reader, vocab_size) if algorithm == P_EAGLE else None,
            norm_before_residual=reader.flag("norm_before_residual"),
            norm_before_fc=reader.flag("norm_before_fc"),
            fc_norm=reader.flag("fc_norm") or reader.flag("use_aux_norm"),
            norm_output=reader.flag("norm_output"),
            num_heads=reader.integer("num_nextn_predict_layers") if algorithm == MULTI_LAYER_EAGLE else 1,
            settings=data,
            quantization=quantization,
        )
        _refuse_switches(reader, algorithm)
        reader.raise_problems()  # only known sizes can be compared with the target's
        head._note_misfits(reader, target)
        reader.raise_problems()
        return head

    def _note_misfits(self, reader: ConfigReader, target: ModelConfig) -> None:
        model = self.model
        if model.vocab_size != target.vocab_size:
            sizes = f"the target has {target.vocab_size} tokens, the draft head {model.vocab_size}"
            reader.problem("vocab_size", f"the vocabularies must match: {sizes}")
        if self.draft_vocab_size > model.vocab_size:
            reader.problem("draft_vocab_size", f"{self.draft_vocab_size} of {model.vocab_size} tokens")
        # EAGLE-3 fuses the target's states to its own width; the others take them as they are.
        taken = self.target_hidden_size if self.algorithm in FUSING else model.hidden_size
        if taken != target.hidden_size:
            sizes = f"states of size {taken}, the target's have {target.hidden_size}"
            reader.problem("hidden_size", f"the head takes hidden {sizes}: it was made for another model")
        if self.algorithm not in (EAGLE, P_EAGLE) and model.num_layers != 1:
            reader.problem("num_hidden_layers", f"{self.algorithm} heads have one layer each, got {model.num_layers}")

    def to_dict(self) -> dict[str, Any]:
        """Return the config.json that `from_dict` reads back; the fused layers are written in both published forms."""
        data = self.model.to_dict()
        if self.block is not None:
            return {**data, **block_keys(self.block, self.algorithm, self.aux_layers, self.draft_vocab_size)}
        suffix = {EAGLE3: "Eagle3", P_EAGLE: "Peagle"}.get(self.algorithm, "Eagle")
        data["architectures"] = [self.model.architecture + suffix]
        if self.algorithm == P_EAGLE:
            data |= {"mask_token_id": self.mask_token, "parallel_drafting": True}
        if self.algorithm in FUSING:
            data["target_hidden_size"] = self.target_hidden_size
            data["draft_vocab_size"] = self.draft_vocab_size
            data |= {key: getattr(self, key) for key in NORMS}
            data[AUX_LAYERS_KEY] = list(self.aux_layers)
            data["eagle_config"] = {AUX_LAYERS_KEY: [layer - 1 for layer in self.aux_layers]}
        if self.algorithm == MULTI_LAYER_EAGLE:
            data["num_nextn_predict_layers"] = self.num_heads
        return data


def _refuse_switches(reader: ConfigReader, algorithm: str) -> None:
    """Refuse what a head's configuration switches on and this class does not compute, wherever the file has it."""
    nested = {key: data for key in _NESTED if isinstance(data := reader.get(key), Mapping)}
    places = {key: f"{where}.{key}" for where, data in nested.items() for key in data}
    for key, value in [*reader.data.items(), *(pair for data in nested.values() for pair in data.items())]:
        is_known = algorithm in FUSING and key in (*NORMS, "use_aux_norm")
        is_known |= algorithm == P_EAGLE and key == "parallel_drafting"
        if value is True and not is_known and key not in COMPUTED_SWITCHES and not SAYS_NOTHING.search(key):
            reader.problem(str(places.get(key, key)), f"true: this is not implemented for {algorithm} heads")
    if not reader.flag("use_aux_hidden_state", True):
        reader.problem("use_aux_hidden_state", "false: EAGLE3 heads that take one hidden state are not implemented")
    for key in _NORMED:
        if not reader.flag(key, True):
            reader.problem(key, f"false: {algorithm} heads without this norm are not implemented")
    if reader.integer("parallel_draft_step", 1) > 1 and algorithm != P_EAGLE:
        reader.problem("parallel_draft_step", "heads that draft several tokens in one pass are not implemented")
    if reader.get("dflash_config"):
        reader.problem("dflash_config", f"the draft is made for {block_kind(reader.data)}, not for {algorithm}")


def read_mask_token(reader: ConfigReader, vocab_size: int) -> int | None:
    """Read which token stands for one to be drafted, from the key that the file has."""
    key = next((key for key in MASK_KEYS if reader.get(key) is not None), MASK_KEYS[0])
    mask = reader.integer(key, minimum=0)
    if mask >= vocab_size:
        reader.problem(key, f"must be a token from 0 to {vocab_size - 1}, got {mask}")
    return mask


def _tensor_names(directory: str | Path) -> Collection[str]:
    """Return the names of the tensors in a directory; none where there are no files, which loading them says."""
    try:
        return list_tensors(directory).keys()
    except CheckpointError:
        return ()


def _with_counted_layers(data: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Any]:
    """Return config.json with the number of layers, and of the heads of a multi-layer draft, that the tensors have.
    Lists with an entry for each layer end there, too."""
    heads = {found[1] for name in names if (found := _HEAD_NUMBER.match(name))}
    layers = {found[1] for name in names if (found := _LAYER_NUMBER.search(name))}
    if any(name.removeprefix("model.").startswith(_ONE_LAYER) for name in names):
        layers.add("0")
    count = len(layers)
    counted: dict[str, Any] = {"num_nextn_predict_layers": len(heads)} if heads else {}
    if count:
        counted["num_hidden_layers"] = count
        if isinstance(kinds := data.get("layer_types"), list):
            counted["layer_types"] = kinds[:count]
    return {**data, **counted}


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Return the layers whose input EAGLE-3 fuses:
    an early, a middle and a late one (2, n/2, n − 3 as published, if these differ)."""
    published = (2, num_layers // 2, num_layers - 3)
    if published[0] < published[1] < published[2]:
        return published
    quarter = num_layers // 4
    return tuple(sorted({quarter, num_layers // 2, num_layers - quarter}))


@dataclass(frozen=True, slots=True)
class _Form:
    """How drafts of one form are recognised: by a mark in the name of their architecture, or by tensors that no other
    model has. `tensors` are beginnings of names without "model.", with * for numbers."""

    name: str  # of the algorithm, or of a form that needs more than its name
    tensors: tuple[str, ...]
    mark: str | None = None

    def has(self, architecture: str, tensor_names: Iterable[str]) -> bool:
        is_marked = self.mark is not None and self.mark in architecture
        return is_marked or any(name.startswith(self.tensors) for name in tensor_names)


_MEDUSA, _PREDICTION = "Medusa", "prediction layer"
_FORMS = (  # the first that a checkpoint has is its form
    _Form(_MEDUSA, ("*.*.weight", "*.*.bias", "*.*.linear.", "medusa_head.")),
    _Form(_PREDICTION, ("mtp_layers.", "mtp.", "layers.*.eh_proj.", "layers.*.enorm.", "layers.*.hnorm.")),
    _Form(P_EAGLE, ("mask_hidden",), mark="Peagle"),
    _Form(EAGLE3, ("d2t", "midlayer."), mark="Eagle3"),
    _Form(MULTI_LAYER_EAGLE, ("heads.*.",)),
    _Form(EAGLE, ("fc.weight",), mark="Eagle"),
)


def head_form(data: Mapping[str, Any], tensor_names: Iterable[str], source: str) -> str | None:
    """Return the algorithm that a head is made for, by its configuration or the tensors that only a head has; None for
    a language model.

    Raises ConfigError for heads of other forms: Medusa's, and those of the speculators format that are not EAGLE's.
    """
    reader = ConfigReader(data, source)
    if (block := block_kind(data)) is not None and not brings_block_drafter(data):
        return block
    if (kind := data.get(SPECULATORS_KEY)) is not None:
        if kind not in SPECULATORS:
            reader.problem(SPECULATORS_KEY, f"expected one of {', '.join(SPECULATORS)}, found {kind!r}")
            reader.raise_problems()
        return SPECULATORS[kind]
    architectures = data.get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    names = {
        ".".join("*" if part.isdecimal() else part for part in name.removeprefix("model.").split("."))
        for name in tensor_names
    }
    form = next((form.name for form in _FORMS if form.has(architecture, names)), None)
    if medusa := medusa_message({"medusa_num_heads": 1} if form == _MEDUSA else data):
        reader.problem("architectures", medusa)
    elif form == _PREDICTION and architectures not in [[name] for name in (*PREDICTION_LAYERS, *_THAT_SEE)]:
        known = ", ".join(PREDICTION_LAYERS)
        reader.problem("architectures", f"{architectures}: prediction layers are implemented for {known} alone")
    reader.raise_problems()
    if form is None and any(data.get(key) is not None for key in PARD_KEYS):
        return PARD
    return EAGLE if form == _PREDICTION else form


def _prediction_layer(reader: ConfigReader, target: ModelConfig) -> HeadConfig:
    """Return the configuration of the layer that a model was trained with to predict the token after next
    (multi-token prediction)."""
    own = ModelConfig.from_dict(reader.data, reader.source)
    if replace(own, dtype=target.dtype) != replace(target, eos_token_ids=own.eos_token_ids):
        reader.problem(
            "architectures", "a prediction layer drafts only for the model of its own checkpoint, not for this target"
        )
    form, text = target.family.prediction, language_model(reader.data, reader.source)
    reader.raise_problems()
    assert form is not None, "the target is the model of this checkpoint"
    if text.integer(form.key, 0 if form.is_counted else 1, minimum=0) != 1:
        found = text.get(form.key)
        text.problem(form.key, f"expected 1: a single layer, which drafts every step; got {found!r}")
    text.raise_problems()
    moe = None if target.moe is None else replace(target.moe, mlp_only_layers=(), decoder_sparse_step=1)
    layer = replace(
        target, num_layers=1, windowed_layers=(), window=0, recurrent_layers=(), state=None, moe=moe, quantization=None
    )
    return HeadConfig(EAGLE, layer, target.hidden_size, target.vocab_size, inside_target=True)


def _of_speculators(reader: ConfigReader, algorithm: str) -> dict[str, Any]:
    """Return the keys of a configuration in the speculators format as other heads have them."""
    kind = reader.get(SPECULATORS_KEY)
    if SPECULATORS.get(kind) != algorithm:
        reader.problem(SPECULATORS_KEY, f"{kind!r} is no {algorithm} head")
    layer = reader.under("transformer_layer_config").data
    architecture = next(
        (name for name, family in MODEL_TYPES.items() if family == layer.get("model_type", "llama")), None
    )
    if architecture not in HEAD_LAYERS:
        reader.problem(
            "transformer_layer_config.model_type",
            f"{layer.get('model_type')!r}: heads have layers of {_known_layers()}",
        )
    own = {key: value for key, value in reader.data.items() if key not in ("transformer_layer_config", "model_type")}
    return {**layer, **own, "architectures": [architecture or LLAMA]}


def _known_layers() -> str:
    return ", ".join(MODEL_TYPES[name] for name in HEAD_LAYERS)


def _layer_architecture(reader: ConfigReader) -> str | None:
    """Return the architecture of the layers: heads put a mark of their own before or behind its name
    (LlamaForCausalLMEagle3)."""
    names = reader.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        reader.problem("architectures", f"must name one architecture, for example {LLAMA}Eagle3; got {names!r}")
        return None
    for mark in ("Eagle3", "Peagle", "Eagle"):
        name = names[0].removesuffix(mark).removeprefix(mark)
        if name in HEAD_LAYERS:
            return name
        if name in ARCHITECTURES:
            reader.problem("architectures", f"{names[0]}: heads have layers of {_known_layers()}")
            return None
    reader.problem("architectures", f"{names[0]} is no known form of a draft head, such as {LLAMA}Eagle3")
    return None


def _read_aux_layers(reader: ConfigReader, target: ModelConfig) -> tuple[int, ...]:
    """Read the target layers that the head sees. `eagle_config` counts layers whose output is taken (−1: the
    embedding), the key at top level layers whose input is taken."""
    inner = reader.under("eagle_config")
    if inner.get(AUX_LAYERS_KEY):
        holder, offset = inner, 1
    elif reader.get(AUX_LAYERS_KEY):
        holder, offset = reader, 0
    else:
        return default_aux_layers(target.num_layers)
    ids = holder.get(AUX_LAYERS_KEY)
    if not isinstance(ids, list) or not all(type(i) is int for i in ids) or sorted(set(ids)) != ids:
        holder.problem(AUX_LAYERS_KEY, f"must be an ascending list of layers, got {ids!r}")
        return default_aux_layers(target.num_layers)
    layers = tuple(i + offset for i in ids)
    if layers[0] < 0 or layers[-1] > target.num_layers:
        holder.problem(AUX_LAYERS_KEY, f"{ids} are not all among the target's {target.num_layers} layers")
    return layers
