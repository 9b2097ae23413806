"""Making a pair: target, STANDALONE draft, EAGLE-3 head, multi-layer EAGLE draft, one after another, each kept when it is done."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor

from ...core.errors import ConfigError, Problem
from ..models.checkpoint import STANDALONE, load_draft, load_target, save_draft, save_target
from ..models.decoder import Decoder
from ..models.head_config import EAGLE3, MULTI_LAYER_EAGLE
from ..ops.torch_ops import TorchOps
from .continuations import continue_texts
from .corpus import Corpus, read_corpus
from .directory import PairOptions, making, publish, read_summary, writing_part
from .drafting import Draft, distillation_loss, next_token_loss
from .measure import measure_draft
from .models import new_eagle3, new_multi_layer_eagle, new_standalone, new_target
from .sizes import Schedule
from .training import HEAD_RATES, LANGUAGE_MODEL_RATES, LossOf, OnProgress, Trained, TrainingProgress, train
from .vocabulary import encode_texts, load_vocabulary, save_vocabulary, train_vocabulary
from .windows import corpus_windows, most_frequent, rows_of, spread_prompts

TARGET = "target"
ALGORITHMS = {"draft": STANDALONE, "eagle3": EAGLE3, "multi_layer_eagle": MULTI_LAYER_EAGLE}  # by directory
PARTS = (TARGET, *ALGORITHMS)
TRAINING = "training.json"  # in each part: how it was trained
# Of a time budget; the rest is for texts and measuring.
BUDGET_SHARES = {TARGET: 0.45, "draft": 0.1, "eagle3": 0.2, "multi_layer_eagle": 0.15}
SAMPLING_TEMPERATURE = 0.7  # of the half of the target's own texts that are not greedy
STEP_WEIGHT = 0.8  # of each further step's loss in an unrolled draft's
WHOLE_WINDOWS_FROM = 0.75  # of a training
CHAIN_LENGTHS = (1, 3, 5)


@dataclass(frozen=True, slots=True)
class MadePair:
    """The pair's directory, its summary, and whether it existed before."""

    directory: Path
    summary: dict[str, Any]
    reused: bool


def make_pair(directory: Path, options: PairOptions, on_progress: OnProgress, device: str = "cpu") -> MadePair:
    """Return the pair of `options` in `directory`, trained unless it is there.

    An interrupted run leaves finished parts in a directory beside it, from which the next one goes on. Weights are the same for the same
    options, versions and number of threads, unless there is a time budget. Raises ConfigError if something else is in `directory` or the
    device is not there, NoCorpus without a standard library.
    """
    _check_device(device)
    summary = read_summary(directory, options)
    if summary is not None:
        return MadePair(directory, summary, reused=True)
    corpus = read_corpus(options.size.corpus_bytes)
    with making(directory, options) as partial:
        summary = read_summary(directory, options)  # another process may have made it meanwhile
        if summary is not None:
            return MadePair(directory, summary, reused=True)
        summary = _Workshop(partial, options, corpus, on_progress, device).make()
        publish(partial, directory, summary)
    return MadePair(directory, summary, reused=False)


class _Workshop:
    """The run that makes one pair."""

    def __init__(
        self, partial: Path, options: PairOptions, corpus: Corpus, on_progress: OnProgress, device: str
    ) -> None:
        self.partial, self.options, self.size = partial, options, options.size
        self.corpus, self.on_progress, self.device = corpus, on_progress, device

    def make(self) -> dict[str, Any]:
        """Make all parts that are missing and return the summary."""
        target = self._target()
        vocabulary = load_vocabulary(self.partial / TARGET)
        self._training = self._tokens(vocabulary, self.corpus.training)
        held_out = self._tokens(vocabulary, self.corpus.held_out)
        missing = [part for part in ALGORITHMS if not (self.partial / part).is_dir()]
        texts = self._own_texts(target) if missing else None
        for part in missing:
            assert texts is not None
            self._make_draft(part, target, texts)
        return self._summary(target, held_out)

    def _target(self) -> Decoder:
        directory = self.partial / TARGET
        if not directory.is_dir():
            self._make_target()
        return load_target(directory, TorchOps(), self.device, torch.float32)

    def _make_target(self) -> None:
        size, seed = self.size, self.options.seed
        vocabulary = train_vocabulary(self.corpus.training, size.vocab_size)
        tokens = self._tokens(vocabulary, self.corpus.training)
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
        """Return what the target itself writes, half of it greedily, in an order that mixes both; int64 [num_continuations, window]."""
        size = self.size
        prompts = spread_prompts(self._training, size.num_continuations, size.prompt_len)
        self.on_progress(TrainingProgress("own texts", 0, 2, None, 0.0, 0.0))
        greedy = continue_texts(target, prompts[::2], size.window)
        self.on_progress(TrainingProgress("own texts", 1, 2, None, 0.0, 0.0))
        sampled = continue_texts(target, prompts[1::2], size.window, SAMPLING_TEMPERATURE, self.options.seed)
        self.on_progress(TrainingProgress("own texts", 2, 2, None, 0.0, 0.0))
        texts = torch.cat([greedy, sampled])
        generator = torch.Generator().manual_seed(self.options.seed)
        return texts[torch.randperm(len(texts), generator=generator).to(texts.device)]

    def _make_draft(self, part: str, target: Decoder, texts: Tensor) -> None:
        size, seed = self.size, self.options.seed
        number = PARTS.index(part)
        draft, num_steps = self._new_draft(part, target, texts, seed + number)
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

    def _new_draft(self, part: str, target: Decoder, texts: Tensor, seed: int) -> tuple[Draft, int]:
        """Return the untrained draft, and the steps over which it learns."""
        size = self.size
        if part == "draft":
            return new_standalone(size, seed, self.device), 1
        if part == "multi_layer_eagle":
            return new_multi_layer_eagle(size, target, seed), size.num_heads
        ids = most_frequent([self._training, texts], size.vocab_size, size.draft_vocab_size)
        return new_eagle3(size, target, ids, seed), size.unroll

    def _train(self, part: str, model: Draft, loss_of: LossOf, schedule: Schedule) -> Trained:
        budget_s = self.options.time_budget_s
        model.requires_grad_(True)
        trained = train(
            part,
            model,
            loss_of,
            schedule.num_steps,
            self.on_progress,
            LANGUAGE_MODEL_RATES if isinstance(model, Decoder) else HEAD_RATES,
            None if budget_s is None else budget_s * BUDGET_SHARES[part],
        )
        model.requires_grad_(False)
        return trained

    def _summary(self, target: Decoder, held_out: Tensor) -> dict[str, Any]:
        """Return what pair.json says: what the pair is made of, and how good it is on files that were not trained on."""
        size = self.size
        with torch.no_grad():
            windows = spread_prompts(held_out, size.num_measured, size.window)
            held_out_loss = float(next_token_loss(target, windows))
        texts = continue_texts(target, windows[:, : size.prompt_len], size.window)
        parts = {TARGET: {**_part(self.partial / TARGET, target), "held_out_loss": held_out_loss}}
        for part, algorithm in ALGORITHMS.items():
            draft = load_draft(self.partial / part, algorithm, target)
            chains = [n for n in CHAIN_LENGTHS if part != "multi_layer_eagle" or n <= size.num_heads]
            if part == "multi_layer_eagle" and size.num_heads not in chains:
                chains.append(size.num_heads)
            quality = measure_draft(target, draft, texts, size.prompt_len, tuple(sorted(chains)))
            parts[part] = {
                "algorithm": algorithm,
                **_part(self.partial / part, draft),
                "agreement": quality.agreement,
                "accept_lengths": {str(steps): length for steps, length in quality.accept_lengths.items()},
            }
        return {
            "digest": self.options.digest,
            "described": self.options.described,
            "options": asdict(self.options),
            "versions": {
                "foretoken": version("foretoken"),
                "python": platform.python_version(),
                "torch": torch.__version__,
                "tokenizers": tokenizers.__version__,
            },
            "device": self.device,
            "num_threads": torch.get_num_threads(),
            "corpus": {"digest": self.corpus.digest, "bytes": self.corpus.num_bytes},
            "parts": parts,
        }

    def _tokens(self, vocabulary: tokenizers.Tokenizer, texts: tuple[str, ...]) -> Tensor:
        return torch.from_numpy(encode_texts(vocabulary, texts)).to(self.device)


def _short_first(windows: Tensor, done: float) -> Tensor:
    """Cut windows in halves for most of the training: nearer tokens matter more, and attention over them costs less."""
    return windows if done >= WHOLE_WINDOWS_FROM else windows.unflatten(1, (2, -1)).flatten(0, 1)


def _part(directory: Path, model: Draft) -> dict[str, Any]:
    """Size of a part and how it was trained."""
    num_parameters = sum(weight.numel() for weight in model.parameters())
    training = json.loads((directory / TRAINING).read_text(encoding="utf-8"))
    return {"parameters": num_parameters, "bytes": model.weight_bytes, **training}


def _write_training(directory: Path, trained: Trained) -> None:
    (directory / TRAINING).write_text(json.dumps(asdict(trained), indent=2) + "\n", encoding="utf-8")


def _check_device(device: str) -> None:
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ConfigError("<arguments>", [Problem("device", f"{device!r} is neither cpu nor cuda")])
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("<arguments>", [Problem("device", "torch finds no CUDA device here; cpu works everywhere")])
