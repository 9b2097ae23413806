"""The command trtllm-serve, with the YAML file that it names, as keys of a scenario.
Names and defaults are those of TensorRT-LLM 1.3."""

from __future__ import annotations

import re
from typing import Any, TypeGuard

from ...core.adaptive.interchange import TRTLLM_MAX_STEPS, TRTLLM_SCHEDULE, import_table, to_json
from ...core.errors import ConfigError, Problem, count_of, nearest
from ...core.parsing import parse_json
from ...sim.cost.draft import PARD
from ...sim.cost.hardware import GPU
from ...sim.cost.server import NEWEST, server_profile
from .command import FLAG, MAX_SIZE, NEAR, NODE, Given, ServerArguments
from .declared import known_arguments, note_keys, other_names, read_keys
from .own_layers import WITH_DRAFT, block_drafter, draft_with_own_layers
from .sglang import sizes_up_to

PROFILE = NEWEST["trtllm"]
LARGEST_GRAPH = 128
RELEASE = re.compile(r"(?:\btensorrt-llm/release:v?|\btensorrt[-_]llm==)(\d+(?:\.\d+)+)")
GUARANTEED = "GUARANTEED_NO_EVICT"  # capacity_scheduler_policy, by default
OTHER_COMMANDS = ("disaggregated", "disaggregated_mpi_worker", "mm_embedding_serve")
USUAL = server_profile(PROFILE).defaults[0]
METHODS = {
    "EAGLE": "EAGLE3",  # the backend pytorch has EAGLE-3 alone, under both names
    "EAGLE3": "EAGLE3",
    "MTP": "own layers",
    "NGRAM": "NGRAM",
    "SA": "SUFFIX",
    "PARD": PARD,
    "DFLASH": "DFLASH",
    "DSPARK": "DSPARK",
    "DRAFTTARGET": "STANDALONE",
}


def _entry(words: list[str]) -> int | None:
    for place, word in enumerate(words):
        if word.rpartition("/")[2] == "trtllm-serve":
            return place + 1 + (words[place + 1 : place + 2] == ["serve"])
        if word == "dynamo.trtllm":
            return place + 1
    return None


def _take_role(values: dict[str, Any]) -> str | None:
    mode = values.pop("disaggregation-mode", None)  # of Dynamo
    role = {"context": "prefill", "generation": "decode"}.get(str(values.pop("server-role", mode)).lower(), mode)
    return role if role in ("prefill", "decode") else None


SERVER = ServerArguments(
    "TensorRT-LLM", _entry, known_arguments("trtllm"), other_names("trtllm"), abbreviates=False, release=RELEASE, take_role=_take_role,
)  # fmt: skip


def read(given: Given, gpu: GPU) -> None:
    """Put into `given` the keys of a scenario, sentences about defaults, and the arguments whose value
    is not modelled."""
    _options(given)
    given.settings["hardware.server"] = PROFILE
    readers = (_model, _parallel, _engine, _batch_wait, _graphs, _speculation, _pools)
    read_keys(given, "trtllm", gpu, readers)
    note_keys(given, "trtllm", "kv-cache-config", given.table("kv-cache-config"), "kv_cache_config.")


def _options(given: Given) -> None:
    """Take the keys of the file of options, and name a backend whose times are not simulated."""
    path = given.text("config")
    if path is not None:
        _take_options(given, path)
        given.check()
    if given.text("backend") not in (None, "pytorch"):
        given.not_modelled["--backend"] = f"{given.text('backend')}: times are those of the backend pytorch"


def _model(given: Given, gpu: GPU) -> None:
    if given.model("model") in OTHER_COMMANDS:
        given.refuse(
            "model", f"is {given.text('model') or given.positional[0]!r}, a command that starts no engine of its own"
        )


def _pools(given: Given, gpu: GPU) -> None:
    roles = given.servers.get("prefill") and given.servers.get("decode")
    role = given.text("server-role")
    is_of_dynamo = given.text("disaggregation-mode") in ("prefill", "decode")
    if is_of_dynamo or roles or (role or "").lower() in ("context", "generation"):
        given.disaggregate()
    elif role is not None:
        given.not_modelled["--server-role"] = f"{role}: of roles there are context and generation"


def _take_options(given: Given, path: str) -> None:
    """Put the keys of the YAML file into `given`: they win over the command's.
    Raises ConfigError for a file that is no YAML."""
    for key, value in given.options(path).items():
        name = SERVER.find(str(key))
        if name is None or name == "config":
            hint = nearest(str(key), [known.replace("-", "_") for known in SERVER.known], NEAR)
            given.problems.append(Problem(f"{path}: {key}", f"is no key of {SERVER.name}{hint}"))
        elif SERVER.known[name].kind == FLAG and not isinstance(value, bool):
            given.problems.append(Problem(f"{path}: {key}", f"is {value!r}; expected true or false"))
        elif SERVER.known[name].reason == "" and (
            isinstance(value, bool) is not (SERVER.known[name].kind == FLAG)
            or (isinstance(value, dict) and not name.endswith("-config"))
        ):
            form = "keys with values" if name.endswith("-config") else "a number or a word"
            given.problems.append(Problem(f"{path}: {key}", f"is {value!r}; expected {form}"))
        elif isinstance(value, bool | dict) or name == "cuda-graph-config":
            given.values[name] = value
        elif value is not None:
            given.values[name] = str(value)


def _parallel(given: Given, gpu: GPU) -> None:
    """Read the devices: with attention data parallelism each has its own requests, and all of them
    divide the experts."""
    devices = given.integer("tensor-parallel-size") or 1
    groups = devices if given.flag("enable-attention-dp") else 1
    given.settings |= {"hardware.tensor_parallel": devices // groups, "hardware.attention_data_parallel": groups}
    given.refuse_pipeline("pipeline-parallel-size")
    if (number := given.integer("gpus-per-node")) is not None and gpu.per_node == NODE:
        given.settings["hardware.gpus_per_node"] = number


def _engine(given: Given, gpu: GPU) -> None:
    # Without --max-batch-size there may be fewer, where the drafts of so many exceed a step.
    given.integer_or("max-batch-size", USUAL.max_running)
    tokens = given.integer_or("max-num-tokens", USUAL.chunk_size)
    given.settings |= {
        "engine.chunk_size": tokens,
        "engine.max_step_tokens": max(tokens, given.settings.get("engine.max_running", 0)),
    }
    table = given.table("scheduler-config")
    policy = str(table.get("capacity_scheduler_policy") or GUARANTEED).upper()
    given.settings["engine.guarantee_output"] = float(policy == GUARANTEED)
    if policy == "STATIC_BATCH":
        given.not_modelled["scheduler_config.capacity_scheduler_policy"] = (
            f"{policy} is not simulated; requests enter as by MAX_UTILIZATION"
        )
    elif policy not in (GUARANTEED, "MAX_UTILIZATION"):
        message = f"is {policy!r}; expected {GUARANTEED}, MAX_UTILIZATION or STATIC_BATCH"
        given.problems.append(Problem("scheduler_config.capacity_scheduler_policy", message))
    note_keys(given, "trtllm", "scheduler-config", table, "scheduler_config.")
    if not given.flag("enable-chunked-prefill"):
        given.assumed.append(
            f"prompts beyond {tokens} tokens, which it refuses without chunked prefill, are cut into chunks"
        )


def _batch_wait(given: Given, gpu: GPU) -> None:
    """Read how long new requests wait for others; it waits only if both numbers are above 0."""
    iterations = given.integer("batch-wait-timeout-iters", least=0)
    share = given.number("batch-wait-max-tokens-ratio", most=1)
    if not iterations or not share:
        return
    if given.flag("enable-attention-dp"):
        reason = "with enable_attention_dp requests do not wait so"
        given.not_modelled |= {"--batch-wait-timeout-iters": reason, "--batch-wait-max-tokens-ratio": reason}
        return
    given.settings |= {"engine.batch_wait_rounds": iterations, "engine.batch_wait_tokens": share}


def _graphs(given: Given, gpu: GPU) -> None:
    if "cuda-graph-config" in given.values and not isinstance(given.values["cuda-graph-config"], dict | str):
        given.settings["hardware.cuda_graphs"] = False  # null
        return
    table = given.table("cuda-graph-config")
    sizes, largest = table.get("batch_sizes"), table.get("max_batch_size") or LARGEST_GRAPH
    if sizes is not None and not (isinstance(sizes, list) and sizes and all(map(_is_size, sizes))):
        given.problems.append(
            Problem("cuda_graph_config.batch_sizes", f"is {sizes!r}; expected numbers from 1 to {MAX_SIZE}")
        )
    elif not _is_size(largest):
        message = f"is {largest!r}; expected a number from 1 to {MAX_SIZE}"
        given.problems.append(Problem("cuda_graph_config.max_batch_size", message))
    else:
        given.settings["hardware.graph_sizes"] = sorted(set(sizes)) if sizes else sizes_up_to(largest)
    if not table.get("enable_padding"):
        given.assumed.append("batches between two captured sizes are padded, as with cuda_graph_config.enable_padding")


def _speculation(given: Given, gpu: GPU) -> None:
    table = given.table("speculative-config")
    if not table:
        given.settings["speculation.algorithm"] = "NONE"
        return
    name = str(table.get("decoding_type"))
    algorithm = METHODS.get(name.upper().replace("_", ""))
    steps = table.get(TRTLLM_MAX_STEPS, table.get("num_nextn_predict_layers"))
    if algorithm is None:
        message = (
            f"{name!r} is not simulated; there are Eagle, Eagle3, MTP, NGram, SA, Draft_Target, PARD, DFlash and DSpark"
        )
        given.problems.append(Problem("speculative_config.decoding_type", message))
        return
    if not _is_size(steps):
        message = f"is {steps!r}; expected an integer from 1 on"
        given.problems.append(Problem(f"speculative_config.{TRTLLM_MAX_STEPS}", message))
        return
    if name.upper() == "EAGLE" and given.text("backend") not in (None, "pytorch"):
        algorithm = "EAGLE"
    draft = table.get("speculative_model") or table.get("speculative_model_dir")
    if algorithm == "DFLASH":
        algorithm, _ = block_drafter(str(draft or ""), algorithm)
    if name.upper() == "MTP":
        draft_with_own_layers(given, steps)
    else:
        given.settings["speculation.algorithm"] = algorithm
    most_rows = (given.settings["engine.max_step_tokens"] - 1) // (steps + 1)
    if given.settings.get("engine.max_running", USUAL.max_running) > most_rows > 0:
        given.settings["engine.max_running"] = most_rows
        given.assumed.append(
            f"{most_rows} requests decode at a time: so many with {count_of(steps, 'draft')} are within max_num_tokens"
        )
    if algorithm in WITH_DRAFT and draft:
        given.settings["model.draft"] = str(draft)
    schedule, most = table.get(TRTLLM_SCHEDULE), table.get("max_concurrency")
    if schedule is None and _is_size(most):  # larger batches do not speculate
        schedule = {most: steps}
    if schedule is None:
        given.settings |= {"speculation.policy": "fixed", "speculation.steps": steps}
    else:
        pairs = ", ".join(f"{last}: {count}" for last, count in schedule.items()) if isinstance(schedule, dict) else ""
        try:
            ours = import_table(f"{TRTLLM_SCHEDULE}: {{{pairs}}}", "speculative_config")
            given.settings["speculation.adaptive"] = parse_json(to_json(ours))
        except ConfigError as error:
            given.problems += error.problems
    note_keys(given, "trtllm", "speculative-config", table, "speculative_config.")


def _is_size(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_SIZE
