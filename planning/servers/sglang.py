"""SGLang's launch command as keys of a scenario. Names and defaults are those of its release 0.5.23."""

from __future__ import annotations

import re
from typing import Any

from ...core.adaptive.interchange import import_table, to_json
from ...core.adaptive.table_text import parse_table
from ...core.contract.step import RoundShape
from ...core.errors import Problem, count_of
from ...core.parsing import parse_json
from ...sim.cost.hardware import GPU
from ...sim.cost.server import NEWEST, server_profile
from .command import MAX_SIZE, Given, ServerArguments, reached_by
from .declared import known_arguments, known_values, other_names, read_keys
from .own_layers import block_drafter, draft_with_own_layers

PROFILE = NEWEST["sglang"]
ACCEPT_LENGTH = ("SGLANG_SIMULATE_ACC_LEN", "SIMULATE_ACC_LEN")  # today's name, and that of earlier releases
ALGORITHMS = {
    "EAGLE": "EAGLE", "NEXTN": "EAGLE", "EAGLE3": "EAGLE3", "STANDALONE": "STANDALONE", "NGRAM": "NGRAM",
    "DFLASH": "DFLASH", "DSPARK": "DSPARK",
}  # fmt: skip
BLOCK_DRAFTS = {"DFLASH": 15, "DSPARK": 7}  # where neither the command nor the draft's file says it
EAGLES = ("EAGLE", "EAGLE3")
RAGGED = "SGLANG_RAGGED_VERIFY_MODE"
STATIC, CAP_ACCEPT, COMPACT = RAGGED_MODES = ("static", "cap-accept", "compact")
RELEASE = re.compile(r"(?:\bsglang:v?|\bsglang(?:\[[^]]*\])?==)(\d+(?:\.\d+)+)")
WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
HOST_RATIO = 2.0  # --hicache-ratio
NGRAM_NODES, NGRAM_BREADTH = 12, 10
SPANNING = (  # of --moe-a2a-backend: these divide the experts among all devices
    "deepep", "deepep_v2", "megamoe", "mooncake", "nixl", "ascend_fuseep", "flashinfer", "flashinfer_megamoe", "mori", "pplx",
)  # fmt: skip


def _entry(words: list[str]) -> int | None:
    for place, word in enumerate(words):
        if word in ("sglang.launch_server", "dynamo.sglang"):
            return place + 1
        if word == "serve" and place and words[place - 1].rpartition("/")[2] == "sglang":
            return place + 1
    return None


def _take_role(values: dict[str, Any]) -> str | None:
    role = values.pop("disaggregation-mode", None)
    return role if role in ("prefill", "decode") else None


SERVER = ServerArguments(
    "SGLang", _entry, known_arguments("sglang"), other_names("sglang"), abbreviates=True, release=RELEASE,
    values=known_values("sglang"), merges_config=True, take_role=_take_role,
)  # fmt: skip


def read(given: Given, gpu: GPU) -> None:
    """Put into `given` the keys of a scenario, sentences about defaults, and the arguments whose value
    is not modelled."""
    given.settings["hardware.server"] = PROFILE
    readers = (_model, _parallel, _engine, _host_memory, _policies, _graphs, _speculation, _pools)
    read_keys(given, "sglang", gpu, readers)


def _model(given: Given, gpu: GPU) -> None:
    given.model("model-path")


def _pools(given: Given, gpu: GPU) -> None:
    if given.choice("disaggregation-mode", ("null", "prefill", "decode")) in ("prefill", "decode"):
        given.disaggregate()


def _parallel(given: Given, gpu: GPU) -> None:
    """Read the devices: with attention data parallelism tp-size counts them all, otherwise data parallelism
    makes more engines."""
    devices, groups = given.integer("tp-size") or 1, given.integer("attn-dp-size")
    engines = given.integer("dp-size") or 1
    if given.flag("enable-dp-attention") and groups is None:
        groups, engines = engines, 1
    groups = groups or 1
    if devices % groups:
        given.refuse("tp-size", f"is {devices}, which {groups} groups of data-parallel attention do not divide")
        return
    given.settings |= {"hardware.tensor_parallel": devices // groups, "hardware.attention_data_parallel": groups}
    given.settings["hardware.replicas"] = engines
    backend = given.text("moe-a2a-backend")
    spans = given.flag("enable-deepep-moe") or (given.flag("enable-ep-moe") and given.text("ep-size") is None)
    if backend in SPANNING or spans:
        given.settings["hardware.expert_parallel"] = devices
    stages = given.refuse_pipeline("pp-size")
    given.spread("nnodes", devices * engines * stages, gpu.per_node)


def _engine(given: Given, gpu: GPU) -> None:
    groups = given.settings.get("hardware.attention_data_parallel", 1)
    usual = server_profile(PROFILE).scheduling(gpu, groups, given.text("speculative-algorithm") is not None)
    running = given.integer_or("max-running-requests", usual["max_running"])
    given.settings["engine.max_running"] = max(1, running // groups)
    chunk = given.integer_or("chunked-prefill-size", usual["chunk_size"], f" on {gpu.name}", least=-1)
    if chunk > 0:
        given.settings["engine.chunk_size"] = max(1, chunk // groups)
    else:
        given.settings["engine.chunk_size"] = 1 << 20  # prompts in one piece
    if given.flag("enable-priority-scheduling"):
        given.settings["engine.preempt"] = not given.flag("disable-priority-preemption")
    if (policy := given.text("schedule-policy")) not in (None, "fcfs"):
        given.not_modelled["--schedule-policy"] = f"{policy}: requests are taken in the order of their arrival"


def _graphs(given: Given, gpu: GPU) -> None:
    if given.flag("disable-cuda-graph") or given.flag("disable-decode-cuda-graph"):
        given.settings["hardware.cuda_graphs"] = False
    elif (sizes := given.integers("cuda-graph-bs-decode")) is not None:
        given.settings["hardware.graph_sizes"] = sizes
    elif (largest := given.integer("cuda-graph-max-bs-decode", most=MAX_SIZE)) is not None:
        given.settings["hardware.graph_sizes"] = sizes_up_to(largest)


def _host_memory(given: Given, gpu: GPU) -> None:
    """Read the size of the hierarchical cache. It counts for each device, and replaces the ratio if it is not 0."""
    ratio, size = given.number("hicache-ratio"), given.number("hicache-size")
    policy = given.choice("hicache-write-policy", WRITE_POLICIES)
    if not given.flag("enable-hierarchical-cache"):
        return
    if size:
        given.settings["engine.host_cache_gb"] = size * (given.integer("tp-size") or 1)
    elif ratio is None or ratio > 0:
        given.settings["engine.host_cache_ratio"] = ratio or HOST_RATIO
    if policy not in (None, WRITE_POLICIES[0]):
        given.not_modelled["--hicache-write-policy"] = f"{policy}: prefixes are copied to host memory at once"


def _policies(given: Given, gpu: GPU) -> None:
    """Read the rules of the scheduler. With a conservativeness of 1 a newcomer leaves the profile's share free."""
    groups = given.settings.get("hardware.attention_data_parallel", 1)
    usual_share = server_profile(PROFILE).rules_for(groups).guarantee_output
    conservativeness = given.number("schedule-conservativeness")
    if conservativeness == 0:
        given.not_modelled["--schedule-conservativeness"] = "0: a newcomer always leaves room for a round of all others"
    elif conservativeness is not None:
        given.settings["engine.guarantee_output"] = min(usual_share * conservativeness, 1.0)


def sizes_up_to(largest: int) -> list[int]:
    """Return captured sizes as servers choose them: 1, 2, 4, then every eighth, and the largest."""
    return sorted({size for size in (1, 2, 4, *range(8, largest + 1, 8), largest) if size <= largest})


def _pretended(given: Given, steps: int, topk: int) -> None:
    """Take the accept length of SGLANG_SIMULATE_ACC_LEN, the switch of its benchmarks: each round accepts the whole
    number below or above it."""
    name = next((one for one in ACCEPT_LENGTH if one in given.environment), None)
    if name is None:
        return
    try:
        length = float(given.environment[name])
    except ValueError:
        given.problems.append(Problem(name, f"is {given.environment[name]!r}; expected a number of tokens"))
        return
    if length > 0 and topk > 1:
        given.not_modelled[name] = "of a tree the scenario says how often its drafts are accepted"
    elif length > 0:  # others switch it off
        given.accept(reached_by(length, steps))


def _speculation(given: Given, gpu: GPU) -> None:
    name = given.text("speculative-algorithm")
    if name is None:
        given.settings["speculation.algorithm"] = "NONE"
        return
    algorithm = ALGORITHMS.get(name.upper())
    if algorithm is None:
        known = ", ".join(ALGORITHMS)
        given.refuse("speculative-algorithm", f"{name} is not simulated; of SGLang's algorithms there are {known}")
        return
    steps, topk, nodes = (
        given.integer(f"speculative-{key}") for key in ("num-steps", "eagle-topk", "num-draft-tokens")
    )
    if algorithm == "NGRAM":
        _look_up(given, nodes)
        return
    _rule(given, algorithm)
    if algorithm in BLOCK_DRAFTS:
        _blocks(given, algorithm, nodes)
        return
    adapts = given.flag("speculative-adaptive") and _adapts(given, algorithm, topk)
    if steps is None and not adapts:
        steps, topk, nodes = _usual_shape(algorithm, given.settings.get("model.target", ""))
        given.assumed.append(
            f"steps, top-k and draft tokens are {steps}, {topk} and {nodes}, its defaults for this model"
        )
    if given.flag("enable-multi-layer-eagle"):
        given.settings["speculation.algorithm"] = "MULTI_LAYER_EAGLE"
    elif algorithm == "EAGLE":
        draft_with_own_layers(given, steps or 1)
    else:
        given.settings["speculation.algorithm"] = algorithm
    draft = given.text("speculative-draft-model-path")
    if draft not in (None, given.settings.get("model.target")):
        given.settings["model.draft"] = draft
    if adapts:
        given.settings["speculation.policy"] = "ema"
        given.settings["speculation.adaptive"] = _table(given) or "with-zero"
        if steps is not None:
            given.settings["speculation.steps"] = steps
        if given.settings["speculation.adaptive"] == "with-zero":
            given.assumed.append("the table of steps is with-zero, SGLang's own")
        return
    assert steps is not None
    given.settings |= {"speculation.policy": "fixed", "speculation.steps": steps, "speculation.topk": topk or 1}
    if (topk or 1) > 1 and nodes is not None:
        given.settings["speculation.num_draft_tokens"] = nodes
    elif nodes not in (None, steps + 1):
        given.assumed.append(
            f"speculative-num-draft-tokens is {steps + 1}: a chain of {count_of(steps, 'draft')} has no others"
        )
    _pretended(given, steps, topk or 1)


def _rule(given: Given, algorithm: str) -> None:
    """Take the rule by which drafts stay."""
    for name, rule, known in (
        ("speculative-use-rejection-sampling", "rejection", EAGLES),
        ("speculative-use-block-verification", "block", (*EAGLES, *BLOCK_DRAFTS)),
    ):
        if given.flag(name) and algorithm not in known:
            given.refuse(name, f"is for {', '.join(known)}, not for {algorithm}")
        elif given.flag(name):
            given.settings["speculation.accept_rule"] = rule


def _table(given: Given) -> Any:
    """Return the table of steps, as a path, or as the table itself if the command writes its file."""
    path = given.text("speculative-adaptive-config")
    if path is None:
        return None
    text = given.written.get(path)
    return given.place(path) if text is None else parse_json(to_json(import_table(text, path)))


def _look_up(given: Given, nodes: int | None) -> None:
    """Read look-up drafting: a tree of `nodes`, as broad as the search in SGLang's trie, and as deep as a chain of all
    its nodes would be."""
    nodes, breadth = nodes or NGRAM_NODES, given.integer("speculative-ngram-max-bfs-breadth") or NGRAM_BREADTH
    shape = {"policy": "fixed", "steps": max(nodes - 1, 1), "topk": breadth}
    if breadth > 1 and nodes > 1:
        shape["num_draft_tokens"] = nodes
        given.assumed.append(f"look-ups draft trees of {nodes} nodes with up to {breadth} branches")
    given.settings |= {"speculation.algorithm": "NGRAM"} | {f"speculation.{key}": value for key, value in shape.items()}
    given.settings["engine.mixed"] = False  # with look-ups prompts and rounds never share a step


def _blocks(given: Given, algorithm: str, nodes: int | None) -> None:
    """Read a block drafter: it verifies its block and the token before, and takes no steps or top-k."""
    draft = given.text("speculative-draft-model-path")
    found, most = block_drafter(draft or given.settings.get("model.target", ""), algorithm)
    is_own = algorithm == "DSPARK"  # whose block has the drafts alone
    block = given.integer("speculative-dspark-block-size" if is_own else "speculative-dflash-block-size")
    if block is not None and nodes not in (None, block + is_own):
        message = f"is {nodes}; expected {block + is_own}, as a block of {block} verifies"
        given.refuse("speculative-num-draft-tokens", message)
        return
    verified = nodes if block is None else block + is_own
    steps = (verified or (most or BLOCK_DRAFTS[algorithm]) + 1) - 1
    if steps < 1:
        given.refuse("speculative-num-draft-tokens", f"is {verified}; expected an integer from 2 on")
        return
    if verified is None:
        by = "the draft's block" if most else "its default"
        given.assumed.append(f"rounds draft {count_of(steps, 'token')}, by {by}")
    if draft is not None:
        given.settings["model.draft"] = draft
    given.settings |= {"speculation.algorithm": found, "speculation.policy": "fixed", "speculation.steps": steps}
    given.settings |= _verification(given, is_own)
    _pretended(given, steps, 1)


def _verification(given: Given, has_confidences: bool) -> dict[str, Any]:
    """Return the keys of adaptive verification. SGLang has it for DSPARK alone, and verifies all drafts if it is given
    no times of rounds."""
    files = {
        "speculation.round_times": "speculative-dspark-sps-table-path",
        "speculation.confidence_temperatures": "speculative-dspark-confidence-sts-path",
    }
    named = {key: path for key, name in files.items() if (path := given.text(name)) is not None}
    mode = given.environment.get(RAGGED, STATIC)
    if mode not in RAGGED_MODES:
        given.problems.append(Problem(RAGGED, f"is {mode!r}; expected {' or '.join(RAGGED_MODES)}"))
        return {}
    if mode == CAP_ACCEPT:
        given.not_modelled[RAGGED] = f"{mode}: all drafts are verified, and what is accepted is cut afterwards"
    if mode == COMPACT and has_confidences and "speculation.round_times" in named:
        tables = {key: _file(given, path) for key, path in named.items()}
        return {"speculation.policy": "confidence", **tables}
    lacks = {
        "an algorithm with confidences (DSPARK)": has_confidences,
        f"{RAGGED}={COMPACT}": mode != STATIC,
        f"--{files['speculation.round_times']}": "speculation.round_times" in named,
    }
    if mode == COMPACT or named:
        lacking = next((what for what, there in lacks.items() if not there), None)
        if lacking is not None:
            given.assumed.append(f"WARNING: without {lacking} SGLang verifies all drafts of each row")
    return {}


def _file(given: Given, path: str) -> Any:
    """Return the place of a JSON file, or its contents if the command writes it."""
    text = given.written.get(path)
    return given.place(path) if text is None else parse_table(text, path)


def _adapts(given: Given, algorithm: str, topk: int | None) -> bool:
    """Return whether SGLang changes the steps; where it cannot it warns and keeps them, and so is said here."""
    reasons = {
        f"the algorithm {algorithm}": algorithm not in ("EAGLE", "EAGLE3"),
        f"top-k {topk}": topk not in (None, 1),
        "attention data parallelism": given.settings.get("hardware.attention_data_parallel", 1) > 1,
        "multi-layer EAGLE": bool(given.flag("enable-multi-layer-eagle")),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None:
        given.assumed.append(f"WARNING: with {reason} SGLang ignores --speculative-adaptive and keeps its steps")
    return reason is None


def _usual_shape(algorithm: str, model: str) -> RoundShape:
    """Return the shape of rounds that SGLang takes for a model unless the command says otherwise."""
    name = model.lower()
    is_llama = "llama" in name and "llama-4" not in name
    return RoundShape(5, 4, 8) if is_llama and algorithm != "STANDALONE" else RoundShape.chain(3)
