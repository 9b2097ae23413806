"""The text that a pair learns: the Python standard library's own source, which every machine that runs Foretoken has."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import ForetokenError

# Tests repeat themselves, and not every installation has them; site-packages is not the standard library.
LEFT_OUT = frozenset({"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "__pycache__"})
HELD_OUT_EVERY = 10
MIN_FILE_BYTES = 400  # shorter files are empty packages
MAX_FILE_BYTES = 60_000  # a longer one would be a large part of a small corpus


class NoCorpus(ForetokenError):
    """This Python has no source of its standard library."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Whole files, in the order of their names."""

    training: tuple[str, ...]
    held_out: tuple[str, ...]  # every 10th file; no model learns from them
    digest: str  # SHA-256 of all of it, in hexadecimal

    @property
    def num_bytes(self) -> int:
        return sum(len(text.encode()) for text in (*self.training, *self.held_out))


def read_corpus(num_bytes: int, root: Path | None = None) -> Corpus:
    """Return the first files of the standard library that fit into `num_bytes` bytes, by name. Raises NoCorpus if there are too few."""
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    training, held_out = [], []
    digest = hashlib.sha256()
    left = num_bytes
    for number, text in enumerate(_texts(root)):
        raw = text.encode()
        if len(raw) > left:
            break
        left -= len(raw)
        digest.update(raw)
        (held_out if number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 else training).append(text)
    if not held_out:
        raise NoCorpus(f"{root}: no source of the standard library here ({len(training)} files); a pair learns from it")
    return Corpus(tuple(training), tuple(held_out), digest.hexdigest())


def _texts(root: Path) -> Iterator[str]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT and not name.startswith("config-"))
        for name in sorted(names):
            path = Path(folder, name)
            # Files named after the machine that built this Python differ from one machine to the next.
            if path.suffix != ".py" or name.startswith("_sysconfigdata"):
                continue
            if not MIN_FILE_BYTES <= path.stat().st_size <= MAX_FILE_BYTES:
                continue
            try:
                yield path.read_text(encoding="utf-8").replace("\r\n", "\n")
            except UnicodeDecodeError:  # a few files declare another encoding
                continue
