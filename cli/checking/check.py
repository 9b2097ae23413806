"""`foredraft check`: search for operations that break a component, and shrink them."""

from __future__ import annotations

import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...core.errors import count_of
from ..options import AsJson, argument, option, print_document, refuse_of_other_modes, refuse_without_effect
from ..progress import LINE_EVERY_S, StatusLine
from .annotations import error_commands
from .component import OwnComponent, refuse_with_package
from .endpoints import SERVER, check_endpoint, with_asking_options
from .printed import end_despite_threads, held_back
from .processes import serve_checks, side_by_side
from .servers import check_server

if TYPE_CHECKING:
    from ...properties.harness.invariants import Invariant
    from ...properties.harness.report import Report
    from ...properties.harness.swarm import Found

EXIT_BROKEN = 1
DEFAULT_BUDGET = "60s"  # of a component that is not ours
DEFAULT_SEED = 1
DEFAULT_CASES = Path("runs/cases")


class Format(StrEnum):
    """How a check is printed."""

    text = "text"
    github = "github"


# fmt: off
Contract = Annotated[str | None, argument("CONTRACT",
    "Contract: allocator, prefix-cache, relay, accept, step-controller, engine, executor, "
    "block-manager, transport or simulator. Or a package, whose components are checked: vllm, sglang or transformers. "
    "Or server: an endpoint with OpenAI's interface. Default: all contracts.")]
Subject = Annotated[str | None, argument("MODULE:MAKE|URL",
    "Component: `MAKE(config)` in MODULE returns a new one; docs/contracts.md lists its methods. Default: the built-in "
    "components. Of a server its address, as http://HOST:PORT.")]
BudgetText = Annotated[str | None, option("--budget",
    "Number of operations (200000) or time (60s, 2m), divided among the components. Default: for your component 60s; "
    "for each built-in component its own number of operations, together about a minute on two cores.", "BUDGET")]
Seed = Annotated[int, option("--seed",
    "Seed of the random operations. Runs with the same seed and number of operations are the same.")]
Capability = Annotated[list[str] | None, option("--capability",
    "A capability of the component, such as paged, sharing or misuse; repeatable. Replaces make.capabilities.", "NAME")]
Expect = Annotated[list[str] | None, option("--expect",
    "An invariant that is known to be broken, with the reason; repeatable. If it holds, that is an error.", "ID=REASON")]
Allow = Annotated[list[str] | None, option("--allow",
    "An invariant that may be broken or hold; repeatable. If it is broken, that is reported and no error.", "ID")]
EveryFailure = Annotated[bool, option("--every-failure",
    "Go on after a failure, without the invariant that failed, until the budget is spent. Default: the first failure of "
    "a component ends its check.")]
Without = Annotated[list[str] | None, option("--without",
    "Leave out this kind of operation, by its name in a history; repeatable.", "NAME")]
ShowList = Annotated[bool, option("--list",
    "Print every invariant (or the invariants of one contract) and how it is checked.")]
Mutants = Annotated[bool, option("--mutants",
    "Plant known defects in the built-in components, and check that each one is found.")]
Replay = Annotated[Path | None, option("--replay", "Run a stored case again.", "FILE")]
Wheel = Annotated[Path | None, option("--wheel",
    "Wheel of vllm or sglang, or the folder into which one was unpacked. Default: the installed package.", "FILE")]
Form = Annotated[Format, option("--format",
    "text, or github: also a line for each failure that GitHub Actions shows beside the component.")]
Algorithm = Annotated[str | None, option("--algorithm",
    "For the contract executor: every engine that is drawn has this algorithm, for example one of a plugin of yours.",
    "NAME")]
Device = Annotated[str | None, option("--device",
    "For the contract executor: check the real executor on this device, without and with captured rounds: cpu, cuda, a "
    "GPU such as cuda:1, or auto.")]
Operations = Annotated[str | None, option("--ops",
    "For the contract executor: check the real executor with these operations. host: torch and NumPy, on a CPU; torch; "
    "triton: the kernels, on a CPU only with TRITON_INTERPRET=1. Default: those of the device.", "host|torch|triton")]
Cases = Annotated[Path, option("--cases", "Directory for the stored cases of failures.", "DIR")]
# fmt: on


@with_asking_options
def check(
    ctx: typer.Context, contract: Contract = None, subject: Subject = None, budget: BudgetText = None, seed: Seed = DEFAULT_SEED,
    capability: Capability = None, expect: Expect = None, allow: Allow = None, without: Without = None,
    every_failure: EveryFailure = False, show_list: ShowList = False, mutants: Mutants = False,
    replay: Replay = None, as_json: AsJson = False, cases: Cases = DEFAULT_CASES, wheel: Wheel = None,
    form: Form = Format.text, algorithm: Algorithm = None, device: Device = None, ops: Operations = None,
    *, asking: Mapping[str, Any],
) -> None:  # fmt: skip
    """Check a component against its invariants, or a server's text against that of another server.

    Runs random operations on the component and on a plain model of it, and checks
    every invariant after each operation. If an invariant breaks, the command
    shrinks the operations to a few and stores them as a case. Exit code 0: no
    broken invariant (skipped components are named); 1: a broken invariant; 2: bad
    input.

    `check server` asks an endpoint with OpenAI's interface (vLLM, SGLang,
    llama.cpp, foredraft serve) and one without speculation (--against) for the
    same greedy texts. If two tokens differ, log-probabilities decide: two nearly
    equal ones are a tie. The difference is noise if the plain endpoint itself
    gives the other text when it is asked again. Everything else is an error, for
    which the command searches for a smaller prompt that shows it. Exit code 0:
    lossless, except for ties and noise; 1: an error; 2: bad input, or an endpoint
    that does not answer.

        foredraft check
        foredraft check allocator my.package:make --budget 60s
        foredraft check vllm --wheel vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl
        foredraft check --replay runs/cases/allocator-ALLOC-10.case.json
        foredraft check server http://127.0.0.1:8001 --against http://127.0.0.1:8000
    """
    _refuse_what_is_no_contract(contract)
    refuse_of_other_modes(ctx, SERVER if contract == SERVER else None, ("contract", "subject", "as_json"))
    if contract == SERVER:
        check_endpoint(subject, as_json, **asking)
        return
    other = "--list" if show_list else "--replay" if replay is not None else "--mutants" if mutants else None
    runs_nothing, elsewhere = show_list or replay is not None, other is not None
    is_placed = device is not None or ops is not None
    said = OwnComponent(capability, expect, allow, without, every_failure)
    refuse_without_effect(
        ("SUBJECT", subject is not None and (show_list or (mutants and replay is None)), f"{other} is about our own"),
        ("--replay", replay is not None and show_list, "--list runs nothing"),
        ("--mutants", mutants and runs_nothing, f"{other} runs no mutants"),
        ("--budget", budget is not None and runs_nothing, f"{other} draws no operations"),
        ("--seed", seed != DEFAULT_SEED and elsewhere, f"{other} has seeds of its own"),
        *(said.rules_beside(other) if other is not None else ()),
        ("--cases", cases != DEFAULT_CASES and elsewhere, f"{other} stores no case"),
        ("--algorithm", algorithm is not None and elsewhere, f"{other} draws no engines"),
        ("--algorithm", algorithm is not None and contract != "executor", "only the contract executor has one"),
        *(_rules_of_places(contract, subject, other) if is_placed else ()),
        ("--format", form != Format.text and (elsewhere or as_json), f"{other or '--json'} prints no annotations"),
    )
    if contract in SERVERS and other is None:
        refuse_with_package(subject, said, form != Format.text)
        if not check_server(contract, budget, seed, as_json, cases, wheel):
            raise typer.Exit(EXIT_BROKEN)
        return
    if wheel is not None:
        refuse_without_effect(("--wheel", subject is None and replay is None, "only other servers' components need it"))
        _name_wheel(wheel)
    if show_list:
        _print_invariants(contract, as_json)
    elif replay is not None:
        _replay(replay, subject, as_json)
    elif mutants:
        _check_mutants(contract, budget, as_json)
    else:
        placed = _placed(device or "cpu", ops) if is_placed else ()
        _check(contract, subject, placed, budget, {**said.options(), "seed": seed}, as_json, cases, form, algorithm)


SERVERS = ("vllm", "sglang", "transformers")


def _refuse_what_is_no_contract(contract: str | None) -> None:
    """Raise ConfigError for an address in the place of the contract, and for a word near to what is checked beside the
    contracts. Other unknown words are refused with the list of contracts."""
    from ...core.errors import ConfigError, nearest
    from ...properties.suites import SUITES

    if contract is None or contract in (*SUITES, SERVER, *SERVERS):
        return
    if "://" in contract or re.fullmatch(r"[\w.-]+:\d+(/.*)?", contract):
        message = f"{contract} is an address; an endpoint is checked by: foredraft check {SERVER} {contract}"
        raise ConfigError.of("<arguments>", "CONTRACT", message)
    hint = nearest(contract, (*SUITES, SERVER, *SERVERS))
    if any(f"{name!r}" in hint for name in (SERVER, *SERVERS)):
        usage = f"; an endpoint is checked by: foredraft check {SERVER} URL" if f"{SERVER!r}" in hint else ""
        raise ConfigError.of("<arguments>", "CONTRACT", f"there is no contract {contract!r}{hint}{usage}")


def _rules_of_places(contract: str | None, subject: str | None, other: str | None) -> list[tuple[str, bool, str]]:
    """Return the rules of `refuse_without_effect` for --device and --ops."""
    return [
        ("--device and --ops", other is not None, f"{other} has components of its own"),
        ("--device and --ops", contract != "executor", "only the contract executor has them"),
        ("SUBJECT", subject is not None, "--device and --ops choose the component"),
    ]


def _name_wheel(path: Path) -> None:
    from ...checks.servers.release import name_any_wheel

    name_any_wheel(path)


def _placed(device: str, ops: str | None) -> tuple[str, ...]:
    """Return the names of the real executor on a device. Raises ConfigError for a device or operations that are not
    there."""
    try:
        from ...checks.adapters.torch_executor import places_of
    except ModuleNotFoundError as error:
        from ...properties.harness.importing import NotInstalled

        raise NotInstalled("--device", error.name or str(error)) from error
    return tuple(place.name for place in places_of(device, ops))


def _check(
    contract: str | None,
    subject: str | None,
    placed: Sequence[str],
    budget: str | None,
    options: dict[str, Any],
    as_json: bool,
    cases: Path,
    form: Format,
    algorithm: str | None,
) -> None:
    from ...checks.registry import SUBJECTS, contracts, suite_of
    from ...properties.harness.swarm import Budget

    names = [suite_of(name).name for name in ([contract] if contract is not None else contracts())]
    if (
        subject is None
        and not placed
        and any(value for name, value in options.items() if name not in ("seed", "every_failure"))
    ):
        _bad("--capability, --expect, --allow and --without", "are for a component of your own: name it as module:make")
    named = placed or (() if subject is None else (subject,))
    chosen = [(name, one) for name in names for one in named or SUBJECTS[name]]
    share = None
    if budget is not None or named:
        share = Budget.of(budget or DEFAULT_BUDGET).divided(len(chosen))
    order = {
        "is_named": bool(named), "budget": None if share is None else asdict(share), "cases": str(cases),
        "algorithm": algorithm, "options": options, "format": form.value, "quiet": len(names) > 1,
    }  # fmt: skip
    checks = [{"contract": contract, "name": name} for contract, name in chosen]
    run = partial(_run, order)
    threads = set(threading.enumerate())
    outcomes, line = [], StatusLine(quiet=len(names) == 1 or not sys.stderr.isatty())
    for answer in side_by_side(__name__, order, checks) if len(names) > 1 else map(run, checks):
        text, outcome = answer["text"], answer["outcome"]
        line.clear()
        if not as_json:
            typer.echo(f"{text}\n")
        outcomes.append(outcome)
        line.show(f"{len(outcomes)} of {len(chosen)} components are checked")
    line.clear()
    ok = all(outcome.get("ok", True) for outcome in outcomes)
    if as_json:
        from ..documents.checking import CheckDocument

        print_document(CheckDocument(ok, sorted(outcomes, key=lambda outcome: "ok" not in outcome)))
    end_despite_threads(threads, 0 if ok else EXIT_BROKEN)
    if not ok:
        raise typer.Exit(EXIT_BROKEN)


def _run(order: Mapping[str, Any], check: Mapping[str, str]) -> dict[str, Any]:
    """Check one component, and store the cases of its failures. Returns the text to print, and the outcome to write as
    JSON. `order` is what all checks of a command share; like `check` it is plain data."""
    from ...checks.registry import OPERATIONS, suite_of
    from ...properties.conformance import check as check_one
    from ...properties.harness.importing import NotInstalled
    from ...properties.harness.swarm import Budget

    contract, name, algorithm = check["contract"], check["name"], order["algorithm"]
    suite = suite_of(contract)
    if algorithm is not None:
        from ...properties.executor.contract import drawn_with

        suite = suite.drawing(drawn_with(algorithm))
    usual = {"operations": OPERATIONS.get(name, suite.quick), "is_extended": True}
    budget, options = Budget(**(order["budget"] or usual)), order["options"]
    try:
        with _shown_progress(name, order["quiet"]) as show, held_back() as traces:
            make = _load(name)
            found = partial(_found, name)
            report = check_one(suite, make, subject=name, progress=show, on_failure=found, budget=budget, **options)
    except NotInstalled as error:
        if order["is_named"]:
            raise
        reason = f"needs {error.package}, which is not installed"
        outcome = {"contract": contract, "subject": name, "skipped": reason}
        return {"text": f"{contract}: {name} skipped: {reason}", "outcome": outcome}
    replay = _stored(report, Path(order["cases"]))
    text = report.text(replay) + traces.lines()
    if order["format"] == Format.github:
        text = "\n".join([text, *error_commands(report, make, replay)])
    return {"text": text, "outcome": report.to_json()}


def _found(name: str, found: Found) -> None:
    """Say on standard error what a check has found, before it is shrunk."""
    broken = found.violation.broken[0]
    operations = count_of(len(found.operations), "operation")
    what = f"{broken.id} is broken in run {found.run} of seed {found.seed}: {broken.finding.was.splitlines()[0]}"
    typer.echo(f"foredraft: {name}: {what}; {operations} are being shrunk", err=True)


def _load(name: str) -> Callable[[Any], Any]:
    """Load a component, with a line for a name that is deprecated."""
    from ...properties.harness.importing import load_make

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DeprecationWarning)
        make = load_make(name)
    for warning in caught:
        if str(warning.message).startswith(name):
            typer.echo(f"foredraft: {warning.message}", err=True)
    return make


def _stored(report: Report, cases: Path) -> dict[str, str]:
    """Store the cases of a report's failures. Returns the command for each invariant that runs its case again."""
    paths = {}
    for failure in report.shown:
        path = cases / report.case_name(failure)
        try:
            failure.case.save(path)
        except OSError as error:
            _bad(str(path), f"the case cannot be written: {error.strerror}")
        paths[failure.id] = path
    return {id: f"foredraft check --replay {path}" for id, path in paths.items()}


def _bad(option: str, what: str) -> None:
    from ...core.errors import ConfigError

    raise ConfigError.of(option, "", what)


def _replay(path: Path, subject: str | None, as_json: bool) -> None:
    from ...checks.registry import suite_of
    from ...properties.harness.cases import load_case
    from ...properties.harness.report import history_lines, outcome_of

    case = load_case(path, suite_of)
    make = _load(subject or case.subject)
    violation, history, calls, ends_in = story = case.tell(make)
    if as_json:
        from ..documents.checking import CaseDocument

        outcomes = [
            {
                "id": one.id,
                "sentence": one.sentence,
                **{key: str(getattr(one.finding, key)) for key in ("was", "should", "why")},
            }
            for one in (violation.broken if violation else ())
        ]
        holds = violation is None
        parts = (case.contract, subject or case.subject, history_lines(history, calls), holds, outcomes)
        print_document(CaseDocument(str(path), *parts, None if holds else ends_in))
        raise typer.Exit(0 if holds else EXIT_BROKEN)
    typer.echo(
        f"{path}: {case.contract} {subject or case.subject}, {count_of(len(case.operations), 'operation')}, {case.config}"
    )
    for line in outcome_of(case, story):
        typer.echo(line)
    if violation is not None:
        raise typer.Exit(EXIT_BROKEN)


def _print_invariants(contract: str | None, as_json: bool) -> None:
    from ...checks.registry import suite_of
    from ...properties.harness.invariants import all_invariants

    chosen: Sequence[Invariant] = all_invariants()
    if contract is not None:
        suite = suite_of(contract)
        chosen = [item for item in chosen if item.contract == suite.name]
    if as_json:
        from ..documents.checking import InvariantLine, InvariantsDocument

        print_document(InvariantsDocument([InvariantLine(one.id, one.group, one.sentence, one.how) for one in chosen]))
        return
    group = ""
    for item in chosen:
        if item.group != group:
            group = item.group
            typer.echo(f"\n{group}")
        typer.echo(f"  {item.id:<11} {item.sentence}")
        typer.echo(f"  {'':<11} [{item.how}]")
    typer.echo(f"\n{len(chosen)} invariants, each checked for a contract.")


def _check_mutants(contract: str | None, budget: str | None, as_json: bool) -> None:
    from ...checks.mutant import kill
    from ...checks.registry import contracts, mutants_of

    names = [contract] if contract is not None else contracts()
    matrix: dict[str, Any] = {}
    survivors = 0
    for name in names:
        kills = []
        for mutant in mutants_of(name):
            kills.append(kill(mutant, budget))
            if not as_json:
                typer.echo(kills[-1].line())
                sys.stdout.flush()  # all of them take long
        alive = sum(not result.is_killed for result in kills)
        survivors += alive
        matrix[name] = [result.to_json() for result in kills]
        caught = sorted({id for result in kills if result.is_killed for id in result.mutant.caught_by})
        if not as_json:
            typer.echo(
                f"{name}: {len(kills) - alive} of {len(kills)} mutants killed; invariants with a mutant: {', '.join(caught)}"
            )
    if as_json:
        from ..documents.checking import MutantsDocument

        print_document(MutantsDocument(not survivors, matrix))
    if survivors:
        raise typer.Exit(EXIT_BROKEN)


@contextmanager
def _shown_progress(name: str, quiet: bool) -> Iterator[Callable[[Any], None]]:
    """Show how far a check is; where there is no terminal, by a line every ten seconds."""
    line = StatusLine(quiet, redraw_every_s=0.5, line_every_s=LINE_EVERY_S)

    def show(swarm: Any) -> None:
        if line.due_s() is not None:
            line.show(f"{name}: {count_of(swarm.num_operations, 'operation')}, {swarm.seconds:.0f} s")

    try:
        yield show
    finally:
        line.clear()


if __name__ == "__main__":
    serve_checks(_run)
