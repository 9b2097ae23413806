"""How the weights of a projection lie in memory on a CPU, chosen by measuring once per machine.

    rows       [out, in], as stored: `F.linear`
    columns    [in, out]: `torch.mm`, and NumPy's product
    blocks     oneDNN's own layout

Which one reads a large matrix fastest for one row and for a few depends on the CPU and on the library. So the first process that meets a
shape times all of them, for one row and for a verify pass, and notes the fastest in a file of the user's cache. Later processes take it
from there, for two reasons: it is quicker, and sums in another order could turn a near tie of logits, so that the same command would not
give the same text.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.errors import ConfigError
from ...core.parsing import ParseError, parse_json
from ...observe.input_files import read_text

ROWS, COLUMNS, BLOCKS = "rows", "columns", "blocks"
TIMED_ROWS = (1, 4)  # a step of plain decoding; the verify pass of the default chain
REPEATS = 5
COLD_BYTES = 64 << 20  # beyond the caches of a core: a matrix of a large model is not in them when its turn comes
LEAST_GAIN = 0.05  # by which another layout must beat the first candidate: less is noise

Product = Callable[[Tensor], Tensor]


def candidates(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the layouts that suit a dtype here, the usual one first."""
    blocked = (BLOCKS,) if has_packed_kernels(dtype) else ()
    # Products with narrow columns convert element by element: a fifth of the speed of rows.
    return (*blocked, ROWS, *((COLUMNS,) if dtype is torch.float32 else ()))


def product_of(layout: str, weight: Tensor, bias: Tensor | None = None) -> Product:
    """Return x [n, in] → x · weightᵀ + bias over a copy of `weight` [out, in] in this layout; over `weight` itself for rows."""
    if layout == BLOCKS:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        multiply = torch.ops.mkldnn._linear_pointwise.default
        return lambda x: multiply(x, packed, bias, "none", [], "")
    if layout == COLUMNS:
        columns = weight.t().contiguous()
        return lambda x: torch.mm(x, columns) if bias is None else torch.addmm(bias, x, columns)
    return lambda x: F.linear(x, weight, bias)


def choose_layout(weight: Tensor) -> str:
    """Return the layout for a large weight [out, in] on this machine; measured if it is not known."""
    names = candidates(weight.dtype)
    if len(names) == 1:
        return names[0]
    machine = f"{_processor()}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    shape = f"{weight.shape[0]} x {weight.shape[1]} {weight.dtype}".replace("torch.", "")
    chosen = _known().get(machine, {}).get(shape)
    if chosen not in names:
        measured = fastest(weight, names)
        # Another process may have noted its choice meanwhile: the first one stays.
        _known.cache_clear()
        shapes = _known().setdefault(machine, {})
        chosen = shapes.get(shape)
        if chosen not in names:
            chosen = shapes[shape] = measured
            _note(_known())
    return chosen


@torch.no_grad()
def fastest(weight: Tensor, names: tuple[str, ...]) -> str:
    """Time the product with `weight` in each layout, out of the caches; return the fastest, or the first if none is clearly so."""
    others = torch.zeros(COLD_BYTES // 4)
    seconds = {}
    for name in names:
        product = product_of(name, weight)
        seconds[name] = 0.0
        for rows in TIMED_ROWS:
            x = torch.ones(rows, weight.shape[1], dtype=weight.dtype)
            product(x)
            seconds[name] += min(_timed(product, x, others) for _ in range(REPEATS))
    best = min(names, key=seconds.__getitem__)
    return best if seconds[best] < (1 - LEAST_GAIN) * seconds[names[0]] else names[0]


def _timed(product: Product, x: Tensor, others: Tensor) -> float:
    others.add_(1.0)
    begin = time.perf_counter()
    product(x)
    return time.perf_counter() - begin


def has_packed_kernels(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies packed weights of this dtype here: a build may lack the operators, a CPU those for bfloat16."""
    operators = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not all(
        hasattr(operators, name)
        for name in ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    ):
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and operators._is_mkldnn_bf16_supported())


def is_native(dtype: torch.dtype) -> bool:
    """Return whether this CPU multiplies numbers of a 16-bit dtype itself; others emulate it, several times slower than 32 bits."""
    if dtype is not torch.bfloat16 or not has_packed_kernels(dtype):
        return False
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


# -- what was measured ------------------------------------------------------------------------------------------------


def notes_file() -> Path:
    """Return the file of measured choices, in the user's cache."""
    cache_dir = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(cache_dir) if Path(cache_dir).is_absolute() else Path.home() / ".cache"
    return root / "foretoken" / "layouts.json"


@cache
def _known() -> dict[str, dict[str, str]]:
    """Return the choices of the file, by machine and shape. A file that cannot be read is measured anew and replaced."""
    try:
        notes = parse_json(read_text(notes_file()))
    except (ConfigError, ParseError):
        return {}
    if not isinstance(notes, dict):
        return {}
    return {machine: dict(shapes) for machine, shapes in notes.items() if isinstance(shapes, dict)}


def _note(known: dict[str, dict[str, str]]) -> None:
    """Write the choices, whole or not at all. A cache that cannot be written costs the next process a second, and nothing else."""
    file = notes_file()
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        partial.replace(file)
    except OSError:
        with suppress(OSError):
            partial.unlink()


@cache
def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # another system than Linux
    return platform.processor() or platform.machine()
