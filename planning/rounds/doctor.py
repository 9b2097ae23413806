"""Whether speculation pays in a deployment: up to which batch, by how much, and what it does to latencies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

from ...core.errors import ForedraftError
from ...observe.output_files import Document
from ...observe.rates import rate_of, rates_of
from ...sim.assembly import Assembly, assemble
from ...sim.assembly.confidence import rests_on
from ...sim.assembly.explaining import timing_line
from ...sim.effects.notices import about_guessed_acceptance
from ...sim.load import asked_lengths, make_workload
from ...sim.running.report import RunProgress
from ...sim.scenario import Scenario
from ..candidates.rounds import MOST_STEPS, RoundModel, without_speculation
from ..confidence.comparison import about_speed_ups, speed_up_error
from ..confidence.unknowns import Moved, gains_by_unknown
from ..demand.trace_part import TracePart
from ..grid import NO_SPECULATION
from ..trial import run_trial

CONTEXTS = (256, 1024, 4096, 16_384)
BATCHES = (1, 4, 16, 64, 256, 1024)
LATENCIES = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True)
class Gain:
    """The best draft steps of one batch, and how many times the tokens of plain decoding they give.

    Attributes:
        batch: Requests that decode together.
        context: KV tokens of each.
        steps: None if so many requests have no room with drafts.
        gain: None in the same case.
        verdict: "faster", "slower" or "equal" (within the error of speed-ups); "no room".
    """

    batch: int
    context: int
    steps: int | None
    gain: float | None
    verdict: Literal["faster", "equal", "slower", "no room"]


@dataclass(frozen=True)
class PlainComparison:
    """A result of the scenario's own load with and without speculation. `interval`, `plain_interval`: 80 % intervals
    [low, high], None where nothing is known."""

    speculative: float
    plain: float
    interval: tuple[float, float] | None
    plain_interval: tuple[float, float] | None


@dataclass(frozen=True)
class Diagnosis(Document):
    """Whether speculation pays, as `foredraft doctor` prints it.

    Attributes:
        timing: A sentence: whose timing this is.
        intervals_rest_on: The published points behind the 80 % intervals of latencies.
        about_speed_ups: What gains and break-even lengths include, and how sure they are.
        algorithm: The algorithm that is judged.
        model: The target.
        gpu: The device; of decode engines if they have their own.
        verdict: "pays", "pays not", or "uncertain" within the error of speed-ups.
        context: KV tokens of a request in the middle of its output, which the next eight hold for.
        pays_up_to_batch: The largest batch at which speculation surely pays; 0 if at none.
        may_pay_up_to_batch: The largest batch at which it is not surely slower.
        most_drafted: Requests that decode together with drafts at most.
        most_plain: The same without drafts.
        gains_by_batch: The best draft steps of some batches up to `may_pay_up_to_batch`.
        batch: Requests that decode together in one engine on average in the simulated load, as far as they have room;
            None, as the next one, if no load was simulated.
        gain: Of the best draft steps at this batch, as in `gains_by_batch`.
        moved_by: The ranges of `gain` that inputs leave that are not known, the widest first.
        busy_rate: Requests per second that keep a batch of `pays_up_to_batch` busy; None if it is 0.
        output_tokens: Mean output of a request.
        gains: The best draft steps by batch and context.
        break_even: By batch, the accept length at which 1, 2, … draft steps are as fast as plain decoding; None if no
            length is, because prompts take longer with a draft.
        expected: The accept length of 1, 2, … draft steps, by the scenario's acceptance.
        expected_by: A sentence: where these come from.
        guessed_acceptance: A sentence: whose acceptance stands for one that was not published, and how far published
            ones are apart; empty where it is known.
        overloaded: Of each run of this load that was overloaded ("as it is", "without speculation"), how much was asked
            for and served; its results have no intervals.
        requests: Completed requests of the simulated load.
        load: Its results by their names in a summary.
    """

    FORMAT: ClassVar[str] = "foredraft-doctor"

    timing: str
    intervals_rest_on: str
    about_speed_ups: str
    algorithm: str
    model: str
    gpu: str
    verdict: Literal["pays", "uncertain", "pays not"]
    context: int
    pays_up_to_batch: int
    may_pay_up_to_batch: int
    most_drafted: int
    most_plain: int
    gains_by_batch: tuple[Gain, ...]
    batch: int | None
    gain: float | None
    moved_by: tuple[Moved, ...]
    busy_rate: float | None
    output_tokens: float
    gains: tuple[Gain, ...]
    break_even: Mapping[int, tuple[float | None, ...]]
    expected: tuple[float, ...]
    expected_by: str
    guessed_acceptance: str
    overloaded: Mapping[str, str]
    requests: int
    load: Mapping[str, PlainComparison]


def diagnose(
    scenario: Scenario,
    requests: int | None,
    model: RoundModel | None = None,
    show: Callable[[str], None] = lambda text: None,
) -> Diagnosis:
    """Judge the speculation of a scenario by the cost model, and by two runs of at most so many requests.

    requests: None makes no run: `load` is empty, and lengths are those that the workload asks for. model: the rounds of
    the scenario, if they are known already. show: called with a text about the progress. Raises ForedraftError for a
    scenario without speculation, and for one that cannot run.
    """
    if scenario.speculation.algorithm == NO_SPECULATION:
        message = (
            "the scenario does not speculate: name the algorithm to judge, such as --set speculation.algorithm=EAGLE3"
        )
        raise ForedraftError(message)
    show("pricing rounds")
    model, own = RoundModel(scenario) if model is None else model, assemble(scenario)
    rows, load, overloaded = None, {}, {}
    if requests is None:
        completed, (prompt, output) = 0, asked_means(own)
    else:
        mine, other = _runs(scenario, requests, show)
        completed, load = mine["completed"], dict(_load(mine, other))
        runs = {"as it is": mine, "without speculation": other}
        overloaded = {name: run["overload"] for name, run in runs.items() if run["overloaded"]}
        prompt, output = mine["mean_input_tokens"], mine["mean_output_tokens"]
        rows = max(1, round((rate_of(mine, "mean_running") or 0.0) / mine["replicas"]))
    show("pricing rounds by batch and context")
    model = model.with_prompts(output)
    context = round(prompt + output / 2)
    error = math.exp(speed_up_error(model.with_steps(1)))
    surely, perhaps = (model.largest_that_pays(context, MOST_STEPS, least) for least in (error, 1 / error))
    last = surely or perhaps
    sizes = sorted({1, min(8, last), min(64, last), last}) if last else []
    longest = model.plain.spec.config.context_len
    contexts = [one for one in CONTEXTS if one <= longest] or [longest]
    steps = range(1, MOST_STEPS + 1)
    most = model.best_drafted(min(rows or 1, model.most_drafted_rows(context) or 1), context, MOST_STEPS).shape.steps
    batch = None if rows is None else min(rows, model.most_drafted_rows(context) or 1)
    return Diagnosis(
        timing=timing_line(model.with_steps(1)),
        intervals_rest_on=rests_on(own),
        about_speed_ups=f"{_prompts(model)} {about_speed_ups(model.with_steps(1))}",
        algorithm=scenario.speculation.algorithm,
        model=scenario.model.target,
        gpu=own.deployment.gpu.name,
        verdict="pays" if surely else "uncertain" if perhaps else "pays not",
        context=context,
        pays_up_to_batch=surely,
        may_pay_up_to_batch=perhaps,
        most_drafted=model.most_drafted_rows(context),
        most_plain=model.most_rows(context, 0),
        gains_by_batch=tuple(_gain(model, size, context) for size in sizes),
        batch=batch,
        gain=None if batch is None else model.gain(model.best_drafted(batch, context, MOST_STEPS)),
        moved_by=() if batch is None else tuple(gains_by_unknown(model, batch, context, MOST_STEPS)),
        busy_rate=model.round(surely, context, 0).tokens_per_s / output if surely else None,
        output_tokens=output,
        gains=tuple(_gain(model, size, one) for size in _batches(model) for one in contexts),
        break_even=dict(_break_even(model, context)),
        expected=tuple(model.round(1, context, count).accept_length for count in steps),
        expected_by=_expectation(model),
        guessed_acceptance=about_guessed_acceptance(model.with_steps(most)),
        overloaded=overloaded,
        requests=completed,
        load=load,
    )


def asked_means(run: Assembly) -> tuple[float, float]:
    """Return the mean tokens of a prompt and of an output that the workload asks for. Raises TraceError, or ConfigError
    for a trace without requests."""
    part = TracePart.of(run.scenario, None)
    if part is not None:
        return float(part.rows.prompt_lens[: part.count].mean()), float(part.rows.output_lens[: part.count].mean())
    lengths = asked_lengths(make_workload(run.scenario, run.spec.config.context_len))
    return lengths["input"][0], lengths["output"][0]


def _runs(
    scenario: Scenario, requests: int, show: Callable[[str], None]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the summaries of a run of the scenario, and of one without speculation."""
    tables = scenario.model_dump(mode="json")
    changes = {"workload.num_requests": min(requests, scenario.workload.num_requests or requests)}
    summaries = []
    for name, one in (("as it is", tables), ("without speculation", without_speculation(tables))):
        text = f"simulating the load {name}"
        show(text)
        trial = run_trial(one, changes, partial(_show_ended, show, text))
        if trial.status != "done":
            raise ForedraftError(trial.message)
        summaries.append(trial.summary)
    return summaries[0], summaries[1]


def _show_ended(show: Callable[[str], None], text: str, done: RunProgress) -> None:
    show(f"{text}: {done.num_ended:,} requests")


def _batches(model: RoundModel) -> list[int]:
    most = min(model.with_steps(steps).spec.config.max_running for steps in (0, 1))
    return sorted({*(size for size in BATCHES if size <= most), min(most, BATCHES[-1])})


def _gain(model: RoundModel, batch: int, context: int) -> Gain:
    if batch > model.most_drafted_rows(context):
        return Gain(batch, context, None, None, "no room")
    found = model.best_drafted(batch, context, MOST_STEPS)
    gain = model.gain(found)
    is_equal = abs(math.log(gain)) <= speed_up_error(model.with_steps(1))
    return Gain(batch, context, found.shape.steps, gain, "equal" if is_equal else "slower" if gain < 1 else "faster")


def _prompts(model: RoundModel) -> str:
    if model.plain.prefill is not None:
        return "The gains are those of the decode engines (hardware.decode): other engines compute the prompts."
    return f"The gains include the time of prompts, for outputs of {model.output_len:,.0f} tokens."


def _break_even(model: RoundModel, context: int) -> Iterator[tuple[int, tuple[float | None, ...]]]:
    for size in _batches(model):
        if size <= model.most_drafted_rows(context):
            plain = model.round(size, context, 0)
            steps = range(1, MOST_STEPS + 1)
            lengths = (model.round(size, context, count).break_even(plain) for count in steps)
            yield size, tuple(length if math.isfinite(length) else None for length in lengths)


def _expectation(model: RoundModel) -> str:
    """Say where the expected accept lengths come from, and how to give others."""
    table = model.scenario.acceptance
    own = [key for key in ("conditional", "mean_length", "recorded") if getattr(table, key) is not None]
    if own:
        return f"Expected by acceptance.{own[0]} of the scenario."
    preset = model.with_steps(1).preset.preset
    return (
        f"Expected by the preset {preset.name} ({preset.source}). acceptance.preset takes another kind of text (chat, "
        "code, math, edit), acceptance.mean_length or acceptance.recorded your own numbers."
    )


def _load(with_it: Mapping[str, Any], without: Mapping[str, Any]) -> Iterator[tuple[str, PlainComparison]]:
    names = ("output_throughput", *(f"{kind}_{one}_ms" for one in LATENCIES for kind in ("mean", "p99")))
    for name in names:
        mine, other = rates_of(name, with_it, without)
        if mine is not None and other:
            ends = rates_of(f"{name}_interval", with_it, without)
            yield name, PlainComparison(mine, other, *(None if one is None else (one[0], one[1]) for one in ends))
