"""Checkpoints in Hugging Face form: `config.json` and safetensors, into the fused weights and back.

Names, shapes and dtypes are checked before anything is allocated or read; then each tensor is read, converted and
copied alone.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...core.algorithm.algorithm import Drafter, SpecAlgorithm
from ...core.algorithm.host_drafts import PluginError
from ...core.errors import ForedraftError, Problem
from ..types.attention import E4M3
from ..types.coded import CodedWeight, stacked
from ..types.ops import NO_OPS, Ops
from ..types.shards import WHOLE, Shard, ShardCut, cut_of
from .config import ModelConfig
from .decoder import Decoder
from .eagle import DraftHead, MultiLayerEagleHeads, PredictionLayer, unprefixed
from .heads.block import BlockHead
from .heads.config import PARD, HeadConfig
from .heads.forms import HEADS
from .mlps import ExpertMlp
from .projection import WeightProduct
from .stored.kv_scales import read_kv_scales
from .stored.quantized import AnyTensor, PackedTensor, read_tensor, read_unpacked, unpacked
from .stored.tensor_files import (
    FLOAT_DTYPES,
    HEAD,
    CheckpointError,
    StoredTensor,
    language_model_name,
    list_tensors,
    read_tensors,
    write_tensors,
)
from .weights import NamedWeight, allocate, initialize, products_of, round_when_filled

STANDALONE = "STANDALONE"
MAX_NAMED = 8  # of a long list of tensors


def load_target(
    directory: str | Path,
    ops: Ops,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    min_positions: int = 0,
    context_len: int | None = None,
    shard: Shard = WHOLE,
    keep_quantized: bool = False,
    kv_dtype: torch.dtype | None = None,
    in_int8: bool = False,
) -> Decoder:
    """Return the model in `directory`, in the checkpoint's dtype if `dtype` is None. Raises ConfigError,
    CheckpointError.

    `min_positions` are those of the target that a draft is loaded for; see `over_positions`. `context_len`: of the
    longest text, if that is known; see `ModelConfig.within`. `shard`: the part of the model to be loaded.
    `keep_quantized`: products take quantized matrices as they are stored, where their form allows it; if not, all
    weights are unpacked into `dtype`, as those of a part always are. `kv_dtype`: of the numbers that KV is kept in, for
    E4M3 divided by the scales of the checkpoint; None: `dtype`. `in_int8`: see `round_when_filled`.
    """
    config = over_positions(ModelConfig.from_directory(directory), min_positions)
    config = config if context_len is None else config.within(context_len)
    files = list_tensors(directory)
    read = {name: tensor for name, tensor in files.items() if _is_read(name, config)}
    stored: Mapping[str, AnyTensor] = read
    if config.quantization is not None:
        stored = unpacked(read, config.quantization)
    whole = Decoder(config, ops, "meta", config.dtype)
    _follow(whole, stored)
    _check(directory, whole, {own: t for name, t in stored.items() if (own := language_model_name(name)) is not None})
    keeps = keep_quantized and config.quantization is not None and shard.is_whole
    decoder = Decoder(replace(config, keeps_quantized=keeps), ops, device, dtype or config.dtype, shard, kv_dtype)
    if decoder.kv_dtype is E4M3:
        of_model = {own: tensor for name, tensor in files.items() if (own := language_model_name(name)) is not None}
        kv_format = None if config.quantization is None else config.quantization.kv_format
        decoder.kv_scales = read_kv_scales(of_model, config.attention_layers, config.latent is not None, kv_format)
    _follow(decoder, stored)
    if keeps:
        stored = _keep(decoder, stored)
    _fill(decoder, stored, language_model_name, {} if shard.is_whole else _cuts(whole, decoder), in_int8)
    return decoder


def load_draft(
    directory: str | Path, algorithm: str, target: Decoder, network: type[DraftHead] | None = None
) -> Decoder | DraftHead:
    """Return the draft of `algorithm` (its name) for `target`: a Decoder for STANDALONE, else a head, in the target's
    dtype. `network`: the class of the head, where it is a plugin's.

    Raises ConfigError if it does not fit the target, CheckpointError for its files, ForedraftError for an algorithm
    without a model.
    """
    if algorithm in (STANDALONE, PARD):
        positions = target.config.max_position_embeddings
        return load_target(directory, target.ops, target.device, target.dtype, positions, kv_dtype=target.kv_dtype)
    if algorithm not in HEADS:
        known = ", ".join((STANDALONE, PARD, *HEADS))
        raise ForedraftError(f"{algorithm} has no draft checkpoint; those that have: {known}")
    return _load_head(Path(directory), algorithm, target, network)


def file_notes(directory: str | Path, config: ModelConfig, drafts_itself: bool = False) -> tuple[str, ...]:
    """Return sentences for the user about the files of a model: where they differ from its `config.json`, and which
    tensors are not read. `drafts_itself`: its prediction layer is loaded as a draft."""
    form, unread = config.family.prediction, []
    for name in list_tensors(directory):
        is_draft = drafts_itself and form is not None and form.name_within(name, config.num_layers) is not None
        is_same = config.tied_embeddings and language_model_name(name) == HEAD
        if not (_is_read(name, config) or _is_ignorable(name) or is_draft or is_same):
            unread.append(name)
    notes = []
    if config.has_own_head:
        notes.append(
            f"{directory} has an LM head that is not the embeddings, and it is used: config.json is wrong where it says "
            "tie_word_embeddings"
        )
    if unread:
        more = f" and {len(unread) - MAX_NAMED} more" if len(unread) > MAX_NAMED else ""
        notes.append(f"tensors of {directory} that are not read: {', '.join(unread[:MAX_NAMED])}{more}")
    return tuple(notes)


def over_positions(draft: ModelConfig, min_positions: int) -> ModelConfig:
    """Return a draft's configuration with positions up to its target's, so that it runs wherever the target does.

    Past the context that it was trained for it drafts worse, which costs speed alone.
    """
    return replace(draft, max_position_embeddings=max(draft.max_position_embeddings, min_positions))


def required_bytes(config: ModelConfig, dtype: torch.dtype, shard: Shard = WHOLE) -> dict[str, int]:
    """Return bytes of the weights by part (embeddings, attention, MLPs, norms), before anything is allocated;
    sum them for the whole. Of a `shard`, of those that its rank has."""
    sizes = {"embeddings": 0, "attention": 0, "mlp": 0, "norms": 0}
    for weight in Decoder(config, NO_OPS, "meta", config.dtype, shard).checkpoint_weights():
        sizes[_part_of(weight.name)] += weight.view.numel() * dtype.itemsize
    return sizes


def random_weights(
    config: ModelConfig,
    ops: Ops,
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int = 0,
    shard: Shard = WHOLE,
    kv_dtype: torch.dtype | None = None,
) -> Decoder:
    """Return a model of this shape with random weights, for timing. All its shards have the same numbers."""
    decoder = Decoder(config, ops, device, dtype, shard, kv_dtype)
    initialize(decoder, seed)
    return decoder


def network_of(algorithm: SpecAlgorithm) -> type[DraftHead] | None:
    """Return the class of a plugin's draft network, None for networks of built-in forms. Raises PluginError for what is
    no such class."""
    who = f"{algorithm.name}.draft_network"
    try:
        network = algorithm.draft_network()
    except Exception as error:
        raise PluginError(f"{who} raised {type(error).__name__}: {error}") from error
    if network is None:
        return None
    base = {Drafter.HEADS: MultiLayerEagleHeads, Drafter.BLOCK: BlockHead}.get(algorithm.drafter, DraftHead)
    if not (isinstance(network, type) and issubclass(network, base)):
        raise PluginError(f"{who} gave {network!r}, expected a subclass of {base.__qualname__}")
    if inspect.isabstract(network):
        raise PluginError(f"{who} gave {network!r}, which lacks {', '.join(sorted(network.__abstractmethods__))}")
    return network


def new_head(config: HeadConfig, target: Decoder, **parts: bool) -> DraftHead:
    """Return a head whose weights are not set. `parts`: what its checkpoint has (`own_embeddings`, `own_lm_head`,
    `fc_bias`); left out, it has what is usual for its class."""
    head: DraftHead = (config.network or HEADS[config.algorithm])(config, target, **parts)
    return head


def random_head(config: HeadConfig, target: Decoder, seed: int = 0) -> DraftHead:
    """Return a head of this shape with random weights, for timing;
    EAGLE-3's vocabulary is the target's first tokens."""
    head = new_head(config, target)
    initialize(head, seed)
    if head.vocab_size != target.vocab_size:
        head.set_vocabulary(torch.arange(head.vocab_size))
    return head


def save_target(decoder: Decoder, directory: str | Path) -> None:
    """Write `config.json` and the weights, as `transformers` loads them."""
    config = replace(decoder.config, dtype=decoder.dtype)
    _save(directory, config.to_dict(), list(decoder.checkpoint_weights()), {})


def save_draft(draft: Decoder | DraftHead, directory: str | Path) -> None:
    """Write a STANDALONE draft or a head, in the form that `load_draft` reads."""
    if isinstance(draft, Decoder):
        save_target(draft, directory)
        return
    vocabulary = {}
    if draft.target_ids is not None:
        ids = draft.target_ids.cpu()
        is_drafted = torch.zeros(draft.config.model.vocab_size, dtype=torch.bool)
        is_drafted[ids] = True
        vocabulary = {"d2t": ids - torch.arange(len(ids)), "t2d": is_drafted}
    config = replace(draft.config, model=replace(draft.config.model, dtype=draft.dtype))
    _save(directory, config.to_dict(), list(draft.checkpoint_weights()), vocabulary)


def _load_head(directory: Path, algorithm: str, target: Decoder, network: type[DraftHead] | None) -> DraftHead:
    config = replace(HeadConfig.from_directory(directory, algorithm, target.config), network=network)
    if config.inside_target:
        return _load_prediction_layer(directory, config, target)
    read = {name: tensor for name, tensor in list_tensors(directory).items() if not _is_ignorable(name)}
    files: Mapping[str, AnyTensor] = read if config.quantization is None else unpacked(read, config.quantization)
    names = {unprefixed(name) for name in files}
    own_embeddings = "embed_tokens.weight" in names
    own_lm_head = "lm_head.weight" in names
    problems = []
    if not own_embeddings and config.model.hidden_size != target.hidden_size:
        problems.append(Problem("embed_tokens.weight", "is missing, and the target's embeddings have another width"))
    if not own_lm_head and (config.draft_vocab_size, config.model.hidden_size) != (
        target.vocab_size,
        target.hidden_size,
    ):
        problems.append(Problem("lm_head.weight", "is missing, and the target's has another shape"))
    if problems:
        raise CheckpointError(str(directory), problems)
    head = new_head(
        config,
        target,
        own_embeddings=own_embeddings,
        own_lm_head=own_lm_head,
        fc_bias=any(name.endswith("fc.bias") for name in names),
    )
    stored = {head.canonical_name(name): (name, tensor) for name, tensor in files.items()}
    vocabulary = {str(name): read[stored.pop(name)[0]] for name in ("d2t", "t2d") if name in stored}
    _check(directory, head, {name: tensor for name, (_, tensor) in stored.items()})
    _fill(head, dict(stored.values()), head.canonical_name)
    _read_vocabulary(directory, head, vocabulary)
    return head


def _load_prediction_layer(directory: Path, config: HeadConfig, target: Decoder) -> PredictionLayer:
    """Load the parts of a model's checkpoint beside the model."""
    head, form = PredictionLayer(config, target), target.config.family.prediction
    assert form is not None, "its configuration was read"
    read = {
        name: tensor
        for name, tensor in list_tensors(directory).items()
        if form.name_within(name, target.num_layers) is not None
    }
    stored: Mapping[str, AnyTensor] = read
    if target.config.quantization is not None:
        stored = unpacked(read, target.config.quantization)
    _follow(head, stored)
    _check(directory, head, {unprefixed(name): tensor for name, tensor in stored.items()})
    _fill(head, stored, unprefixed)
    return head


def _read_vocabulary(directory: Path, head: DraftHead, stored: dict[str, StoredTensor]) -> None:
    """Read `d2t`, which must be added to a draft token to get the target's; `t2d` repeats which tokens have one, and
    must say the same."""
    if head.vocab_size == head.config.model.vocab_size and "d2t" not in stored:
        return
    if "d2t" not in stored:
        sizes = f"draft_vocab_size is {head.vocab_size}, vocab_size {head.config.model.vocab_size}"
        raise CheckpointError(str(directory), [Problem("d2t", f"is missing, but {sizes}")])
    tensors = dict(read_tensors({name: stored[name] for name in ("d2t", "t2d") if name in stored}))
    offsets = tensors["d2t"]
    if offsets.shape != (head.vocab_size,) or offsets.dtype not in (torch.int64, torch.int32):
        found = f"{list(offsets.shape)} {offsets.dtype}"
        problem = Problem("d2t", f"must be whole numbers [{head.vocab_size}] (draft_vocab_size), got {found}")
        raise CheckpointError(str(stored["d2t"].path), [problem])
    ids = offsets.long() + torch.arange(head.vocab_size)
    size = head.config.model.vocab_size
    if int(ids.min()) < 0 or int(ids.max()) >= size or len(ids.unique()) != len(ids):
        problem = Problem("d2t", f"must map draft tokens to different tokens of the target, 0 … {size - 1}")
        raise CheckpointError(str(stored["d2t"].path), [problem])
    if (has_draft := tensors.get("t2d")) is not None:
        marked = has_draft.flatten().bool().nonzero().flatten()
        if has_draft.numel() != size or not torch.equal(marked, ids.sort().values):
            problem = Problem("t2d", f"marks {len(marked)} of {has_draft.numel()} tokens, which are not those of d2t")
            raise CheckpointError(str(stored["t2d"].path), [problem])
    head.set_vocabulary(ids)


def _follow(model: Decoder | DraftHead, names: Collection[str]) -> None:
    """Name a model's weights as the tensors of a checkpoint, where a family has several ways."""
    for module in model.modules():
        if isinstance(module, ExpertMlp):
            module.follow(names)


def _check(directory: str | Path, model: Decoder | DraftHead, stored: Mapping[str, AnyTensor]) -> None:
    """Raise CheckpointError if the names, shapes or dtypes differ from the model's."""
    expected = {weight.name: tuple(weight.view.shape) for weight in model.checkpoint_weights()}
    problems = [
        *_listed(expected.keys() - stored.keys(), "is missing", "tensors are missing"),
        *_listed(stored.keys() - expected.keys(), "belongs to nothing in the model", "tensors belong to nothing"),
    ]
    for name, shape in expected.items():
        tensor = stored.get(name)
        if tensor is not None and tensor.shape != shape:
            found = f"{list(tensor.shape)} in {tensor.path.name}"
            problems.append(Problem(name, f"has shape {found}, the configuration makes it {list(shape)}"))
        elif tensor is not None and tensor.dtype not in FLOAT_DTYPES:
            problems.append(Problem(name, f"has dtype {tensor.dtype}; known are {', '.join(FLOAT_DTYPES)}"))
    if problems:
        raise CheckpointError(str(directory), problems)


def _listed(names: set[str], one: str, many: str) -> list[Problem]:
    """Return a problem per name, the end of a long list in one."""
    ordered = sorted(names)
    problems = [Problem(name, one) for name in ordered[:MAX_NAMED]]
    if len(ordered) > MAX_NAMED:
        problems.append(Problem("", f"… {len(ordered) - MAX_NAMED} more {many}"))
    return problems


def _keep(decoder: Decoder, stored: Mapping[str, AnyTensor]) -> dict[str, AnyTensor]:
    """Give the products their matrices in stored numbers, one at a time, and return the tensors that are left.

    A product's matrix may be made of several tensors. Where one of them has no numbers to keep, or they are of
    different forms, the parameter gets memory for unpacked weights.
    """
    left = {language_model_name(name): (name, tensor) for name, tensor in stored.items()}
    for product, weights in kept_products(decoder):
        coded = _together([(weight, *left[weight.name]) for weight in weights])
        if coded is None:
            allocate(product.parameter)
            continue
        product.keep(coded.viewed(tuple(product.parameter.shape)).to(decoder.device))
        for weight in weights:
            del left[weight.name]
    return dict(left.values())


def kept_products(decoder: Decoder) -> Iterator[tuple[WeightProduct, list[NamedWeight]]]:
    """Yield the products that may keep stored numbers, with the tensors that their matrices are made of."""
    parts: dict[int, list[NamedWeight]] = {}
    for weight in decoder.checkpoint_weights():
        parts.setdefault(weight.view.untyped_storage()._cdata, []).append(weight)  # on "meta" there is no address
    for product in products_of(decoder):
        parameter = product.parameter
        if parameter.untyped_storage().nbytes() < parameter.nbytes:  # others have memory of their own
            yield product, parts[parameter.untyped_storage()._cdata]


def _together(parts: list[tuple[NamedWeight, str, AnyTensor]]) -> CodedWeight | None:
    """Return the matrix that is made of these tensors (the part of each, its name in the files, itself), if all of them
    have numbers to keep, of one form."""
    values = []
    for weight, name, tensor in parts:
        value = read_tensor(tensor, name) if isinstance(tensor, PackedTensor) else None
        if not isinstance(value, CodedWeight):
            return None
        values.append(weight.arranged(value))
    return stacked(values)


def _fill(
    model: Decoder | DraftHead,
    stored: Mapping[str, AnyTensor],
    canonical: Callable[[str], str | None] = str,
    cuts: Mapping[str | None, ShardCut] = MappingProxyType({}),
    in_int8: bool = False,
) -> None:
    weights: dict[str | None, NamedWeight] = {weight.name: weight for weight in model.checkpoint_weights()}
    filled = round_when_filled(model, weights.values())
    for name, tensor in read_unpacked(stored, {n: cuts[own] for n in stored if (own := canonical(n)) in cuts}):
        weight = weights.pop(canonical(name))  # whose memory goes if it is rounded
        weight.fill(tensor)
        if in_int8:
            filled(weight)


def _cuts(whole: Decoder, part: Decoder) -> dict[str | None, ShardCut]:
    """Return which part of each published tensor a rank has, by name, of those that are divided."""
    cuts: dict[str | None, ShardCut] = {}
    for weight, own in zip(whole.checkpoint_weights(), part.checkpoint_weights(), strict=True):
        assert weight.name == own.name, (weight.name, own.name)
        fused = None if weight.fused is None or own.fused is None else (weight.fused, own.fused)
        cut = cut_of(weight.view.shape, own.view.shape, part.shard, fused)
        if cut is not None:
            cuts[weight.name] = cut
    return cuts


def _save(
    directory: str | Path, config: Mapping[str, Any], weights: list[NamedWeight], others: dict[str, Tensor]
) -> None:
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    # A fused parameter's parts share memory, which safetensors refuses, so each is copied.
    tensors = [(w.name, w.published, w.view.nbytes) for w in weights]
    tensors += [(name, value.contiguous, value.nbytes) for name, value in others.items()]
    write_tensors(directory, tensors)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _part_of(name: str) -> str:
    if "embed_tokens" in name or name.startswith("lm_head"):
        return "embeddings"
    if "norm" in name:
        return "norms"
    return "mlp" if ".mlp." in name or ".block_sparse_moe." in name else "attention"


def _is_read(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor of a model's files belongs to what `load_target` loads, or to nothing that is known."""
    own = language_model_name(name)
    is_tied = config.tied_embeddings and own == HEAD
    return not (own is None or is_tied or _is_ignorable(name) or _is_behind(name, config))


def _is_behind(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor belongs to a layer behind the model's own, which predicts further tokens."""
    number = name.removeprefix("model.layers.").partition(".")[0]
    return config.family.prediction is not None and number.isdecimal() and int(number) >= config.num_layers


def _is_ignorable(name: str) -> bool:
    """Return whether a tensor is not needed: rotary frequencies, which the configuration determines, and parts of
    a head's target."""
    return name.endswith("rotary_emb.inv_freq") or name.startswith("verifier_")
