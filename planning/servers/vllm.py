"""vLLM's launch command as keys of a scenario. Names and defaults are those of its release 0.33."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from ...core.adaptive.interchange import VLLM_SCHEDULE, import_table, to_json
from ...core.errors import ConfigError, Problem, count_of
from ...core.model_shape import SPECULATORS_KEY
from ...core.parsing import ConfigReader, ParseError, parse_json, read_json_object
from ...observe.input_files import read_text
from ...sim.cost.draft import BLOCK_DRAFTERS, P_EAGLE, PARD
from ...sim.cost.hardware import GPU
from ...sim.cost.measured.model_files import find_model_files
from ...sim.cost.memory.rules import rules_of
from ...sim.cost.server import NEWEST, server_profile
from .command import MAX_SIZE, Given, ServerArguments, reached_by
from .declared import known_arguments, known_values, note_keys, other_names, read_keys
from .own_layers import WITH_DRAFT, block_drafter, draft_with_own_layers
from .sglang import sizes_up_to

PROFILE = NEWEST["vllm"]
OWN_LAYERS = "own layers"
SUFFIX_DEPTH = 24  # suffix_decoding_max_tree_depth
METHODS = {
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
    "mtp": OWN_LAYERS,
    "draft_model": "STANDALONE",
    "ngram": "NGRAM",
    "ngram_gpu": "NGRAM",
    "suffix": "SUFFIX",
    "peagle": P_EAGLE,
    "dflash": "DFLASH",
    "dflash2": "DFLASH2",
    "dspark": "DSPARK",
}
VERIFIES = "rejection_sample_method"
METHODS_OF_VERIFYING = ("standard", "block", "synthetic", "fly", "strict", "probabilistic")
"""Of `rejection_sample_method`; the last two are those of earlier releases, for drafts that are not drawn and drawn."""
IN_ONE_PASS = {"STANDALONE": PARD, "EAGLE3": P_EAGLE}
"""What methods are with parallel_drafting."""
CAPTURE_SIZES, LARGEST_CAPTURE = "cudagraph_capture_sizes", "max_cudagraph_capture_size"
GRAPH_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
RELEASE = re.compile(r"(?:\bvllm-openai(?:-[a-z]+)?:v?|\bvllm(?:\[[^]]*\])?==)(\d+(?:\.\d+)+)")
IMAGE = re.compile(r"\bvllm-openai(?:-[\w.-]+)?(?::|@|$)")
OTHER_IMAGE = re.compile(r"[\w./-]*/[\w.-]*vllm[\w.-]*(?::|@|$)")  # others start the server, too, if arguments follow
POOLS_CONNECTOR = "NixlConnector"  # which only connects prefill and decode, whatever the role that it is given
OF_ONE_SERVER = ("kv_role", "kv_rank", "kv_port", "kv_ip", "engine_id")
PARALLEL_BESIDE = ("decode-context-parallel-size", "prefill-context-parallel-size")


def _entry(words: list[str]) -> int | None:
    for place, word in enumerate(words):
        if word.endswith("vllm.entrypoints.openai.api_server") or word == "dynamo.vllm":
            return place + 1
        if word == "serve" and place and words[place - 1].rpartition("/")[2] == "vllm":
            return place + 1
    if not {"run", "create"} & set(words):
        return None
    entry = next((place for place, word in enumerate(words) if word.startswith("--entrypoint")), None)
    if entry is not None:
        starts_server = " ".join(words[entry : entry + 2]).replace("=", " ").split()[1:2] == ["vllm"]
        return words.index("serve", entry) + 1 if starts_server and "serve" in words[entry:] else None
    for place, word in enumerate(words):  # an image that starts the server by itself
        has_arguments = words[place + 1 : place + 2] == ["--model"] and OTHER_IMAGE.match(word)
        if IMAGE.search(word) or has_arguments:
            return place + 1
    return None


def _take_role(values: dict[str, Any]) -> str | None:
    """Take the role and the numbers of a server out of --kv-transfer-config."""
    try:
        config = values.get("kv-transfer-config", {})
        config = dict(parse_json(config) if isinstance(config, str) else config)
    except (ParseError, TypeError, ValueError):
        return None  # refused where the arguments are read
    role = {"kv_producer": "prefill", "kv_consumer": "decode"}.get(config.get("kv_role", ""))
    mode, is_prefill = values.pop("disaggregation-mode", None), values.pop("is-prefill-worker", None)  # of Dynamo
    role = mode if mode in ("prefill", "decode") else "prefill" if is_prefill else role
    if "kv-transfer-config" in values:
        values["kv-transfer-config"] = {key: value for key, value in config.items() if key not in OF_ONE_SERVER}
    return role


SERVER = ServerArguments(
    "vLLM", _entry, known_arguments("vllm"), other_names("vllm"), abbreviates=False, release=RELEASE,
    values=known_values("vllm"), merges_config=True, take_role=_take_role,
)  # fmt: skip


def read(given: Given, gpu: GPU) -> None:
    """Put into `given` the keys of a scenario, sentences about defaults, and the arguments whose value
    is not modelled."""
    given.settings["hardware.server"] = PROFILE
    read_keys(given, "vllm", gpu, (_model, _parallel, _engine, _graphs, _speculation, _pools))


def _model(given: Given, gpu: GPU) -> None:
    model = given.model("model")
    files = find_model_files(model) if model else None
    if files is not None and files.config.is_file():
        config = read_json_object(str(files.config), read_text, of_checkpoint=True)
        if isinstance(config.get("speculators_config"), Mapping):
            _verifier(given, ConfigReader(config, str(files.config)), model)


def _verifier(given: Given, head: ConfigReader, model: str) -> None:
    """Take the target and the draft tokens from the files of a head in the format of speculators, as vLLM does where a
    head stands in the place of the model. Raises ConfigError."""
    about = head.under("speculators_config")
    methods = about.get("proposal_methods")
    method = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], Mapping) else {}
    target, steps = about.under("verifier").get("name_or_path"), method.get("speculative_tokens")
    if not isinstance(target, str) or type(steps) is not int:
        about.problem("verifier", "a head is served by its own name where it names its target and draft tokens")
    head.raise_problems()
    own = {"method": head.get(SPECULATORS_KEY), "model": model}
    given.values["speculative-config"] = {
        "num_speculative_tokens": steps, **given.table("speculative-config"), **own,
    }  # fmt: skip
    given.settings["model.target"] = target
    given.assumed.append(f"{model} is a head, which names {target} as its target")


def _pools(given: Given, gpu: GPU) -> None:
    roles = given.servers.get("prefill") and given.servers.get("decode")
    if given.text("disaggregation-mode") in ("prefill", "decode") or given.flag("is-prefill-worker") or roles:
        given.disaggregate()
        return
    transfer = given.table("kv-transfer-config")
    role, connector = transfer.get("kv_role"), transfer.get("kv_connector")
    if role in ("kv_producer", "kv_consumer") or (role == "kv_both" and connector == POOLS_CONNECTOR):
        given.disaggregate()
    elif given.text("kv-transfer-config") is not None:
        given.not_modelled["--kv-transfer-config"] = "KV outside the device's memory is not simulated"


def _parallel(given: Given, gpu: GPU) -> None:
    devices, groups = given.integer("tensor-parallel-size") or 1, given.integer("data-parallel-size") or 1
    given.settings["hardware.tensor_parallel"] = devices
    if given.flag("enable-expert-parallel"):
        given.settings |= {"hardware.attention_data_parallel": groups, "hardware.expert_parallel": devices * groups}
    else:
        given.settings["hardware.replicas"] = groups
        if groups > 1:
            given.assumed.append(
                "data-parallel ranks are engines of their own; of a mixture of experts vLLM divides the experts over them"
            )
    stages = given.refuse_pipeline("pipeline-parallel-size")
    given.spread("nnodes", devices * groups * stages, gpu.per_node)
    for name in PARALLEL_BESIDE:
        if (given.integer(name) or 1) > 1:
            given.not_modelled[f"--{name}"] = "parallel are tensors, experts and data alone"


def _engine(given: Given, gpu: GPU) -> None:
    usual = server_profile(PROFILE).on(gpu)
    # Without --max-num-seqs there may be fewer, where the drafts of so many exceed a step.
    running = given.integer_or("max-num-seqs", usual.max_running, f" on {gpu.name}")
    tokens = max(running, given.integer_or("max-num-batched-tokens", usual.chunk_size, f" on {gpu.name}"))
    by_release = server_profile(PROFILE).memory
    rules = by_release[-1] if given.known_release is None else rules_of(given.known_release, by_release)
    utilization = given.share("gpu-memory-utilization")
    given.settings |= {"engine.chunk_size": tokens, "engine.max_step_tokens": tokens}
    if "hardware.kv_gb" not in given.settings:
        given.settings["hardware.reserved_fraction"] = round(1 - (utilization or rules.utilization), 6)
    if (blocks := given.integer("num-gpu-blocks-override")) is not None:
        given.settings["engine.kv_slots"] = blocks * given.settings["engine.page_size"]
    if (gibibytes := given.number("kv-offloading-size")) is not None and gibibytes > 0:
        groups = given.settings.get("hardware.attention_data_parallel", 1)
        given.settings["engine.host_cache_gb"] = round(gibibytes * groups * 2**30 / 1e9, 6)
    if given.flag("enable-chunked-prefill") is False:
        given.not_modelled["--no-enable-chunked-prefill"] = "prompts are cut at max-num-batched-tokens"


def _graphs(given: Given, gpu: GPU) -> None:
    compilation = dict(given.table("compilation-config"))
    known = {name: compilation.pop(name, None) for name in (CAPTURE_SIZES, LARGEST_CAPTURE, "cudagraph_mode")}
    listed = known.pop(CAPTURE_SIZES)
    of_table = Given(given.source, {name: str(value) for name, value in known.items() if value is not None})
    if listed is not None:
        of_table.values[CAPTURE_SIZES] = [str(size) for size in listed] if isinstance(listed, list) else [str(listed)]
    sizes = given.integers("cudagraph-capture-sizes") or of_table.integers(CAPTURE_SIZES)
    largest = given.integer("max-cudagraph-capture-size", most=MAX_SIZE) or of_table.integer(
        LARGEST_CAPTURE, most=MAX_SIZE
    )
    mode = of_table.choice("cudagraph_mode", GRAPH_MODES)
    level = given.choice("optimization-level", ("0", "1", "2", "3"))
    given.problems += [Problem(f"--compilation-config {one.key[2:]}", one.message) for one in of_table.problems]
    if given.flag("enforce-eager") or mode == "NONE" or level == "0":
        given.settings["hardware.cuda_graphs"] = False
    else:
        if mode == "PIECEWISE":
            given.settings["hardware.launch"] = "piecewise"
        if sizes:
            given.settings["hardware.graph_sizes"] = sizes
        elif largest:
            given.settings["hardware.graph_sizes"] = sizes_up_to(largest)
    if compilation:
        given.not_modelled["--compilation-config"] = (
            f"{', '.join(sorted(compilation))}: times are those of measured kernels or of the roofline"
        )


def _speculation(given: Given, gpu: GPU) -> None:
    table = dict(given.table("speculative-config"))
    for name, key in (("spec-method", "method"), ("spec-model", "model"), ("spec-tokens", "num_speculative_tokens")):
        if (text := given.text(name)) is not None:
            table[key] = int(text) if key == "num_speculative_tokens" and re.fullmatch(r"\d{1,4}", text) else text
    if not table:
        given.settings["speculation.algorithm"] = "NONE"
        return
    model = str(table.get("model", ""))
    method = str(table.get("method") or _method_of(model))
    algorithm = METHODS.get(method) or (OWN_LAYERS if method.endswith("_mtp") else None)
    if table.get("parallel_drafting") is True:
        algorithm = IN_ONE_PASS.get(algorithm or "", algorithm)
    algorithm, steps = _drafts(table, algorithm, model, str(given.settings.get("model.target", "")))
    if algorithm is None:
        given.refuse(
            "speculative-config", f"the method {method!r} is not simulated; of vLLM's there are {', '.join(METHODS)}"
        )
        return
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        given.refuse("speculative-config", f"num_speculative_tokens is {steps!r}; expected an integer from 1 on")
        return
    if algorithm == OWN_LAYERS:
        draft_with_own_layers(given, steps)
        if model not in ("", given.settings.get("model.target")):
            given.not_modelled["--speculative-config model"] = (
                "a layer of the target's own form drafts, not this checkpoint"
            )
    else:
        given.settings["speculation.algorithm"] = algorithm
    if algorithm in WITH_DRAFT and model:
        given.settings["model.draft"] = model
    _steps(given, table, steps)
    _pretended(given, table, steps)
    _rule(given, table)
    _name_keys(given, table)


def _drafts(table: Mapping[str, Any], algorithm: str | None, model: str, target: str) -> tuple[str | None, Any]:
    """Return the algorithm by the draft's file, and num_speculative_tokens or what vLLM takes without it."""
    steps = table.get("num_speculative_tokens")
    if algorithm == "SUFFIX" and steps is None:
        steps = table.get("suffix_decoding_max_tree_depth", SUFFIX_DEPTH)
    if algorithm in BLOCK_DRAFTERS:
        algorithm, most = block_drafter(model or target, algorithm)
        if algorithm == "DSPARK" and steps is None:
            steps = most or None
    return algorithm, steps


def _pretended(given: Given, table: dict[str, Any], steps: int) -> None:
    """Take the acceptance of `rejection_sample_method` synthetic."""
    if table.get("rejection_sample_method") != "synthetic":
        return
    rates, length = table.pop("synthetic_acceptance_rates", None), table.pop("synthetic_acceptance_length", None)
    if rates is None and length is None:
        return  # an earlier release, whose one rate is named as not simulated
    numbers = rates if isinstance(rates, list) else [length]
    if (rates is None) == (length is None) or not all(isinstance(one, int | float) for one in numbers):
        message = "expected either synthetic_acceptance_rates, a list, or synthetic_acceptance_length, a number"
        given.refuse("speculative-config", message)
    elif rates is None and not 1 <= length <= steps + 1:
        given.refuse("speculative-config", f"synthetic_acceptance_length is {length}; expected 1 to {steps + 1}")
    elif rates is None:
        given.accept(reached_by(length, steps))
    elif len(rates) != steps or not all(1 >= one >= two >= 0 for one, two in pairwise([1, *rates])):
        message = (
            f"synthetic_acceptance_rates is {rates}; expected {count_of(steps, 'number')} from 1 to 0 that do not rise"
        )
        given.refuse("speculative-config", message)
    else:
        given.accept(rates)


def _rule(given: Given, table: Mapping[str, Any]) -> None:
    """Take the rule by which drafts stay: how they are drawn, and how they are verified."""
    words = {
        key: str(table.get(key, usual)) for key, usual in (("draft_sample_method", "greedy"), (VERIFIES, "standard"))
    }
    for key, known in (("draft_sample_method", ("greedy", "probabilistic")), (VERIFIES, METHODS_OF_VERIFYING)):
        if words[key] not in known:
            given.refuse("speculative-config", f"{key} is {words[key]!r}; expected {', '.join(known)}")
    verifies, looks_up = words[VERIFIES], given.settings["speculation.algorithm"] in ("NGRAM", "SUFFIX")
    are_drawn = (words["draft_sample_method"] == "probabilistic" or verifies == "probabilistic") and not looks_up
    if verifies == "fly":
        reason = "fly keeps tokens that the target would not emit; how often drafts are accepted is the scenario's"
        given.not_modelled[f"--speculative-config {VERIFIES}"] = reason
    elif verifies == "block" and not are_drawn:
        given.assumed.append("block verification of drafts that are not drawn keeps what the target's rule keeps")
    elif are_drawn and verifies not in ("synthetic", "strict"):
        given.settings["speculation.accept_rule"] = "block" if verifies == "block" else "rejection"


def _steps(given: Given, table: dict[str, Any], steps: int) -> None:
    """Take the schedule of steps, which vLLM drops under data parallelism, or their number."""
    if table.get(VLLM_SCHEDULE) is not None and (given.integer("data-parallel-size") or 1) > 1:
        given.assumed.append(
            f"WARNING: with data parallelism vLLM drops {VLLM_SCHEDULE} and always drafts {count_of(steps, 'token')}, as simulated here"
        )
    elif table.get(VLLM_SCHEDULE) is not None:
        try:
            schedule = import_table(_schedule_text(table), "--speculative-config")
            given.settings["speculation.adaptive"] = parse_json(to_json(schedule))
        except ConfigError as error:
            given.problems += error.problems
        return
    has_confidences = given.settings.get("speculation.algorithm") not in ("NGRAM", "SUFFIX")
    policy = "confidence" if table.get("enable_adaptive_verification") and has_confidences else "fixed"
    given.settings |= {"speculation.policy": policy, "speculation.steps": steps}


def _name_keys(given: Given, table: dict[str, Any]) -> None:
    """Name the keys of --speculative-config that a run does not follow."""
    asked = {key: value for key, value in table.items() if value is not None and value is not False}
    note_keys(given, "vllm", "speculative-config", asked, "--speculative-config ")
    devices = given.settings["hardware.tensor_parallel"]
    if table.get("draft_tensor_parallel_size", devices) != devices:
        reason = f"the draft is divided among {devices} devices, as the target is"
        given.not_modelled["--speculative-config draft_tensor_parallel_size"] = reason


def _schedule_text(table: dict[str, Any]) -> str:
    """Return the keys of --speculative-config that are about steps, as JSON."""
    return json.dumps({key: table[key] for key in ("num_speculative_tokens", VLLM_SCHEDULE)})


def _method_of(model: str) -> str:
    """Return the method that vLLM uses if only the draft is named; it follows from words in the draft's name."""
    name = model.lower()
    if "eagle3" in name or "eagle-3" in name:
        return "eagle3"
    for method in ("dflash", "dspark"):
        if method in name:
            return method
    return "eagle" if "eagle" in name else "ngram" if name in ("ngram", "[ngram]") else "draft_model"
