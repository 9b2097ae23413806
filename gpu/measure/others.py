"""Other engines that decode the requests of a benchmark, in turns with its arms: the same weights, the same prompts,
the same number of tokens, plainly and greedily.

transformers loads a checkpoint as it is, CTranslate2 one that its own converter has made of it. Random weights are
saved as a checkpoint first. Both clocks run from an engine's first tokens to its last, as they do for the arms.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Protocol

import numpy as np
import torch

from ..models.checkpoint import save_target
from ..models.decoder import Decoder
from ..types.session_options import INT8
from .arm import Timing
from .clock import wall_and_cpu_s
from .plan import OTHERS, BenchPlan
from .turns import Timed

Prompts = Sequence[np.ndarray]


@dataclass(frozen=True, slots=True)
class OtherTiming:
    """One run over the prompts of a cell: what passed between the first token of a batch and its last."""

    wall_s: float
    cpu_s: float
    tokens: int
    outputs: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class OtherResult:
    """Medians of another engine in a cell; where it could not decode, `problem` says why and the rest is 0."""

    name: str
    computes: str = ""  # the numbers that it multiplies
    tokens_per_s: float = 0.0
    tokens_per_cpu_s: float = 0.0
    ratio: float = 0.0  # our plain decoding over it, in wall time; the median of the turns' own ratios
    cpu_ratio: float = 0.0  # the same in processor time
    equal_outputs: int = 0  # requests with the tokens of our plain decoding
    problem: str = ""


class OtherEngine(Protocol):
    """A model loaded by another engine."""

    computes: str

    def decode(self, prompts: Prompts, tokens: int, on_token: Callable[[], None]) -> list[list[int]]:
        """Return the greedy continuations of equally long prompts; call `on_token` after each token of the batch."""


class Transformers:
    """`generate()` of transformers, with its own attention and cache."""

    def __init__(self, source: Path, place: Path, plan: BenchPlan) -> None:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(source, dtype=plan.dtype).eval().to(plan.device)
        settings = self._model.generation_config
        settings.eos_token_id, settings.pad_token_id = None, 0
        self.computes = _name_of(plan.dtype)

    def decode(self, prompts: Prompts, tokens: int, on_token: Callable[[], None]) -> list[list[int]]:
        ids = torch.from_numpy(np.stack(prompts)).to(self._model.device)

        def stamp(tokens: torch.Tensor, scores: object, **others: object) -> torch.Tensor:
            on_token()
            return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)

        with torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, use_cache=True,
                repetition_penalty=1.0, stopping_criteria=[stamp],
            )  # fmt: skip
        found: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return found


class CTranslate2:
    """CTranslate2's generator, over a checkpoint that its converter has changed into its own form."""

    def __init__(self, source: Path, place: Path, plan: BenchPlan) -> None:
        import ctranslate2

        in_int8 = plan.options.quantized == INT8
        self.computes = "int8_float32" if in_int8 else _name_of(plan.dtype)
        kind = plan.device.partition(":")[0]
        supported = sorted(ctranslate2.get_supported_compute_types(kind))
        if self.computes not in supported:
            raise ValueError(f"it does not compute in {self.computes} here, but in {', '.join(supported)}")
        directory = str(place / "ctranslate2")
        converter = ctranslate2.converters.TransformersConverter(str(source))
        converter.convert(directory, quantization="int8" if in_int8 else None)
        gc.collect()
        words: list[str] = json.loads(Path(directory, "vocabulary.json").read_text(encoding="utf-8"))
        self._words = words
        self._ids = {word: number for number, word in enumerate(words)}
        threads = {"intra_threads": torch.get_num_threads(), "inter_threads": 1}
        self._model = ctranslate2.Generator(directory, device=kind, compute_type=self.computes, **threads)

    def decode(self, prompts: Prompts, tokens: int, on_token: Callable[[], None]) -> list[list[int]]:
        left = [len(prompts)]  # rows whose token of this round has not come yet

        def stamp(step: object) -> bool:
            left[0] -= 1
            if not left[0]:
                left[0] = len(prompts)
                on_token()
            return False

        found = self._model.generate_batch(
            [[self._words[token] for token in prompt.tolist()] for prompt in prompts],
            max_length=tokens, min_length=tokens, sampling_topk=1, end_token=[], include_prompt_in_result=False,
            callback=stamp,
        )  # fmt: skip
        return [[self._ids[word] for word in one.sequences[0]] for one in found]


_ENGINES: dict[str, Callable[[Path, Path, BenchPlan], OtherEngine]] = dict(
    zip(OTHERS, (Transformers, CTranslate2), strict=True)
)


class OtherEngines:
    """The engines that a benchmark is compared with, loaded with its model; of those that cannot be, the reason."""

    def __init__(self, plan: BenchPlan, target: Decoder) -> None:
        """`target`: the model before it is laid out for a CPU, which is saved if its weights are random."""
        self._plan = plan
        self._folder = TemporaryDirectory()
        place = Path(self._folder.name)
        source = plan.options.model or place
        if plan.options.model is None:
            save_target(target, place)
            _add_words(place, target.vocab_size)
        self._engines = {name: _loaded(name, source, place, plan) for name in plan.against}

    def close(self) -> None:
        self._engines.clear()
        self._folder.cleanup()

    def timed(self, prompts: Prompts, batch_size: int) -> list[Timed[OtherTiming]]:
        """Return the samples of the engines that there are, as `take_turns` takes them."""
        tokens, repeat = self._plan.options.output_tokens, self._plan.options.repeat

        def of(name: str, engine: OtherEngine) -> Timed[OtherTiming]:
            def warm() -> None:
                _run(engine, prompts[:batch_size], batch_size, 2)

            return Timed(name, repeat, lambda sample: _run(engine, prompts, batch_size, tokens), warm)

        return [of(name, engine) for name, engine in self._engines.items() if not isinstance(engine, str)]

    def results(self, timings: Sequence[Sequence[OtherTiming]], plain: Sequence[Timing]) -> tuple[OtherResult, ...]:
        """Return a result for each engine from the timings of those that there are, beside those of plain decoding."""
        left = iter(timings)
        return tuple(
            OtherResult(name, problem=engine)
            if isinstance(engine, str)
            else _result(f"{name} {version(name)}", engine.computes, next(left), plain)
            for name, engine in self._engines.items()
        )


def _loaded(name: str, source: Path, place: Path, plan: BenchPlan) -> OtherEngine | str:
    """Return the engine with the model of `source`, or why it cannot be had: it is not installed, or does not know
    the model. What it writes goes to `place`."""
    try:
        version(name)
    except PackageNotFoundError:
        return f"it is not installed (pip install {name})"
    try:
        return _ENGINES[name](source, place, plan)
    except Exception as error:  # whatever a package of others refuses a model with
        return (str(error) or type(error).__name__).strip().splitlines()[0]


def _run(engine: OtherEngine, prompts: Prompts, batch_size: int, tokens: int) -> OtherTiming:
    """Decode `prompts` batch by batch, and add the times up."""
    batches = [_run_batch(engine, prompts[i : i + batch_size], tokens) for i in range(0, len(prompts), batch_size)]
    return OtherTiming(
        wall_s=sum(one.wall_s for one in batches),
        cpu_s=sum(one.cpu_s for one in batches),
        tokens=sum(one.tokens for one in batches),
        outputs=tuple(output for one in batches for output in one.outputs),
    )


def _run_batch(engine: OtherEngine, prompts: Prompts, tokens: int) -> OtherTiming:
    stamps: list[tuple[float, float]] = []
    found = engine.decode(prompts, tokens, lambda: stamps.append(wall_and_cpu_s()))
    (first_wall, first_cpu), (last_wall, last_cpu) = stamps[0], stamps[-1]
    return OtherTiming(
        last_wall - first_wall, last_cpu - first_cpu, len(prompts) * (tokens - 1), tuple(map(tuple, found))
    )


def _result(name: str, computes: str, timings: Sequence[OtherTiming], plain: Sequence[Timing]) -> OtherResult:
    pairs = list(zip(plain, timings, strict=True))
    outputs = zip(plain[0].outputs, timings[0].outputs, strict=True)
    return OtherResult(
        name,
        computes,
        tokens_per_s=median(one.tokens / one.wall_s for one in timings),
        tokens_per_cpu_s=median(one.tokens / one.cpu_s for one in timings),
        ratio=median(ours.tokens / ours.decode_s * its.wall_s / its.tokens for ours, its in pairs),
        cpu_ratio=median(ours.tokens / ours.cpu_s * its.cpu_s / its.tokens for ours, its in pairs),
        equal_outputs=sum(ours == its[: len(ours)] for ours, its in outputs),
    )


def _add_words(directory: Path, vocab_size: int) -> None:
    """Write a tokenizer beside random weights, whose words are numbers: a converter of checkpoints asks for one."""
    vocabulary = {str(token): token for token in range(vocab_size)}
    words: dict[str, object] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "0"},
    }  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(words), encoding="utf-8")
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "1", "eos_token": "2", "unk_token": "0"}
    (directory / "tokenizer_config.json").write_text(json.dumps(special), encoding="utf-8")


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
