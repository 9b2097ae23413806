"""The matrix: every way to serve must give the tokens of the plain greedy loop.

`cells.py` has the cells: one choice in every dimension each. `run_cell` serves a small workload in that configuration
under disturbances, and compares every output with the oracle.

    python tests/support/matrix/serving_matrix.py --cells 5000 --seed 1
    python tests/support/matrix/serving_matrix.py --cells 200 --algorithm MY_PLUGIN
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from cells import MatrixCell, pairwise_cells, random_cells
from foredraft.core.acceptance.process import GaussianAcceptance
from foredraft.core.adaptive import AdaptiveController, CostTable, build_controller, fixed_controller
from foredraft.core.algorithm.algorithm import Drafter, SpecAlgorithm
from foredraft.core.algorithm.builtin import Standalone
from foredraft.core.algorithm.registry import get_algorithm
from foredraft.core.contract.events import ignore
from foredraft.core.contract.request import Request
from foredraft.core.contract.text import TextDecoder
from foredraft.core.errors import ConfigError
from foredraft.core.prompt import Prompt
from foredraft.core.scheduler.config import EngineConfig, EngineSizes
from foredraft.core.scheduler.engine import Engine
from foredraft.core.scheduler.rules import OurRules
from foredraft.properties.executor.reference import HashDraft, HashLanguageModel, ReferenceExecutor
from foredraft.properties.executor.reference.language_model import USER_OUTPUTS
from hostile_driver import (
    Dice,
    Disturbance,
    DriverOperation,
    HostileDriver,
    UnitClock,
    check_feedback,
    check_greedy_output,
    compare_histories,
)

VOCAB_SIZE = 24
STOP_TOKEN = 5


class OutsideDraft(Standalone):
    """A plugin as a user would write it: an unshifted draft of its own, never registered among the built-in ones."""

    name = "OUTSIDE"


class LetterDecoder(TextDecoder):
    """Token ids as letters, so that stop strings have a text to stand in."""

    def decode(self, tokens: np.ndarray) -> str:
        return "".join(chr(97 + int(token)) for token in tokens)


def algorithm_of(cell: MatrixCell) -> SpecAlgorithm:
    return OutsideDraft() if cell.algorithm == "PLUGIN" else get_algorithm(cell.algorithm)


def _drafts_on_host(cell: MatrixCell) -> bool:
    return algorithm_of(cell).drafter is Drafter.LOOKUP


def controller_of(cell: MatrixCell) -> AdaptiveController:
    """Return the step policy of a cell: candidates up to `steps`, zero among them."""
    steps, topk = cell.steps, cell.topk
    shape: dict[str, Any] = {"depth_limited": not _drafts_on_host(cell)}
    if cell.policy == "fixed":
        if topk > 1 and steps:
            shape |= {"topk": topk, "num_draft_tokens": _tree_size(cell, steps)}
        return fixed_controller(steps, **shape)
    table = _table(cell)
    if topk > 1:
        for entry in table.values():  # trees of their own for each step count of each range
            entry["num_draft_tokens"] = {str(s): _tree_size(cell, s) for s in entry["candidate_steps"] if s}
        shape["topk"] = topk
    if cell.policy == "goodput":
        candidates = sorted({step for entry in table.values() for step in entry["candidate_steps"]})
        costs = CostTable(
            tuple(candidates),
            (1, 4),
            tuple((100_000 + 9_000 * s, 110_000 + 21_000 * s) for s in candidates),
            tuple(100 for _ in candidates),
        )
        return build_controller("goodput", table, cost_table=costs, **shape)
    return build_controller("ema", table, **shape)


def _table(cell: MatrixCell) -> dict[str, Any]:
    low = max(1, cell.steps - 2)
    quick = {"ema_alpha": 0.6, "update_interval": 2, "warmup_batches": 1}
    top = sorted({low, cell.steps})
    if cell.policy != "ranges":
        return {"1": {"candidate_steps": sorted({0, *top}), **quick}}
    return {
        "1": {"candidate_steps": top, **quick},
        "2": {"candidate_steps": sorted({0, 1, cell.steps}), **quick},
        "4": {"candidate_steps": [0, 1], **quick},
    }


def _tree_size(cell: MatrixCell, steps: int) -> int:
    """Return the nodes of a tree that `steps` levels can fill, and not the same number for every cell."""
    most = 1 + cell.topk + (steps - 1) * cell.topk**2
    return min(most, 2 + (cell.seed * 7 + cell.steps) % 16 + steps)


def config_of(cell: MatrixCell, algorithm: SpecAlgorithm, controller: AdaptiveController) -> EngineConfig:
    """Return sizes near their limits: a tight pool holds about two requests, a tiny one hardly more than
    the longest alone."""
    config = EngineConfig(
        num_pages=1 << 16,
        context_len=72,
        page_size=cell.page_size,
        overlap=cell.mode == "overlap",
        max_running=5,
        chunk_size=cell.chunk_size,
        mixed=cell.mixed,
        prefix_cache=cell.cache,
        rules=OurRules(watermark=0.02),
        multi_step_rounds=cell.multi_step_rounds,
        preempt=cell.priorities == "preempt",
        ageing_bound=3,
        track_tokens=True,
        max_step_tokens=5 * controller.max_num_draft_tokens + 4 if cell.token_budget else None,
        verify=cell.verify,
    )
    sizes = EngineSizes.resolve(config, algorithm, controller)
    longest = 72 + sizes.reserve + 2 * cell.page_size
    slots = {"tiny": longest + 8, "tight": 2 * longest, "roomy": 12 * longest, "vast": 40 * longest}[cell.pool]
    return replace(config, num_pages=-(-slots // cell.page_size))


def requests_of(cell: MatrixCell, dice: Dice, output_lens: tuple[int, ...] = (1, 2, 5, 12, 24)) -> list[Request]:
    """Return a few requests whose lengths lie at and around page and chunk edges."""
    stem = [dice.below(VOCAB_SIZE) for _ in range(40)]
    requests = []
    for i in range(5 + dice.below(4)):
        length = dice.choose([1, 2, 3, cell.page_size, cell.page_size + 1, 7, 16, 17, 2 + dice.below(40)])
        tokens = [dice.below(VOCAB_SIZE) for _ in range(length)]
        if cell.prefixes != "none" and dice.chance(70):
            tokens = (stem[: dice.choose([4, 16, 17, 33])] + tokens)[:48]
        stops = {}
        if cell.stops == "tokens":
            stops = {"stop_tokens": (STOP_TOKEN, 11)}
        if cell.stops == "strings" and i % 2:
            stops = {"stop_strings": (chr(97 + dice.below(VOCAB_SIZE)), chr(97 + dice.below(VOCAB_SIZE)), "bc")}
        requests.append(
            Request(
                f"r{i}",
                Prompt.of_tokens(tokens),
                dice.choose(output_lens),
                priority=0 if cell.priorities == "none" else dice.below(3),
                namespace="" if cell.prefixes != "namespaces" else dice.choose(["", "other"]),
                outputs=USER_OUTPUTS if cell.outputs and i % 3 != 1 else (),
                **stops,
            )
        )
    return requests


def disturbance_of(cell: MatrixCell) -> Disturbance:
    return Disturbance(
        submit=100 if cell.arrivals == "at once" else 8,
        abort=4 if cell.disturbance in ("abort", "all") else 0,
        retract=5 if cell.disturbance in ("retract", "all") else 0,
        idle=30 if cell.faults == "slow host" else 0,
    )


@dataclass(frozen=True, slots=True)
class CellReport:
    """What serving one cell did; the numbers say that the cell was not vacuous."""

    steps: int
    rounds: int
    blocks: int
    correct_drafts: int
    drafted: int
    retractions: int
    disturbances: int
    refused: int


def build_cell(cell: MatrixCell, events=ignore) -> tuple[Engine, ReferenceExecutor, HashLanguageModel]:
    algorithm, controller = algorithm_of(cell), controller_of(cell)
    config = config_of(cell, algorithm, controller)
    engine = Engine(config, algorithm, controller, events=events, text_decoder=LetterDecoder())
    regularity = 0.8 if _drafts_on_host(cell) else 0.0  # else nothing that was said before would come again
    model = HashLanguageModel(seed=cell.seed, vocab_size=VOCAB_SIZE, regularity=regularity)
    acceptance = GaussianAcceptance((0.8,) * 8, seed=cell.seed) if cell.drafts == "simulated" else None
    fail_at = {"r1": cell.seed % 7, "r4": 0} if cell.faults == "target" else None
    draft = HashDraft(model, cell.agreement)
    executor = ReferenceExecutor(engine, draft, acceptance=acceptance, fail_at=fail_at)
    return engine, executor, model


def run_cell(cell: MatrixCell) -> CellReport:
    """Serve a cell's workload and compare everything; raises at the first contradiction."""
    dice = Dice(cell.seed * 1_000_003 + 17)
    events: list = []
    engine, executor, model = build_cell(cell, events.append)
    requests = requests_of(cell, dice)
    driver = HostileDriver(engine, executor, requests, dice, disturbance_of(cell))
    finished = driver.run()
    check_feedback(engine, events)
    check_greedy_output(engine, model, requests, finished, driver.refused, LetterDecoder().decode)
    return CellReport(
        driver.num_steps,
        executor.num_rounds,
        sum(getattr(getattr(getattr(e, "result", None), "decode", None), "rounds", 0) > 1 for e in events),
        executor.num_correct_drafts,
        executor.num_drafted,
        sum(len(getattr(event, "retracted", ())) for event in events),
        driver.num_disturbances,
        len(driver.refused),
    )


def run_cell_in_multi_steps(cell: MatrixCell) -> int:
    """Check SIM-12 for one cell: run the same history in multi-steps and singly. Returns how many multi-steps there
    were."""
    dice = Dice(cell.seed * 1_000_003 + 29)
    if cell.stops == "strings":
        cell = replace(cell, stops="tokens")
    requests = requests_of(cell, dice, (2, 12, 30, 60))
    span = 0 if cell.arrivals == "at once" else 60
    operations = [DriverOperation(dice.below(span) if span else 0, request) for request in requests]
    if cell.disturbance in ("abort", "all"):
        operations += [
            DriverOperation(dice.below(80), None, request.request_id) for request in requests if dice.chance(40)
        ]
    histories = []
    for rounds in (max(cell.multi_step_rounds, 2), 1):
        # Multi-steps need free memory, so every pool is one size larger; with stop strings there are none.
        pool = {"tiny": "tight", "tight": "roomy", "roomy": "vast"}[cell.pool]
        engine, executor, _ = build_cell(replace(cell, multi_step_rounds=rounds, pool=pool))
        histories.append(UnitClock(engine, executor, operations).run())
    compare_histories(*histories)
    return histories[0].blocks


@dataclass(frozen=True, slots=True)
class MatrixFailure:
    cell: MatrixCell
    error: str


def run_cells(cells, report=print, run=run_cell) -> tuple[list[MatrixFailure], list]:
    """Run cells; a failing one is reported by its one-line reproducer, the others go on."""
    failures, reports = [], []
    for cell in cells:
        try:
            reports.append(run(cell))
        except Exception as error:
            failures.append(MatrixFailure(cell, f"{type(error).__name__}: {error}"))
            report(f"{failures[-1].error}\n    {cell.reproducer()}")
    return failures, reports


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python tests/support/matrix/serving_matrix.py",
        description="Serve random cells of the matrix against the plain greedy loop.",
    )
    parser.add_argument("--cells", type=int, default=1000, help="how many random cells; default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="equal seeds give equal cells; default: %(default)s")
    parser.add_argument("--algorithm", help="draw random cells of this algorithm only (built in or from a plugin)")
    parser.add_argument("--pairwise", action="store_true", help="run the pairwise cover instead of random cells")
    parser.add_argument("--blocks", action="store_true", help="compare multi-steps with single rounds instead")
    parser.add_argument("--cell", help="run one cell, as a failure prints it")
    options = parser.parse_args(arguments)
    begin = time.perf_counter()
    if options.cell:
        known = {field.name for field in fields(MatrixCell)}
        cells = [MatrixCell(**{key: value for key, value in json.loads(options.cell).items() if key in known})]
    elif options.pairwise:
        cells = pairwise_cells()
    else:
        try:
            fixed = {"algorithm": get_algorithm(options.algorithm).name} if options.algorithm else None
        except ConfigError as error:
            parser.error(str(error))
        cells = random_cells(options.cells, options.seed, fixed)
    if options.blocks:
        failures, blocks = run_cells(cells, run=run_cell_in_multi_steps)
        print(f"{len(blocks)} cells equal, {len(failures)} differ: {sum(blocks)} blocks", end=" ")
        print(f"in {time.perf_counter() - begin:.1f} s")
        return 1 if failures else 0
    failures, reports = run_cells(cells)
    print(summary(failures, reports), f"in {time.perf_counter() - begin:.1f} s")
    return 1 if failures else 0


def summary(failures: list[MatrixFailure], reports: list[CellReport]) -> str:
    total = {name: sum(getattr(report, name) for report in reports) for name in CellReport.__slots__}
    counts = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in total.items())
    return f"{len(reports)} cells passed, {len(failures)} failed: {counts}"


if __name__ == "__main__":
    sys.exit(main())
