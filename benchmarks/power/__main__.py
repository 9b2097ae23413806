"""How many fresh defects `foredraft check` finds.

    python -m benchmarks.power sites --seed 1                      where the next draw of defects is planted
    python -m benchmarks.power show benchmarks/power/draws/1.toml  does a caller see each of them?
    python -m benchmarks.power judge benchmarks/power/draws/1.toml does `foredraft check` find them?

A draw is made by hand: at each site, in the order of its area, the mistake is written that a person would most easily
make there, before anybody asks whether the suite finds it. `show` runs each defect's script with and without it; one
that makes no difference is left out of the draw. `judge` plants each defect in a copy of the tree and runs the
components whose checks can reach its area, with the default operations of `foredraft check`. Each outcome is a line of
`runs/power/<draw>-<digest>-<judgement>-seed-<seed>.jsonl`, so a second call goes on where the first one stopped, and a
draw that was changed begins anew. With other oracles a draw is judged again, under another name of the judgement.
`--write` puts the table into docs/evidence/detection.md, at `<!-- draw <draw>, <judgement> -->`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from textwrap import fill

from ..pages import write_block
from .copies import in_fork, planted, warm_up
from .defects import DrawnDefect, DrawOfDefects, read_draw
from .judging import COMPONENTS, judge_one, report
from .sites import AREAS, ROOT, draw_sites

SHOW_LIMIT_S = 200.0


def main() -> int:
    parser = argparse.ArgumentParser(description="How many fresh defects `foredraft check` finds.")
    commands = parser.add_subparsers(dest="command", required=True)
    sites = commands.add_parser("sites", help="print functions at random, area by area")
    sites.add_argument("--seed", type=int, required=True)
    sites.add_argument("--count", type=int, default=12, help="of each area")
    for name, text in (("show", "run the script of each defect"), ("judge", "run `foredraft check` on each defect")):
        command = commands.add_parser(name, help=text)
        command.add_argument("draw", type=Path)
        command.add_argument("--only", nargs="+", metavar="ID", help="these defects or areas")
        command.add_argument("--workers", type=int, default=1)
    judge = commands.choices["judge"]
    judge.add_argument("--seed", type=int, default=1, help="of the checks")
    judge.add_argument("--judgement", default="first", metavar="NAME", help="which one it is of this draw")
    judge.add_argument("--write", action="store_true", help="put the table into docs/evidence/detection.md")
    options = parser.parse_args()
    if options.command == "sites":
        _print_sites(options.seed, options.count)
        return 0
    draw = read_draw(options.draw)
    chosen = [one for one in draw.defects if not options.only or {one.id, one.area} & set(options.only)]
    print(f"{draw.path.name}: {len(draw.defects)} defects, digest {draw.digest}")
    warm_up()
    if options.command == "show":
        return _show(draw, chosen, options.workers)
    lines = _judge(draw, chosen, options.workers, options.seed, options.judgement)
    print("\n".join(lines))
    if options.write:
        write_block("evidence/detection.md", f"draw {draw.path.stem}, {options.judgement}", lines)
    return 0


def _print_sites(seed: int, count: int) -> None:
    for group, areas in AREAS.items():
        for area in areas:
            for number, site in enumerate(draw_sites(group, area, seed, count), 1):
                print(
                    f"\n{area}, {number}: {site.module} {site.name}, lines {site.first} to {site.last}\n{site.text()}"
                )


def _seen_file(draw: DrawOfDefects) -> Path:
    """Return the file that says which defects were seen."""
    path = ROOT / "runs" / "power" / f"{draw.path.stem}-{draw.digest}-seen.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _read_seen(draw: DrawOfDefects) -> dict[str, bool]:
    path = _seen_file(draw)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _show(draw: DrawOfDefects, defects: list[DrawnDefect], workers: int) -> int:
    """Print of each defect whether its script sees it, and keep that. Returns 1 if it does not see one."""
    unseen, seen = 0, _read_seen(draw)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:

        def said(script: str, name: str, defect: DrawnDefect | None) -> tuple[bool, str]:
            with planted(Path(folder) / name, defect) as place:
                error = in_fork(place, partial(_run_script, script), SHOW_LIMIT_S)
                return error is None, (place / "printed").read_text(encoding="utf-8") + json.dumps(error)

        scripts = list(dict.fromkeys(one.show for one in defects))
        names = [f"as-it-is-{number}" for number in range(len(scripts))]
        expected = dict(zip(scripts, pool.map(partial(said, defect=None), scripts, names), strict=True))
        for one in defects:
            if one.gone():
                print(f"{one.id:<14} is no longer in the source")
        defects = [one for one in defects if not one.gone()]
        found = pool.map(lambda one: said(one.show, one.id, one), defects)
        for one, (is_whole, printed) in zip(defects, found, strict=True):
            if not expected[one.show][0]:
                line = f"the script fails without the defect: {expected[one.show][1][-300:]}"
            elif printed == expected[one.show][1]:
                line = "makes no difference"
            else:
                line = "seen" if is_whole else f"seen: {printed[-120:]}"
            seen[one.id] = line.startswith("seen")
            unseen += not seen[one.id]
            _seen_file(draw).write_text(json.dumps(seen, indent=0), encoding="utf-8")
            print(f"{one.id:<14} {line}", flush=True)
    return int(unseen > 0)


def _run_script(script: str) -> None:
    exec(compile(script, "<show>", "exec"), {"__name__": "__main__"})
    sys.stdout.flush()


def _judge(draw: DrawOfDefects, defects: list[DrawnDefect], workers: int, seed: int, judgement: str) -> list[str]:
    """Judge what is not judged yet. Returns the table of all that is, with its conditions."""
    seen = _read_seen(draw)
    counted = [one for one in draw.defects if seen.get(one.id)]
    path = _seen_file(draw).with_name(f"{draw.path.stem}-{draw.digest}-{judgement}-seed-{seed}.jsonl")
    known = {}
    if path.exists():
        known = {item["id"]: item for item in map(json.loads, path.read_text(encoding="utf-8").splitlines())}
    left = [one for one in counted if one in defects and one.id not in known]
    left.sort(key=lambda one: int(one.id.rpartition("-")[2]))  # some of each area first
    with (
        tempfile.TemporaryDirectory() as folder,
        path.open("a", encoding="utf-8") as file,
        ThreadPoolExecutor(workers) as pool,
    ):
        for done in as_completed(pool.submit(judge_one, one, Path(folder), seed) for one in left):
            outcome = done.result()
            known[outcome["id"]] = outcome
            print(json.dumps(outcome), file=file, flush=True)
            by = outcome["found_by"] or outcome.get("gone") or f"missed by {', '.join(COMPONENTS[outcome['area']])}"
            print(f"{outcome['id']:<14} {by}", file=sys.stderr, flush=True)
    judged = [one for one in counted if one.id in known and "gone" not in known[one.id]]
    lines = [
        f"`python -m benchmarks.power judge benchmarks/power/draws/{draw.path.name} --judgement {judgement} --seed {seed}`:",
        f"digest {draw.digest}, {len(judged)} defects judged, each by the default operations of `foredraft check`.",
        "",
        *report([known[one.id] for one in judged]),
    ]
    for reason, without in (
        ("their place is no longer in the source", [one.id for one in draw.defects if one.gone()]),
        ("no script has shown them", [one.id for one in draw.defects if not seen.get(one.id) and not one.gone()]),
    ):
        lines += ["", fill(f"Not counted, {reason}: {', '.join(without)}.", 120)] if without else []
    left = [one for one in counted if one not in judged and not one.gone()]
    lines += (
        ["", f"Not judged yet, in the order of their numbers: {len(left)} more defects that were shown."]
        if left
        else []
    )
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
