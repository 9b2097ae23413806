"""What all tables of a scenario share: their base class, the ranges of their numbers, and what a key declares beside
its type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from ...core.prompt import MAX_PROMPT_LENGTH

Positive = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]  # thirty years; simulated time counts nanoseconds in 64 bits
Rate = Annotated[float, Field(ge=1e-6, le=1e9)]
Count = Annotated[int, Field(ge=1)]
Tokens = Annotated[int, Field(ge=1, le=MAX_PROMPT_LENGTH)]
Engines = Annotated[int, Field(ge=0, le=1024)]  # each has some megabytes of tables
Share = Annotated[float, Field(ge=0, le=1)]
Spread = Annotated[float, Field(ge=0, le=10)]
Policy = Literal["round_robin", "least_loaded", "prefix_aware", "random"]


NOTHING: Any = object()


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A condition under which a run does not use a key, or any key of a table: part of the key's type, `Annotated`.

    Attributes:
        condition: The name of a function in `sim/effects/conditions.py`, which returns why.
        of: Further arguments of this function.
        says: The value that describes what such a run does anyway, so that it is no mistake.
        tells: Whether this value is told where the command line gives it, because who gives it expects a difference.
        outcome: What becomes of the key, in words.
    """

    condition: str
    of: tuple[str, ...] = ()
    says: Any = NOTHING
    tells: bool = False
    outcome: str = "has no effect"


class Table(BaseModel):
    """A table of the scenario file: unknown keys, wrong types and NaN are refused."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
