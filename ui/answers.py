"""What `foredraft doctor --round` and `foredraft doctor` say of a page's scenario, as plain data; no simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..core.errors import ForedraftError
from ..planning.candidates.rounds import MOST_STEPS, RoundModel
from ..planning.grid import NO_SPECULATION
from ..planning.rounds.cost import cost_of_rounds
from ..planning.rounds.doctor import asked_means, diagnose
from ..sim.assembly import assemble
from ..sim.effects.given_keys import refuse_without_effect
from ..sim.effects.notices import notices_of
from ..sim.scenario import Scenario

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def answer(scenario: Scenario, origins: Mapping[str, str], batch: int, context: int | None) -> dict[str, Any]:
    """Return the rounds of a batch, whether speculation pays, and the throughput by batch, that of `batch` among them.

    The rounds are decode alone, as `foredraft doctor --round` prints them; gains and throughput bear the prompts of new
    requests. batch: requests that decode together, no more than fit. context: KV tokens of each; None: those of a
    request of the scenario's workload in the middle of its output. Raises a ForedraftError for a scenario that cannot
    run.
    """
    run = assemble(scenario)
    refuse_without_effect(run, origins)
    prompt, output = asked_means(run)
    if context is None:
        context = round(prompt + output / 2)
    context = min(context, run.spec.config.context_len)
    model, speculates = RoundModel(scenario), scenario.speculation.algorithm != NO_SPECULATION
    most = model.most_drafted_rows(context) if speculates else model.most_rows(context, 0)
    if not most:
        raise ForedraftError(f"no request with {context:,} tokens of context fits into the KV slots")
    steps = range(MOST_STEPS + 1) if speculates else (0,)
    batch = min(batch, most)
    sizes = sorted({*(size for size in BATCHES if size < most), batch, most})
    return {
        "notices": [*notices_of(run, origins)],
        "devices": run.deployment.parallel.devices,
        "kv_slots": run.spec.config.num_pages * run.spec.config.page_size,
        "most_rows": most,
        "cost": cost_of_rounds(scenario, [batch], context, steps, model).to_json(),
        "doctor": diagnose(scenario, None, model).to_json() if speculates else None,
        "speeds": [asdict(speed) for speed in model.with_prompts(output).speeds(context, sizes, speculates)],
        "output_tokens": None if run.prefill is not None else output,
    }
