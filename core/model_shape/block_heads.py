"""What block drafters have beside their layers, and the reader of their `config.json`.

A block drafter (DFlash and what follows it) predicts a block of tokens in one pass over mask tokens. Its keys and
values of earlier tokens are made from fused hidden states of the target. Published files have its keys at top level
(the format of speculators), or in `dflash_config` or `dspark_config` beside the keys of the layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..parsing import ConfigReader
from .families import read_model_shape
from .heads import SPECULATORS_KEY, HeadShape, flat_head, refuse_switches
from .mixers import replace_missing
from .prediction import prediction_layer
from .shape import ModelShape

DFLASH, DFLASH2, DSPARK = "DFLASH", "DFLASH2", "DSPARK"
_NESTED = ("dflash_config", "dspark_config")
_OWN_PREFIX = "dspark_"
_OWN_RANK = "dspark_markov_rank"
_OWN_LAYERS = 3  # of a target's checkpoint that does not say how many of them draft
_RENAMED = {"noise_token_id": "mask_token_id"}
_MARKS = re.compile(r"dflash|dspark", re.IGNORECASE)
_REFINERS = re.compile(r"xpress|domino|lilicorr", re.IGNORECASE)
_SWITCHES = (
    "sample_from_anchor", "bonus_anchor", "sliding_window_non_causal", "causal", "is_causal", "enable_confidence_head",
    "confidence_head_with_markov", "shift_label", "parallel_drafting",
)  # fmt: skip
_SELECTOR_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_CONFIDENCE_KEYS = ("enable_confidence_head", "confidence_head_with_markov")
_MARKOV_HEADS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, slots=True)
class BlockParts:
    """The parts of a block drafter beside its layers; 0 where it has none.

    Attributes:
        block_size: Tokens of a block as the drafter was trained; 0: not known.
        samples_anchor: Whether the place of the last known token predicts, too, so that a block of k tokens drafts k;
            otherwise the masks behind it alone do.
        conv_taps: Taps of the convolutions before and after each sublayer (DFlash2).
        conv_group: Channels that share a kernel of them.
        selector_rank: Rank of the codebooks that score pairs of candidates (DFlash2).
        selector_top_k: Candidates of a position.
        markov_rank: Rank of the head that adds a bias by the token before (DSpark).
        markov_head: Its form: "vanilla", "gated" or "rnn".
        has_confidence: Whether a head predicts how likely each draft is accepted.
        confidence_with_markov: Whether it also sees what the Markov head makes of the token before.
        mask_token: The token at the places that predict; None: not known.
        is_causal: Whether places of a block see only those before them, in all layers; None: `windows_are_causal`.
        windows_are_causal: The same of layers with a window.
        input_scale: What embeddings of the block are multiplied by.
        logit_scale: What logits are multiplied by before they are capped.
        logit_softcap: c: logits become c · tanh(logit / c); 0: they stay.
    """

    block_size: int = 0
    samples_anchor: bool = False
    conv_taps: int = 0
    conv_group: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    markov_rank: int = 0
    markov_head: str = "vanilla"
    has_confidence: bool = False
    confidence_with_markov: bool = True
    mask_token: int | None = None
    is_causal: bool | None = None
    windows_are_causal: bool = True
    input_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0

    @property
    def most_drafts(self) -> int:
        """The drafts of a block of the trained size; 0: not known."""
        return max(self.block_size - (not self.samples_anchor), 0)

    def conv_kernels(self, hidden: int) -> int:
        """Return the columns of the product that gives the kernels of one sublayer's two convolutions."""
        return 2 * self.conv_taps * (hidden // self.conv_group) if self.conv_taps else 0

    def parameters(self, hidden: int, layers: int, vocab: int, draft_vocab: int) -> int:
        """Return the weights of all parts. Every device has them whole."""
        rank, markov = self.markov_rank, 0
        convs = 2 * layers * (hidden * self.conv_kernels(hidden) + 2 * self.conv_taps * hidden)
        selector = self.selector_rank * (2 * vocab + hidden)
        if rank:
            markov = rank * (vocab + draft_vocab)
            markov += {"gated": (hidden + rank) * rank, "rnn": (2 * rank + hidden) * 3 * rank}.get(self.markov_head, 0)
        return convs + selector + markov + self.has_confidence * (hidden + rank * self.confidence_with_markov)


NO_PARTS = BlockParts()
USUAL_PARTS = {
    DFLASH: NO_PARTS,
    DFLASH2: BlockParts(conv_taps=2, conv_group=16, selector_rank=256, selector_top_k=16),
    DSPARK: BlockParts(samples_anchor=True, markov_rank=256, has_confidence=True),
}
"""Block drafters, with the parts of one whose configuration is not known: the defaults of speculators 0.9."""
BLOCK_LAYERS = 5
"""The layers of a block drafter whose configuration is not known, and the hidden states that it fuses (the default of
speculators 0.9)."""


def flat_block(reader: ConfigReader) -> ConfigReader:
    """Return a reader that finds the keys of a block drafter at top level, wherever the file has them."""
    data = dict(flat_head(reader).data)
    for key in _NESTED:
        data |= {name: value for name, value in reader.under(key).data.items() if value is not None}
    names = {key: key.removeprefix(_OWN_PREFIX) for key in reader.data if key.startswith(_OWN_PREFIX)}
    own = {_RENAMED.get(name, name): reader.data[key] for key, name in names.items() if key not in _NESTED}
    return reader.with_data({**data, **{key: value for key, value in own.items() if value is not None}})


def brings_block_drafter(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration is that of a target with a block drafter in its own checkpoint."""
    return bool(config.get(_OWN_RANK))


def block_kind(config: Mapping[str, Any]) -> str | None:
    """Return the algorithm of a block drafter by its configuration; None for another draft."""
    reader = ConfigReader(config, "")
    data = flat_block(reader).data
    named = [config.get(SPECULATORS_KEY), *_architectures(reader)]
    if not any(_MARKS.search(str(name)) for name in named) and not any(config.get(key) for key in _NESTED):
        return DSPARK if brings_block_drafter(config) else None
    if data.get("markov_rank") or any("dspark" in str(name).lower() for name in named):
        return DSPARK
    return DFLASH2 if data.get("selector_rank") or "dflash2" in map(_plain, named) else DFLASH


def most_block_drafts(config: Mapping[str, Any]) -> int:
    """Return the drafts of a block of the trained size, by a drafter's configuration; 0: not known."""
    return _parts(flat_block(ConfigReader(config, "")), DFLASH if block_kind(config) != DSPARK else DSPARK).most_drafts


def _architectures(reader: ConfigReader) -> list[Any]:
    names = reader.get("architectures")
    return names if isinstance(names, list) else []


def _plain(name: Any) -> str:
    return str(name).lower().removesuffix("draftmodel").removesuffix("speculator")


class TargetSizes(Protocol):
    """What a drafter's configuration is compared with."""

    @property
    def name(self) -> str: ...
    @property
    def layers(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def vocab(self) -> int: ...


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """What a drafter's configuration says beside its layers. `reader` finds the keys of these at top level.

    `fused_layers`: ascending, the target's layers whose inputs are fused, its number of layers being the last one's
    output; None: it takes the last hidden state alone. `vocab`: the tokens that it drafts.
    """

    reader: ConfigReader
    fused_layers: tuple[int, ...] | None
    fused_size: int
    vocab: int
    parts: BlockParts


def read_block_config(whole: ConfigReader, name: str, target: TargetSizes, algorithm: str) -> BlockConfig:
    """Read a parsed `config.json` of a block drafter for `target`. Raises ConfigError."""
    kind = block_kind(whole.data)
    if kind != algorithm:
        message = f"{name} is made for {kind or 'another algorithm'}, not for {algorithm}"
        whole.problem("architectures" if whole.data.get("architectures") else SPECULATORS_KEY, message)
    reader = flat_block(whole)
    _refuse_refiners(reader)
    refuse_switches(reader, *_SWITCHES)
    whole.raise_problems()
    reader = replace_missing(reader, vocab_size=target.vocab)
    layers, size = _fused_layers(reader, target), _fused_size(reader, target)
    _check_tokens(reader, target)
    parts = _parts(reader, algorithm)
    own_vocab = reader.integer("draft_vocab_size", None)
    whole.raise_problems()
    vocab = own_vocab or target.vocab
    if vocab > target.vocab:
        reader.problem("draft_vocab_size", f"{vocab} of {target.vocab} tokens")
    hidden = reader.integer("hidden_size")
    if parts.conv_group and hidden % parts.conv_group:
        reader.problem("conv_group_size", f"{parts.conv_group} does not divide the hidden size of {hidden}")
    if parts.selector_top_k > vocab:
        reader.problem("selector_top_k", f"{parts.selector_top_k} of {vocab} tokens")
    whole.raise_problems()
    return BlockConfig(reader, layers, size, vocab, parts)


def read_block_head(
    config: Mapping[str, Any], source: str, name: str, target: ModelShape, algorithm: str
) -> tuple[HeadShape, BlockParts]:
    """Read a parsed `config.json` of a block drafter for `target`: its layers, and its other parts. Raises
    ConfigError."""
    whole = ConfigReader(config, source)
    found = read_block_config(whole, name, target, algorithm)
    reader = replace_missing(found.reader, max_position_embeddings=target.max_context)
    data = {**reader.data, "architectures": None, "vocab_size": target.vocab}
    for key in ("torch_dtype", "dtype"):  # servers load it in the type of the target
        data[key] = None if data.get(key) == "float32" else data.get(key)
    body = read_model_shape(data, source, name, is_whole=False)
    whole.raise_problems()
    has_lm_head = found.vocab < target.vocab or reader.flag("has_own_lm_head")
    body = replace(body, vocab=found.vocab, tied_embeddings=False, kv_dtype=target.kv_dtype, config=None)
    return HeadShape(body, len(found.fused_layers or ()), found.fused_size, None, has_lm_head), found.parts


def read_own_block(target: ModelShape) -> tuple[HeadShape, BlockParts] | None:
    """Return the block drafter that a target's own checkpoint has (DSpark of DeepSeek-V4): layers of its form, and the
    other parts; None if it has none. Raises ConfigError."""
    config = target.config or {}
    if not brings_block_drafter(config):
        return None
    reader = flat_block(ConfigReader(config, target.source))
    count = reader.integer("n_mtp_layers", _OWN_LAYERS)
    fused, parts = _fused_layers(replace_missing(reader, num_hidden_layers=count), target), _parts(reader, DSPARK)
    reader.raise_problems()
    one = prediction_layer(target)
    mixers = tuple((mixer, number * count) for mixer, number in one.mixers)
    mlps = tuple((mlp, number * count) for mlp, number in one.mlps)
    body = replace(one, name=f"DSpark of {target.name}", layers=count, mixers=mixers, mlps=mlps)
    return HeadShape(body, len(fused or ()), target.hidden, None, False), parts


def _refuse_refiners(reader: ConfigReader) -> None:
    """Note what chooses the tokens of a block in another way than those that have a price."""
    named = [("architectures", name) for name in _architectures(reader)]
    named += [(key, reader.get(key)) for key in (SPECULATORS_KEY, "projector_type")]
    for key, name in named:
        if name is not None and _REFINERS.search(str(name)):
            reader.problem(key, f"{name} refines a block in a way that is not modelled; {DFLASH2} and {DSPARK} are")
            return


def _fused_size(reader: ConfigReader, target: TargetSizes) -> int:
    """Return the size of the hidden states that are fused, which has to be the target's."""
    key = "hidden_size" if reader.get("target_hidden_size") is None else "target_hidden_size"
    size = reader.integer(key)
    if size != target.hidden:
        message = f"the drafter takes hidden states of size {size}, those of {target.name} have {target.hidden}"
        reader.problem(key, message)
    layers = reader.integer("num_target_layers", None)
    if layers not in (None, target.layers):
        reader.problem("num_target_layers", f"made for a target of {layers} layers, {target.name} has {target.layers}")
    return size


def _fused_layers(reader: ConfigReader, target: TargetSizes) -> tuple[int, ...] | None:
    """Return the target's layers whose inputs are fused. `target_layer_ids` count layers whose output is taken, the
    keys of speculators those whose input is. Without a list they are as many as the drafter has layers, spread evenly
    over the target."""
    if not reader.flag("use_aux_hidden_state", True):
        return None
    for key in ("target_layer_ids", "aux_hidden_state_layer_ids"):
        ids, behind = reader.get(key), int(key == "target_layer_ids")
        if ids is None:
            continue
        last = target.layers - behind
        if not isinstance(ids, list) or not ids or not all(type(one) is int and 0 <= one <= last for one in ids):
            reader.problem(key, f"must be a list of layers from 0 to {last} of {target.name}, got {ids!r}")
            return None
        return tuple(one + behind for one in ids)
    return usual_fused_layers(reader.integer("num_hidden_layers"), target.layers)


def usual_fused_layers(count: int, target_layers: int) -> tuple[int, ...]:
    """Return which of a target's layers have the inputs that a drafter of `count` layers fuses, if it does not say."""
    if count == 1:
        return (target_layers // 2 + 1,)
    span = max(target_layers - 4, 0)
    return tuple(round(1 + place * span / (count - 1)) + 1 for place in range(count))


def _check_tokens(reader: ConfigReader, target: TargetSizes) -> None:
    """Note a vocabulary that is not the target's, and a mask token outside of it."""
    vocab, mask = reader.integer("vocab_size"), reader.get("mask_token_id")
    if vocab != target.vocab:
        reader.problem("vocab_size", f"the drafter has {vocab} tokens, {target.name} has {target.vocab}")
    if mask is not None and (type(mask) is not int or not 0 <= mask < target.vocab):
        reader.problem("mask_token_id", f"must be a token from 0 to {target.vocab - 1}, got {mask!r}")


def _parts(reader: ConfigReader, algorithm: str) -> BlockParts:
    """Read the parts of an algorithm beside the layers."""
    anchor = reader.flag("sample_from_anchor", algorithm == DSPARK)
    causal = reader.flag("is_causal", reader.flag("causal"))
    parts = BlockParts(
        block_size=reader.integer("block_size", 0, minimum=1 if anchor else 2),
        samples_anchor=anchor,
        mask_token=mask if type(mask := reader.get("mask_token_id")) is int else None,
        is_causal=None if reader.get("is_causal") is None and reader.get("causal") is None else causal,
        windows_are_causal=not reader.flag("sliding_window_non_causal", algorithm == DFLASH2),
        input_scale=reader.number("input_embedding_scale", 1.0),
        logit_scale=reader.number("output_multiplier", 1.0),
        logit_softcap=reader.number("final_logit_softcapping") if reader.get("final_logit_softcapping") else 0.0,
    )
    if algorithm == DFLASH2:
        taps, group, rank, top_k = (reader.integer(key) for key in _SELECTOR_KEYS)
        return replace(parts, conv_taps=taps, conv_group=group, selector_rank=rank, selector_top_k=top_k)
    if algorithm != DSPARK:
        return parts
    rank, head = reader.integer("markov_rank", 0, minimum=0), str(reader.get("markov_head_type") or "vanilla").lower()
    if head not in _MARKOV_HEADS:
        reader.problem("markov_head_type", f"expected {', '.join(_MARKOV_HEADS)}, got {head!r}")
    has_confidence, with_markov = (reader.flag(key, True) for key in _CONFIDENCE_KEYS)
    return replace(
        parts,
        markov_rank=rank,
        markov_head=head,
        has_confidence=has_confidence,
        confidence_with_markov=with_markov and rank > 0,
    )
