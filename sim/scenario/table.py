"""What all tables of a scenario share: their base class, the ranges of their numbers, and what a key declares beside
its type."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from ...core.prompt import MAX_PROMPT_LENGTH
from .flags import NOTHING

Positive = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]  # thirty years; simulated time counts nanoseconds in 64 bits
Rate = Annotated[float, Field(ge=1e-6, le=1e9)]
Count = Annotated[int, Field(ge=1)]
Tokens = Annotated[int, Field(ge=1, le=MAX_PROMPT_LENGTH)]
Engines = Annotated[int, Field(ge=0, le=1024)]  # each has some megabytes of tables
Share = Annotated[float, Field(ge=0, le=1)]
Spread = Annotated[float, Field(ge=0, le=10)]
Policy = Literal["round_robin", "least_loaded", "prefix_aware", "random"]


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A condition under which a run does not use a key, or any key of a table: part of the key's type, `Annotated`.

    Attributes:
        condition: A function of `conditions.py`, which returns why.
        of: Further arguments of this function.
        says: The value that describes what such a run does anyway, so that it is no mistake.
        tells: Whether this value is reported where the command line gives it, because its user expects a difference.
        outcome: What becomes of the key, in words.
    """

    condition: Callable[..., str | None]
    of: tuple[str, ...] = ()
    says: Any = NOTHING
    tells: bool = False
    outcome: str = "has no effect"


@dataclass(frozen=True, slots=True)
class RefusedIf:
    """A condition under which a key cannot be as it is: part of the key's type, `Annotated`.

    Attributes:
        condition: A function of `refusals.py`, which returns what is wrong with the key.
        needs: What it takes beside the scenario: "target", "spec", "calibration", "unlike"; "": nothing.
    """

    condition: Callable[..., str | None]
    needs: str = ""


class ScenarioTable(BaseModel):
    """A table of the scenario file: unknown keys, wrong types and NaN are refused."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def declared_keys(
    table: type[BaseModel], prefix: str = "", around: tuple[Any, ...] = ()
) -> Iterator[tuple[str, list[Any]]]:
    """Yield the dotted key of every leaf of a table with what its type declares: that of each table around it, then its
    own."""
    for name, info in table.model_fields.items():
        declared = (*around, info.metadata)
        kinds = (info.annotation, *get_args(info.annotation))
        below = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if below is not None:
            yield from declared_keys(below, f"{prefix}{name}.", declared)
        yield f"{prefix}{name}", [*declared]  # of a table: where it is not given
