"""Which workers a session has, and on which devices they and their ranks are."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...core.errors import ConfigError, Problem, nearest
from ...core.scheduler.config import EngineRole
from ..parallel.processes import WorkerPlace
from ..session.devices import ARGUMENTS
from ..types.session_options import AUTO

MAX_WORKERS = 64
_ROLES = (EngineRole.PREFILL, EngineRole.DECODE)


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """Counts of workers."""

    prefill: int
    decode: int

    def __post_init__(self) -> None:
        problems = []
        for role in _ROLES:
            count = getattr(self, role.value)
            if not 1 <= count <= MAX_WORKERS:
                problems.append(
                    Problem("disaggregate", f"{role.value}={count}; 1 to {MAX_WORKERS} workers are possible")
                )
        if problems:
            raise ConfigError(ARGUMENTS, problems)

    @classmethod
    def parse(cls, text: str) -> WorkerCounts:
        """Parse "prefill=1,decode=2". Raises ConfigError with all problems."""
        counts: dict[str, int] = {}
        problems = []
        for part in text.split(","):
            name, found, count = (piece.strip() for piece in part.partition("="))
            if name not in (role.value for role in _ROLES):
                hint = nearest(name, [role.value for role in _ROLES])
                problems.append(Problem("disaggregate", f"{part.strip()!r} is neither prefill=N nor decode=N{hint}"))
            elif not found or not re.fullmatch(r"[0-9]{1,9}", count):
                problems.append(Problem("disaggregate", f"{part.strip()!r}: {name} needs a number, as in {name}=1"))
            elif name in counts:
                problems.append(Problem("disaggregate", f"{name} is given twice"))
            else:
                counts[name] = int(count)
        missing = [role.value for role in _ROLES if role.value not in counts]
        if not problems and missing:
            problems.append(
                Problem("disaggregate", f"{' and '.join(missing)} is missing; an example: prefill=1,decode=1")
            )
        if problems:
            raise ConfigError(ARGUMENTS, problems)
        return cls(counts["prefill"], counts["decode"])

    def __str__(self) -> str:
        return f"prefill={self.prefill},decode={self.decode}"

    @property
    def num_workers(self) -> int:
        return self.prefill + self.decode

    def workers(self) -> tuple[WorkerPlace, ...]:
        """Return all workers, those that prefill first; the rank is the index."""
        names = [(role, f"{role.value}{i}") for role in _ROLES for i in range(getattr(self, role.value))]
        return tuple(WorkerPlace(name, role, rank) for rank, (role, name) in enumerate(names))

    def devices(self, asked: str, ranks: int = 1) -> tuple[str, ...]:
        """Return the device of each worker, or of each of its `ranks`, worker by worker. "cpu" and a numbered GPU are
        shared by all of them; else each one has a GPU of its own."""
        import torch

        needed = self.num_workers * ranks
        num_gpus = torch.cuda.device_count() if asked.partition(":")[0] in (AUTO, "cuda") else 0
        if asked == AUTO and not num_gpus:
            asked = "cpu"
        if asked not in (AUTO, "cuda"):
            return (asked,) * needed
        if num_gpus < needed:
            message = (
                f"{self} needs {needed} GPUs, torch finds {num_gpus}; --device cuda:0 puts all workers on one, "
                "--device cpu on none"
            )
            raise ConfigError.of(ARGUMENTS, "disaggregate", message)
        return tuple(f"cuda:{rank}" for rank in range(needed))
