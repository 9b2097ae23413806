"""Tables of the passes of one model, on one GPU under one server and parallelism: asked of the database once and kept
in the user's cache.

A run looks times up in these plain arrays and does not need the package any more. Refusals of the database are kept,
too. An operation that it interpolates or estimates itself is named in `provenance`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from tokenize import TokenError
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

from ....core.model_shape import Attention, ModelShape
from ..hardware import Parallelism
from ..measured import database
from .database import (
    LEAST_WIDE,
    SERVERS,
    WIDE_SYSTEMS,
    NotMeasured,
    WideExperts,
    check_known,
    package_version,
    question,
    refusal,
    wide_experts,
)

MEASURED = ("silicon", "mixed")  # the database's words for a table, and for points between those of a table
COMPARED_ROWS = (1, 8, 32)
"""Rows of the decode passes, behind 1024 tokens of context, in which products of servers are compared: with the most, a
product takes about as long as for one row, reading its weights."""
_REDUCED_TWICE = "tp_allreduce"
"""All-reduces that vLLM's passes with latent attention have beside those around their experts, which are already
two for each layer."""


class PricedOperation(NamedTuple):
    """One operation of all layers: its time, and how the database knows it."""

    ns: float
    known: str


Pass = dict[str, PricedOperation]


def _decode(rows: int, context: int, handle: Any) -> Pass:
    return _pass(handle.decode_step_per_op(rows, context, 2))


def _prompt(rows: int, new: int, past: int, handle: Any) -> Pass:
    return _pass(handle._engine.run_static_per_op(rows, 1, new + past, 1, past, 1.0, 1.0, "static_ctx", 32)[0])


SLOW, FLAT = 3.0, 2.0
"""A product has the host's launches in its time if it takes more than SLOW times as long as under the other servers for
one token, and for tens of tokens less than FLAT times as long as for one."""
TIMED_WITH_LAUNCHES = ("vllm",)
"""The servers of which the database timed products so: 91 tables of the others have none. To ask for the same model
under two other servers takes twice as long as all else."""
_PRODUCTS = ("gemm", "overlap")  # in names of operations: matrix products, and parts of a pass that overlap some


class PricedOperations:
    """The operations of the passes of one model under one server, from the database's handles of it and of others.

    The database timed some matrix products with the host's launch of each, which takes longer than the product. A
    captured pass has no such launches. These times are flat: one token takes as long as tens, and many times as long as
    under the other servers. The geometric mean of the others stands in for them. Kernels that are only slower stay.

    `launches_ns`: the times of such products, by operation.
    """

    def __init__(self, own: Any, others: Sequence[Any]) -> None:
        self._own, self._others = own, tuple(others)
        self.has_copies = isinstance(own, WideExperts)
        self.launches_ns: dict[str, float] = {}
        few = [_decode(rows, 1024, own) for rows in COMPARED_ROWS]
        for name, elsewhere_ns in self._elsewhere(partial(_decode, COMPARED_ROWS[0], 1024)).items():
            times = [found[name].ns for found in few if name in found]
            is_product = any(mark in name for mark in _PRODUCTS)
            if is_product and times and times[0] > SLOW * elsewhere_ns and max(times) < FLAT * min(times):
                self.launches_ns[name] = max(times)

    def decode(self, rows: int, context: int) -> Pass:
        """Return the operations of a decode pass of so many rows behind `context` tokens each."""
        return self._priced(partial(_decode, rows, context))

    def prompt(self, rows: int, new: int, past: int) -> Pass:
        """Return the operations of a pass over `new` tokens of each row behind `past`."""
        return self._priced(partial(_prompt, rows, new, past))

    def _priced(self, ask: Callable[[Any], Pass]) -> Pass:
        found = ask(self._own)
        if self.launches_ns:
            elsewhere = self._elsewhere(ask)
            for name, launches_ns in self.launches_ns.items():
                if name in found and found[name].ns < FLAT * launches_ns:
                    found[name] = found[name]._replace(ns=min(found[name].ns, elsewhere.get(name, math.inf)))
        return found

    def _elsewhere(self, ask: Callable[[Any], Pass]) -> dict[str, float]:
        """Return the geometric mean of an operation's times under the other servers, in ns, by operation."""
        logarithms: dict[str, list[float]] = {}
        for other in self._others:
            for name, (ns, known) in ask(other).items():
                if known in MEASURED and ns > 0:
                    logarithms.setdefault(name, []).append(math.log(ns))
        return {name: math.exp(statistics.fmean(found)) for name, found in logarithms.items()}


def _pass(operations: Sequence[tuple[str, float, float, str]]) -> Pass:
    return {
        short: PricedOperation(milliseconds * 1e6, known)
        for name, milliseconds, _, known in operations
        if (short := name.removeprefix("generation_").removeprefix("context_")) != _REDUCED_TWICE
    }


TABLE_VERSION = 7  # of what stands below: raise it when the grids or the groups of operations change
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
    "_ar": "comm", "ar_": "comm", "dispatch": "comm", "p2p": "comm", "moe_norm": "layers", "moe": "experts",
}  # fmt: skip
"""Which group an operation belongs to, by the first of these marks in its name; "layers" without any."""
_LAUNCHES = "launches of the host; the kernels are those of the other servers"
_IDEAL = "sol"  # the database's word for a kernel of which it has no measurement at all: the roofline's is taken


@dataclass(frozen=True, slots=True, eq=False)
class KernelTables:
    """Times of the passes of one model, in float nanoseconds, on the grids above, for one attention-data parallel
    group.

    layers:      [TOKENS]                       matrix products and small kernels of all layers, embedding included,
                                                routed experts apart
    comm:        [TOKENS]                       all-reduces and what else moves between devices
    lm_head:     [TOKENS]                       logits of so many rows
    decode:      [ROWS, CONTEXTS]               attention of one new token per row
    verify:      [ROWS, QUERIES, CONTEXTS]      attention of several new tokens per row behind a prefix; empty where the
                                                database knows none
    prefill:     [CHUNKS, PASTS]                attention of one prompt chunk behind so many tokens
    experts:     [TOKENS]                       routed experts, for tokens of as many requests; empty without experts
    provenance:  operation -> how the database knows it: silicon, mixed, empirical; roofline: it does not; or that it
                 was timed with the host's launches
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
    experts: np.ndarray = field(default_factory=lambda: np.empty(0))


_ARRAYS = ("layers", "comm", "lm_head", "decode", "verify", "prefill", "experts")
_SHAPES = {
    **dict.fromkeys(("layers", "comm", "lm_head", "experts"), (len(TOKENS),)),
    "decode": (len(ROWS), len(CONTEXTS)),
    "verify": (len(ROWS), len(QUERIES), len(CONTEXTS)),
    "prefill": (len(CHUNKS), len(PASTS)),
}
_OPTIONAL = ("verify", "experts")  # empty where the roofline prices this, or there is nothing to price
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
    config, options = question(shape, system, server, parallel)
    is_wide = system in WIDE_SYSTEMS and parallel.data > 1 and parallel.devices == parallel.expert >= LEAST_WIDE
    asked = [TABLE_VERSION, version, config, options, system, server, *(["experts with copies"] if is_wide else [])]
    text = json.dumps(asked, sort_keys=True)
    identity = hashlib.sha256(text.encode()).hexdigest()
    path = cache_folder("kernels") / f"{identity[:24]}.npz"
    tables = _load(path, identity)
    if tables is None:
        try:
            own = database.compiled(config, options, system, server)
            if is_wide:
                with suppress(NotMeasured):  # of another model's sizes
                    own = WideExperts(own, wide_experts(config, options))
            others = _other_handles(shape, system, server, parallel) if server in TIMED_WITH_LAUNCHES else []
            operations = PricedOperations(own, others)
            experts = ", experts with copies under trtllm" if isinstance(own, WideExperts) else ""
            source = f"{database.PACKAGE} {version}: {shape.name} on {system}, {server}, {parallel}{experts}"
            has_head_norms = any(getattr(mixer, "qk_norm", False) for mixer, _ in shape.mixers)
            has_verify = all(isinstance(mixer, Attention) for mixer, _ in shape.mixers)
            found = replace(
                _query(operations, source, has_verify, has_head_norms),
                place=f"{gpu} under {server}",
            )
            hole = _table_with_hole(found)
            tables = found if hole is None else f"the database has no usable time at some points of {hole!r}"
        except NotMeasured as error:
            tables = str(error)
        _store(path, identity, tables)
    if isinstance(tables, str):
        if wants_nearest:
            raise refusal(shape, gpu, server, parallel, tables)
        raise NotMeasured(f"{shape.name} on {gpu} under {server}, {parallel}: no measured kernels ({tables})")
    return tables


def _table_with_hole(tables: KernelTables) -> str | None:
    """Return the name of a table that lacks a time, or has a number that is none; None if every table is whole."""
    for name, shape in _SHAPES.items():
        table = getattr(tables, name)
        if table.size == 0 and name in _OPTIONAL:
            continue
        is_whole = table.shape == shape and np.issubdtype(table.dtype, np.floating)
        if not is_whole or not np.isfinite(table).all() or (table < 0).any():
            return name
    return None


def _other_handles(shape: ModelShape, system: str, server: str, parallel: Parallelism) -> list[Any]:
    """Return the database's handles of the same model under the other servers that it has."""
    handles = []
    for other in SERVERS:
        if other != server:
            with suppress(NotMeasured):
                handles.append(database.compiled(*question(shape, system, other, parallel), system, other))
    return handles


def _sums(found: Pass) -> dict[str, float]:
    """Return the times of a pass by group, in ns."""
    sums = dict.fromkeys(("layers", "experts", "comm", "lm_head", "attention"), 0.0)
    for name, (ns, known) in found.items():
        if known != _IDEAL:
            sums[next((group for mark, group in _GROUPS.items() if mark in name), "layers")] += ns
    return sums


def _query(operations: PricedOperations, source: str, has_verify: bool, has_head_norms: bool) -> KernelTables:
    """Price every point of the grids. `has_verify`: whether a prompt's pass behind a
    prefix is like a verify pass, as it is for plain attention alone."""
    provenance: dict[str, str] = {}

    def grouped(found: Pass) -> dict[str, float]:
        """Note how the database knows the operations, and return their times by group."""
        for name, (_, known) in found.items():
            if known == _IDEAL:
                provenance[name] = "roofline"
            else:
                provenance[name] = known if provenance.get(name, known) == known else "mixed"
        return _sums(found)

    def decode_pass(rows: int, context: int) -> dict[str, float]:
        return grouped(operations.decode(rows, context))

    def prefill(rows: int, new: int, past: int) -> dict[str, float]:
        return grouped(operations.prompt(rows, new, past))

    few = [decode_pass(tokens, 1024) for tokens in TOKENS if tokens <= ROWS[-1]]
    many = [prefill(1, tokens, 0) for tokens in TOKENS if tokens > ROWS[-1]]
    # A prompt needs the logits of its last token alone; those of many rows are in proportion to the largest decode
    # batch.
    lm_head = [sums["lm_head"] for sums in few]
    lm_head += [lm_head[-1] * tokens / ROWS[-1] for tokens in TOKENS if tokens > ROWS[-1]]
    by_tokens = few + many
    experts = np.array([sums["experts"] for sums in by_tokens])
    if operations.has_copies:  # the prompts of its graph have none
        experts = np.array([decode_pass(tokens, 1024)["experts"] for tokens in TOKENS])
    decode = np.array([[decode_pass(rows, c)["attention"] for c in CONTEXTS] for rows in ROWS])
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
        provenance=provenance | dict.fromkeys(operations.launches_ns, _LAUNCHES),
        measured_share=shares[True] / sum(shares.values()),
        has_states="roofline" not in provenance.values(),
        experts=experts if experts.any() else np.empty(0),
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
    except _OF_DAMAGED_FILES:
        return None


_OF_DAMAGED_FILES = (
    *(OSError, ValueError, KeyError, TypeError, EOFError, SyntaxError, RuntimeError),
    *(BadZipFile, TokenError, zlib.error),
)
"""What zipfile and NumPy raise for files in which any byte may be wrong."""


@lru_cache(maxsize=64)
def _read(path: Path, identity: str, _written_ns: int) -> KernelTables | str | None:
    """Read a cache file, once for all runs of this process while the file stays as it is."""
    with np.load(path, allow_pickle=False) as file:
        about = json.loads(str(file["about"]))
        if about["identity"] != identity:
            return None
        if about.get("refused"):
            return str(about["refused"])
        tables = KernelTables(**{name: about[name] for name in _ABOUT}, **{name: file[name] for name in _ARRAYS})
    return tables if _table_with_hole(tables) is None else None


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
