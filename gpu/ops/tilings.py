"""Which way of a product with stored numbers a device computes fastest.

The kernel can tile a matrix in several ways (`TILINGS`), and many rows may be multiplied faster by torch, with a matrix
that is unpacked first. Which is fastest differs by device, shape and number of rows. So each is timed at the first
start on a device, before the first request, and the fastest are kept in a file of the user's cache. Until then, and for
shapes that were not timed, `usual_tiling` holds.

Ways differ in rounding. Within a process the way of a shape changes at most once, before the first request.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...observe.output_files import UnwritableFile, cache_directory, write_json
from ..kernels.jit import triton
from ..kernels.layers.products import TILINGS, Tiling, coded_product_triton, padded_rows, usual_tiling
from ..types.coded import Code, CodedWeight

TIMED_ROWS = (16, 32, 64, 128)
"""Numbers of rows that are timed; fewer are padded to the next."""
CLEARLY_FASTER = 0.97
"""Of the usual way's time: another way that takes no less is not worth another program."""
TURNS = 5
VERSION = 1


@dataclass(frozen=True, slots=True)
class ProductShape:
    """What decides how fast a product is. `rows`: one of `TIMED_ROWS`."""

    code: str
    group: int
    outputs: int
    inputs: int
    dtype: str
    rows: int


_measured: dict[ProductShape, Tiling | None] = {}


def tiling_for(weight: CodedWeight, num_rows: int, dtype: torch.dtype) -> Tiling | None:
    """Return how num_rows rows are multiplied with a matrix; None: with the unpacked one."""
    rows = padded_rows(num_rows)
    if not _measured or rows > TIMED_ROWS[-1]:
        return usual_tiling(rows)
    shape = shape_of(weight, rows, dtype)
    return _measured[shape] if shape in _measured else usual_tiling(rows)


def shape_of(weight: CodedWeight, rows: int, dtype: torch.dtype) -> ProductShape:
    """Return the shape of a product of `rows` rows in `dtype` with a matrix."""
    outputs, inputs = weight.shape[-2:]
    return ProductShape(weight.code.value, weight.group, outputs, inputs, str(dtype).removeprefix("torch."), rows)


def take_tilings(measured: Mapping[ProductShape, Tiling | None]) -> None:
    """Multiply in these ways from now on."""
    _measured.update(measured)


def coded_matrices(*models: nn.Module | None) -> list[CodedWeight]:
    """Return the matrices that models keep in stored numbers, those of experts aside."""
    found = [
        projection.coded
        for model in models
        if model is not None
        for module in model.modules()
        for projection in getattr(module, "projections", ())
    ]
    return [weight for weight in found if weight is not None and weight.codes.dim() == 2]


def measure_tilings(
    weights: Iterable[CodedWeight],
    dtype: torch.dtype,
    seconds_of: Callable[[Callable[[], object]], float],
    on_line: Callable[[str], None],
    limit_s: float,
) -> dict[ProductShape, Tiling | None]:
    """Time the ways of every product that has not been timed yet, until `limit_s` seconds have passed.

    weights: matrices on the device. `seconds_of` times one call there. Returns the fastest way of each shape.
    """
    end = time.monotonic() + limit_s
    wanted = {shape_of(weight, rows, dtype): weight for weight in weights for rows in TIMED_ROWS}
    wanted = {shape: weight for shape, weight in wanted.items() if shape not in _measured}
    fastest: dict[ProductShape, Tiling | None] = {}
    for number, (shape, weight) in enumerate(wanted.items(), 1):
        if time.monotonic() >= end:
            on_line(f"timing products: {number - 1} of {len(wanted)} when the time ended; the others run the usual way")
            break
        on_line(f"timing products: {number} of {len(wanted)}")
        x = torch.randn(shape.rows, shape.inputs, device=weight.codes.device).to(dtype)
        fastest[shape] = _fastest(x, weight, seconds_of)
    return fastest


def _fastest(x: Tensor, weight: CodedWeight, seconds_of: Callable[[Callable[[], object]], float]) -> Tiling | None:
    usual = usual_tiling(x.shape[0])
    seconds = {way: seconds_of(partial(coded_product_triton, x, weight, way)) for way in (*TILINGS, None)}
    best = min(seconds, key=seconds.__getitem__)
    return best if seconds[best] < CLEARLY_FASTER * seconds[usual] else usual


def device_seconds(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """Return a function that times a call on a GPU, with an empty cache: the best of `TURNS` calls, in seconds."""
    flushed = torch.empty(2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.uint8, device=device)

    def seconds_of(call: Callable[[], object]) -> float:
        call()  # which compiles
        best_ms = float("inf")
        for _ in range(TURNS):
            flushed.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            best_ms = min(best_ms, begin.elapsed_time(end))
        return best_ms / 1e3

    return seconds_of


# -- the file ---------------------------------------------------------------------------------------------------------


def tilings_path(device: torch.device) -> Path:
    """Return where a GPU's ways are kept: another GPU, torch or Triton has a file of its own."""
    name = "-".join(torch.cuda.get_device_name(device).lower().split())
    return cache_directory() / "products" / f"{name}-torch{torch.__version__}-triton{triton.__version__}.json"


def read_tilings(path: Path) -> dict[ProductShape, Tiling | None]:
    """Read the ways that were found to be fastest. Empty if there is no file, or one that was not written here: then
    they are timed again."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        assert document["version"] == VERSION
        return dict(map(_read_entry, document["products"]))
    except (OSError, ValueError, KeyError, TypeError, AssertionError):
        return {}


def _read_entry(entry: dict[str, Any]) -> tuple[ProductShape, Tiling | None]:
    shape, tiling = ProductShape(**entry["shape"]), entry["tiling"]
    assert shape.rows in TIMED_ROWS and Code(shape.code)
    way = None if tiling is None else Tiling(**tiling)
    assert way is None or way in TILINGS
    return shape, way


def write_tilings(path: Path, measured: Mapping[ProductShape, Tiling | None]) -> None:
    """Add ways to the file, which is replaced as a whole. One that cannot be written is left: they are timed again."""
    entries = [
        {"shape": asdict(shape), "tiling": None if way is None else way._asdict()}
        for shape, way in (read_tilings(path) | dict(measured)).items()
    ]
    try:
        write_json(path, {"version": VERSION, "products": entries})
    except UnwritableFile:
        return
