"""What the benchmarks of real decoding have in common: contenders take turns in one process after another."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.pages import write_block

PROCESSES = 5
Generate = Callable[[list[np.ndarray]], list[list[int]]]


def seconds(generate: Generate, prompts: list[np.ndarray]) -> tuple[float, float]:
    """Return wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    generate(prompts)
    return time.perf_counter() - wall, time.process_time() - cpu


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


def in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function of a benchmark's module returns in a process of its own."""
    module = sys.modules[function.__module__]
    place = module.__spec__.name if module.__spec__ is not None else module.__name__
    order = json.dumps([function.__name__, *arguments])
    command = [sys.executable, "-m", place, "--child", order]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def spread(values: Sequence[float], form: str) -> str:
    return f"{median(values):{form}} ({min(values):{form}} … {max(values):{form}})"


def run(measure: Callable[[int], list[str]], name: str, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Be the command of a benchmark: print what `measure` returns for a number of processes, and put it into the place
    `name` of docs/evidence/benchmarks.md. `functions` are those that processes of their own run."""
    parser = argparse.ArgumentParser(description=(measure.__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/evidence/benchmarks.md")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        function, *arguments = json.loads(options.child)
        print(json.dumps(functions[function](*arguments)))
        return
    lines = measure(options.processes)
    print("\n".join(lines))
    if options.write:
        write_block("evidence/benchmarks.md", name, lines)
