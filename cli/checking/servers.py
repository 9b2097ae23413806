"""`foredraft check vllm`, `sglang`, `transformers`: components of other servers, a line each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ...core.errors import ConfigError, count_of
from ..options import print_document
from .processes import serve_checks, side_by_side

if TYPE_CHECKING:
    from ...checks.servers.packages import ServerComponent, ServerPackage
    from ...checks.servers.release import Release
    from ...properties.harness.report import Failure, Report


def check_server(name: str, budget: str | None, seed: int, as_json: bool, cases: Path, wheel: Path | None) -> bool:
    """Check the components of a package, and print a line for each. Returns whether nothing new was found.

    Raises ConfigError for a package that is missing, incomplete, or of a release that the adapters do not know.
    """
    from ...checks.servers.packages import package_of
    from ...checks.servers.release import name_wheel
    from ...properties.harness.swarm import Budget

    package = package_of(name)
    if wheel is not None:
        name_wheel(package.name, wheel)
    release = package.open()
    if not as_json:
        typer.echo(f"{release.package} {release.version}, {release.path}")
    share = None if budget is None else Budget.of(budget).divided(len(package.components))
    outcomes, ok = [], True
    width = max(len(item.name) for item in package.components)
    order = {
        "package": name, "budget": None if share is None else asdict(share), "seed": seed, "cases": str(cases),
        "wheel": None if wheel is None else str(wheel), "width": width,
    }  # fmt: skip
    for answer in side_by_side(__name__, order, [{"name": component.name} for component in package.components]):
        line, text, outcome = answer["line"], answer["text"], answer["outcome"]
        outcomes.append(outcome)
        ok &= outcome["ok"]
        if not as_json:
            typer.echo(line)
            if text:
                typer.echo(f"\n{text}\n")
    _say_absent(package, width, as_json, outcomes)
    if as_json:
        from ..documents.checking import CheckDocument

        print_document(CheckDocument(ok, outcomes))
    return ok


def _say_absent(package: ServerPackage, width: int, as_json: bool, outcomes: list[dict[str, Any]]) -> None:
    for name, reason in package.absent.items():
        outcomes.append({"component": name, "status": "cannot run here", "reason": reason})
        if not as_json:
            typer.echo(f"  {name:<{width}}  {'':<15}  cannot run here\n      {reason}")


def _run(order: Mapping[str, Any], check: Mapping[str, str]) -> dict[str, Any]:
    """Check one component. Returns its line, the text of failures that are new, and the outcome to write as JSON."""
    from ...checks.servers.packages import package_of
    from ...checks.servers.release import name_wheel
    from ...properties.conformance import check as check_one
    from ...properties.harness.importing import load_make
    from ...properties.harness.swarm import Budget
    from ...properties.suites import suite_of

    package, wheel = package_of(order["package"]), order["wheel"]
    if wheel is not None:
        name_wheel(package.name, Path(wheel))
    release = package.open()
    component = next(item for item in package.components if item.name == check["name"])
    budget = {"operations": component.operations} if order["budget"] is None else order["budget"]
    report = check_one(
        suite_of(component.contract),
        load_make(component.subject),
        subject=component.subject,
        seed=order["seed"],
        budget=Budget(**budget),
        allowed_failures=component.may_break(release.version),
        every_failure=True,
    )
    paths = {}
    option = "" if wheel is None else f" --wheel {wheel}"
    for failure in report.shown:
        if failure.id not in component.otherwise:
            paths[failure.id] = _store(release, component, failure, Path(order["cases"]), option)
    status, rest, notes = _status(report, component, component.defects_of(release.version), paths)
    lines = [
        f"  {component.name:<{order['width']}}  {component.contract:<15}  {status}{rest}",
        *(f"      {note}" for note in notes),
    ]
    replays = {id: f"foredraft check --replay {path}{option}" for id, path in paths.items()}
    text = "" if report.ok else report.text(replays)
    outcome = {"component": component.name, "status": status, **report.to_json()}
    return {"line": "\n".join(lines), "text": text, "outcome": outcome}


def _store(release: Release, component: ServerComponent, failure: Failure, cases: Path, option: str) -> Path:
    """Store the case of a failure, and a report for its maintainers beside it."""
    from ...checks.servers.bug_report import bug_report

    words = "-".join(component.name.replace(",", "").replace("_", "-").split())
    path = cases / f"{release.package}-{words}-{failure.id}.case.json"
    text = bug_report(release, component, failure, f"foredraft check --replay {path}{option}")
    try:
        failure.case.save(path)
        path.with_suffix("").with_suffix(".md").write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError.of(str(path), "", f"the case cannot be written: {error.strerror}") from error
    return path


def _status(
    report: Report, component: ServerComponent, defects: Mapping[str, str], paths: dict[str, Path]
) -> tuple[str, str, list[str]]:
    """Return in a word what came of a check, the rest of its line, and the lines below it."""
    held = count_of(sum(map(bool, report.evaluations.values())) - len(report.shown), "invariant")
    operations = count_of(report.num_operations, "operation")
    broken = {failure.id for failure in report.expected}
    if not report.ok:
        return "FAILED", f": {'; '.join(report.reasons())}", []
    otherwise = [*component.relaxed, *sorted(broken & component.otherwise.keys())]
    notes = [f"by design other: {', '.join(otherwise)}"] if otherwise else []
    if not broken & defects.keys():
        return "holds", f": {held} in {operations}", notes
    by_text: dict[str, list[str]] = {}
    for id in sorted(broken & defects.keys()):
        by_text.setdefault(defects[id], []).append(id)
    for text, ids in by_text.items():
        reports = [str(paths[id].with_suffix("").with_suffix(".md")) for id in ids]
        notes += [f"{', '.join(ids)}: {text}", *reports]
    return "defect", f"; {held} held in {operations}", notes


if __name__ == "__main__":
    serve_checks(_run)
