"""The arguments of SGLang that a scenario says, and the files that they name: for a table of steps, and for adaptive
verification."""

from __future__ import annotations

from ....core.adaptive.interchange import export_table
from ....core.adaptive.lengths.interchange import round_times_json, temperatures_json
from ....core.adaptive.lengths.pass_costs import PassCosts
from ....core.contract.step import RoundShape
from ....core.errors import ForedraftError
from ....sim.assembly import Assembly
from ...rounds.doctor import asked_means
from ..declared import values_to_write, words_of
from ..files import SGLANG_VERSION, sglang_scheduling, shape_arguments
from ..own_layers import WITH_DRAFT
from ..sglang import BLOCK_DRAFTS, COMPACT, EAGLES, RAGGED
from .arguments import Arguments, method_of, table_of

TABLE, ROUND_TIMES, TEMPERATURES = "sglang-adaptive.json", "sglang-sps.json", "sglang-sts.json"
ROLES = ("prefill", "decode")
RULES = {"rejection": "--speculative-use-rejection-sampling", "block": "--speculative-use-block-verification"}


def devices(run: Assembly) -> list[str]:
    """Return the arguments for the devices of one replica: --tp-size counts them all."""
    hardware, groups = run.scenario.hardware, run.scenario.hardware.attention_data_parallel
    given = {
        "hardware.tensor_parallel": hardware.tensor_parallel * groups,
        "hardware.attention_data_parallel": groups,
        "hardware.expert_parallel": hardware.expert_parallel,
    }
    computed = {key: value for key, value in given.items() if value > 1}
    flags = ["--enable-dp-attention"] if groups > 1 else []
    return [*words_of(values_to_write(run.scenario, "sglang", computed=computed)[0]), *flags]


def arguments(run: Assembly) -> Arguments:
    """Return the arguments behind the model and the devices. Raises ForedraftError for what SGLang has none for."""
    scenario, config, made = run.scenario, run.spec.config, Arguments()
    engine, hardware, model = scenario.engine, scenario.hardware, scenario.model
    groups = hardware.attention_data_parallel
    host_gb = None if engine.host_cache_gb is None else f"{engine.host_cache_gb / hardware.devices:.6g}"
    computed = {
        "engine.chunk_size": config.chunk_size * groups if engine.chunk_size or groups > 1 else None,
        "engine.kv_slots": run.memory.slots if hardware.kv_gb and run.memory else engine.kv_slots,
        "model.weight_dtype": "fp8" if model.weight_dtype == "fp8" else None,
        "engine.host_cache_gb": host_gb,  # of a device
        "engine.host_cache_ratio": engine.host_cache_ratio,
        **sglang_scheduling(scenario, config.max_running),
    }
    made.give_keys(scenario, "sglang", computed)
    if engine.host_cache_gb is not None or engine.host_cache_ratio is not None:
        made.words.append("--enable-hierarchical-cache")
    made.note_weights(run, "fp8", "bf16")
    if run.pools.is_disaggregated:
        made.of_role = {role: ["--disaggregation-mode", role] for role in ROLES}
    _speculation(run, made)
    return made


def _speculation(run: Assembly, made: Arguments) -> None:
    table, spec = run.scenario.speculation, run.spec
    method, draft, steps = method_of(run, "SGLang", trees=True, choices=True), run.scenario.model.draft, None
    if method is None:
        return
    made.note_head(run, "--speculative-draft-model-path")
    made.words += ["--speculative-algorithm", method]
    if table.algorithm == "MULTI_LAYER_EAGLE":
        made.words.append("--enable-multi-layer-eagle")
    if table.algorithm in WITH_DRAFT and draft is not None:
        made.words += ["--speculative-draft-model-path", draft]
    has_flag = method in EAGLES or (table.accept_rule == "block" and method in BLOCK_DRAFTS)
    if table.accept_rule != "target" and has_flag:
        made.words.append(RULES[table.accept_rule])
    elif table.accept_rule != "target":
        made.note_rule(run)
    steps = spec.adaptive.candidate_steps
    if len(steps) == 1:
        made.words += shape_arguments(spec.draft_shape.round_shape(steps[0], 1), table.algorithm)
        if spec.policy == "confidence":
            _verification(run, made)
        return
    if table.algorithm not in EAGLES or spec.topk > 1 or run.scenario.hardware.attention_data_parallel > 1:
        message = f"its adaptive steps are for chains of {' and '.join(EAGLES)} without data-parallel attention"
        raise ForedraftError(f"SGLang has no arguments for this configuration: {message}")
    made.files[TABLE] = export_table(table_of(run), f"sglang-{SGLANG_VERSION}") + "\n"
    made.words += ["--speculative-adaptive", "--speculative-adaptive-config", TABLE]
    made.words += shape_arguments(RoundShape.chain(table.steps or steps[len(steps) // 2]), table.algorithm)


def _verification(run: Assembly, made: Arguments) -> None:
    """Add the files of adaptive verification: the times of rounds by which the run chose, and its temperatures. The
    times in SGLang's file have no contexts, so these are those in the middle of an output."""
    spec, (prompt, output) = run.spec, asked_means(run)
    context = round(prompt + output / 2)
    assert isinstance(spec.cost_table, PassCosts), "the policy confidence chooses by times of passes"
    made.environment[RAGGED] = COMPACT
    made.files[ROUND_TIMES] = round_times_json(spec.cost_table, spec.max_steps, context) + "\n"
    if run.scenario.speculation.round_times is None:
        made.notes.append(
            f"the times of {ROUND_TIMES} are simulated, for contexts of {context:,} tokens: "
            "sglang.benchmark.dspark_sps_profiler measures them on your GPUs"
        )
    made.words += ["--speculative-dspark-sps-table-path", ROUND_TIMES]
    if spec.temperatures:
        made.files[TEMPERATURES] = temperatures_json(spec.temperatures) + "\n"
        made.words += ["--speculative-dspark-confidence-sts-path", TEMPERATURES]
