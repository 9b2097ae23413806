"""Plain decoding of larger shapes with random weights on a CPU: this project, `transformers`, and CTranslate2 where it
is installed (`pip install ctranslate2`), in one process after another.

    OMP_NUM_THREADS=1 python -m benchmarks.timing.test_real_shapes   # or pytest -s; some minutes
    OMP_NUM_THREADS=1 python -m benchmarks.timing.test_real_shapes --write

The last one puts the tables into docs/evidence/benchmarks.md.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from foredraft.core.model_shape import built_in_config
from foredraft.gpu.measure.plan import BenchOptions, plan_bench
from foredraft.gpu.measure.run import Bench

from benchmarks.timing.contenders import PROCESSES, in_process, run, seconds, spread, their_tokens

transformers = pytest.importorskip("transformers")

PROMPT_LEN = 64
SHAPE_TOKENS = 24  # with random weights
SHAPE_STEPS, SHAPE_ACCEPT_LENGTH = 3, 2.5  # of the chains with random weights, whose acceptance is simulated
LLAMA_160M = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 768,
    "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 12,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
SHAPES = {"160M": LLAMA_160M, "1B": built_in_config("llama-3.2-1b")[1]}


def products_bytes_per_s(model: torch.nn.Module) -> float:
    """Return the bytes of weights per second that one row reads in all products of a model and nothing else, the
    median of nine times."""
    projections = [one for module in model.modules() for one in getattr(module, "projections", ())]
    rows = [(one, torch.ones(1, one._weight.shape[1], dtype=one._weight.dtype)) for one in projections]
    times = []
    for _ in range(9):
        begin = time.perf_counter()
        for one, row in rows:
            one(row)
        times.append(time.perf_counter() - begin)
    return sum(one._weight.nbytes for one in projections) / median(times)


def time_shape(name: str, weights: str = "") -> dict[str, Any]:
    """Return tokens per second of plain decoding with random weights, ours and theirs, our shares of the bandwidth, and
    what a chain of drafts makes of it: the time of a round over that of a plain one, and the speed-up.

    `weights`: "int8" rounds large ones to 8-bit integers.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(SHAPES[name]), encoding="utf-8")
        options = BenchOptions(
            random_weights=str(path),
            algorithm="NGRAM",
            steps=str(SHAPE_STEPS),
            acceptance=str(SHAPE_ACCEPT_LENGTH),
            batch_sizes="1",
            context_lengths=str(PROMPT_LEN),
            output_tokens=SHAPE_TOKENS,
            device="cpu",
            quantized=weights if weights == "int8" else "auto",
            prompts=1,
            repeat=1,
            threads=torch.get_num_threads(),
        )
        bench = Bench(plan_bench(options))
        ((ours, chain),) = bench.cells()
        dtype = bench.plan.dtype
        products = products_bytes_per_s(bench.models[0]) / bench.machine.copy_bytes_per_s
        del bench
        config = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    prompt = [np.arange(1, PROMPT_LEN + 1)]
    their_tokens(model, prompt, 2)
    short, long = (seconds(lambda p, n=n: their_tokens(model, p, n), prompt)[0] for n in (1, 1 + SHAPE_TOKENS))
    return {
        "ours": ours.tokens_per_s,
        "share": ours.floor_share,
        "products": products,
        "theirs": SHAPE_TOKENS / (long - short),  # without the prompt, as ours
        "round": chain.round_ms / ours.round_ms,
        "chain": chain.tokens_per_s / ours.tokens_per_s,
        "dtype": str(dtype).removeprefix("torch."),
    }


def time_rival(name: str) -> dict[str, float]:
    """Return tokens per second of plain decoding by CTranslate2, by the type that it computes with; none where it is
    not installed."""
    try:
        import ctranslate2
    except ImportError:
        return {}
    from tokenizers import Tokenizer as Words
    from tokenizers.models import WordLevel

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        config = transformers.AutoConfig.for_model(**SHAPES[name], bos_token_id=1, eos_token_id=2)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        words = Words(WordLevel({str(token): token for token in range(config.vocab_size)}, unk_token="0"))
        special = {"bos_token": "1", "eos_token": "2", "unk_token": "0"}
        transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
        prompt = [[str(token) for token in range(3, PROMPT_LEN + 3)]]
        for weights, computes in ((None, "float32"), ("int8", "int8_float32")):
            place = Path(folder, computes)
            ctranslate2.converters.TransformersConverter(folder).convert(str(place), quantization=weights)
            threads = {"intra_threads": torch.get_num_threads(), "inter_threads": 1}
            model = ctranslate2.Generator(str(place), device="cpu", compute_type=computes, **threads)

            def generate(tokens: int, model: Any = model) -> None:
                settings = {"max_length": tokens, "min_length": tokens, "include_prompt_in_result": False}
                model.generate_batch(prompt, sampling_topk=1, end_token=[], **settings)

            generate(2)
            short, long = (seconds(lambda _, n=n: generate(n), [])[0] for n in (1, 1 + SHAPE_TOKENS))
            found[computes] = SHAPE_TOKENS / (long - short)
    return found


def measure_shapes(processes: int) -> list[str]:
    """Return the tables of larger shapes with random weights, as lines of Markdown."""
    lines = [
        f"{processes} processes, {torch.get_num_threads()} thread; median, least and greatest.",
        "",
        "| plain, random weights | tokens/s | of the copy bandwidth | its products alone | transformers | ratio "
        f"| round of {SHAPE_STEPS + 1} rows over plain | chain over plain |",
        "| --- " * 8 + "|",
    ]
    for shape, weights in (("160M", ""), ("160M", "int8"), ("1B", "")):
        print(f"shape {shape}", file=sys.stderr, flush=True)
        found = [in_process(time_shape, shape, weights) for _ in range(processes)]
        columns = [[run[key] for run in found] for key in ("ours", "share", "products", "theirs")]
        columns.append([ours / theirs for ours, theirs in zip(columns[0], columns[3], strict=True)])
        columns += [[run[key] for run in found] for key in ("round", "chain")]
        forms = (".1f", ".0%", ".0%", ".1f", ".2f", ".2f", ".2f")
        texts = [spread(values, form) for values, form in zip(columns, forms, strict=True)]
        if weights == "int8":
            texts[1:3] = "–", "–"  # they count the bytes of float32
        named = {"": "", "int8": ", weights in int8"}[weights]
        lines.append(f"| {shape}, {found[0]['dtype']}{named} | {' | '.join(texts)} |")
    rivals = [in_process(time_rival, "160M") for _ in range(processes)]
    if rivals[0]:
        lines += ["", "| 160M, plain, CTranslate2 | tokens/s |", "| --- | --- |"]
        lines += [f"| {name} | {spread([run[name] for run in rivals], '.1f')} |" for name in rivals[0]]
    return lines


def test_real_shapes():
    """Print the tables."""
    print("\n" + "\n".join(measure_shapes(PROCESSES)))


if __name__ == "__main__":
    run(measure_shapes, "real decode: shapes", globals())
