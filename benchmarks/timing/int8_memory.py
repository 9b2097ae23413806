"""The memory that a CPU needs while it loads a model in 8-bit integers, beside what it keeps (Linux).

    python -m benchmarks.timing.int8_memory smollm2-135m llama-160m qwen3-0.6b

A checkpoint of each shape with random weights is written into a temporary folder, and loaded in another process after
a small one, which brings the pages of libraries.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from foredraft.gpu.measure.shapes import shape_of
from foredraft.gpu.models.checkpoint import load_target, random_weights, save_target
from foredraft.gpu.models.projection import INT8, pack_projections
from foredraft.gpu.session.devices import ops_for

SMALL, WHOLE = "small", "whole"


def measure(shape: str) -> str:
    """Return a line with what a checkpoint of a shape takes, and the peak while it is loaded."""
    configs = {SMALL: replace(shape_of("smollm2-135m"), num_layers=1, vocab_size=512), WHOLE: shape_of(shape)}
    with TemporaryDirectory() as directory:
        for name, config in configs.items():
            save_target(random_weights(config, ops_for("cpu"), "cpu", torch.float32), Path(directory, name))
        command = [sys.executable, "-m", "benchmarks.timing.int8_memory", directory]
        return f"{shape}: {subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout}"


def load(directory: Path) -> str:
    """Load the small model and then the whole one. Returns the second half of `measure`'s line."""
    torch.set_num_threads(1)
    before = 0
    for name in (SMALL, WHOLE):
        before = memory("VmRSS")
        model = load_target(directory / name, ops_for("cpu"), "cpu", torch.float32, in_int8=True)
        pack_projections(model, in_int8=True)
        products = [one for module in model.modules() for one in getattr(module, "projections", ())]
        integers = [one.compiled.weight.nbytes for one in products if one.layout == INT8 and one.compiled is not None]
        kept = sum(integers) + sum(one.untyped_storage().nbytes() for one in model.parameters())
        peak = memory("VmHWM") - before
        del model, products
    return f"{kept / 1e6:.0f} MB in memory, at most {peak / kept:.2f} of it while it is loaded"


def memory(name: str) -> int:
    """Return bytes of this process from the kernel's status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


if __name__ == "__main__":
    for given in sys.argv[1:]:
        if Path(given, WHOLE).is_dir():
            print(load(Path(given)))
        else:
            print(measure(given), end="", flush=True)
