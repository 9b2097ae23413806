"""Making a pair: target, STANDALONE draft, EAGLE-3 head, multi-layer EAGLE draft, block drafter, one after another,
each kept when it is done."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
import torch
from torch import Tensor

from ...core.model_shape import BlockParts
from ...core.model_shape.block_heads import DFLASH
from ..models.checkpoint import (
    STANDALONE,
    load_draft,
    load_target,
    random_head,
    random_weights,
    save_draft,
    save_target,
)
from ..models.config import LLAMA, ModelConfig
from ..models.decoder import Decoder
from ..models.eagle import DraftHead, Eagle3Head, MultiLayerEagleHeads
from ..models.heads.block import BlockHead
from ..models.heads.block_config import QWEN3
from ..models.heads.config import EAGLE3, MULTI_LAYER_EAGLE, HeadConfig, default_aux_layers
from ..models.layer import Layer
from ..models.mixers import GroupedAttention
from ..ops.torch_ops import TorchOps
from .continuations import continue_texts
from .corpus import (
    END_OF_TEXT_ID,
    corpus_windows,
    encode_texts,
    load_vocabulary,
    make_corpus,
    most_frequent,
    rows_of,
    save_vocabulary,
    spread_prompts,
    train_vocabulary,
)
from .drafting import Draft, distillation_loss, measure_drafts, next_token_loss
from .sizes import PairOptions, Schedule, TinyShape, TinySize, making, publish, read_summary, writing_part
from .training import HEAD_RATES, LANGUAGE_MODEL_RATES, LossOf, OnProgress, Trained, TrainingProgress, train

TARGET = "target"
ALGORITHMS = {"draft": STANDALONE, "eagle3": EAGLE3, "multi_layer_eagle": MULTI_LAYER_EAGLE, "dflash": DFLASH}
"""By directory."""
PARTS = (TARGET, *ALGORITHMS)
TRAINING = "training.json"  # in each part: how it was trained
SAMPLING_TEMPERATURE = 0.7  # of the half of the target's own texts that are not greedy
STEP_WEIGHT = 0.8  # of each further step's loss in an unrolled draft's
WHOLE_WINDOWS_FROM = 0.75  # of a training
CHAIN_LENGTHS = (1, 3, 5)
MOST_REPEATS = 0.5  # of the tokens that the target writes may be the one before, else it has learnt no text


@dataclass(frozen=True, slots=True)
class MadePair:
    """The pair's directory, its summary, and whether it existed before."""

    directory: Path
    summary: dict[str, Any]
    reused: bool


def make_pair(directory: Path, options: PairOptions, on_progress: OnProgress) -> MadePair:
    """Return the pair of `options` in `directory`, trained on the CPU unless it is there.

    An interrupted run leaves finished parts in a directory beside it, from which the next one goes on. Weights are the
    same for the same options, versions and number of threads. Raises ConfigError if something else is in `directory`.
    """
    summary = read_summary(directory, options)
    if summary is not None:
        return MadePair(directory, summary, reused=True)
    with making(directory, options) as partial:
        summary = read_summary(directory, options)  # another process may have made it meanwhile
        if summary is not None:
            return MadePair(directory, summary, reused=True)
        summary = _Workshop(partial, options, on_progress).make()
        publish(partial, directory, summary)
    return MadePair(directory, summary, reused=False)


class _Workshop:
    """The run that makes one pair."""

    def __init__(self, partial: Path, options: PairOptions, on_progress: OnProgress) -> None:
        self.partial, self.options, self.size = partial, options, options.size
        self.corpus, self.on_progress = make_corpus(options.size.num_modules), on_progress
        self.missing = [part for part in PARTS if not (partial / part).is_dir()]

    def make(self) -> dict[str, Any]:
        is_there = TARGET not in self.missing
        vocabulary = (
            load_vocabulary(self.partial / TARGET)
            if is_there
            else train_vocabulary(self.corpus.training, self.size.vocab_size)
        )
        self._training = self._tokens(vocabulary, self.corpus.training)
        if not is_there:
            self._make_target(vocabulary)
        target = load_target(self.partial / TARGET, TorchOps(), "cpu", torch.float32)
        drafts = [part for part in self.missing if part != TARGET]
        texts = self._own_texts(target) if drafts else None
        for part in drafts:
            assert texts is not None
            self._make_draft(part, target, texts)
        return self._summary(target, self._tokens(vocabulary, self.corpus.held_out))

    def _make_target(self, vocabulary: tokenizers.Tokenizer) -> None:
        size, seed, tokens = self.size, self.options.seed, self._training
        target = new_target(size, seed)

        def loss_of(step: int, done: float) -> tuple[Tensor, int]:
            windows = corpus_windows(tokens, size.target_schedule.batch_size, size.window, seed, 0, step)
            windows = _short_first(windows, done)
            return next_token_loss(target, windows), windows.numel()

        trained = self._train(TARGET, target, loss_of, size.target_schedule)
        with writing_part(self.partial, TARGET) as directory:
            save_target(target, directory)
            save_vocabulary(vocabulary, directory, size.max_positions)
            _write_training(directory, trained)

    def _own_texts(self, target: Decoder) -> Tensor:
        """Return texts by the target itself, half of them greedy, in a mixed order; int64 [n, window]."""
        size, seed = self.size, self.options.seed
        prompts = spread_prompts(self._training, size.num_continuations, size.prompt_len)
        self.on_progress(TrainingProgress("own texts", 0, 2, None, 0.0, 0.0))
        greedy = continue_texts(target, prompts[::2], size.window)
        self.on_progress(TrainingProgress("own texts", 1, 2, None, 0.0, 0.0))
        sampled = continue_texts(target, prompts[1::2], size.window, SAMPLING_TEMPERATURE, seed)
        self.on_progress(TrainingProgress("own texts", 2, 2, None, 0.0, 0.0))
        texts = torch.cat([greedy, sampled])
        return texts[torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))]

    def _make_draft(self, part: str, target: Decoder, texts: Tensor) -> None:
        size, seed = self.size, self.options.seed
        schedule = size.block_schedule if part == "dflash" else size.draft_schedule
        number = PARTS.index(part)
        ids = most_frequent([self._training, texts], size.vocab_size, size.draft_vocab_size)
        draft, num_steps = new_draft(part, size, target, seed + number, ids)
        from_corpus = max(schedule.batch_size // 2, 1)
        from_target = max(schedule.batch_size - from_corpus, 1)

        def loss_of(step: int, done: float) -> tuple[Tensor, int]:
            windows = corpus_windows(self._training, from_corpus, size.window, seed, number, step)
            windows = _short_first(torch.cat([windows, rows_of(texts, from_target, step)]), done)
            return distillation_loss(target, draft, windows, num_steps, STEP_WEIGHT), windows.numel()

        trained = self._train(part, draft, loss_of, schedule)
        with writing_part(self.partial, part) as directory:
            save_draft(draft, directory)
            if isinstance(draft, Decoder):
                save_vocabulary(load_vocabulary(self.partial / TARGET), directory, size.max_positions)
            _write_training(directory, trained)

    def _train(self, part: str, model: Draft, loss_of: LossOf, schedule: Schedule) -> Trained:
        model.requires_grad_(True)
        rates = LANGUAGE_MODEL_RATES if isinstance(model, Decoder) else HEAD_RATES
        trained = train(part, model, loss_of, schedule.num_steps, self.on_progress, rates)
        model.requires_grad_(False)
        return trained

    def _summary(self, target: Decoder, held_out: Tensor) -> dict[str, Any]:
        """Return the content of pair.json: the parts of the pair, and its quality on files that were not trained on."""
        size = self.size
        windows = spread_prompts(held_out, size.num_measured, size.window)
        drafts = {part: load_draft(self.partial / part, algorithm, target) for part, algorithm in ALGORITHMS.items()}
        chains: dict[str, tuple[int, ...]] = dict.fromkeys(drafts, CHAIN_LENGTHS)
        heads = {n for n in CHAIN_LENGTHS if n <= size.num_heads} | {size.num_heads}
        chains["multi_layer_eagle"] = tuple(sorted(heads))
        chains["dflash"] = tuple(n for n in CHAIN_LENGTHS if n < size.block_size)
        texts = continue_texts(target, windows[:, : size.prompt_len], size.window)
        measured = {}
        for part, draft in drafts.items():
            ids = None if isinstance(draft, Decoder) else draft.target_ids
            untrained, _ = new_draft(part, size, target, self.options.seed + PARTS.index(part), ids)
            measured[part] = (draft, untrained, chains[part])
        qualities = measure_drafts(target, measured, texts, size.prompt_len)

        quality = self._target_quality(target, windows, texts[:, size.prompt_len :])
        parts = {TARGET: {**_part(self.partial / TARGET, target), **quality}}
        for part, algorithm in ALGORITHMS.items():
            parts[part] = {
                "algorithm": algorithm,
                **_part(self.partial / part, drafts[part]),
                "agreement": qualities[part].agreement,
                "untrained_agreement": qualities[part].untrained_agreement,
                "has_learnt": qualities[part].has_learnt,
                "accept_lengths": {str(steps): length for steps, length in qualities[part].accept_lengths.items()},
            }
        return {
            "digest": self.options.digest,
            "described": self.options.described,
            "options": asdict(self.options),
            "versions": {
                "foredraft": version("foredraft"),
                "python": platform.python_version(),
                "torch": torch.__version__,
                "tokenizers": tokenizers.__version__,
            },
            "num_threads": torch.get_num_threads(),
            "corpus": {"digest": self.corpus.digest, "bytes": self.corpus.num_bytes},
            "parts": parts,
        }

    @torch.no_grad()
    def _target_quality(self, target: Decoder, windows: Tensor, own: Tensor) -> dict[str, Any]:
        """Return the target's loss on held-out windows beside that of the token frequencies, nats per token, and
        how many of the tokens that it wrote itself, int64 [n, t], repeat the one before."""
        loss = float(torch.stack([next_token_loss(target, window) for window in windows.split(1)]).mean())
        counts = torch.bincount(self._training, minlength=self.size.vocab_size).double() + 1.0
        frequency_loss = float(-(counts / counts.sum()).log()[windows[:, 1:]].mean())
        repeats = float((own[:, 1:] == own[:, :-1]).double().mean())
        has_learnt = loss < frequency_loss and repeats <= MOST_REPEATS
        return {"held_out_loss": loss, "frequency_loss": frequency_loss, "repeats": repeats, "has_learnt": has_learnt}

    def _tokens(self, vocabulary: tokenizers.Tokenizer, texts: tuple[str, ...]) -> Tensor:
        return torch.from_numpy(encode_texts(vocabulary, texts))


def _short_first(windows: Tensor, done: float) -> Tensor:
    """Cut windows in halves for most of the training: nearer tokens matter more, and attention over them costs less."""
    return windows if done >= WHOLE_WINDOWS_FROM else windows.unflatten(1, (2, -1)).flatten(0, 1)


def _part(directory: Path, model: Draft) -> dict[str, Any]:
    num_parameters = sum(weight.numel() for weight in model.parameters())
    training = json.loads((directory / TRAINING).read_text(encoding="utf-8"))
    return {"parameters": num_parameters, "bytes": model.weight_bytes, **training}


def _write_training(directory: Path, trained: Trained) -> None:
    (directory / TRAINING).write_text(json.dumps(asdict(trained), indent=2) + "\n", encoding="utf-8")


def new_target(size: TinySize, seed: int) -> Decoder:
    """Return a Llama."""
    return _language_model(size, size.target, seed)


def new_standalone(size: TinySize, seed: int) -> Decoder:
    """Return a smaller Llama of the same vocabulary."""
    return _language_model(size, size.standalone, seed)


def new_draft(part: str, size: TinySize, target: Decoder, seed: int, ids: Tensor | None) -> tuple[Draft, int]:
    """Return the untrained draft of a part, and the steps over which it learns. `ids`: the vocabulary of an EAGLE-3
    head, as `new_eagle3` takes it."""
    if part == "draft":
        return new_standalone(size, seed), 1
    if part == "multi_layer_eagle":
        return new_multi_layer_eagle(size, target, seed), size.num_heads
    if part == "dflash":
        return new_block_drafter(size, target, seed), size.block_size - 1
    assert ids is not None, "an EAGLE-3 head has a vocabulary of its own"
    return new_eagle3(size, target, ids, seed), size.unroll


def new_eagle3(size: TinySize, target: Decoder, vocabulary: Tensor, seed: int) -> Eagle3Head:
    """Make an EAGLE-3 head over the tokens `vocabulary` (int64 [draft vocabulary], ascending);
    its output layer begins as the target's."""
    aux_layers = default_aux_layers(target.num_layers)
    head = _head(EAGLE3, target, seed, draft_vocab_size=size.draft_vocab_size, aux_layers=aux_layers)
    assert isinstance(head, Eagle3Head)
    head.set_vocabulary(vocabulary)
    assert head.lm_head_weight is not None, "EAGLE-3 has an output layer of its own"
    with torch.no_grad():
        head.lm_head_weight.copy_(target.output_embedding[vocabulary.to(target.device)])
    return head


def new_multi_layer_eagle(size: TinySize, target: Decoder, seed: int) -> MultiLayerEagleHeads:
    """Return one EAGLE head per step; embeddings and output layer are the target's."""
    head = _head(MULTI_LAYER_EAGLE, target, seed, draft_vocab_size=target.vocab_size, num_heads=size.num_heads)
    assert isinstance(head, MultiLayerEagleHeads)
    return head


def new_block_drafter(size: TinySize, target: Decoder, seed: int) -> BlockHead:
    """Return a block drafter, whose mask is the token that is rarest in the vocabulary."""
    parts = BlockParts(block_size=size.block_size, mask_token=target.vocab_size - 1)
    layers = {"architecture": QWEN3, "qk_norm": True, "num_layers": size.block_layers}
    head = _head(
        DFLASH, target, seed, layers, draft_vocab_size=target.vocab_size, block=parts,
        aux_layers=default_aux_layers(target.num_layers),
    )  # fmt: skip
    assert isinstance(head, BlockHead)
    return head


def _head(
    algorithm: str, target: Decoder, seed: int, layers: Mapping[str, Any] = MappingProxyType({}), **sizes: Any
) -> DraftHead:
    layer = replace(target.config, **{"num_layers": 1, "tied_embeddings": False, **layers})
    return random_head(HeadConfig(algorithm, layer, target.hidden_size, **sizes), target, seed)


def _language_model(size: TinySize, shape: TinyShape, seed: int) -> Decoder:
    """Make a model whose layers add nothing at first, so that the token is not lost in the noise of many of them."""
    model = random_weights(_llama(size, shape), TorchOps(), "cpu", torch.float32, seed)
    with torch.no_grad():
        for layer in model.layers:
            assert isinstance(layer, Layer) and isinstance(layer.mixer, GroupedAttention)
            layer.mixer.output_weight.zero_()
            layer.mlp.down_weight.zero_()
    return model


def _llama(size: TinySize, shape: TinyShape) -> ModelConfig:
    return ModelConfig(
        architecture=LLAMA,
        vocab_size=size.vocab_size,
        **asdict(shape),
        max_position_embeddings=size.max_positions,
        tied_embeddings=True,
        eos_token_ids=(END_OF_TEXT_ID,),
    )
