"""The shape of a draft: a small language model, an EAGLE-type head, or none (drafts from the host).

A head is one decoder layer of the target's width that reads the target's hidden states. The number of its own weights
matters twice: they take memory away from the KV pool, and each drafting pass streams them once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

from ...core.errors import ForedraftError
from ...core.model_shape import Attention, BlockParts, Experts, HeadShape, Mlp, ModelShape, prediction_layer
from ...core.model_shape.block_heads import BLOCK_LAYERS, NO_PARTS, USUAL_PARTS
from .hardware import Parallelism

STANDALONE = "STANDALONE"
EAGLE = "EAGLE"
EAGLE3 = "EAGLE3"
MULTI_LAYER_EAGLE = "MULTI_LAYER_EAGLE"
P_EAGLE = "P_EAGLE"
PARD = "PARD"
BLOCK_DRAFTERS = tuple(USUAL_PARTS)


class Drafting(Enum):
    """In which passes a draft on the device proposes the tokens of a round."""

    STEPS = "steps"  # one pass for each step, or one head
    MASKS = "masks"  # one pass over the accepted tokens and masks behind them
    BLOCK = "block"  # one pass over a block of masks, which attends to KV made from the target's hidden states


class DraftMismatch(ForedraftError):
    """A draft that cannot serve this target (for example another vocabulary)."""


@dataclass(frozen=True, slots=True)
class DraftShape:
    """What drafts. `body` is the stack of layers that one pass runs (None for drafts from the host).

    `fusion_inputs`: how many vectors the fully connected layer in front of the head joins (0: there is none).
    `fused_size`: the size of each, None: that of the head's own hidden states. `fusion_every_pass`: EAGLE joins the
    embedding and the last hidden state in every pass. EAGLE-3 joins three of the target's hidden states, only in the
    catch-up pass, because they exist only for tokens that the target has seen. `qkv_inputs`: width of the input of the
    first layer's attention in hidden sizes (EAGLE-3: 2, the embedding beside the feature). `heads`: separately trained
    heads, one per step (multi-layer EAGLE); else 1. `verify_share`: the time of proposing on the host, as a share of
    the verify pass. `look_up_share`: the share of the rows that draft by look-up in a round, beside a head that drafts
    for the others. `embedded`: the tokens that a head has own embeddings for; 0: it takes the
    target's. `unknown`: the name of a draft whose configuration is not known, so that its sizes are assumed.
    `drafting`: in which passes it drafts. `parts`: what a block drafter has beside its layers.
    `is_own_layer`: whether it is a layer of the target's own checkpoint.
    """

    name: str
    algorithm: str
    body: ModelShape | None
    fusion_inputs: int = 0
    fusion_every_pass: bool = False
    qkv_inputs: int = 1
    heads: int = 1
    shares_lm_head: bool = True
    verify_share: float = 0.0
    fused_size: int | None = None
    embedded: int = 0
    unknown: str | None = None
    drafting: Drafting = Drafting.STEPS
    parts: BlockParts = NO_PARTS
    target_vocab: int = 0
    is_own_layer: bool = False
    look_up_share: float = 0.0

    def __post_init__(self) -> None:
        assert 0.0 <= self.look_up_share <= 1.0, self.name
        assert self.heads >= 1, self.name
        assert self.qkv_inputs in (1, 2), self.name

    @property
    def on_host(self) -> bool:
        """Whether drafts are proposed from the text so far, without a model, in trees of any depth."""
        return self.body is None

    def runs(self, rows: int) -> float:
        """Return the share of rounds in which the draft's passes run: those in which not all rows draft by look-up. A
        row does so as often whatever the others do."""
        return 1.0 - self.look_up_share**rows

    @property
    def is_model(self) -> bool:
        """Whether it is a language model with embeddings and a head of its own."""
        return self.algorithm in (STANDALONE, PARD)

    @property
    def parameters(self) -> int:
        """The draft's own weights, without those that it shares with the target."""
        body = self.body
        if body is None:
            return 0
        if self.is_model:
            return body.parameters
        first = body.mixers[0][0]
        own = sum(count * body.mixer_parameters(mixer) for mixer, count in body.mixers)
        own += body.mixer_parameters(first, self.qkv_inputs) - body.mixer_parameters(first)
        own += sum(count * part.parameters(body.hidden) for part, count in body.mlps)
        layers = own + body.layers * 2 * body.hidden
        fusion = self.fusion_width * body.hidden
        embedding = self.embedded * body.hidden
        lm_head = 0 if self.shares_lm_head else body.embedding_parameters
        return self.heads * (layers + fusion) + embedding + lm_head + self.whole_parameters

    @property
    def whole_parameters(self) -> int:
        """The weights that every device has whole."""
        body = self.body
        if body is None:
            return 0
        return self.parts.parameters(body.hidden, body.layers, self.target_vocab or body.vocab, body.vocab)

    @property
    def fusion_width(self) -> int:
        """Elements that the fully connected layer in front of the head joins to one hidden state."""
        return 0 if self.body is None else self.fusion_inputs * (self.fused_size or self.body.hidden)

    @property
    def weight_bytes(self) -> int:
        if self.body is None:
            return 0
        if self.is_model:
            return self.body.weight_bytes
        body = self.body
        main, mixers = body.format_bytes(), body.attention_parameters * self.heads
        others = mixers * (body.format_bytes(body.attention_dtype) - main)
        others += body.dense_parameters * self.heads * (body.format_bytes(body.mlp_dtype) - main)
        return math.ceil(self.parameters * main + others)

    def weight_bytes_per_device(self, parallel: Parallelism) -> int:
        """Return the bytes of the draft's weights on one device, as those of a model are divided."""
        body = self.body
        if body is None:
            return 0
        whole = share = 0.0
        for part, count in body.mlps:
            if isinstance(part, Experts):
                size, layers = part.expert_parameters(body.hidden), self.heads * count
                whole += layers * part.count * size
                held = math.ceil(part.count / parallel.expert)
                share += layers * held * math.ceil(size * parallel.expert / parallel.devices)
        main = body.format_bytes()
        divided = self.weight_bytes - (whole + self.whole_parameters) * main
        return math.ceil(divided / parallel.tensor + (share + self.whole_parameters) * main)

    @property
    def kv_bytes_per_token(self) -> int:
        """Draft KV that every slot carries beside the target's: all layers of a model, one layer of each head."""
        return self.token_bytes(1)

    def token_bytes(self, tp: int) -> int:
        """Return the bytes of a token's draft KV on each of `tp` devices."""
        return 0 if self.body is None else self.heads * self.body.token_bytes(tp)

    @property
    def source(self) -> str:
        """Where the sizes are from."""
        return "computed" if self.body is None else self.body.source

    def explain(self) -> list[tuple[str, float, str, str]]:
        """Return rows (name, value, unit, source) for `--explain`."""
        return [
            (f"{self.name} own parameters", self.parameters / 1e9, "billion", f"{self.algorithm}, {self.source}"),
            (f"{self.name} own weights", self.weight_bytes / 1e9, "GB", "computed"),
            (f"{self.name} draft KV per token", self.kv_bytes_per_token, "B", "computed"),
        ]


def _head_body(target: ModelShape, name: str, vocab: int) -> ModelShape:
    """Return one dense decoder layer as wide as the target. A sparse target's head is dense, as wide as its active
    experts.

    Where the target's layers have no keys and values per head, the head gets grouped attention, as published heads
    have. It has the target's number of heads, each of 128 elements, eight of them for one KV head (assumption).
    """
    own = next((mixer for mixer, _ in target.mixers if isinstance(mixer, Attention)), None)
    if own is None:
        heads = next((mixer.heads for mixer, _ in target.mixers), 1)
        own = Attention(heads, max(heads // 8, 1), 128, 128)
    plain = Attention(own.heads, own.kv_heads, own.head_dim, own.value_dim)
    experts = target.experts
    if experts is not None:
        width = experts.top_k * experts.width + experts.shared_width
    else:
        width = max((part.width for part, _ in target.mlps if isinstance(part, Mlp)), default=4 * target.hidden)
    return replace(
        target, name=name, layers=1, vocab=vocab, tied_embeddings=False, weight_dtype="bf16", attention_dtype=None,
        mlp_dtype=None, mixers=((plain, 1),), mlps=((Mlp(width), 1),), config=None,
        layer_inputs=None,
        source=f"assumed: one decoder layer of {target.name}",
    )  # fmt: skip


def eagle_head(target: ModelShape) -> DraftShape:
    """Shape EAGLE's head (arXiv 2401.15077): a 2h→h layer and one decoder layer;
    embedding and the full LM head are the target's."""
    name = f"eagle({target.name})"
    return DraftShape(name, EAGLE, _head_body(target, name, target.vocab), fusion_inputs=2, fusion_every_pass=True)


def eagle3_head(target: ModelShape, draft_vocab: int = 32_000) -> DraftShape:
    """Return EAGLE-3's head (arXiv 2503.01840): a 3h→h layer over three target layers, one decoder layer whose q, k and
    v read 2h, and an LM head of its own. `draft_vocab`: the size of that head's vocabulary, at most the target's."""
    if not 1 <= draft_vocab <= target.vocab:
        message = f"draft_vocab must be 1 … {target.vocab} (the vocabulary of {target.name}), not {draft_vocab}"
        raise DraftMismatch(message)
    name = f"eagle3({target.name})"
    body = _head_body(target, name, draft_vocab)
    return DraftShape(name, EAGLE3, body, fusion_inputs=3, qkv_inputs=2, shares_lm_head=False)


def parallel_eagle(target: ModelShape, draft_vocab: int) -> DraftShape:
    """Return P-EAGLE's head (arXiv 2602.01469): that of EAGLE-3 with embeddings of its own."""
    head = replace(eagle3_head(target, draft_vocab), name=f"p-eagle({target.name})", algorithm=P_EAGLE)
    return replace(head, drafting=Drafting.MASKS, embedded=target.vocab)


def block_drafter(target: ModelShape, algorithm: str) -> DraftShape:
    """Return a block drafter as published ones are (arXiv 2602.06036): dense layers of the target's sizes, a layer that
    fuses as many hidden states, and embedding and LM head of the target."""
    name = f"{algorithm.lower()}({target.name})"
    one = _head_body(target, name, target.vocab)
    (mixer, _), (mlp, _) = one.mixers[0], one.mlps[0]
    body = replace(one, layers=BLOCK_LAYERS, mixers=((mixer, BLOCK_LAYERS),), mlps=((mlp, BLOCK_LAYERS),))
    body = replace(body, source=f"assumed: {BLOCK_LAYERS} decoder layers of {target.name}")
    return DraftShape(
        name, algorithm, body, fusion_inputs=BLOCK_LAYERS, drafting=Drafting.BLOCK, parts=USUAL_PARTS[algorithm]
    )


def multi_layer_eagle(target: ModelShape, heads: int) -> DraftShape:
    """Shape `heads` EAGLE heads, one for each step, each with its own layer and its own KV; embedding and LM head are
    shared."""
    if heads < 1:
        raise DraftMismatch(f"multi-layer EAGLE needs at least one head, not {heads}")
    return replace(eagle_head(target), name=f"eagle×{heads}({target.name})", algorithm=MULTI_LAYER_EAGLE, heads=heads)


def own_head(head: HeadShape, target: ModelShape, algorithm: str, heads: int = 1) -> DraftShape:
    """Shape a head whose configuration is known. `heads`: those of a multi-layer draft whose file does not say."""
    if algorithm in (EAGLE3, P_EAGLE):
        shape = _fusing_head(head, target, algorithm, qkv_inputs=2)
        return shape if algorithm == EAGLE3 else replace(shape, drafting=Drafting.MASKS, embedded=target.vocab)
    count = (head.count or heads) if algorithm == MULTI_LAYER_EAGLE else 1
    return DraftShape(head.body.name, algorithm, head.body, fusion_inputs=2, fusion_every_pass=True, heads=count)


def own_block_drafter(head: HeadShape, parts: BlockParts, target: ModelShape, algorithm: str) -> DraftShape:
    """Shape a block drafter whose configuration is known."""
    shape = _fusing_head(head, target, algorithm)
    return replace(shape, drafting=Drafting.BLOCK, parts=parts, target_vocab=target.vocab)


def _fusing_head(head: HeadShape, target: ModelShape, algorithm: str, qkv_inputs: int = 1) -> DraftShape:
    return DraftShape(
        head.body.name, algorithm, head.body, fusion_inputs=head.fused, qkv_inputs=qkv_inputs,
        fused_size=head.fused_size, embedded=0 if head.body.hidden == target.hidden else target.vocab,
        shares_lm_head=not head.has_lm_head,
    )  # fmt: skip


def own_layer(target: ModelShape, algorithm: str, heads: int) -> DraftShape:
    """Shape the layers of the target's own checkpoint that draft for it, each a layer of the target behind a 2h→h
    layer."""
    body = prediction_layer(target)
    return DraftShape(
        body.name, algorithm, body, fusion_inputs=2, fusion_every_pass=True, heads=heads, is_own_layer=True
    )


def standalone(draft: ModelShape, target: ModelShape, algorithm: str = STANDALONE) -> DraftShape:
    """Shape a small language model with the target's tokenizer. Raises `DraftMismatch` when the vocabularies differ."""
    if draft.vocab != target.vocab:
        raise DraftMismatch(
            f"a draft model must have its target's vocabulary: {draft.name} has {draft.vocab} tokens, "
            f"{target.name} has {target.vocab}"
        )
    body = replace(draft, kv_dtype=target.kv_dtype)
    drafting = Drafting.MASKS if algorithm == PARD else Drafting.STEPS
    return DraftShape(draft.name, algorithm, body, shares_lm_head=False, drafting=drafting)


def host_draft(algorithm: str, verify_share: float) -> DraftShape:
    """Shape drafts from the host: no weights, no KV; the round waits for them a small part of the verify time."""
    return DraftShape(algorithm.lower(), algorithm, None, verify_share=verify_share)
