"""Making a pair: target, STANDALONE draft, EAGLE-3 head, multi-layer EAGLE draft, one after another, each kept
when it is done."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor

from ...core.errors import ConfigError
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
from ..models.eagle import DraftHead, Eagle3Head, MultiLayerEagle
from ..models.head_config import EAGLE3, MULTI_LAYER_EAGLE, HeadConfig, default_aux_layers
from ..models.layer import Layer
from ..models.mixers import GroupedAttention
from ..ops.torch_ops import TorchOps
from .continuations import continue_texts
from .corpus import (
    END_OF_TEXT_ID,
    Corpus,
    corpus_windows,
    encode_texts,
    load_vocabulary,
    most_frequent,
    read_corpus,
    rows_of,
    save_vocabulary,
    spread_prompts,
    train_vocabulary,
)
from .drafting import Draft, distillation_loss, measure_drafts, next_token_loss
from .sizes import PairOptions, Schedule, TinyShape, TinySize, making, publish, read_summary, writing_part
from .training import (
    HEAD_RATES,
    LANGUAGE_MODEL_RATES,
    LossOf,
    OnProgress,
    TimeBudget,
    Trained,
    TrainingProgress,
    WorkClock,
    train,
    while_they_fit,
)

TARGET = "target"
ALGORITHMS = {"draft": STANDALONE, "eagle3": EAGLE3, "multi_layer_eagle": MULTI_LAYER_EAGLE}  # by directory
PARTS = (TARGET, *ALGORITHMS)
TRAINING = "training.json"  # in each part: how it was trained
# of the corpus' files: with these the pace is measured, and they are all that is used where no more fit
TRIAL_EVERY = 10
SAMPLING_TEMPERATURE = 0.7  # of the half of the target's own texts that are not greedy
STEP_WEIGHT = 0.8  # of each further step's loss in an unrolled draft's
WHOLE_WINDOWS_FROM = 0.75  # of a training
CHAIN_LENGTHS = (1, 3, 5)
MOST_REPEATS = 0.5  # of the tokens that the target writes may be the one before, else it has learnt no text
MEASURED = ("held-out loss", "held-out texts", "measurement")  # what is made behind the parts


@dataclass(frozen=True, slots=True)
class MadePair:
    """The pair's directory, its summary, and whether it existed before."""

    directory: Path
    summary: dict[str, Any]
    reused: bool


def make_pair(
    directory: Path,
    options: PairOptions,
    on_progress: OnProgress,
    device: str = "cpu",
) -> MadePair:
    """Return the pair of `options` in `directory`, trained unless it is there.

    An interrupted run leaves finished parts in a directory beside it, from which the next one goes on. Without a time
    budget, weights are the same for the same options, versions and number of threads. The summary's "cuts" say what was
    left out to keep within a budget. Raises ConfigError if something else is in `directory` or the device is not there,
    NoCorpus without a standard library.
    """
    _check_device(device)
    clock = WorkClock(device)
    summary = read_summary(directory, options)
    if summary is not None:
        return MadePair(directory, summary, reused=True)
    corpus = read_corpus(options.size.corpus_bytes)
    with making(directory, options) as partial:
        summary = read_summary(directory, options)  # another process may have made it meanwhile
        if summary is not None:
            return MadePair(directory, summary, reused=True)
        summary = _Workshop(partial, options, corpus, on_progress, device, clock).make()
        publish(partial, directory, summary)
    return MadePair(directory, summary, reused=False)


class _Workshop:
    """The run that makes one pair."""

    def __init__(
        self,
        partial: Path,
        options: PairOptions,
        corpus: Corpus,
        on_progress: OnProgress,
        device: str,
        clock: WorkClock,
    ) -> None:
        self.partial, self.options, self.size = partial, options, options.size
        self.corpus, self.on_progress, self.device = corpus, on_progress, device
        self.missing = [part for part in PARTS if not (partial / part).is_dir()]
        texts = ["own texts"] if set(self.missing) & set(ALGORITHMS) else []
        parts = ["data", *self.missing[: TARGET in self.missing], *texts, *self.missing[TARGET in self.missing :]]
        self.budget = TimeBudget(options.time_budget_s, clock, [*parts, *MEASURED])

    def make(self) -> dict[str, Any]:
        vocabulary, self._training = self._read_data()
        if TARGET in self.missing:
            self._make_target(vocabulary)
        target = load_target(self.partial / TARGET, TorchOps(), self.device, torch.float32)
        drafts = [part for part in self.missing if part != TARGET]
        texts = self._own_texts(target) if drafts else None
        for part in drafts:
            assert texts is not None
            self._make_draft(part, target, texts)
        return self._summary(target, self._tokens(vocabulary, self.corpus.held_out))

    def _read_data(self) -> tuple[tokenizers.Tokenizer, Tensor]:
        """Return the vocabulary, and the tokens of the corpus: of all its files, or of as many as there is time for."""
        seconds, begun_s = self.budget.begin("data"), self.budget.clock.now_s()
        files = self.corpus.training
        if not self.budget.is_limited:
            return self._encode(files)
        trial = self._encode(files[::TRIAL_EVERY])
        trial_s = self.budget.clock.now_s() - begun_s
        num_fitting = int(len(files) * min((seconds - trial_s) / max(TRIAL_EVERY * trial_s, 1e-9), 1.0))
        num_used = max(num_fitting, len(files[::TRIAL_EVERY]))
        self.budget.cut("data", num_used, len(files), "files")
        if num_used > num_fitting:
            return trial
        return self._encode(tuple(files[number * len(files) // num_used] for number in range(num_used)))

    def _encode(self, files: tuple[str, ...]) -> tuple[tokenizers.Tokenizer, Tensor]:
        """Return the vocabulary of these files, or that of the target if this is there, and the files' tokens."""
        is_there = TARGET not in self.missing
        vocabulary = (
            load_vocabulary(self.partial / TARGET) if is_there else train_vocabulary(files, self.size.vocab_size)
        )
        return vocabulary, self._tokens(vocabulary, files)

    def _make_target(self, vocabulary: tokenizers.Tokenizer) -> None:
        size, seed, tokens = self.size, self.options.seed, self._training
        target = new_target(size, seed, self.device)

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
        """Return texts by the target itself, half of them greedy, in a mixed order; int64 [n, window].

        Within a budget the texts may be shorter; each window then holds several of them, one behind another.
        """
        size = self.size
        seconds, begun_s = self.budget.begin("own texts"), self.budget.clock.now_s()
        prompts = spread_prompts(self._training, size.num_continuations, size.prompt_len)
        self.on_progress(TrainingProgress("own texts", 0, 2, None, 0.0, 0.0))
        least = size.prompt_len + 1
        greedy = continue_texts(
            target, prompts[::2], size.window, least=least, seconds=seconds / 2, clock=self.budget.clock
        )
        self.on_progress(TrainingProgress("own texts", 1, 2, None, 0.0, 0.0))
        seconds -= self.budget.clock.now_s() - begun_s
        sampled = continue_texts(
            target,
            prompts[1::2],
            greedy.shape[1],
            SAMPLING_TEMPERATURE,
            self.options.seed,
            least=least,
            seconds=seconds,
            clock=self.budget.clock,
        )
        self.on_progress(TrainingProgress("own texts", 2, 2, None, 0.0, 0.0))
        written = sampled.shape[1]
        self.budget.cut("own texts", written, size.window, "tokens each")
        texts = torch.cat([greedy[:, :written], sampled])
        generator = torch.Generator().manual_seed(self.options.seed)
        texts = texts[torch.randperm(len(texts), generator=generator).to(texts.device)]
        length = size.window
        while length > written:
            length //= 2
        texts = texts[:, written - length :].reshape(-1)  # their ends: the target's own tokens more than the prompts
        num_windows = len(texts) // size.window
        assert num_windows > 0, f"{len(texts)} tokens are no window of {size.window}"
        return texts[: num_windows * size.window].view(num_windows, size.window)

    def _make_draft(self, part: str, target: Decoder, texts: Tensor) -> None:
        size, seed = self.size, self.options.seed
        number = PARTS.index(part)
        ids = most_frequent([self._training, texts], size.vocab_size, size.draft_vocab_size)
        draft, num_steps = new_draft(part, size, target, seed + number, ids)
        from_corpus = max(size.draft_schedule.batch_size // 2, 1)
        from_target = max(size.draft_schedule.batch_size - from_corpus, 1)

        def loss_of(step: int, done: float) -> tuple[Tensor, int]:
            windows = corpus_windows(self._training, from_corpus, size.window, seed, number, step)
            windows = _short_first(torch.cat([windows, rows_of(texts, from_target, step)]), done)
            return distillation_loss(target, draft, windows, num_steps, STEP_WEIGHT), windows.numel()

        trained = self._train(part, draft, loss_of, size.draft_schedule)
        with writing_part(self.partial, part) as directory:
            save_draft(draft, directory)
            if isinstance(draft, Decoder):
                save_vocabulary(load_vocabulary(self.partial / TARGET), directory, size.max_positions)
            _write_training(directory, trained)

    def _train(self, part: str, model: Draft, loss_of: LossOf, schedule: Schedule) -> Trained:
        seconds = self.budget.begin(part)
        model.requires_grad_(True)
        trained = train(
            part,
            model,
            loss_of,
            schedule.num_steps,
            self.on_progress,
            LANGUAGE_MODEL_RATES if isinstance(model, Decoder) else HEAD_RATES,
            self.budget.clock,
            seconds,
        )
        model.requires_grad_(False)
        return trained

    def _summary(self, target: Decoder, held_out: Tensor) -> dict[str, Any]:
        """Return the content of pair.json: the parts of the pair, and its quality on files that were not trained on."""
        size, budget = self.size, self.budget
        windows = spread_prompts(held_out, size.num_measured, size.window)
        losses = self._held_out_losses(target, windows)
        budget.cut("held-out loss", len(losses), len(windows), "windows")

        drafts = {part: load_draft(self.partial / part, algorithm, target) for part, algorithm in ALGORITHMS.items()}
        chains: dict[str, tuple[int, ...]] = dict.fromkeys(drafts, CHAIN_LENGTHS)
        heads = {n for n in CHAIN_LENGTHS if n <= size.num_heads} | {size.num_heads}
        chains["multi_layer_eagle"] = tuple(sorted(heads))
        seconds = budget.begin("held-out texts")
        least = size.prompt_len + max(map(max, chains.values())) + 1
        texts = continue_texts(
            target, windows[:, : size.prompt_len], size.window, least=least, seconds=seconds, clock=budget.clock
        )
        budget.cut("held-out texts", texts.shape[1], size.window, "tokens each")
        seconds = budget.begin("measurement")
        measured = {}
        for part, draft in drafts.items():
            ids = None if isinstance(draft, Decoder) else draft.target_ids
            untrained, _ = new_draft(part, size, target, self.options.seed + PARTS.index(part), ids)
            measured[part] = (draft, untrained, chains[part])
        qualities, num_texts = measure_drafts(target, measured, texts, size.prompt_len, self.budget.clock, seconds)
        budget.cut("accept lengths", num_texts, len(texts), "held-out texts")
        budget.end()

        quality = self._target_quality(float(losses.mean()), windows[: len(losses)], texts[:, size.prompt_len :])
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
        if budget.is_limited:
            for part, made in parts.items():
                schedule = size.target_schedule if part == TARGET else size.draft_schedule
                budget.cut(part, made["num_steps"], schedule.num_steps, "steps")
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
            "device": self.device,
            "num_threads": torch.get_num_threads(),
            "corpus": {"digest": self.corpus.digest, "bytes": self.corpus.num_bytes},
            "parts": parts,
            "seconds": {part: round(seconds, 3) for part, seconds in budget.seconds.items()},
            "cuts": budget.cuts,
        }

    @torch.no_grad()
    def _held_out_losses(self, target: Decoder, windows: Tensor) -> Tensor:
        """Return the loss of each window that there is time for, nats per token."""
        seconds = self.budget.begin("held-out loss")
        pieces = while_they_fit(windows.split(1), seconds, self.budget.clock)
        return torch.stack([next_token_loss(target, piece) for piece in pieces])

    def _target_quality(self, loss: float, windows: Tensor, own: Tensor) -> dict[str, Any]:
        """Return the target's loss on held-out windows beside that of the token frequencies, nats per token, and
        how many of the tokens that it wrote itself, int64 [n, t], repeat the one before."""
        counts = torch.bincount(self._training, minlength=self.size.vocab_size).double() + 1.0
        frequency_loss = float(-(counts / counts.sum()).log()[windows[:, 1:]].mean())
        repeats = float((own[:, 1:] == own[:, :-1]).double().mean())
        has_learnt = loss < frequency_loss and repeats <= MOST_REPEATS
        return {"held_out_loss": loss, "frequency_loss": frequency_loss, "repeats": repeats, "has_learnt": has_learnt}

    def _tokens(self, vocabulary: tokenizers.Tokenizer, texts: tuple[str, ...]) -> Tensor:
        return torch.from_numpy(encode_texts(vocabulary, texts)).to(self.device)


def _short_first(windows: Tensor, done: float) -> Tensor:
    """Cut windows in halves for most of the training: nearer tokens matter more, and attention over them costs less."""
    return windows if done >= WHOLE_WINDOWS_FROM else windows.unflatten(1, (2, -1)).flatten(0, 1)


def _part(directory: Path, model: Draft) -> dict[str, Any]:
    num_parameters = sum(weight.numel() for weight in model.parameters())
    training = json.loads((directory / TRAINING).read_text(encoding="utf-8"))
    return {"parameters": num_parameters, "bytes": model.weight_bytes, **training}


def _write_training(directory: Path, trained: Trained) -> None:
    (directory / TRAINING).write_text(json.dumps(asdict(trained), indent=2) + "\n", encoding="utf-8")


def _check_device(device: str) -> None:
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ConfigError.of("<arguments>", "device", f"{device!r} is neither cpu nor cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError.of("<arguments>", "device", "torch finds no CUDA device here; cpu works everywhere")


def new_target(size: TinySize, seed: int, device: str) -> Decoder:
    """Return a Llama. Training needs gradients, so the operations are the plain ones on every device."""
    return _language_model(size, size.target, seed, device)


def new_standalone(size: TinySize, seed: int, device: str) -> Decoder:
    """Return a smaller Llama of the same vocabulary."""
    return _language_model(size, size.standalone, seed, device)


def new_draft(part: str, size: TinySize, target: Decoder, seed: int, ids: Tensor | None) -> tuple[Draft, int]:
    """Return the untrained draft of a part, and the steps over which it learns. `ids`: the vocabulary of an EAGLE-3
    head, as `new_eagle3` takes it."""
    if part == "draft":
        return new_standalone(size, seed, str(target.device)), 1
    if part == "multi_layer_eagle":
        return new_multi_layer_eagle(size, target, seed), size.num_heads
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


def new_multi_layer_eagle(size: TinySize, target: Decoder, seed: int) -> MultiLayerEagle:
    """Return one EAGLE head per step; embeddings and output layer are the target's."""
    head = _head(MULTI_LAYER_EAGLE, target, seed, draft_vocab_size=target.vocab_size, num_heads=size.num_heads)
    assert isinstance(head, MultiLayerEagle)
    return head


def _head(algorithm: str, target: Decoder, seed: int, **sizes: Any) -> DraftHead:
    layer = replace(target.config, num_layers=1, tied_embeddings=False)
    return random_head(HeadConfig(algorithm, layer, target.hidden_size, **sizes), target, seed)


def _language_model(size: TinySize, shape: TinyShape, seed: int, device: str) -> Decoder:
    """Make a model whose layers add nothing at first, so that the token is not lost in the noise of many of them."""
    model = random_weights(_llama(size, shape), TorchOps(), device, torch.float32, seed)
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
