"""The pairs that can be trained: how large the models are and how long each learns.
Everything else follows from the seed."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError, nearest


@dataclass(frozen=True, slots=True)
class TinyShape:
    """One decoder. Heads have `head_dim` channels; the output layer is the embedding."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """One part's training: `num_steps` steps of `batch_size` windows."""

    num_steps: int
    batch_size: int


@dataclass(frozen=True, slots=True)
class TinySize:
    """One size of pair.

    The target is deep and narrow, because at batch 1 on a CPU the cost of a pass depends on the number of its
    operations more than on their size. So verifying a few tokens costs little more than decoding one, and a draft of a
    single layer costs a fraction.
    """

    name: str
    num_modules: int  # of the corpus
    vocab_size: int
    window: int  # tokens that a training example shows: the distance over which attention is learnt
    max_positions: int
    target: TinyShape
    standalone: TinyShape
    draft_vocab_size: int  # EAGLE-3's own vocabulary, the most frequent tokens
    num_heads: int  # of the multi-layer EAGLE draft
    unroll: int  # steps of EAGLE-3's training-time test
    block_layers: int  # of the block drafter
    block_size: int  # tokens of its block, of which it drafts all but the first
    target_schedule: Schedule
    draft_schedule: Schedule
    block_schedule: Schedule  # of the block drafter
    num_continuations: int  # texts of the target's own that the drafts learn from
    prompt_len: int  # tokens of the corpus that each of them begins with
    num_measured: int  # held-out prompts on which acceptance is measured


NANO = TinySize(
    name="nano",
    num_modules=200,
    vocab_size=512,
    window=64,
    max_positions=512,
    target=TinyShape(64, 160, 2, 4, 2, 16),
    standalone=TinyShape(32, 96, 1, 2, 1, 16),
    draft_vocab_size=384,
    num_heads=2,
    unroll=2,
    block_layers=1,
    block_size=4,
    target_schedule=Schedule(120, 16),
    draft_schedule=Schedule(60, 16),
    block_schedule=Schedule(120, 16),
    num_continuations=64,
    prompt_len=16,
    num_measured=16,
)

TINY = TinySize(
    name="tiny",
    num_modules=600,
    vocab_size=768,
    window=256,
    max_positions=2048,
    target=TinyShape(64, 192, 16, 2, 1, 32),
    standalone=TinyShape(64, 160, 1, 2, 1, 32),
    draft_vocab_size=512,
    num_heads=2,
    unroll=3,
    block_layers=2,
    block_size=6,
    target_schedule=Schedule(220, 4),
    draft_schedule=Schedule(50, 4),
    block_schedule=Schedule(160, 4),
    num_continuations=32,
    prompt_len=64,
    num_measured=32,
)

SIZES = {size.name: size for size in (NANO, TINY)}


def size_of(name: str) -> TinySize:
    """Return the size called `name`. Raises ConfigError, naming the known ones."""
    if name not in SIZES:
        known = ", ".join(SIZES)
        raise ConfigError.of("<arguments>", "size", f"{name!r} is none of {known}{nearest(name, SIZES)}")
    return SIZES[name]


# -- the directory of a pair ------------------------------------------------------------------------------------------
# It exists only when the pair is complete; parts are made in another directory beside it.


FORMAT = 2  # rises when the same options would give another pair
SUMMARY = "pair.json"
LOCK = ".lock"


@dataclass(frozen=True, slots=True)
class PairOptions:
    """All settings of a pair."""

    size: TinySize
    seed: int = 0

    @property
    def digest(self) -> str:
        """Hexadecimal, the same for equal options."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def described(self) -> str:
        return f"size {self.size.name}, seed {self.seed}"


def read_summary(directory: Path, options: PairOptions) -> dict[str, Any] | None:
    """Return the summary of the pair in `directory` if it is there and has these options; None if there is nothing.

    Raises ConfigError if something else is there: nothing of the user's is ever overwritten.
    """
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return None
    expected = f"expected an empty directory, none, or a pair of {options.described}"
    if not directory.is_dir():
        raise ConfigError.of(str(directory), "", f"is a file; {expected}")
    try:
        summary: dict[str, Any] = json.loads((directory / SUMMARY).read_text(encoding="utf-8"))
        digest, described = summary["digest"], summary["described"]
    except FileNotFoundError:
        names = sorted(path.name for path in directory.iterdir())
        found = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise ConfigError.of(str(directory), "", f"has something else in it ({found}); {expected}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError.of(str(directory / SUMMARY), "", f"is not the summary of a pair; {expected}") from error
    if digest != options.digest:
        other = described if described != options.described else f"{described}, made by another version"
        raise ConfigError.of(str(directory), "", f"has another pair in it ({other}); {expected}")
    return summary


def partial_directory(directory: Path, options: PairOptions) -> Path:
    """Return where the pair is being made."""
    return directory.with_name(f"{directory.name}.partial-{options.digest}")


@contextmanager
def making(directory: Path, options: PairOptions) -> Iterator[Path]:
    """Yield the partial directory, held by this process alone; others wait here and then find the pair.

    What was finished stays when the body raises, so that another run goes on from there.
    """
    partial = partial_directory(directory, options)
    try:
        partial.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError.of(str(partial), "", f"cannot be made: {error.strerror or error}") from error
    with (partial / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield partial
        finally:
            for leftover in sorted(partial.glob("*.tmp")):
                shutil.rmtree(leftover)
            if partial.exists() and [path.name for path in partial.iterdir()] == [LOCK]:
                shutil.rmtree(partial)


@contextmanager
def writing_part(partial: Path, part: str) -> Iterator[Path]:
    """Yield a directory to write the part into; it gets its name when the body has come to its end."""
    temporary = partial / f"{part}.tmp"
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir()
    yield temporary
    temporary.rename(partial / part)


def publish(partial: Path, directory: Path, summary: dict[str, Any]) -> None:
    (partial / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    (partial / LOCK).unlink()
    partial.rename(directory)
