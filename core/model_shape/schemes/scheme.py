"""Which format each matrix of a quantized checkpoint has: the entries of its configuration, resolved by name.

An entry names matrices: by their name or that of a module above them, by a name with * and ?, by an expression behind
`re:`, or by their class, `Linear` or `Embedding`. What stands before `layers.` differs between checkpoints of one model
and is not compared, except in expressions, which may match with any published beginning.

Entries stand in tiers. The first tier that has an entry for a matrix decides. Within a tier, entries of two groups must
not name the same matrix, unless the tier is ordered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache

from ..matrices import ANY_LAYER, Matrix, expert_number, first_expert, layer_named, layer_prefix, matrix_named
from .beside import beside

LINEAR, EMBEDDING = "Linear", "Embedding"  # classes of modules

_BEGINNINGS = ("model.", "model.language_model.", "language_model.model.", "language_model.", "backbone.", "")
_NUMBERS = re.compile(r"layers\\?\.([0-9]{1,7})")
_ELSEWHERE = (
    "vis", "image", "modality", "audio", "video", "speech", "mtp", "nextn", "projector", "vit", "tower", "encoder", "patch",
    "merger", "adapter", "draft", "eagle",
)  # fmt: skip
"""Parts of names of what is no part of the language model."""
_BEHIND = 10  # layers that draft for the model have numbers behind its last, at most so many


@dataclass(frozen=True, slots=True)
class FormatEntry:
    """One entry: `key` in the file, the format of the matrices that it names (None: 16 bits), its `group`."""

    key: str
    pattern: str
    format: str | None
    group: str = ""
    is_loose: bool = False  # a part of a name is enough
    is_vital: bool = True  # must name a matrix


@dataclass(frozen=True)
class Tier:
    """Entries of one rank. `is_ordered`: the first that names a matrix counts."""

    entries: tuple[FormatEntry, ...]
    is_ordered: bool = False

    def entry_for(self, matrix: Matrix) -> FormatEntry | None:
        """Return the entry that names a matrix. Raises TwoGroups if those of two groups do."""
        found: FormatEntry | None = None
        for entry in self._candidates(matrix):
            if found is None or (not self.is_ordered and entry.group == found.group):
                found = found or entry
            elif not self.is_ordered:
                raise TwoGroups(found, entry, matrix)
            if self.is_ordered:
                break
        return found

    @cached_property
    def _named(self) -> dict[tuple[int | None, str], list[FormatEntry]]:
        """The entries that are whole names, by what they name."""
        found: dict[tuple[int | None, str], list[FormatEntry]] = {}
        for entry in self.entries:
            if _is_plain(entry):
                matrix = matrix_named(entry.pattern)
                found.setdefault((matrix.layer, matrix.names[0]), []).append(entry)
        return found

    @cached_property
    def _others(self) -> list[tuple[FormatEntry, Callable[[Matrix], bool]]]:
        return [(entry, _matcher(entry)) for entry in self.entries if not _is_plain(entry)]

    def _candidates(self, matrix: Matrix) -> Iterable[FormatEntry]:
        found = [entry for name in _with_parents(matrix.names) for entry in self._named.get((matrix.layer, name), ())]
        found += [entry for entry, matches in self._others if matches(matrix)]
        return sorted(found, key=self._order.__getitem__) if self.is_ordered else found

    @cached_property
    def _order(self) -> dict[FormatEntry, int]:
        return {entry: place for place, entry in enumerate(self.entries)}


class TwoGroups(Exception):
    """Entries of two groups that name the same matrix."""

    def __init__(self, first: FormatEntry, second: FormatEntry, matrix: Matrix) -> None:
        super().__init__(first, second, matrix)
        self.key = second.key
        self.message = f"{second.pattern!r} names {matrix}, which {first.pattern!r} of {first.group} names, too"


@dataclass(frozen=True)
class Scheme:
    """The formats of a checkpoint's matrices. `base`: of those in layers that no tier names, as `head` that of the LM
    head. `kv`: that of the KV cache, if the checkpoint says one."""

    method: str = ""
    tiers: tuple[Tier, ...] = ()
    base: str | None = None
    head: str | None = None
    kv: str | None = None
    parts: dict[str, str] = field(default_factory=dict)  # the base of parts of layers that have another one

    def format_of(self, matrix: Matrix) -> str | None:
        """Return the format of a matrix, None for 16 bits. Raises TwoGroups."""
        for tier in self.tiers:
            if (entry := tier.entry_for(matrix)) is not None:
                return entry.format
        if matrix.layer is None:
            return self.head if matrix.names[0] == "lm_head" else None
        return self.parts.get(matrix.part, self.base)

    def formats(self) -> list[tuple[str, str]]:
        """Return the formats that are given, and the key of the file that gives each ("" for the main one)."""
        found = [("", name) for name in (self.base, self.head, *self.parts.values()) if name is not None]
        return found + [(entry.key, entry.format) for tier in self.tiers for entry in tier.entries if entry.format]

    def of_some_experts(self, matrices: Sequence[Matrix]) -> Iterable[FormatEntry]:
        """Yield entries that name some of a layer's experts where none of the same format name the others."""
        layers = [matrix for matrix in matrices if matrix.experts > 1]
        for tier in self.tiers if layers else ():
            named: dict[tuple[int | None, str, str | None], tuple[FormatEntry, set[int]]] = {}
            for entry in tier.entries:
                number = expert_number(entry.pattern)
                if number is not None and _is_plain(entry):
                    place = matrix_named(entry.pattern)
                    named.setdefault((place.layer, place.names[0], entry.format), (entry, set()))[1].add(number)
                elif number is not None or (entry.pattern.startswith("re:") and "expert" in entry.pattern):
                    matches = _matcher(entry)
                    if any(_differs(entry, matches, matrix) for matrix in layers[:1]):
                        yield entry
            counts = {(m.layer, name): m.experts for m in layers for name in _with_parents(m.names) if named}
            for (layer, name, _), (entry, numbers) in named.items():
                if len(numbers) < counts.get((layer, name), 0):
                    yield entry

    def unused(self, matrices: Sequence[Matrix]) -> Iterable[FormatEntry]:
        """Yield the entries that name none of the matrices of a model, nor what it may have beside them."""
        layers = sorted({matrix.layer for matrix in matrices if matrix.layer is not None})
        behind = range(layers[-1] + 1, layers[-1] + 1 + _BEHIND)
        known = [*matrices, *beside(layers)]
        places = {(matrix.layer, name) for matrix in known for name in _with_parents(matrix.names)}
        for tier in self.tiers:
            for entry in tier.entries:
                if not entry.is_vital or any(word in entry.pattern.lower() for word in _ELSEWHERE):
                    continue
                if _is_plain(entry):
                    named = matrix_named(entry.pattern.removesuffix(".weight").removesuffix(".bias"))
                    is_used = (named.layer, named.names[0]) in places or named.layer in behind
                else:
                    is_behind = any(int(number) in behind for number in _NUMBERS.findall(entry.pattern))
                    is_used = is_behind or any(map(_matcher(entry), known))
                if not is_used:
                    yield entry


def _differs(entry: FormatEntry, matches: Callable[[Matrix], bool], matrix: Matrix) -> bool:
    """Return whether an entry with an expression or * names some of the experts that have a matrix, and not all."""
    if not entry.pattern.startswith("re:"):
        return matches(matrix)  # its number is that of one expert
    named = (
        replace(matrix, names=tuple(first_expert(name, number) for name in matrix.names))
        for number in range(matrix.experts)
    )
    return len(set(map(matches, named))) > 1


def _is_plain(entry: FormatEntry) -> bool:
    """Return whether an entry is the whole name of one module of a layer."""
    return not entry.is_loose and not entry.pattern.startswith("re:") and _numbered(entry.pattern) is not None


def _numbered(pattern: str) -> tuple[str, str] | None:
    """Return the number of the layer in a name and what stands behind it, if nothing in it stands for something."""
    return None if set("*?[") & set(pattern) else layer_named(pattern)


@lru_cache(4096)  # the matrices of each layer have the same names
def _with_parents(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of a matrix and those of the modules that it is a part of."""
    parts = [name.split(".") for name in names]
    return tuple(dict.fromkeys(".".join(of[:end]) for of in parts for end in range(len(of), 0, -1)))


def _full_names(matrix: Matrix, pattern: str) -> list[str]:
    """Return the names that a matrix may have in a checkpoint, from the beginning; those that it has together with
    others where the pattern speaks of them."""
    place = "" if matrix.layer is None else layer_prefix(matrix.layer)
    own, *others = matrix.names
    names = [own, *(name for name in others if name.rpartition(".")[2] in pattern)]
    return [f"{beginning}{place}{name}" for name in names for beginning in _BEGINNINGS]


def _matcher(entry: FormatEntry) -> Callable[[Matrix], bool]:
    pattern = entry.pattern
    if pattern == LINEAR:
        return lambda matrix: matrix.names[0] != "embed_tokens"
    if pattern == EMBEDDING:
        return lambda matrix: matrix.names[0] == "embed_tokens"
    if pattern.startswith("re:"):
        expression = re.compile(pattern[3:])
        return lambda matrix: any(expression.match(name) for name in _full_names(matrix, pattern))
    if entry.is_loose:
        return lambda matrix: any(pattern in name for name in _full_names(matrix, pattern))
    found = layer_named(pattern)
    number, own = found or ("", pattern)

    def is_named(matrix: Matrix) -> bool:
        if matrix.layer is None or found is None:
            return any(_names(pattern, name) for name in _full_names(matrix, pattern))
        is_layer = number in (ANY_LAYER[matrix.layer < 0], str(matrix.layer))
        return is_layer and any(_names(first_expert(own), name) for name in matrix.names)

    return is_named


def _names(pattern: str, module: str) -> bool:
    """Return whether a name, with * and ? or without, is that of a module or of one above it, or a part of the path."""
    return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*") or f".{pattern}." in f".{module}."
