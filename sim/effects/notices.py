"""Sentences for the user of a run: about given keys without effect, and about decisions that the scenario left to the
run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...core.acceptance.presets import ANY_FAMILY, OWN_LAYER, PRESETS, UNKNOWN_FAMILY, TraceAcceptance
from ...core.algorithm.algorithm import Drafter
from ...core.errors import count_of
from ..assembly import Assembly
from ..assembly.acceptance import LOOK_UPS_LIKE, guessed_lengths, is_guessed
from ..cost.hardware import GIB, MIB
from ..cost.memory.rules import release_numbers
from ..load import trace_notes
from ..scenario.conditions import drafts_in_no_round, mode_fell_back
from ..scenario_file import origin_of
from .given_keys import said_anyway, without_effect

STATES_ARE_COUNTED = (0, 17)
GRAPHS_SHARE = 0.1  # of the KV pool's size: graphs that take more get a notice


def notices_of(run: Assembly, origins: Mapping[str, str]) -> tuple[str, ...]:
    """Return sentences for the user: about given keys without effect, and about decisions that the scenario left to the
    run."""
    notices = [str(item) for found in (without_effect, said_anyway) for item in found(run, origins)]
    if run.algorithm.drafter is Drafter.MODEL and run.draft is not None and run.scenario.model.draft is None:
        notices.append(f"model.draft is not given: {run.draft.name} drafts")
    if run.draft is not None and run.draft.unknown is not None:
        notices.append(
            f"model.draft: the config.json of {run.draft.unknown} is not on this machine, so {run.draft.name} drafts "
            f"({run.draft.source}); give the folder of the head"
        )
    notices += _steps_notices(run, origins)
    if mode_fell_back(run, "engine.mode") is not None and not any("engine.mode =" in notice for notice in notices):
        notices.append(f"the mode is {run.spec.config.mode}: {run.spec.config.mode_reason}")
    notices += [*_preset_notices(run), *_drafter_notices(run)]
    notices += [f"workload.trace: {note}" for note in trace_notes(run.scenario.workload)]
    notices += [*_graph_notices(run), *_states_notices(run), *start_notices(run)]
    if isinstance(run.acceptance, TraceAcceptance) and len(run.acceptance.keys) == 1:
        notices.append(
            f"acceptance.recorded: {run.scenario.acceptance.recorded} has one request, so every simulated request repeats its runs"
        )
    for tensor in dict.fromkeys(part.deployment.parallel.tensor for part in run.by_role.values()):
        if (calibration := run.deployment.calibration) is not None:
            notices += calibration.notices(run.target.name, tensor)
    return tuple(dict.fromkeys([*notices, *run.spec.notices]))


def _steps_notices(run: Assembly, origins: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence if steps are given and the policy, which is not, changes them."""
    table, policy = run.scenario.speculation, run.spec.policy
    is_chosen = any(origin_of(f"speculation.{key}", origins) for key in ("policy", "adaptive"))
    if table.steps is None or is_chosen or policy == "fixed" or drafts_in_no_round(run):
        return
    yield (
        f"speculation.steps = {table.steps} are the first steps, which the policy {policy} changes; "
        "speculation.policy = fixed keeps them"
    )


def _drafter_notices(run: Assembly) -> Iterator[str]:
    """Yield a sentence if rounds draft more than a block drafter was trained for, and about look-ups beside a head of
    which the scenario does not say how many there are or how they are accepted."""
    table = run.scenario.acceptance
    if run.algorithm.looks_up_beside_a_draft and not drafts_in_no_round(run):
        if not table.look_up_share:
            yield (
                f"{run.algorithm.name} drafts by its head in every row, and without CUDA graphs: how many rows draft by "
                "look-up instead, acceptance.look_up_share says"
            )
        elif table.look_up_conditional is None and table.recorded is None:
            yield f"look-ups are accepted as those of preset {LOOK_UPS_LIKE} (an assumption); acceptance.look_up_conditional says otherwise"
    most = 0 if run.draft is None else run.draft.parts.most_drafts
    if most and run.spec.max_steps > most:
        assert run.draft is not None
        yield (
            f"rounds draft up to {count_of(run.spec.max_steps, 'token')}, and the drafter was trained for blocks of "
            f"{run.draft.parts.block_size} ({count_of(most, 'draft')}): how often the others are accepted is a guess"
        )


def about_guessed_acceptance(run: Assembly) -> str:
    """Say whose acceptance stands for one that was not published, how far published ones of such drafts are apart, and
    what that does to the speed; empty where it is known."""
    if drafts_in_no_round(run) or not is_guessed(run.scenario, run.preset):
        return ""
    table, preset, algorithm = run.scenario.acceptance, run.preset.preset, run.algorithm
    usual = PRESETS.get(algorithm.usual_acceptance)
    asked = table.preset or (algorithm.usual_acceptance if usual is None else usual.text)
    model = {ANY_FAMILY: "", UNKNOWN_FAMILY: "another model's "}.get(preset.family, f"{preset.family} ")
    (least, low), (_, own), (most, high) = guessed_lengths(run.preset, run.spec.largest_round)
    name = OWN_LAYER if preset.algorithm == OWN_LAYER else algorithm.name
    return (
        f"no published acceptance for {name} on {run.target.family} {asked}; that of {preset.algorithm} on "
        f"{model}{preset.text} is used (preset {preset.name}; {preset.source}). With {run.spec.max_steps} steps such "
        f"drafts have accept lengths of {low:.2f} ({least}) to {high:.2f} ({most}), and this one {own:.2f}: requests "
        f"would decode {low / own:.2f} to {high / own:.2f} times as fast"
    )


def _preset_notices(run: Assembly) -> Iterator[str]:
    """Yield a sentence if the acceptance is that of another algorithm, family or kind of text, and what
    look-ups depend on."""
    table, preset = run.scenario.acceptance, run.preset.preset
    if drafts_in_no_round(run) or not all(v is None for v in (table.conditional, table.mean_length, table.recorded)):
        return
    if about := about_guessed_acceptance(run):
        yield about
    rule = run.scenario.speculation.accept_rule
    if rule != "target" and table.of_rule is None and not run.algorithm.has_look_ups:
        yield (
            f"speculation.accept_rule = {rule}: preset {preset.name} does not say which rule it was measured with, and is taken "
            f"to hold for {rule}; acceptance.of_rule says otherwise (greedy requests keep the same by all rules)"
        )
    if run.algorithm.drafter is Drafter.LOOKUP:
        known = "" if run.preset.differs else f": preset {preset.name} ({preset.source})"
        yield (
            f"look-ups are accepted as often as the text repeats itself{known}; "
            "acceptance.preset = chat, code or edit says what the text is"
        )


def _states_notices(run: Assembly) -> Iterator[str]:
    """Yield a sentence if there are recurrent states for fewer requests than may run."""
    if run.states_cap is not None:
        yield (
            f"at most {count_of(run.spec.config.max_running, 'request')} run at once, not {run.states_cap:,}: there are recurrent "
            f"states for no more ({run.deployment.server.name} keeps them beside the KV pool; docs/servers.md)"
        )


def start_notices(run: Assembly) -> Iterator[str]:
    """Yield a sentence if the server refuses to start or may do so, because one request of the whole context takes more
    than the pool."""
    server = run.deployment.server
    for part in run.by_role.values():
        memory, config = part.memory, part.spec.config
        yield from _block_notices(part)
        if not server.holds_the_context or memory is None or (memory.holds(config) and not memory.may_not_start):
            continue
        slots = config.group_sizes.total(config.context_len, config.chunk_size)
        needed = slots * memory.slot_bytes
        pool = f"the KV pool has {memory.kv_pool_bytes / GIB:.2f} GiB, give or take {memory.margin_bytes / GIB:.2f}"
        if memory.may_not_start:
            why = "in some of its releases, of which none is named (hardware.release)"
            yield f"{server.name} may not start: {pool}, and {why} nothing for a request of the whole context"
            continue
        may = "may not start" if needed < memory.kv_pool_bytes + memory.margin_bytes else "does not start"
        yield (
            f"{server.name} {may}: {pool}, and a request of {config.context_len:,} tokens takes {needed / GIB:.2f}; "
            "give model.context_len"
        )


def _block_notices(part: Assembly) -> Iterator[str]:
    """Yield a sentence if vLLM refuses to start because it captures a step of more requests than there are blocks for
    their states (config/compilation.py, resolve_cudagraph_mode_and_sizes; since its issue 34094)."""
    memory, hardware = part.memory, part.scenario.hardware
    if memory is None or not memory.blocks.block or not hardware.cuda_graphs or hardware.launch == "piecewise":
        return
    if hardware.release is not None and release_numbers(hardware.release) < STATES_ARE_COUNTED:
        return
    blocks, asked = memory.kv_pool_bytes // memory.blocks.block, part.spec.config.max_running
    if asked > blocks:
        more = (memory.kv_pool_bytes + memory.margin_bytes) // memory.blocks.block
        yield (
            f"{part.deployment.server.name} {'may not start' if asked <= more else 'does not start'}: {asked:,} requests may "
            f"run, and the KV pool has {blocks:,} blocks for their states; lower engine.max_running"
        )


def _graph_notices(run: Assembly) -> Iterator[str]:
    """Yield a sentence if the CUDA graphs take more than `GRAPHS_SHARE` of the KV pool's size."""
    memory, counts = run.memory, len(run.spec.adaptive.candidate_steps)
    if memory is None or memory.graphs_bytes <= GRAPHS_SHARE * memory.kv_pool_bytes:
        return
    fewer = "fewer candidates (speculation.adaptive), " if counts > 1 else ""
    yield (
        f"CUDA graphs of {count_of(counts, 'step count')} take {memory.graphs_bytes / MIB:,.0f} MiB, the KV pool has "
        f"{memory.kv_pool_bytes / MIB:,.0f} MiB; {fewer}a smaller engine.max_running or fewer hardware.graph_sizes leave more KV"
    )
