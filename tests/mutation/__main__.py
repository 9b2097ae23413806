"""Change the source, one small thing at a time, and see whether a test notices: `make mutation`.

    python tests/mutation [--packages core sim gpu] [--judge tests|check] [--sample N] [--budget 2h] [--seed 1] [module
    …] python tests/mutation --again

Changes are drawn from all modules of the packages, from each package in turn, until the sample or the budget is spent.
A copy of the tree is changed, never the tree itself. For each change the tests of its folder run, then those elsewhere
that import its module, then `MORE_TESTS`; what noticed a change of this folder before comes first, and the first
failure ends it. With `--judge check` it is the components of `foredraft check` whose suites run the changed line, and
only lines that some suite runs are changed: what each runs is measured first. Every run is a fork of a process that has
imported the libraries, has a limit of its own processor time, and is over when it uses none for a minute: how busy the
machine is makes no difference. What fails is run once without the change: if it fails there, too, it is named, and the
change is left out.

Every outcome is a line of the results file: a second call goes on where the first one stopped, and runs again what
belongs to a module that is another one by now. A survivor is a change that was not noticed: either a test is missing,
or it makes no difference; those stand in `tests/mutation/equivalent_changes.json`. `--again` judges the survivors by
the tests of today, and the report has both shares.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from changes import CHANGED, ROOT, Change, drawn, modules_of
from copies import Copy, children_s, warm_up
from judges import reach_of, that_run
from outcomes import read_results, report, source_of

EQUIVALENT = ROOT / "tests" / "mutation" / "equivalent_changes.json"


def seconds_of(text: str) -> float:
    match = re.fullmatch(r"(\d+)(s|m|h)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a time, such as 600s, 10m or 2h")
    return int(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def main() -> int:
    parser = argparse.ArgumentParser(description="Change the source, one small thing at a time.")
    parser.add_argument("modules", nargs="*", help="as in core/contract/hidden.py; all of the packages by default")
    parser.add_argument("--packages", nargs="+", choices=CHANGED, default=list(CHANGED))
    parser.add_argument("--judge", choices=("tests", "check"), default="tests", help="what must notice a change")
    parser.add_argument(
        "--quick",
        type=int,
        metavar="S",
        help="only the tests of the module's folder, for S seconds; --again goes further",
    )
    parser.add_argument(
        "--tests", nargs="+", help="these tests alone; with --again, for the survivors that they concern"
    )
    parser.add_argument("--sample", type=int, help="changes of each package at most, those of earlier calls included")
    parser.add_argument("--budget", type=seconds_of, default=seconds_of("2h"), help="600s, 10m, 2h")
    parser.add_argument("--seed", type=int, default=1, help="another seed draws other changes first")
    parser.add_argument("--again", action="store_true", help="judge the survivors again, and nothing else")
    parser.add_argument(
        "--results", type=Path, help="runs/mutation.jsonl by default, runs/mutation_check.jsonl of check"
    )
    options = parser.parse_args()
    unknown = [module for module in options.modules if not (ROOT / module).is_file()]
    if unknown:
        parser.error(f"no such module: {', '.join(unknown)}")
    modules = options.modules or modules_of(options.packages)
    path = options.results or ROOT / "runs" / ("mutation.jsonl" if options.judge == "tests" else "mutation_check.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    results = {key: outcomes for key, outcomes in read_results(path).items() if outcomes[0]["module"] in set(modules)}
    equivalent = json.loads(EQUIVALENT.read_text(encoding="utf-8"))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, path.open("a", encoding="utf-8") as file:
        copy = Copy(Path(folder), options.judge, options.quick, options.tests)
        warm_up()
        changes = drawn(modules, options.seed)
        if options.judge == "check":
            copy.reach = reach_of(copy.subjects(), copy.measure, path.with_name("mutation_reach.json"))
            changes = (change for change in changes if that_run(change, copy.reach))
        for change in remaining(changes, options, results):
            if (spent_s := time.monotonic() - begin) >= options.budget:
                break
            used_s = children_s()
            outcome, by = copy.outcome(change)
            used_s = children_s() - used_s
            print(f"[{spent_s:.0f} s] {change.key} {outcome} in {used_s:.1f} s {by}", file=sys.stderr, flush=True)
            if outcome == "untested":
                continue
            result = {
                "key": change.key,
                "source": source_of(change.module),
                "outcome": outcome,
                "by": by,
                **asdict(change),
            }
            results.setdefault(change.key, []).append(result)
            print(json.dumps(result), file=file, flush=True)
    print(report(list(results.values()), equivalent))
    return 0


def remaining(
    changes: Iterable[Change], options: argparse.Namespace, results: dict[str, list[dict]]
) -> Iterator[Change]:
    """Yield the changes that are still to be judged."""
    there = Counter(key.split("/")[0] for key in results)
    survivors = {key for key, outcomes in results.items() if outcomes[-1]["outcome"] == "survived"}
    for change in changes:
        package = change.module.split("/")[0]
        if options.again:
            if change.key in survivors:
                yield change
        elif change.key not in results and (options.sample is None or there[package] < options.sample):
            there[package] += 1
            yield change


if __name__ == "__main__":
    raise SystemExit(main())
