"""What all tables of a scenario share: their base class, and the ranges of their numbers."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

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


class Table(BaseModel):
    """A table of the scenario file: unknown keys, wrong types and NaN are refused."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
