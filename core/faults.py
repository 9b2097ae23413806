"""Fault plans: what is to go wrong, how often, as plain data that any driver can inject.

A plan is a TOML file of families, each with its kinds:

    [device.hangs]
    probability = 0.002        # of a step
    watchdog_s = 4.0

Everything has a default, and a kind that is left out never happens. Every draw is keyed by (seed, kind, subject, occasion): a kind more or
less, or another probability, moves no other fault. The swarm is a plan made by drawing, too: each kind is dropped with probability 1/2.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .draws import Purpose, uniform
from .errors import ConfigError, Problem, nearest

SWARM = "swarm"

Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0, le=1e6)]
Count = Annotated[int, Field(ge=1, le=10**6)]


class FaultTable(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Fault(FaultTable):
    """One kind of fault. `probability` is per occasion; the unit of an occasion is the kind's (see `KINDS`)."""

    probability: Share = Field(0.0, description="of an occasion")

    @property
    def is_enabled(self) -> bool:
        return self.probability > 0


class Regular(Fault):
    """A kind that may also happen on every n-th occasion."""

    every: Count | None = Field(None, description="also on every n-th occasion")

    @property
    def is_enabled(self) -> bool:
        return self.probability > 0 or self.every is not None


class Episode(Fault):
    lasts_s: Seconds = Field(3.0, description="until it is over")


class Slow(Episode):
    factor: Annotated[float, Field(ge=1, le=1000)] = Field(8.0, description="of every step's device time")


class Hang(Fault):
    watchdog_s: Seconds = Field(5.0, description="after so long the step is given up")
    restart_s: Seconds = Field(4.0, description="until a new worker runs")


class Restart(Fault):
    restart_s: Seconds = Field(4.0, description="until a new worker runs")


class Late(Fault):
    delay_s: Seconds = Field(2.0, description="at most so much later")


class Lost(Fault):
    retry_s: Seconds = Field(2.0, description="until the sender tries again")
    retries: Count = Field(3, description="attempts after which it gives up")


class Cancel(Fault):
    mean_s: Seconds = Field(3.0, description="mean time until the client leaves")


class Gone(Fault):
    notice_s: Seconds = Field(20.0, description="until the service notices")


class Denial(Regular):
    count: Count = Field(2, description="attempts that find nothing")


class Burst(Fault):
    factor: Annotated[int, Field(ge=2, le=1000)] = Field(10, description="requests that come instead of one")


class Jump(Fault):
    jump_s: Seconds = Field(60.0, description="at most so far, forwards or backwards")


class Shutdown(Fault):
    within_s: Seconds = Field(600.0, description="at some moment of the first so many seconds")


class DeviceFaults(FaultTable):
    raises: Fault = Fault()
    out_of_memory: Episode = Episode()
    hangs: Hang = Hang()
    slow: Slow = Slow()
    restarts: Restart = Restart()
    poison: Fault = Fault()
    nan: Fault = Fault()


class LinkFaults(FaultTable):
    late: Late = Late()
    duplicated: Late = Late()
    lost: Lost = Lost()


class ClientFaults(FaultTable):
    cancels: Cancel = Cancel()
    gone: Gone = Gone()
    duplicate_id: Fault = Fault()
    bad_request: Fault = Fault()
    token_limits: Fault = Fault()
    stop_edge: Fault = Fault()


class DraftFaults(FaultTable):
    right: Episode = Episode()
    wrong: Episode = Episode()
    nan: Fault = Fault()


class PoolFaults(FaultTable):
    denied: Denial = Denial()
    retraction: Regular = Regular()


class LoadFaults(FaultTable):
    burst: Burst = Burst()


class ClockFaults(FaultTable):
    jump: Jump = Jump()
    freeze: Episode = Episode()


class ConfigFaults(FaultTable):
    half_written: Fault = Fault()


class ServiceFaults(FaultTable):
    shutdown: Shutdown = Shutdown()


class FaultPlan(FaultTable):
    """What may go wrong in a run. Faults begin with the run and end with its last arrival (or at `stop_s`); then all must drain."""

    stop_s: Seconds | None = Field(None, description="no new fault from then on; default: the last arrival")
    recovery_s: Seconds = Field(600.0, description="after the last fault everything has ended within so long")
    device: DeviceFaults = DeviceFaults()
    link: LinkFaults = LinkFaults()
    client: ClientFaults = ClientFaults()
    draft: DraftFaults = DraftFaults()
    pool: PoolFaults = PoolFaults()
    load: LoadFaults = LoadFaults()
    clock: ClockFaults = ClockFaults()
    config: ConfigFaults = ConfigFaults()
    service: ServiceFaults = ServiceFaults()

    def of(self, kind: str) -> Fault:
        """The settings of a kind by its name, such as "device.hangs"."""
        family, _, name = kind.partition(".")
        return getattr(getattr(self, family), name)

    @property
    def enabled(self) -> tuple[str, ...]:
        """The kinds that can happen, in the order of `KINDS`."""
        return tuple(kind for kind in KINDS if self.of(kind).is_enabled)

    def to_toml(self) -> str:
        """The plan as a file: the enabled kinds with all their values."""
        lines = [f"{key} = {value}" for key in ("stop_s", "recovery_s") if (value := getattr(self, key)) is not None]
        for kind in self.enabled:
            values = self.of(kind).model_dump(exclude_none=True)
            lines += ["", f"[{kind}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class Kind:
    """What is fixed about a kind. `number` keys its draws and never changes; `swarm` is the range of its probability there."""

    number: int
    occasion: str  # step, request, message, run
    swarm: tuple[float, float]
    fault: str
    promise: str


KINDS: dict[str, Kind] = {
    "device.raises": Kind(
        1,
        "step",
        (0.001, 0.02),
        "a step raises",
        "no token of it is seen; its slots are fenced; what it held is tried again",
    ),
    "device.out_of_memory": Kind(
        2,
        "step",
        (0.001, 0.01),
        "for a while steps above half of this one's tokens run out of memory",
        "fewer steps, then a smaller batch, then retraction",
    ),
    "device.hangs": Kind(
        3,
        "step",
        (0.0005, 0.004),
        "a step does not come back",
        "a watchdog says what was in flight; the worker is started anew",
    ),
    "device.slow": Kind(
        4, "step", (0.001, 0.01), "a straggler: steps take a multiple of their time", "nothing but time is lost"
    ),
    "device.restarts": Kind(
        5,
        "step",
        (0.0005, 0.004),
        "the worker is lost",
        "nothing of the old epoch is read; requests go on from what was delivered",
    ),
    "device.poison": Kind(6, "request", (0.002, 0.02), "every step with this request raises", "only the victim fails"),
    "device.nan": Kind(
        26,
        "step",
        (0.001, 0.005),
        "the target has no numbers for one request",
        "that request fails with the reason, its neighbours go on",
    ),
    "link.late": Kind(
        7, "message", (0.01, 0.1), "a message comes late, after others", "no request is lost; early news is kept"
    ),
    "link.duplicated": Kind(8, "message", (0.01, 0.1), "a message comes twice", "it counts once"),
    "link.lost": Kind(
        9, "message", (0.01, 0.1), "a message is lost", "it is sent again, or its request ends with that reason"
    ),
    "client.cancels": Kind(
        10,
        "request",
        (0.02, 0.2),
        "a client leaves, in whatever state its request is, and says so twice",
        "no later token; all is released",
    ),
    "client.gone": Kind(
        11, "request", (0.01, 0.1), "a client is gone; the service notices late", "no later token; all is released"
    ),
    "client.duplicate_id": Kind(
        12, "request", (0.01, 0.1), "a second request with a live id", "refused; the first is unaffected"
    ),
    "client.bad_request": Kind(
        13,
        "request",
        (0.01, 0.1),
        "empty or oversize prompts, NaN, negative and zero parameters",
        "refused at the door with the number expected",
    ),
    "client.token_limits": Kind(
        14, "request", (0.01, 0.1), "max_tokens of 1, or of 2**40", "kept to, capped by the context"
    ),
    "client.stop_edge": Kind(
        15,
        "request",
        (0.02, 0.2),
        "a stop one before, at, or one past max_tokens",
        "the first end wins; usage is what was delivered",
    ),
    "draft.right": Kind(
        16, "step", (0.002, 0.02), "for a while every draft is right", "the output is unchanged; steps stay candidates"
    ),
    "draft.wrong": Kind(
        17, "step", (0.002, 0.02), "for a while every draft is wrong", "the output is unchanged; steps stay candidates"
    ),
    "draft.nan": Kind(
        18, "step", (0.005, 0.05), "NaN, infinite, negative and huge feedback", "refused; the policy is as it was"
    ),
    "pool.denied": Kind(
        19, "step", (0.005, 0.05), "allocations find nothing", "nothing changes; no token is lost; progress"
    ),
    "pool.retraction": Kind(
        20, "step", (0.005, 0.05), "a running request is retracted", "it goes on from what was delivered"
    ),
    "load.burst": Kind(
        21, "request", (0.005, 0.05), "ten requests instead of one", "a bounded queue; shed with a reason"
    ),
    "clock.jump": Kind(
        22, "step", (0.002, 0.02), "the host's clock jumps", "no time stamp goes back; no negative duration"
    ),
    "clock.freeze": Kind(
        23, "step", (0.002, 0.02), "the host's clock stands still", "no time stamp goes back; no negative duration"
    ),
    "config.half_written": Kind(24, "step", (0.005, 0.05), "a reload finds half of a table", "the last good one stays"),
    "service.shutdown": Kind(
        25, "run", (0.2, 0.5), "the service is shut down", "all finish or are aborted; every slot comes back"
    ),
}


# -- reading ----------------------------------------------------------------------------------------------------------


def load_fault_plan(given: str | Path, seed: int) -> FaultPlan:
    """The plan in a TOML file, or the swarm of `seed` for the word "swarm". Raises ConfigError with every problem of the file."""
    if str(given) == SWARM:
        return swarm_plan(seed)
    path = Path(given)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        hint = nearest(str(given), [SWARM])
        raise ConfigError(str(path), [Problem("", f"cannot be read: {error}{hint}")]) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(path), [Problem("", f"is no TOML: {error}")]) from None
    return fault_plan(table, str(path))


def fault_plan(table: Mapping[str, Any], source: str = "<fault plan>") -> FaultPlan:
    """Validate plain data. Raises ConfigError with all problems, an unknown key with the nearest known one."""
    try:
        return FaultPlan.model_validate(dict(table))
    except ValidationError as error:
        raise ConfigError(source, [_problem(detail) for detail in error.errors()]) from None


def _problem(detail: Mapping[str, Any]) -> Problem:
    key = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        table, _, name = key.rpartition(".")
        known = _keys_of(table)
        hint = nearest(name, known) or nearest(key, KINDS)
        return Problem(key, f"unknown key{hint}" + ("" if hint else f"; known here: {', '.join(known)}"))
    message = detail["msg"]
    return Problem(key, f"{message[0].lower()}{message[1:]}, got {detail['input']!r}")


def _keys_of(table: str) -> list[str]:
    at: Any = FaultPlan()
    for name in filter(None, table.split(".")):
        at = getattr(at, name)
    return list(type(at).model_fields)


def swarm_plan(seed: int) -> FaultPlan:
    """A plan drawn from `seed`: each kind is dropped with probability 1/2, or has a probability from its range (log-uniform)."""
    families: dict[str, dict[str, Any]] = {}
    for name, kind in KINDS.items():
        if float(uniform(seed, Purpose.SWARM, kind.number, 0)) < 0.5:
            continue
        low, high = kind.swarm
        coin = float(uniform(seed, Purpose.SWARM, kind.number, 1))
        family, _, key = name.partition(".")
        families.setdefault(family, {})[key] = {"probability": low * (high / low) ** coin}
    return fault_plan(families, "<swarm>")


# -- drawing ----------------------------------------------------------------------------------------------------------


class FaultDraws:
    """Which occasions have which fault. A pure function of (seed, kind, subject, occasion), drawn a stretch at a time."""

    STRETCH = 512

    def __init__(self, plan: FaultPlan, seed: int) -> None:
        self.plan = plan
        self._seed = seed
        self._by_unit = {
            unit: [(name, KINDS[name].number, plan.of(name)) for name in plan.enabled if KINDS[name].occasion == unit]
            for unit in ("step", "request", "message", "run")
        }
        self._stretches: dict[tuple[str, int, int], dict[int, tuple[str, ...]]] = {}

    def at(self, unit: str, subject: int, occasion: int) -> tuple[str, ...]:
        """The kinds that happen at this occasion, in the order of `KINDS`. `subject`: the replica, link or run that it belongs to."""
        if not self._by_unit[unit]:
            return ()
        number = occasion // self.STRETCH
        stretch = self._stretches.get((unit, subject, number))
        if stretch is None:
            stretch = self._stretches[unit, subject, number] = dict(self._draw(unit, subject, number))
        return stretch.get(occasion, ())

    def _draw(self, unit: str, subject: int, number: int) -> Iterator[tuple[int, tuple[str, ...]]]:
        first = number * self.STRETCH
        occasions = np.arange(first, first + self.STRETCH)
        hits: dict[int, list[str]] = {}
        for name, lane, fault in self._by_unit[unit]:
            happens = uniform(self._seed, Purpose.FAULT, subject, occasions, lane) < fault.probability
            every = getattr(fault, "every", None)
            if every is not None:
                happens |= (occasions + 1) % every == 0
            for occasion in occasions[happens].tolist():
                hits.setdefault(occasion, []).append(name)
        for occasion, names in hits.items():
            yield occasion, tuple(names)

    def amount(self, kind: str, subject: int, occasion: int, part: int = 0) -> float:
        """A number in [0, 1) that belongs to one fault: how late, how far, which one."""
        lane = KINDS[kind].number + 64 * (part + 1)
        return float(uniform(self._seed, Purpose.FAULT, subject, occasion, lane))
