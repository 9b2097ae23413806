"""Tables of the passes of one model, on one GPU under one server and parallelism: asked of the database once and kept
in the user's cache.

A run looks times up in these plain arrays and does not need the package any more. Refusals of the database are kept,
too. An operation that it interpolates or estimates itself is named in `provenance`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

from ....core.model_shape import Attention, ModelShape
from ..hardware import Parallelism
from ..measured import database
from .database import SERVERS, NotMeasured, check_known, package_version, question, refusal

# Operations are checked against the same ones under other servers. Two servers take about the same for an operation in
# one format on one GPU: in passes of 16 models on H200, B200 and L40S 98 of 100 are less than a factor of 2 apart. What
# takes more than SLOW times as long was measured with the host's launches (vLLM's products of FP8 in blocks: 57 to 430
# us however small), or without the tuning of a server's start (its experts in FP8 on Hopper). There the least of the
# servers' times is taken, and the provenance says so.

SLOW = 3.0
MEASURED = ("silicon", "mixed")  # the database's words for a table, and for points between those of a table
_KERNELS = (
    "gemm",
    "moe",
    "attention",
    "mla_block",
)  # in names of operations: the others are small or move data between devices
_PROBED_ROWS, _PROBED_PROMPTS = (1, 8, 32, 128, 512), (1024, 8192)
_REDUCED_TWICE = "tp_allreduce"
"""All-reduces that vLLM's passes with latent attention have beside those around their experts, which are already
two for each layer."""


class Operation(NamedTuple):
    """One operation of all layers: its time, and how the database knows it."""

    ns: float
    known: str


Pass = dict[str, Operation]


def _decode(rows: int, context: int, handle: Any) -> Pass:
    return _pass(handle.decode_step_per_op(rows, context, 2))


def _prompt(rows: int, new: int, past: int, handle: Any) -> Pass:
    return _pass(handle._engine.run_static_per_op(rows, 1, new + past, 1, past, 1.0, 1.0, "static_ctx", 32)[0])


def _pass(operations: Sequence[tuple[str, float, float, str]]) -> Pass:
    return {
        short: Operation(milliseconds * 1e6, known)
        for name, milliseconds, _, known in operations
        if (short := name.removeprefix("generation_").removeprefix("context_")) != _REDUCED_TWICE
    }


class Operations:
    """Prices passes by operation, from the database's handle of a server and, by name, those of others.

    `corrected`: the operations that are too slow, each with its replacement.
    """

    def __init__(self, own: Any, others: Mapping[str, Any]) -> None:
        self._own, self._others = own, tuple(others.values())
        self.corrected: dict[str, str] = {}
        probes = [partial(_decode, rows, 1024) for rows in _PROBED_ROWS]
        for ask in (*probes, *(partial(_prompt, 1, new, 0) for new in _PROBED_PROMPTS)):
            own_pass = ask(own)
            for name, ns in self._least_elsewhere(ask).items():
                is_kernel = any(mark in name for mark in _KERNELS) and "dispatch" not in name
                if is_kernel and name in own_pass and own_pass[name].ns > SLOW * ns:
                    self.corrected[name] = f"{own_pass[name].known}, at most that of {' and '.join(others)}"

    def decode(self, rows: int, context: int) -> Pass:
        """Return the operations of a decode pass of so many rows behind `context` tokens each."""
        return self._corrected(partial(_decode, rows, context))

    def prompt(self, rows: int, new: int, past: int) -> Pass:
        """Return the operations of a pass over `new` tokens of each row behind `past`."""
        return self._corrected(partial(_prompt, rows, new, past))

    def _corrected(self, ask: Callable[[Any], Pass]) -> Pass:
        found = ask(self._own)
        if self.corrected:
            for name, ns in self._least_elsewhere(ask).items():
                if name in self.corrected and name in found:
                    found[name] = found[name]._replace(ns=min(found[name].ns, ns))
        return found

    def _least_elsewhere(self, ask: Callable[[Any], Pass]) -> dict[str, float]:
        """Return the least time that was measured under other servers of each operation of a pass."""
        least: dict[str, float] = {}
        for other in self._others:
            for name, (ns, known) in ask(other).items():
                if known in MEASURED and ns > 0:
                    least[name] = min(ns, least.get(name, ns))
        return least


TABLE_VERSION = 5  # of what stands below: raise it when the grids or the groups of operations change
TOKENS = (*range(1, 65), *range(72, 513, 8), *range(576, 2049, 64), 3072, 4096, 6144, 8192, 12288, 16384)
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
QUERIES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)
CONTEXTS = (64, 256, 1024, 4096, 16384)
CHUNKS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PASTS = (0, 256, 1024, 4096, 16384, 65536)
KNEE = 1024
"""Context per row where the line of an attention pass may bend; must be one of CONTEXTS."""

_GROUPS = {
    "attention": "attention", "mla_block": "attention", "logits": "lm_head",
    "_ar": "comm", "ar_": "comm", "dispatch": "comm", "p2p": "comm",
}  # fmt: skip
_IDEAL = "sol"  # the database's word for a kernel of which it has no measurement at all: the roofline's is taken
_LIBRARIES = ("bf16", "fp16")  # formats whose kernels are those of the vendor's libraries under every server


@dataclass(frozen=True, slots=True)
class KernelTables:
    """Times of the passes of one model, in float nanoseconds, on the grids above, for one attention-data parallel
    group.

    layers:      [TOKENS]                       matrix products and small kernels of all layers, embedding included
    comm:        [TOKENS]                       all-reduces and what else moves between devices
    lm_head:     [TOKENS]                       logits of so many rows
    decode:      [ROWS, CONTEXTS]               attention of one new token per row
    verify:      [ROWS, QUERIES, CONTEXTS]      attention of several new tokens per row behind a prefix; empty where the
                                                database knows none
    prefill:     [CHUNKS, PASTS]                attention of one prompt chunk behind so many tokens
    provenance:  operation -> how the database knows it: silicon, mixed, empirical; roofline: it does not; or what was
                 corrected
    measured_share:  share of a decode pass (16 rows, 1024 tokens of context) that comes from measurements
    """

    source: str
    layers: np.ndarray
    comm: np.ndarray
    lm_head: np.ndarray
    decode: np.ndarray
    verify: np.ndarray
    prefill: np.ndarray
    provenance: dict[str, str]
    measured_share: float = 1.0
    place: str = ""  # GPU and server
    has_states: bool = True  # whether recurrent layers are priced from measurements


_ARRAYS = ("layers", "comm", "lm_head", "decode", "verify", "prefill")
_ABOUT = ("source", "provenance", "measured_share", "place", "has_states")


def measured_tables(
    shape: ModelShape, gpu: str, server: str, parallel: int | Parallelism, *, wants_nearest: bool = False
) -> KernelTables:
    """Return the tables of a shape, from the cache folder or, the first time, from the database.

    Raises NotMeasured if the package is not installed, or cannot price this shape, GPU, server or parallelism. With
    `wants_nearest` the message names the nearest that it can, which takes a few more questions to it.
    """
    parallel = Parallelism.of(parallel)
    system = check_known(gpu, server, parallel)
    version = package_version()
    config, options = question(shape, server, parallel)
    text = json.dumps([TABLE_VERSION, version, config, options, system, server], sort_keys=True)
    identity = hashlib.sha256(text.encode()).hexdigest()
    path = cache_folder("kernels") / f"{identity[:24]}.npz"
    tables = _load(path, identity)
    if tables is None:
        try:
            operations = _operations(shape, system, server, parallel)
            place = f"{database.PACKAGE} {version}: {shape.name} on {system}, {server}, {parallel}"
            has_head_norms = any(getattr(mixer, "qk_norm", False) for mixer, _ in shape.mixers)
            has_verify = all(isinstance(mixer, Attention) for mixer, _ in shape.mixers)
            tables = replace(_query(operations, place, has_verify, has_head_norms), place=f"{gpu} under {server}")
        except NotMeasured as error:
            tables = str(error)
        _store(path, identity, tables)
    if isinstance(tables, str):
        if wants_nearest:
            raise refusal(shape, gpu, server, parallel, tables)
        raise NotMeasured(f"{shape.name} on {gpu} under {server}, {parallel}: no measured kernels ({tables})")
    return tables


def _operations(shape: ModelShape, system: str, server: str, parallel: Parallelism) -> Operations:
    """Return the object that prices the operations of a shape. Raises NotMeasured."""

    def asked(of: str) -> Any:
        return database.compiled(*question(shape, of, parallel), system, of)

    own, others = asked(server), {}
    for other in SERVERS if shape.weight_dtype not in _LIBRARIES else ():
        if other != server:
            with suppress(NotMeasured):
                others[other] = asked(other)
    return Operations(own, others)


def _query(operations: Operations, source: str, has_verify: bool, has_head_norms: bool) -> KernelTables:
    """Ask the database for every point of the grids; `has_verify`: whether a prompt's pass behind a prefix is like a
    verify pass, as it is for plain attention alone."""
    provenance: dict[str, str] = {}

    def grouped(found: Pass) -> dict[str, float]:
        """Sum the times of operations by group, in ns."""
        sums: dict[str, float] = dict.fromkeys(("layers", "comm", "lm_head", "attention"), 0.0)
        for name, (ns, known) in found.items():
            if known == _IDEAL:
                provenance[name] = "roofline"
                continue
            group = next((group for mark, group in _GROUPS.items() if mark in name), "layers")
            sums[group] += ns
            provenance[name] = known if provenance.get(name, known) == known else "mixed"
        return sums

    def prefill(rows: int, new: int, past: int) -> dict[str, float]:
        return grouped(operations.prompt(rows, new, past))

    few = [grouped(operations.decode(tokens, 1024)) for tokens in TOKENS if tokens <= ROWS[-1]]
    many = [prefill(1, tokens, 0) for tokens in TOKENS if tokens > ROWS[-1]]
    # A prompt needs the logits of its last token alone; those of many rows are in proportion to the largest decode
    # batch.
    lm_head = [sums["lm_head"] for sums in few]
    lm_head += [lm_head[-1] * tokens / ROWS[-1] for tokens in TOKENS if tokens > ROWS[-1]]
    by_tokens = few + many
    decode = np.array([[grouped(operations.decode(rows, c))["attention"] for c in CONTEXTS] for rows in ROWS])
    verify = np.empty(0)
    if has_verify:
        verify = np.array([[[prefill(rows, q, c)["attention"] for c in CONTEXTS] for q in QUERIES] for rows in ROWS])
        if has_head_norms:
            # The database adds norms of heads to each layer of a prompt's pass, which a captured decode pass fuses. A
            # single token behind a short prefix takes the same in both.
            verify -= max(0.0, verify[0, 0, 0] - decode[0, 0])
        # A verify pass reads at least what a decode pass reads: the database extrapolates it for few queries.
        verify = np.maximum(verify, decode[:, None, :])
    shares: dict[bool, float] = {True: 0.0, False: 0.0}
    for ns, known in operations.decode(16, 1024).values():
        shares[known in MEASURED] += ns
    return KernelTables(
        source=source,
        layers=np.array([sums["layers"] for sums in by_tokens]),
        comm=np.array([sums["comm"] for sums in by_tokens]),
        lm_head=np.array(lm_head),
        decode=decode,
        verify=verify,
        prefill=np.array([[prefill(1, new, past)["attention"] for past in PASTS] for new in CHUNKS]),
        provenance=provenance | operations.corrected,
        measured_share=shares[True] / sum(shares.values()),
        has_states="roofline" not in provenance.values(),
    )


# -- the cache ---------------------------------------------------------------------------------------------------------


def cache_folder(of: str) -> Path:
    """Return the user's folder of what is kept, `of` tables or results."""
    base = os.environ.get("FOREDRAFT_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "foredraft"
    )
    return Path(base) / of


def _load(path: Path, identity: str) -> KernelTables | str | None:
    """Return the tables of a cache file, or the reason why there are none; None if there is no file, or it is damaged
    or of another identity."""
    try:
        return _read(path, identity, path.stat().st_mtime_ns)
    except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile):
        return None


@lru_cache(maxsize=64)
def _read(path: Path, identity: str, _written_ns: int) -> KernelTables | str | None:
    """Read a cache file, once for all runs of this process while the file stays as it is."""
    with np.load(path, allow_pickle=False) as file:
        about = json.loads(str(file["about"]))
        if about["identity"] != identity:
            return None
        if about.get("refused"):
            return str(about["refused"])
        return KernelTables(**{name: about[name] for name in _ABOUT}, **{name: file[name] for name in _ARRAYS})


def _store(path: Path, identity: str, tables: KernelTables | str) -> None:
    """Write a cache file as a whole; if the folder cannot be written, only the next run takes some seconds longer."""
    about: dict[str, Any] = {"identity": identity}
    arrays: dict[str, np.ndarray] = {}
    if isinstance(tables, str):
        about["refused"] = tables
    else:
        about |= {name: getattr(tables, name) for name in _ABOUT}
        arrays = {name: getattr(tables, name) for name in _ARRAYS}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.stem}.{os.getpid()}.npz")
        arrays["about"] = np.array(json.dumps(about))
        np.savez(partial, **arrays)  # type: ignore[arg-type]  # the stub takes any of the arrays for `allow_pickle`
        partial.replace(path)
    except OSError:
        return
