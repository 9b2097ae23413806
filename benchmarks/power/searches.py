"""How many planted defects the swarm and Hypothesis find in equal processor time.

    python -m benchmarks.power.searches [--seconds 4] [--every 6] [--write]

A search of Hypothesis is given up when its time is spent, also where it is making a failure short; then the defect
counts as missed. `--write` puts the table into docs/properties.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from statistics import median

from foredraft.checks.mutant import Mutant
from foredraft.checks.registry import contracts, mutants_of
from foredraft.properties.harness.machines import SETTINGS, machine
from foredraft.properties.harness.swarm import Budget, Swarm
from foredraft.properties.harness.trial import Violation
from foredraft.properties.suites import suite_of
from hypothesis import seed, settings
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test

from ..pages import write_block

LEFT_OUT = ("simulator",)  # whose operations are whole simulations
STEP_COUNT, MOST_EXAMPLES = 25, 1000
OPERATIONS_AT_ONCE = 200


class Spent(BaseException):
    """The time of a search is over. It is no error that Hypothesis would look into."""


def by_swarm(contract: str, mutant: Mutant, limit_s: float) -> bool:
    component, begin = suite_of(contract).component(mutant.make), time.process_time()
    swarm = Swarm(component, 1)
    while time.process_time() - begin < limit_s:
        if swarm.search(component.invariants, Budget(operations=swarm.num_operations + OPERATIONS_AT_ONCE)):
            return True
    return False


def by_hypothesis(contract: str, mutant: Mutant, limit_s: float) -> bool:
    begin = time.process_time()

    class Limited(machine(suite_of(contract), mutant.make)):  # type: ignore[misc]  # a class that is made at run time
        def __init__(self) -> None:
            if time.process_time() - begin > limit_s:
                raise Spent
            super().__init__()

    options = settings(SETTINGS, max_examples=MOST_EXAMPLES, stateful_step_count=STEP_COUNT, database=None)
    try:
        run_state_machine_as_test(seed(1)(Limited), settings=options)
    except (Spent, Flaky):  # it was looking for the same failure again, and the time was over
        return False
    except Violation:
        return True
    return False


SEARCHES = {"swarm": by_swarm, "Hypothesis": by_hypothesis}


def drawn(every: int) -> Iterator[tuple[str, Mutant]]:
    """Yield one of so many planted defects of each contract."""
    for contract in contracts():
        if contract not in LEFT_OUT:
            yield from ((contract, mutant) for mutant in mutants_of(contract)[1::every])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="of processor time for a defect and a search")
    parser.add_argument("--every", type=int, default=6, help="planted defect of a contract's list")
    parser.add_argument("--write", action="store_true", help="put the table into docs/properties.md")
    options = parser.parse_args()
    defects = list(drawn(options.every))
    lines = [f"{len(defects)} planted defects, {options.seconds:g} s of processor time for each and each search.", ""]
    lines += ["| search | found | median, s | missed |", "| --- | --- | --- | --- |"]
    for name, search in SEARCHES.items():
        taken, missed = [], []
        for number, (contract, mutant) in enumerate(defects, 1):
            print(f"\r{name}: {number} of {len(defects)}", end="", file=sys.stderr, flush=True)
            begin = time.process_time()
            if search(contract, mutant, options.seconds):
                taken.append(time.process_time() - begin)
            else:
                missed.append(contract)
        print(file=sys.stderr)
        counts = ", ".join(f"{contract} {missed.count(contract)}" for contract in dict.fromkeys(missed)) or "none"
        lines.append(f"| {name} | {len(taken)} | {median(taken):.2f} | {counts} |")
    print("\n".join(lines))
    if options.write:
        write_block("properties.md", "searches", lines)


if __name__ == "__main__":
    main()
