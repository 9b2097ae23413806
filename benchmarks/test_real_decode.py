"""Real decoding on a CPU: the tiny pair here, and with the `generate()` of `transformers`, on the same prompts in the same process.

    pytest benchmarks/test_real_decode.py -s

Greedy, float32, the same number of threads; ends of text are ignored, so that everyone makes the same number of tokens. Contenders take
turns. Each side first looks for its best setting on one prompt. Both wall and CPU time are reported: on a machine that is busy with other
things the second says more. FORETOKEN_PAIR names a pair's directory; without it the cache's is used, and trained if it is missing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch
from foretoken.cli.decode.tiny import default_directory
from foretoken.core.contract.request import Request
from foretoken.core.prompt import Prompt
from foretoken.gpu.bench.arm import Arm
from foretoken.gpu.bench.plan import BenchOptions, plan_bench
from foretoken.gpu.bench.prompts import bench_prompts
from foretoken.gpu.models.checkpoint import load_draft, load_target
from foretoken.gpu.session.devices import ops_for
from foretoken.gpu.session.text import Tokenizer
from foretoken.gpu.tiny.directory import PairOptions
from foretoken.gpu.tiny.pair import make_pair
from foretoken.gpu.tiny.sizes import size_of

transformers = pytest.importorskip("transformers")

NEW_TOKENS = 96
PROMPT_LEN = 64
PROMPTS = 4
TURNS = 3
THEIR_DRAFT_TOKENS = range(2, 9)
OUR_STEPS = (2, 3, 4, 5)
TREES = ((2, 3, 6), (2, 4, 8), (4, 3, 8))  # top-k, steps, nodes
TIE = 1e-3  # logits nearer than this are equal in float32 after sixteen layers
Generate = Callable[[list[np.ndarray]], list[list[int]]]


def pair_directory() -> Path:
    given = os.environ.get("FORETOKEN_PAIR")
    if given:
        return Path(given)
    return make_pair(default_directory("tiny", 0, None), PairOptions(size_of("tiny")), lambda progress: None).directory


class Ours:
    """This project's executor. `contender` makes a way to decode."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ops = ops_for("cpu")
        self.target = load_target(directory / "target", self.ops, "cpu", torch.float32)
        names = {"STANDALONE": "draft", "EAGLE3": "eagle3"}
        self.drafts = {name: load_draft(directory / part, name, self.target) for name, part in names.items()}
        self.parts = names

    def contender(
        self, batch_size: int, algorithm: str, steps: int, topk: int = 1, nodes: int | None = None
    ) -> Generate:
        draft = None if algorithm == "NONE" else str(self.directory / self.parts[algorithm])
        options = BenchOptions(
            model=self.directory / "target",
            draft=draft,
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
        loop = Arm(plan, self.target, self.drafts.get(algorithm), self.ops, [], NEW_TOKENS).loop

        def generate(prompts: list[np.ndarray]) -> list[list[int]]:
            tokens: dict[str, list[int]] = {}
            for number, prompt in enumerate(prompts):
                tokens[str(number)] = []
                assert not loop.submit(Request(str(number), Prompt.of_tokens(prompt), NEW_TOKENS))
            while not loop.is_idle:
                for delta in loop.turn():
                    tokens[delta.request_id].extend(delta.tokens.tolist())
            return list(tokens.values())

        return generate


class Theirs:
    """`transformers`, with its own attention and cache."""

    def __init__(self, directory: Path) -> None:
        transformers.utils.logging.set_verbosity_error()
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.target, self.assistant = (
            load(directory / part, dtype=torch.float32).eval() for part in ("target", "draft")
        )
        for model in (self.target, self.assistant):
            model.generation_config.eos_token_id = None
        self.assistant.generation_config.num_assistant_tokens_schedule = "constant"

    def contender(self, **settings: object) -> Generate:
        def generate(prompts: list[np.ndarray]) -> list[list[int]]:
            longest = max(map(len, prompts))
            ids = torch.zeros((len(prompts), longest), dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, prompt in enumerate(prompts):
                ids[row, longest - len(prompt) :] = torch.from_numpy(prompt)
                mask[row, longest - len(prompt) :] = 1
            with torch.inference_mode():
                out = self.target.generate(
                    ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, use_cache=True, pad_token_id=0, **settings
                )  # fmt: skip
            return out[:, longest:].tolist()

        return generate

    def assisted(self, num_tokens: int, threshold: float) -> Generate:
        def generate(prompts: list[np.ndarray]) -> list[list[int]]:
            # Both are read from the assistant's own configuration.
            self.assistant.generation_config.num_assistant_tokens = num_tokens
            self.assistant.generation_config.assistant_confidence_threshold = threshold
            return self.contender(assistant_model=self.assistant)(prompts)

        return generate

    def logits_after(self, prompt: np.ndarray, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            ids = torch.tensor([[*prompt.tolist(), *tokens]])
            return self.target(ids).logits[0, -1]


def seconds(generate: Generate, prompts: list[np.ndarray]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    generate(prompts)
    return time.perf_counter() - wall, time.process_time() - cpu


def best(candidates: dict[str, Generate], prompts: list[np.ndarray]) -> tuple[str, Generate]:
    """The candidate that takes the least CPU time, the better of two runs each after a first one."""
    times = {}
    for name, generate in candidates.items():
        generate(prompts)
        times[name] = min(seconds(generate, prompts)[1] for _ in range(2))
    name = min(times, key=times.get)
    return name, candidates[name]


def check_equal(theirs: Theirs, prompt: np.ndarray, tokens: list[int], other: list[int], name: str) -> bool:
    """Greedy outputs are the same up to ties: where they part, the model holds both tokens for equally good."""
    assert len(tokens) == len(other) == NEW_TOKENS, name
    if tokens == other:
        return True
    place = next(i for i, (a, b) in enumerate(zip(tokens, other, strict=True)) if a != b)
    logits = theirs.logits_after(prompt, tokens[:place])
    assert abs(float(logits[tokens[place]] - logits[other[place]])) < TIE, f"{name} parts at token {place}"
    return False


def compare(contenders: dict[str, Generate], batches: list[list[np.ndarray]], theirs: Theirs) -> dict[str, dict]:
    """Seconds per token of every contender, medians over turns of all batches together."""
    outputs = {name: [generate(batch) for batch in batches] for name, generate in contenders.items()}
    reference = next(iter(outputs.values()))
    equal = {}
    for name, batch_outputs in outputs.items():
        pairs = [
            check_equal(theirs, prompt, a, b, name)
            for batch, ours, others in zip(batches, reference, batch_outputs, strict=True)
            for prompt, a, b in zip(batch, ours, others, strict=True)
        ]
        equal[name] = f"{sum(pairs)}/{len(pairs)}"
    turns = []
    for _ in range(TURNS):
        turn = {name: np.zeros(2) for name in contenders}
        for batch in batches:
            for name, generate in contenders.items():
                turn[name] += seconds(generate, batch)
        turns.append(turn)
    num_tokens = NEW_TOKENS * sum(map(len, batches))
    result = {}
    for name in contenders:
        wall, cpu = (median(turn[name][i] for turn in turns) for i in range(2))
        result[name] = {
            "tokens_per_s": num_tokens / wall,
            "cpu_ms_per_token": 1e3 * cpu / num_tokens,
            "equal": equal[name],
        }
    return result


def show(title: str, result: dict[str, dict]) -> None:
    print(f"\n{title}, {torch.get_num_threads()} threads, {NEW_TOKENS} tokens behind {PROMPT_LEN}")
    for name, row in result.items():
        print(
            f"  {name:48s} {row['tokens_per_s']:8.1f} tokens/s {row['cpu_ms_per_token']:8.3f} ms CPU per token, equal {row['equal']}"
        )


def ratio(result: dict[str, dict], fast: str, slow: str) -> dict[str, float]:
    """How much faster, by wall and by CPU time."""
    return {
        "wall": result[fast]["tokens_per_s"] / result[slow]["tokens_per_s"],
        "cpu": result[slow]["cpu_ms_per_token"] / result[fast]["cpu_ms_per_token"],
    }


@pytest.fixture(scope="module")
def pair() -> tuple[Ours, Theirs, list[np.ndarray]]:
    directory = pair_directory()
    ours = Ours(directory)
    tokenizer = Tokenizer.load(directory / "target")
    prompts = bench_prompts(tokenizer, ours.target.vocab_size, max(8, PROMPTS), PROMPT_LEN, 0)
    return ours, Theirs(directory), prompts


def test_batch_1(benchmark, pair):
    """Goals: 2 × assisted generation, 1.3 × our own plain decoding."""
    ours, theirs, prompts = pair
    first, batches = [prompts[-1]], [[prompt] for prompt in prompts[:PROMPTS]]
    plain = ours.contender(1, "NONE", 0)
    chains = {
        name: best({f"ours {name} S={s}": ours.contender(1, name, s) for s in OUR_STEPS}, first)
        for name in ("STANDALONE", "EAGLE3")
    }
    trees = best({f"ours EAGLE3 k={k} S={s} nd={n}": ours.contender(1, "EAGLE3", s, k, n) for k, s, n in TREES}, first)
    assisted = best(
        {f"theirs assisted n={n} threshold={t}": theirs.assisted(n, t) for n in THEIR_DRAFT_TOKENS for t in (0.0, 0.4)},
        first,
    )
    lookup = best(
        {f"theirs prompt look-up n={n}": theirs.contender(prompt_lookup_num_tokens=n) for n in (3, 5, 10)}, first
    )
    contenders = dict(
        [("ours plain", plain), *chains.values(), trees, ("theirs plain", theirs.contender()), assisted, lookup]
    )
    result = benchmark.pedantic(compare, args=(contenders, batches, theirs), rounds=1)
    show("batch 1", result)
    fastest = max((*(name for name, _ in chains.values()), trees[0]), key=lambda name: result[name]["tokens_per_s"])
    benchmark.extra_info["contenders"] = result
    for name, slow in (("over our plain", "ours plain"), ("over assisted", assisted[0]), ("over look-up", lookup[0])):
        benchmark.extra_info[name] = ratio(result, fastest, slow)
        same_draft = ratio(result, chains["STANDALONE"][0], slow)
        print(f"  {name}: {fastest} {_in_words(ratio(result, fastest, slow))}; STANDALONE {_in_words(same_draft)}")


def test_batch_8(benchmark, pair):
    """Assisted generation is for batch 1 alone, so this is against plain generation with padding on the left."""
    ours, theirs, prompts = pair
    # Of different lengths, so that there is something to pad.
    batch = [prompt[: PROMPT_LEN - 5 * i] for i, prompt in enumerate(prompts[:8])]
    contenders = {
        "ours plain": ours.contender(8, "NONE", 0),
        "ours STANDALONE S=3": ours.contender(8, "STANDALONE", 3),
        "ours EAGLE3 S=3": ours.contender(8, "EAGLE3", 3),
        "theirs plain": theirs.contender(),
    }
    result = benchmark.pedantic(compare, args=(contenders, [batch], theirs), rounds=1)
    show("batch 8", result)
    benchmark.extra_info["contenders"] = result
    for name in list(contenders)[:-1]:
        print(f"  over theirs: {name} {_in_words(ratio(result, name, 'theirs plain'))}")


def _in_words(ratios: dict[str, float]) -> str:
    return f"{ratios['wall']:.2f}× wall, {ratios['cpu']:.2f}× CPU"
