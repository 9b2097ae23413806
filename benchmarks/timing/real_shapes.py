"""Decoding of larger shapes with random weights on a CPU beside transformers and CTranslate2 (`pip install
ctranslate2`): `foredraft bench --against`, one shape after another, as one table.

    python -m benchmarks.timing.real_shapes                                    # two hours on a quiet core
    python -m benchmarks.timing.real_shapes llama-160m --batch-sizes 1         # one shape, one batch size
    python -m benchmarks.timing.real_shapes llama-160m --batch-sizes 1 --write # its rows in docs/evidence/benchmarks.md

Other rows that stand there stay, if they are of the same processor, threads and turns.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.pages import read_block, write_block

PAGE, BLOCK = "evidence/benchmarks.md", "real decode: shapes"
SHAPES = ("smollm2-135m", "llama-160m", "qwen3-0.6b", "llama-3.2-1b")
BENCH = (
    "--algorithm NGRAM --steps 3 --acceptance 2.7 --context-lengths 64 --output-tokens 25 --prompts 1 --device cpu "
    "--dtype float32 --quiet --json"
)
TITLES = (
    "shape", "batch", "weights", "tokens/s", "per CPU s", "of the copy bandwidth", "over transformers",
    "over CTranslate2", "round of 4 rows over plain", "chain of 3 over plain",
)  # fmt: skip


def measure(shape: str, options: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """Yield the machine's name and a row of the table for each kind of weights and each batch size."""
    for weights, others in (("auto", "transformers,ctranslate2"), ("int8", "ctranslate2")):
        arguments = f"--batch-sizes {options.batch_sizes} --repeat {options.repeat} --threads {options.threads}"
        command = ["bench", "--random-weights", shape, "--quantized", weights, "--against", others]
        command = [sys.executable, "-m", "foredraft", *command, *arguments.split(), *BENCH.split()]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        for plain, chain in zip(found["cells"][::2], found["cells"][1::2], strict=True):
            yield found["machine"]["device_name"], row(shape, "int8" if weights == "int8" else "float32", plain, chain)


def row(shape: str, weights: str, plain: dict[str, Any], chain: dict[str, Any]) -> list[str]:
    ratios = {one["name"].split()[0]: f"{one['cpu_ratio']:.2f}" for one in plain["others"] if not one["problem"]}
    return [
        shape, str(plain["batch_size"]), weights, f"{plain['tokens_per_s']:.1f}", f"{plain['tokens_per_cpu_s']:.1f}",
        "–" if weights == "int8" else f"{plain['floor_share']:.0%}", ratios.get("transformers", "–"),
        ratios.get("ctranslate2", "–"), f"{cpu_ms(chain) / cpu_ms(plain):.2f}",
        f"{chain['tokens_per_cpu_s'] / plain['tokens_per_cpu_s']:.2f}",
    ]  # fmt: skip


def cpu_ms(cell: dict[str, Any]) -> float:
    """Return the processor time of a round."""
    return 1e3 * cell["batch_size"] * cell["accept_length"] / cell["tokens_per_cpu_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("shapes", nargs="*", default=SHAPES, help=f"default: {', '.join(SHAPES)}")
    parser.add_argument("--batch-sizes", default="1,8,32")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="put these rows into docs/evidence/benchmarks.md")
    options = parser.parse_args()
    devices, rows = set(), []
    for shape in options.shapes:
        for device, cells in measure(shape, options):
            print(" ".join(cells), file=sys.stderr, flush=True)
            devices.add(device)
            rows.append(cells)
    head = f"{devices.pop()}, {options.threads} thread{'s' * (options.threads > 1)}; medians of {options.repeat} turns."
    print("\n".join(table(head, rows)))
    if options.write:
        kept = [] if (old := read_block(PAGE, BLOCK))[0] != head else [one.strip("| ").split(" | ") for one in old[4:]]
        new = {tuple(row[:3]): row for row in kept} | {tuple(row[:3]): row for row in rows}
        order = sorted(new.values(), key=lambda row: (SHAPES.index(row[0]), int(row[1]), row[2]))
        write_block(PAGE, BLOCK, table(head, order))


def table(head: str, rows: list[list[str]]) -> list[str]:
    return [head, "", *(f"| {' | '.join(one)} |" for one in [TITLES, ["---"] * len(TITLES), *rows])]


if __name__ == "__main__":
    main()
