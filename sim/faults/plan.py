"""Fault plans: which faults happen, and how often, as plain data that any driver can inject.

A plan is a TOML file of families, each with its kinds:

    [device.hangs]
    probability = 0.002        # of a step
    watchdog_s = 4.0

Everything has a default, and a kind that is left out never happens. Every draw is keyed by (seed, kind, subject,
occasion): so a change of one kind or one probability does not move other faults. A swarm is a plan that is drawn
itself: each kind is dropped with probability 1/2.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...core.draws import Purpose, uniform
from ...core.errors import ConfigError, Problem, nearest, shown
from ...observe.input_files import read_toml
from .kinds import KINDS, UNITS

SWARM = "swarm"

Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0, le=1e6)]
Count = Annotated[int, Field(ge=1, le=10**6)]


class FaultTable(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Fault(FaultTable):
    """One kind of fault. `probability` is per occasion; the unit of an occasion is the kind's (see `KINDS`)."""

    probability: Share = Field(default=0.0, description="of an occasion")

    @property
    def is_enabled(self) -> bool:
        return self.probability > 0


class Regular(Fault):
    """A kind that may also happen on every n-th occasion."""

    every: Count | None = Field(default=None, description="also on every n-th occasion")

    @property
    def is_enabled(self) -> bool:
        return self.probability > 0 or self.every is not None


class Episode(Fault):
    lasts_s: Seconds = Field(default=3.0, description="until it is over")


class Slow(Episode):
    factor: Annotated[float, Field(ge=1, le=1000)] = Field(
        default=8.0, description="of every step's device time, of a transfer's time"
    )


class Hang(Fault):
    watchdog_s: Seconds = Field(default=5.0, description="after so long the step is given up")
    restart_s: Seconds = Field(default=4.0, description="until a new worker runs")


class Restart(Fault):
    restart_s: Seconds = Field(default=4.0, description="until a new worker runs")


class Late(Fault):
    delay_s: Seconds = Field(default=2.0, description="at most so much later")


class Lost(Fault):
    retry_s: Seconds = Field(default=2.0, description="until the sender tries again")
    retries: Count = Field(default=3, description="attempts after which it gives up")


class CancelFault(Fault):
    mean_s: Seconds = Field(default=3.0, description="mean time until the client leaves")


class Gone(Fault):
    notice_s: Seconds = Field(default=20.0, description="until the service notices")


class Denial(Regular):
    count: Count = Field(default=2, description="attempts that find nothing")


class Burst(Fault):
    factor: Annotated[int, Field(ge=2, le=1000)] = Field(default=10, description="requests that come instead of one")


class Jump(Fault):
    jump_s: Seconds = Field(default=60.0, description="at most so far, forwards or backwards")


class Shutdown(Fault):
    within_s: Seconds = Field(default=600.0, description="at some moment of the first so many seconds")


class Death(Restart):
    notice_s: Seconds = Field(default=1.0, description="until the other engines know")


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
    cancels: CancelFault = CancelFault()
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


class TransferFaults(FaultTable):
    lost: Fault = Fault()
    short: Fault = Fault()
    corrupt: Fault = Fault()
    duplicated: Late = Late()
    reordered: Fault = Fault()
    late: Late = Late()
    slow: Slow = Slow()
    ack_lost: Fault = Fault()
    cancelled: Fault = Fault()
    peer_dies: Death = Death()
    decoder_lost: Death = Death()


class FaultPlan(FaultTable):
    """The faults of a run. They begin with the run and end with its last arrival (or at `stop_s`);
    then all requests must end."""

    stop_s: Seconds | None = Field(default=None, description="no new fault from then on; default: the last arrival")
    recovery_s: Seconds = Field(default=600.0, description="after the last fault everything has ended within so long")
    device: DeviceFaults = DeviceFaults()
    link: LinkFaults = LinkFaults()
    client: ClientFaults = ClientFaults()
    draft: DraftFaults = DraftFaults()
    pool: PoolFaults = PoolFaults()
    load: LoadFaults = LoadFaults()
    clock: ClockFaults = ClockFaults()
    config: ConfigFaults = ConfigFaults()
    service: ServiceFaults = ServiceFaults()
    transfer: TransferFaults = TransferFaults()

    def of(self, kind: str) -> Fault:
        """Return the settings of a kind by its name, such as "device.hangs"."""
        family, _, name = kind.partition(".")
        fault = getattr(getattr(self, family), name)
        assert isinstance(fault, Fault), f"{kind} is no kind of fault"
        return fault

    def late(self, kind: str) -> Late:
        """Return the settings of a kind that delays something."""
        fault = self.of(kind)
        assert isinstance(fault, Late), f"{kind} delays nothing"
        return fault

    @property
    def enabled(self) -> tuple[str, ...]:
        """The kinds that can happen, in the order of `KINDS`."""
        return tuple(kind for kind in KINDS if self.of(kind).is_enabled)

    def of_service(self) -> tuple[FaultPlan, tuple[str, ...]]:
        """Return the plan without the faults of clients, of their load and of a service that stops, and the enabled
        kinds that this leaves out."""
        outside = {"client": ClientFaults(), "load": LoadFaults(), "service": ServiceFaults()}
        return self.model_copy(update=outside), tuple(
            kind for kind in self.enabled if kind.partition(".")[0] in outside
        )

    def to_toml(self) -> str:
        """Return the plan as a file: the enabled kinds with all their values."""
        lines = [f"{key} = {value}" for key in ("stop_s", "recovery_s") if (value := getattr(self, key)) is not None]
        for kind in self.enabled:
            values = self.of(kind).model_dump(exclude_none=True)
            lines += ["", f"[{kind}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
        return "\n".join(lines) + "\n"


# -- reading ----------------------------------------------------------------------------------------------------------


def load_fault_plan(given: str | Path, seed: int, *, transfers: bool = False) -> FaultPlan:
    """Read the plan in a TOML file; for the word "swarm" draw one from `seed`, with `transfers` including faults
    between engines.

    Raises ConfigError with every problem of the file.
    """
    if str(given) == SWARM:
        return swarm_plan(seed, transfers=transfers)
    path = Path(given)
    if not path.exists() and (hint := nearest(str(given), [SWARM])):
        raise ConfigError.of(str(path), "", f"is no file{hint}")
    return fault_plan(read_toml(path), str(path))


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
    return Problem(key, f"{message[0].lower()}{message[1:]}, got {shown(detail['input'])}")


def _keys_of(table: str) -> list[str]:
    at: Any = FaultPlan()
    for name in filter(None, table.split(".")):
        at = getattr(at, name)
    return list(type(at).model_fields)


def swarm_plan(seed: int, *, transfers: bool = False) -> FaultPlan:
    """Draw a plan: each kind is dropped with probability 1/2, or has a probability from its range (log-uniform).

    With `transfers` faults of transfers are included; they move no other fault.
    """
    families: dict[str, dict[str, Any]] = {}
    for name, kind in KINDS.items():
        if kind.needs_transfers and not transfers:
            continue
        if float(uniform(seed, Purpose.SWARM, kind.number, 0)) < 0.5:
            continue
        low, high = kind.swarm
        coin = float(uniform(seed, Purpose.SWARM, kind.number, 1))
        family, _, key = name.partition(".")
        families.setdefault(family, {})[key] = {"probability": low * (high / low) ** coin}
    return fault_plan(families, "<swarm>")


# -- drawing ----------------------------------------------------------------------------------------------------------


class FaultDraws:
    """The faults of all occasions, as a pure function of (seed, kind, subject, occasion); they are drawn for many
    occasions at a time."""

    STRETCH = 512

    def __init__(self, plan: FaultPlan, seed: int) -> None:
        self.plan = plan
        self._seed = seed
        self._by_unit = {
            unit: [(name, KINDS[name].number, plan.of(name)) for name in plan.enabled if KINDS[name].occasion == unit]
            for unit in UNITS
        }
        self._stretches: dict[tuple[str, int, int], dict[int, tuple[str, ...]]] = {}

    def at(self, unit: str, subject: int, occasion: int) -> tuple[str, ...]:
        """Return the kinds that happen at this occasion, in the order of `KINDS`.
        `subject`: its replica, link or run."""
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
        """Return a number in [0, 1) that belongs to one fault, for example how late a message is."""
        lane = KINDS[kind].number + 64 * (part + 1)
        return float(uniform(self._seed, Purpose.FAULT, subject, occasion, lane))


class Ledger:
    """One per run, shared by all that inject."""

    def __init__(self, plan: FaultPlan, seed: int) -> None:
        self.plan = plan
        self.draws: FaultDraws = FaultDraws(plan, seed)
        self.injected: dict[str, int] = dict.fromkeys(plan.enabled, 0)
        self.cancelled_in: dict[str, int] = {}  # by the state of the request
        self.last_ns: int = 0
        self.num_requests = 0  # occasions of the unit "request"
        self._ended = False

    def kinds_at(self, unit: str, subject: int, occasion: int, now_ns: int) -> tuple[str, ...]:
        """Return the faults of this occasion; none once the plan has ended."""
        if self._ended or (self.plan.stop_s is not None and now_ns >= self.plan.stop_s * 1e9):
            return ()
        return self.draws.at(unit, subject, occasion)

    def note(self, kind: str, now_ns: int) -> None:
        """Count a fault that happens."""
        self.injected[kind] += 1
        self.last_ns = max(self.last_ns, now_ns)

    def end(self) -> None:
        """Inject no new faults from now on."""
        self._ended = True

    @property
    def has_ended(self) -> bool:
        return self._ended

    @property
    def never_fired(self) -> tuple[str, ...]:
        return tuple(kind for kind, count in self.injected.items() if not count)
