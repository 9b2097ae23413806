"""Real decoding on a CPU: this project and the `generate()` of `transformers`, on the same prompts, in the same
processes.

    OMP_NUM_THREADS=1 python -m benchmarks.timing.test_real_decode   # or pytest -s; some minutes
    OMP_NUM_THREADS=1 python -m benchmarks.timing.test_real_decode --write  # put the tables into docs/benchmarks.md

The tiny pair in float32, greedy, and plain decoding of larger shapes with random weights. Ends of text are ignored, so
that everyone makes the same number of tokens. Each side first looks for its best settings on one prompt. Then
contenders take turns in one process after another; tables have medians over the processes, least and greatest.
FOREDRAFT_PAIR names a pair's directory; without it that of the cache is used, and trained if it is missing. CTranslate2
is a rival where it is installed (`pip install ctranslate2`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from foredraft.cli.decode.tiny import default_directory
from foredraft.core.contract.request import Request
from foredraft.core.model_shape import built_in_config
from foredraft.core.prompt import Prompt
from foredraft.gpu.bench.arm import Arm
from foredraft.gpu.bench.plan import BenchOptions, plan_bench
from foredraft.gpu.bench.run import Bench, bench_prompts
from foredraft.gpu.executor.round import PhaseClock
from foredraft.gpu.models import projection
from foredraft.gpu.models.checkpoint import load_draft, load_target
from foredraft.gpu.session.devices import ops_for
from foredraft.gpu.session.text import Tokenizer
from foredraft.gpu.tiny.pair import make_pair
from foredraft.gpu.tiny.sizes import PairOptions, size_of

from benchmarks.pages import write_block

transformers = pytest.importorskip("transformers")

PROCESSES = 5
NEW_TOKENS, PROMPT_LEN, PROMPTS, BATCH = 96, 64, 4, 8
SHAPE_TOKENS = 24  # with random weights
SHAPE_STEPS, SHAPE_ACCEPT_LENGTH = 3, 2.5  # of the chains with random weights, whose acceptance is simulated
TIE = 1e-3  # logits nearer than this are equal in float32 after sixteen layers
LLAMA_160M = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 768,
    "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 12,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
SHAPES = {"160M": LLAMA_160M, "1B": built_in_config("llama-3.2-1b")[1]}

Spec = Sequence[Any]
"""A contender: "ours", algorithm, steps, and of a tree top-k and nodes; or "theirs", what, and its settings."""
PLAIN, THEIR_PLAIN = ("ours", "NONE", 0), ("theirs", "plain")
CANDIDATES: dict[str, list[Spec]] = {
    "STANDALONE": [("ours", "STANDALONE", s) for s in (2, 3, 4, 5)],
    "EAGLE3": [("ours", "EAGLE3", s) for s in (2, 3, 4)],
    "tree": [("ours", "EAGLE3", *shape) for shape in ((3, 2, 6), (4, 2, 8), (3, 4, 8))],
    "NGRAM": [("ours", "NGRAM", s) for s in (3, 5, 10)],
    "assisted": [("theirs", "assisted", n, t) for n in (2, 3, 4, 5, 7) for t in (0.0, 0.4)],
    "look-up": [("theirs", "prompt look-up", n) for n in (3, 5, 10)],
}
OF_BATCH: list[Spec] = [PLAIN, ("ours", "STANDALONE", 3), ("ours", "EAGLE3", 3), THEIR_PLAIN]
RATIOS = (("STANDALONE", "plain", 1.3), ("STANDALONE", "assisted", 2.0), ("NGRAM", "look-up", 1.4))  # with their goals
Generate = Callable[[list[np.ndarray]], list[list[int]]]
PARTS = ("draft", "verify", "catch-up", "relay", "plan and commit", "rest")
"""Where the time of a round goes; `catch-up`: what the draft model reads of accepted tokens; `rest`:
reading results, handing them over."""


def in_words(spec: Spec) -> str:
    whose, what, *numbers = spec
    if whose == "theirs":
        settings = ("tokens", "threshold")
        return f"transformers, {what}" + "".join(f", {n:g} {s}" for n, s in zip(numbers, settings, strict=False))
    if what == "NONE":
        return "plain"
    return f"{what}, {numbers[0]} steps" + (f", tree of {numbers[2]}, top-k {numbers[1]}" if len(numbers) > 1 else "")


def pair_directory() -> Path:
    given = os.environ.get("FOREDRAFT_PAIR")
    if given:
        return Path(given)
    return make_pair(default_directory("tiny", 0, None), PairOptions(size_of("tiny")), lambda progress: None).directory


# -- in a process of its own ------------------------------------------------------------------------------------------


class Ours:
    """This project with one setting: generates as the others do, and says where the time of its rounds went."""

    def __init__(self, arm: Arm) -> None:
        self._loop, self._executor = arm.loop, arm.executor
        self._laps: list[tuple[str, float]] = []
        self._executor.clock = PhaseClock(lambda name, seconds: self._laps.append((name, seconds)))

    def __call__(self, prompts: list[np.ndarray]) -> list[list[int]]:
        tokens: dict[str, list[int]] = {}
        for number, prompt in enumerate(prompts):
            tokens[str(number)] = []
            assert not self._loop.submit(Request(str(number), Prompt.of_tokens(prompt), NEW_TOKENS))
        while not self._loop.is_idle:
            for delta in self._loop.turn():
                tokens[delta.request_id].extend(delta.tokens.tolist())
        return list(tokens.values())

    def spent(self) -> np.ndarray:
        """Return what was spent since the start: rounds, and seconds by the names of PARTS, float64 [1 + parts]."""
        of = {name: sum(s for lap, s in self._laps if lap == name) for name in ("verify", "relay", "prefill")}
        drafts = [seconds for lap, seconds in self._laps if lap == "draft"]  # of a round: its drafts, then its catch-up
        parts = [sum(drafts[::2]), of["verify"], sum(drafts[1::2]), of["relay"], self._loop.driver.host_ns / 1e9]
        return np.array([self._executor.counters.rounds, *parts, of["prefill"]])


class Contenders:
    """The pair in this project and in `transformers`, which has its own attention and cache."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.ops = directory, ops_for("cpu")
        self.target = load_target(directory / "target", self.ops, "cpu", torch.float32)
        self.parts = {"STANDALONE": "draft", "EAGLE3": "eagle3"}
        self.drafts = {name: load_draft(directory / part, name, self.target) for name, part in self.parts.items()}
        transformers.utils.logging.set_verbosity_error()
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.theirs, self.assistant = (
            load(directory / part, dtype=torch.float32).eval() for part in ("target", "draft")
        )
        for model in (self.theirs, self.assistant):
            model.generation_config.eos_token_id = None
        self.assistant.generation_config.num_assistant_tokens_schedule = "constant"
        tokenizer = Tokenizer.load(directory / "target")
        self.prompts = bench_prompts(tokenizer, self.target.vocab_size, BATCH, PROMPT_LEN, 0)

    def make(self, spec: Spec, batch_size: int = 1) -> Generate:
        whose, what, *numbers = spec
        if whose == "ours":
            return self._ours(batch_size, what, *numbers)
        if what == "assisted":
            return self._assisted(*numbers)
        return self._their(**({"prompt_lookup_num_tokens": numbers[0]} if numbers else {}))

    def _ours(self, batch_size: int, algorithm: str, steps: int, topk: int = 1, nodes: int | None = None) -> Generate:
        options = BenchOptions(
            model=self.directory / "target",
            draft=str(self.directory / self.parts[algorithm]) if algorithm in self.parts else None,
            algorithm=algorithm,
            steps=str(steps),
            topk=topk,
            num_draft_tokens=nodes,
            batch_sizes=str(batch_size),
            context_lengths=str(PROMPT_LEN),
            output_tokens=NEW_TOKENS,
            device="cpu",
            dtype="float32",
        )
        plan = plan_bench(options).cells[0].arms[-1]
        return Ours(Arm(plan, self.target, self.drafts.get(algorithm), self.ops, [], NEW_TOKENS))

    def _their(self, **settings: object) -> Generate:
        return lambda prompts: their_tokens(self.theirs, prompts, NEW_TOKENS, **settings)

    def _assisted(self, num_tokens: int, threshold: float) -> Generate:
        def generate(prompts: list[np.ndarray]) -> list[list[int]]:
            # Both are read from the assistant's own configuration.
            self.assistant.generation_config.num_assistant_tokens = num_tokens
            self.assistant.generation_config.assistant_confidence_threshold = threshold
            return their_tokens(self.theirs, prompts, NEW_TOKENS, assistant_model=self.assistant)

        return generate

    def is_equal(self, prompt: np.ndarray, tokens: list[int], other: list[int], name: str) -> bool:
        """Greedy outputs are the same up to ties: where they part, the model holds both tokens for equally good."""
        assert len(tokens) == len(other) == NEW_TOKENS, name
        if tokens == other:
            return True
        place = next(i for i, (a, b) in enumerate(zip(tokens, other, strict=True)) if a != b)
        with torch.inference_mode():
            logits = self.theirs(torch.tensor([[*prompt.tolist(), *tokens[:place]]])).logits[0, -1]
        assert abs(float(logits[tokens[place]] - logits[other[place]])) < TIE, f"{name} parts at token {place}"
        return False

    def time(self, specs: Sequence[Spec], batches: list[list[np.ndarray]]) -> dict[str, list[float]]:
        """Return tokens per second, CPU ms per token and the share of outputs equal to the first contender's, by
        contender.

        Ours have behind these what their rounds are made of: tokens per round, then milliseconds of a round by PARTS.
        """
        generates = {in_words(spec): self.make(spec, len(batches[0])) for spec in specs}
        outputs = {name: [generate(batch) for batch in batches] for name, generate in generates.items()}
        reference = next(iter(outputs.values()))
        equal = {
            name: [
                self.is_equal(prompt, a, b, name)
                for batch, ours, others in zip(batches, reference, found, strict=True)
                for prompt, a, b in zip(batch, ours, others, strict=True)
            ]
            for name, found in outputs.items()
        }
        sums = {name: np.zeros(2) for name in generates}
        before = {name: one.spent() for name, one in generates.items() if isinstance(one, Ours)}
        for batch in batches:
            for name, generate in generates.items():
                sums[name] += seconds(generate, batch)
        tokens = NEW_TOKENS * sum(map(len, batches))
        found = {n: [tokens / s[0], 1e3 * s[1] / tokens, float(np.mean(equal[n]))] for n, s in sums.items()}
        for name, then in before.items():
            rounds, *parts, prefill = generates[name].spent() - then
            rest = sums[name][0] - prefill - sum(parts)
            found[name] += [tokens / rounds, *(1e3 * part / rounds for part in (*parts, rest))]
        return found


def their_tokens(model: Any, prompts: list[np.ndarray], num_tokens: int, **settings: object) -> list[list[int]]:
    longest = max(map(len, prompts))
    ids = torch.zeros((len(prompts), longest), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.from_numpy(prompt)
        mask[row, longest - len(prompt) :] = 1
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False, use_cache=True, pad_token_id=0, **settings
        )  # fmt: skip
    return out[:, longest:].tolist()


def seconds(generate: Generate, prompts: list[np.ndarray]) -> tuple[float, float]:
    """Return wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    generate(prompts)
    return time.perf_counter() - wall, time.process_time() - cpu


def choose(directory: str) -> dict[str, Spec]:
    """Return the candidate of each group that takes the least CPU time on one prompt, the better of two runs
    after a first one."""
    contenders, chosen = Contenders(Path(directory)), {}
    for group, specs in CANDIDATES.items():
        times = []
        for spec in specs:
            generate = contenders.make(spec)
            times.append(min(seconds(generate, contenders.prompts[-1:])[1] for _ in range(3)))
        chosen[group] = specs[int(np.argmin(times))]
    return chosen


def time_pair(directory: str, specs: list[Spec]) -> dict[str, dict[str, list[float]]]:
    """Return the times of one process at batch 1, and at batch 8 with prompts of different lengths, so that there is
    something to pad."""
    contenders = Contenders(Path(directory))
    batch = [prompt[: PROMPT_LEN - 5 * i] for i, prompt in enumerate(contenders.prompts)]
    alone = [[prompt] for prompt in contenders.prompts[:PROMPTS]]
    return {"1": contenders.time(specs, alone), str(BATCH): contenders.time(OF_BATCH, [batch])}


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


def time_shape(name: str, in_columns: bool = False) -> dict[str, Any]:
    """Return tokens per second of plain decoding with random weights, ours and theirs, our shares of the bandwidth, and
    what a chain of drafts makes of it: the time of a round over that of a plain one, and the speed-up.

    `in_columns`: large weights lie in columns, also where blocks are faster.
    """
    if in_columns:
        projection.blocks_are_faster = lambda: False
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


# -- all processes ----------------------------------------------------------------------------------------------------


def in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function of this file returns in a process of its own."""
    order = json.dumps([function.__name__, *arguments])
    command = [sys.executable, "-m", "benchmarks.timing.test_real_decode", "--child", order]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure_pair(processes: int) -> list[str]:
    """Return the tables of the pair, as lines of Markdown."""
    directory = str(pair_directory())
    chosen = in_process(choose, directory)
    specs = [PLAIN, *chosen.values(), THEIR_PLAIN]
    runs = []
    for number in range(processes):
        print(f"pair, process {number + 1} of {processes}", file=sys.stderr, flush=True)
        runs.append(in_process(time_pair, directory, specs))
    lines = [f"{processes} processes, {torch.get_num_threads()} thread; median, least and greatest.", ""]
    for batch in ("1", str(BATCH)):
        lines += [f"| batch {batch} | tokens/s | CPU ms per token | equal outputs |", "| --- | --- | --- | --- |"]
        for name in runs[0][batch]:
            rates, cpu, equal = zip(*(run[batch][name][:3] for run in runs), strict=True)
            lines.append(f"| {name} | {_spread(rates, '.0f')} | {_spread(cpu, '.2f')} | {min(equal):.0%} |")
        lines.append("")
    lines += ["| ratio, batch 1 | measured | goal |", "| --- | --- | --- |"]
    for fast, slow, goal in RATIOS:
        names = [in_words(chosen.get(which, PLAIN)) for which in (fast, slow)]
        ratios = [run["1"][names[0]][0] / run["1"][names[1]][0] for run in runs]
        missed = ": missed" if median(ratios) < goal else ""
        lines.append(f"| {names[0]} over {names[1]} | {_spread(ratios, '.2f')} | ≥ {goal:g}{missed} |")
    lines += ["", f"| a round, batch 1, ms | tokens | {' | '.join(PARTS)} | together |", "| --- " * 9 + "|"]
    for name in [in_words(spec) for spec in specs if spec[0] == "ours"]:
        tokens, *parts = (median(column) for column in zip(*(run["1"][name][3:] for run in runs), strict=True))
        lines.append(f"| {name} | {tokens:.2f} | {' | '.join(f'{part:.2f}' for part in parts)} | {sum(parts):.2f} |")
    return lines


def measure_shapes(processes: int) -> list[str]:
    """Return the tables of larger shapes with random weights, as lines of Markdown."""
    lines = [
        f"{processes} processes, {torch.get_num_threads()} thread; median, least and greatest.",
        "",
        "| plain, random weights | tokens/s | of the copy bandwidth | its products alone | transformers | ratio "
        f"| round of {SHAPE_STEPS + 1} rows over plain | chain over plain |",
        "| --- " * 8 + "|",
    ]
    for shape, in_columns in (("160M", False), ("160M", True), ("1B", False)):
        print(f"shape {shape}", file=sys.stderr, flush=True)
        found = [in_process(time_shape, shape, in_columns) for _ in range(processes)]
        columns = [[run[key] for run in found] for key in ("ours", "share", "products", "theirs")]
        columns.append([ours / theirs for ours, theirs in zip(columns[0], columns[3], strict=True)])
        columns += [[run[key] for run in found] for key in ("round", "chain")]
        forms = (".1f", ".0%", ".0%", ".1f", ".2f", ".2f", ".2f")
        texts = [_spread(values, form) for values, form in zip(columns, forms, strict=True)]
        columns_of = ", in columns" if in_columns else ""
        lines.append(f"| {shape}, {found[0]['dtype']}{columns_of} | {' | '.join(texts)} |")
    rivals = [in_process(time_rival, "160M") for _ in range(processes)]
    if rivals[0]:
        lines += ["", "| 160M, plain, CTranslate2 | tokens/s |", "| --- | --- |"]
        lines += [f"| {name} | {_spread([run[name] for run in rivals], '.1f')} |" for name in rivals[0]]
    return lines


def _spread(values: Sequence[float], form: str) -> str:
    return f"{median(values):{form}} ({min(values):{form}} … {max(values):{form}})"


TABLES = {"pair": measure_pair, "shapes": measure_shapes}


def test_real_decode():
    """Print the tables. Outputs that differ, other than by ties, end a process with an error."""
    for measure in TABLES.values():
        print("\n" + "\n".join(measure(PROCESSES)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/benchmarks.md")
    parser.add_argument("--only", choices=list(TABLES), help="the tables of the pair or those of larger shapes")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, *arguments = json.loads(options.child)
        print(json.dumps(globals()[name](*arguments)))
        return
    for name, measure in TABLES.items():
        if options.only in (None, name):
            lines = measure(options.processes)
            print("\n".join(lines))
            if options.write:
                write_block("benchmarks.md", f"real decode: {name}", lines)


if __name__ == "__main__":
    main()
