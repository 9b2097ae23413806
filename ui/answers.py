"""What `foredraft cost` and `foredraft doctor` say of a page's scenario, as plain data; no simulation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.errors import ForedraftError
from ..planning.confidence.comparison import about_speed_ups, speed_up_error
from ..planning.rounds import Round, RoundModel
from ..planning.trace_part import TracePart
from ..sim.assembly import Assembly, assemble
from ..sim.confidence import factors_of_rounds, rests_on
from ..sim.effects.given_keys import refuse_without_effect
from ..sim.load import asked_lengths, make_workload
from ..sim.notices import notices_of
from ..sim.scenario import Scenario

NO_SPECULATION = "NONE"
MOST_STEPS = 7
CONTEXTS = (256, 1024, 4096, 16_384)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def answer(scenario: Scenario, origins: Mapping[str, str], batch: int, context: int | None) -> dict[str, Any]:
    """Return the rounds of a batch, and whether speculation pays.

    batch: requests that decode together, no more than fit. context: KV tokens of each; None: those of a request of the
    scenario's workload in the middle of its output. Raises a ForedraftError for a scenario that cannot run.
    """
    run = assemble(scenario)
    refuse_without_effect(run, origins)
    prompt, output = _mean_lengths(scenario, run)
    context = min(round(prompt + output / 2) if context is None else context, run.spec.config.context_len)
    model = RoundModel(scenario)
    speculates = scenario.speculation.algorithm != NO_SPECULATION
    most = model.most_drafted_rows(context) if speculates else model.most_rows(context, 0)
    if not most:
        raise ForedraftError(f"no request with {context:,} tokens of context fits into the KV slots")
    batch = min(batch, most)
    found = {
        "timing": run.timing,
        "notices": [f"{notice[0].upper()}{notice[1:]}." for notice in notices_of(run, origins)],
        "devices": scenario.hardware.devices,
        "engines": run.pools.num_engines,
        "kv_slots": run.spec.config.num_pages * run.spec.config.page_size,
        "batch": batch,
        "context": context,
        "output": output,
        "most_rows": most,
        "cost": _rounds(model, batch, context, range(MOST_STEPS + 1) if speculates else (0,)),
        "speeds": _speeds(model, context, most, speculates),
    }
    return found | ({"doctor": _doctor(model, context, output)} if speculates else {})


def _mean_lengths(scenario: Scenario, run: Assembly) -> tuple[float, float]:
    """Return the mean tokens of a prompt and of an output."""
    part = TracePart.of(scenario, None)
    if part is not None:
        return float(part.rows.prompt_lens[: part.count].mean()), float(part.rows.output_lens[: part.count].mean())
    lengths = asked_lengths(make_workload(scenario, run.spec.config.context_len))
    return lengths["input"][0], lengths["output"][0]


def _rounds(model: RoundModel, batch: int, context: int, counts: Sequence[int]) -> dict[str, Any]:
    """Return the rounds of a batch by draft steps, without those that the deployment cannot have."""
    plain, rounds = model.round(batch, context, 0), []
    for steps in counts:
        try:
            if batch <= model.most_rows(context, steps):
                rounds.append(_round(model.round(batch, context, steps), plain))
        except ForedraftError:
            continue
    run = model.with_steps(rounds[-1]["steps"])
    interval = factors_of_rounds(run, batch)
    return {
        "rounds": rounds,
        "interval": None if interval is None else [interval.low, interval.high],
        "rests_on": rests_on(run),
        "about": about_speed_ups(run),
    }


def _round(one: Round, plain: Round) -> dict[str, Any]:
    return {
        "steps": one.steps,
        "nodes": one.num_draft_tokens,
        "parts_us": {part: ns / 1e3 for part, ns in one.parts_ns.items()},
        "device_us": one.device_ns / 1e3,
        "host_us": one.host_ns / 1e3,
        "is_overlapped": one.is_overlapped,
        "total_us": one.total_ns / 1e3,
        "accept_length": one.accept_length,
        "break_even": one.break_even(plain),
        "tokens_per_s": one.tokens_per_s,
    }


def _speeds(model: RoundModel, context: int, most: int, speculates: bool) -> list[dict[str, Any]]:
    """Return the output tokens per second of all requests by batch: plain, and with the best draft steps."""
    found = []
    for size in sorted({*(size for size in BATCHES if size < most), most}):
        point: dict[str, Any] = {"batch": size, "plain": model.round(size, context, 0).tokens_per_s}
        if speculates:
            best = model.best_drafted(size, context, MOST_STEPS)
            point |= {"drafted": best.tokens_per_s, "steps": best.steps}
        found.append(point)
    return found


def _doctor(model: RoundModel, context: int, output: float) -> dict[str, Any]:
    """Return up to which batch speculation pays, its gains by batch and context, and the accept lengths at which it
    breaks even."""
    error = math.exp(speed_up_error(model.with_steps(1)))
    most = model.most_drafted_rows(context)
    surely, perhaps = (model.largest_that_pays(context, MOST_STEPS, least) for least in (error, 1 / error))
    busy = model.round(surely, context, 0).tokens_per_s / output if surely else None
    longest = model.plain.spec.config.context_len
    contexts = [one for one in CONTEXTS if one <= longest] or [longest]
    sizes = sorted({*(size for size in BATCHES[::2] if size < most), most})
    return {
        "surely": surely,
        "perhaps": perhaps,
        "most": most,
        "busy_rate": busy,
        "error": error,
        "contexts": contexts,
        "gains": [{"batch": size, "cells": [_gain(model, size, one) for one in contexts]} for size in sizes],
    }


def _gain(model: RoundModel, size: int, context: int) -> dict[str, Any] | None:
    if size > model.most_drafted_rows(context):
        return None
    best = model.best_drafted(size, context, MOST_STEPS)
    return {"steps": best.steps, "gain": model.gain(best)}
