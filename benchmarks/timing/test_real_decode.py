"""Real decoding on a CPU: this project and the `generate()` of `transformers`, on the same prompts, in the same
processes.

    OMP_NUM_THREADS=1 python -m benchmarks.timing.test_real_decode   # or pytest -s; some minutes
    OMP_NUM_THREADS=1 python -m benchmarks.timing.test_real_decode --write

The last one puts the tables into docs/evidence/benchmarks.md.

The tiny pair in float32, greedy. Ends of text are ignored, so that everyone makes the same number of tokens. Each side
first looks for its best settings on one prompt. Then contenders take turns in one process after another; tables have
medians over the processes, least and greatest. FOREDRAFT_PAIR names a pair's directory; without it that of the cache is
used, and trained if it is missing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from foredraft.cli.decode.tiny import default_directory
from foredraft.core.contract.request import Request
from foredraft.core.prompt import Prompt
from foredraft.gpu.executor.round import PhaseClock
from foredraft.gpu.measure.arm import Arm
from foredraft.gpu.measure.plan import BenchOptions, plan_bench
from foredraft.gpu.measure.prompts import bench_prompts
from foredraft.gpu.models.checkpoint import load_draft, load_target
from foredraft.gpu.session.devices import ops_for
from foredraft.gpu.session.loop import DecodeLoop, DeliverySink
from foredraft.gpu.session.text import Tokenizer
from foredraft.gpu.tiny.pair import make_pair
from foredraft.gpu.tiny.sizes import PairOptions, size_of

from benchmarks.timing.contenders import PROCESSES, Generate, in_process, run, seconds, spread, their_tokens

transformers = pytest.importorskip("transformers")

NEW_TOKENS, PROMPT_LEN, PROMPTS, BATCH = 96, 64, 4, 8
TIE = 1e-3  # logits nearer than this are equal in float32 after sixteen layers

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
    return make_pair(default_directory("tiny"), PairOptions(size_of("tiny")), lambda progress: None).directory


# -- in a process of its own ------------------------------------------------------------------------------------------


class Ours:
    """This project with one setting: generates as the others do, and says where the time of its rounds went."""

    def __init__(self, arm: Arm) -> None:
        deliveries = DeliverySink()
        engine, self._executor = arm.open(deliveries)
        self._loop = DecodeLoop(engine, self._executor, deliveries)
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
        draft = self.drafts.get(algorithm) if plan.steps else None
        return Ours(Arm(algorithm, plan.spec, self.target, draft, self.ops))

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


# -- all processes ----------------------------------------------------------------------------------------------------


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
            lines.append(f"| {name} | {spread(rates, '.0f')} | {spread(cpu, '.2f')} | {min(equal):.0%} |")
        lines.append("")
    lines += ["| ratio, batch 1 | measured | goal |", "| --- | --- | --- |"]
    for fast, slow, goal in RATIOS:
        names = [in_words(chosen.get(which, PLAIN)) for which in (fast, slow)]
        ratios = [run["1"][names[0]][0] / run["1"][names[1]][0] for run in runs]
        missed = ": missed" if median(ratios) < goal else ""
        lines.append(f"| {names[0]} over {names[1]} | {spread(ratios, '.2f')} | ≥ {goal:g}{missed} |")
    lines += ["", f"| a round, batch 1, ms | tokens | {' | '.join(PARTS)} | together |", "| --- " * 9 + "|"]
    for name in [in_words(spec) for spec in specs if spec[0] == "ours"]:
        tokens, *parts = (median(column) for column in zip(*(run["1"][name][3:] for run in runs), strict=True))
        lines.append(f"| {name} | {tokens:.2f} | {' | '.join(f'{part:.2f}' for part in parts)} | {sum(parts):.2f} |")
    return lines


def test_real_decode():
    """Print the tables. Outputs that differ, other than by ties, end a process with an error."""
    print("\n" + "\n".join(measure_pair(PROCESSES)))


if __name__ == "__main__":
    run(measure_pair, "real decode: pair", globals())
