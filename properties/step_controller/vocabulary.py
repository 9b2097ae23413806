"""What a step controller is asked in a random run: a small table, rounds of few kinds, and stretches that are long enough to settle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..harness.letters import Letter, Vocabulary
from . import operations as ops
from .contract import StepsCapabilities, StepsConfig
from .processes import PROCESSES
from .table import DAMAGES, Table, read_table
from .trial import FEWEST_ROWS, GARBAGE, looked_at

BOUNDS = ((1,), (1, 4), (1, 2, 8), (2, 5), (1, 16))
CANDIDATES = ((1, 3, 7), (0, 1, 3), (0, 2), (1, 3), (0, 1, 2, 3, 5, 7), (1,), (0, 7), (2, 5))
CAPTURED = ((), (), (1, 2, 4, 8), (4, 16), (1, 3, 6, 12), (32,))
INTERVALS = (1, 2, 5, 5)
WARM_UPS = (0, 10, 1, 3)
ALPHAS = (0.2, 1.0, 0.5, 0.05)
RUNS = ((0,), (1,), (2,), (7,), (8, 0), (0, 1, 2), (3, 5), (1, 0, 0, 0))


def draw_config(bits: int, capabilities: StepsCapabilities) -> StepsConfig:
    """A table of one to three ranges, from 32 random bits; with one candidate if the controller is not adaptive."""
    pick = _Picker(bits)
    bounds = pick.of(BOUNDS) if capabilities.adaptive else (1,)
    sets = [pick.of(CANDIDATES) for _ in bounds]
    captured = pick.of(CAPTURED)
    if not capabilities.adaptive:
        table = Table((1,), ((pick.of((0, 1, 3, 7)),),))
        return StepsConfig(table.text(), captured, fail_at=pick.of((0, 0, 1)))
    dwell = 0 if pick.of(range(8)) else 16
    table = Table(bounds, tuple(sets), pick.of(INTERVALS), pick.of(WARM_UPS), pick.of(ALPHAS), dwell)
    config = StepsConfig(table.text(), captured, fail_at=pick.of((0, 0, 1, 2)))
    if not capabilities.goodput:
        return config
    return replace(
        config,
        draft_ns=pick.of((700_000, 100_000, 2_000_000)),
        token_ns=pick.of((21_000, 5_000, 200_000)),
        kv_per_row=pick.of((500, 0, 20_000)),
        varied=pick.of(("acceptance", "cost")),
    )


class _Picker:
    """Takes random bits apart: each pick uses up what it needs."""

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def of(self, values):
        self.bits, at = divmod(self.bits, len(values))
        return values[at]


def simpler_configs(config: StepsConfig) -> Iterator[StepsConfig]:
    """Configurations like this one, but smaller: fewer ranges, fewer candidates, no graphs, no failure."""
    table = read_table(config.table)
    for at in range(len(table.bounds)):
        if len(table.bounds) > 1:
            bounds = table.bounds[:at] + table.bounds[at + 1 :]
            candidates = table.candidates[:at] + table.candidates[at + 1 :]
            yield replace(config, table=_with(table, bounds, candidates))
    for at, members in enumerate(table.candidates):
        for leave in range(len(members)):
            if len(members) > 1:
                fewer = members[:leave] + members[leave + 1 :]
                candidates = (*table.candidates[:at], fewer, *table.candidates[at + 1 :])
                yield replace(config, table=_with(table, table.bounds, candidates))
    if config.captured:
        yield replace(config, captured=config.captured[:-1])
    if config.fail_at:
        yield replace(config, fail_at=config.fail_at - 1)


def _with(table: Table, bounds: tuple[int, ...], candidates: tuple[tuple[int, ...], ...]) -> str:
    return replace(table, bounds=bounds, candidates=candidates).text()


def vary(kind: str, config: StepsConfig) -> StepsConfig | None:
    """The other configuration of an invariant over two runs."""
    if kind != "with more acceptance, or dearer verification":
        return config
    if config.varied == "acceptance":
        return replace(config, lift=1)
    return replace(config, token_ns=4 * config.token_ns, draft_ns=2 * config.draft_ns)


def vocabulary(config: StepsConfig, capabilities: StepsCapabilities) -> Vocabulary:
    """The letters of one configuration."""
    sizes = looked_at(config)
    steps = sorted({0, 1, *read_table(config.table).union})
    small = [size for size in sizes if size <= 16] or [1]
    letters = {
        "": (
            Letter(ops.Round, 20, sizes, RUNS),
            Letter(ops.Deliver, 24, (0, 0, 0, 1, 2, 64)),
            Letter(ops.Idle, 3, sizes),
        ),
        "hostile": (
            Letter(ops.Observe, 8, sizes, steps, RUNS),
            Letter(ops.Garbage, 8, sizes, tuple(GARBAGE)),
        ),
        "adaptive": (
            Letter(ops.Repeat, 12, small, RUNS, (5, 1, 20, 50)),
            Letter(ops.Phase, 1, PROCESSES, [size for size in small if size >= FEWEST_ROWS] or [FEWEST_ROWS]),
            Letter(ops.Offer, 1, small),
        ),
        "reload": (
            Letter(ops.Reload, 2, (-1, 0, 1, 2), (5, 1, 2)),
            Letter(ops.ReloadBroken, 4, DAMAGES),
        ),
    }
    return {name: found for name, found in letters.items() if name in ("", "hostile", *capabilities.declared)}
