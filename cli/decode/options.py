"""The options of a decoding session, which several commands have, in the panels that their help shows."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..options import AS_JSON, Decorator, in_panel, output_option, with_options

if TYPE_CHECKING:
    from ...core.errors import Problem

model_option, speculation_option, prompt_option = map(in_panel, ("Model and draft", "Speculation", "Prompts"))
sampling_option, engine_option = map(in_panel, ("Sampling", "Engine and device"))


def problems_name_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with problems of its arguments written as `--adaptive: …`, where they have the
    names of parameters."""

    @wraps(command)
    def run(**arguments: Any) -> None:
        from ...core.errors import ConfigError, ForedraftError

        try:
            command(**arguments)
        except ConfigError as error:
            if error.source != "<arguments>":
                raise
            raise ForedraftError("\n".join(_named(problem, arguments) for problem in error.problems)) from error

    return run


def _named(problem: Problem, parameters: Container[str]) -> str:
    """Return a problem as text, its key as the option that it is a value of."""
    name, dot, rest = problem.key.partition(".")
    if name in parameters:
        return f"--{name.replace('_', '-')}{dot}{rest}: {problem.message}"
    return str(problem) if name.startswith("--") else f"<arguments>: {problem}"


def tree_nodes(text: str | None) -> int | dict[str, int] | None:
    """Return what `--num-draft-tokens` says: one number, or the nodes of each step count. Raises ConfigError."""
    from ...core.errors import ConfigError

    if text is None:
        return None
    pairs = re.findall(r"([0-9]{1,9}):([0-9]{1,9})(?:,|$)", text)
    if re.fullmatch(r"[0-9]{1,9}", text):
        return int(text)
    if not pairs or ",".join(map(":".join, pairs)) != text or len(dict(pairs)) < len(pairs):
        message = f"{text!r}; expected a whole number, or one for each step count, as in 1:5,3:16"
        raise ConfigError.of("<arguments>", "--num-draft-tokens", message)
    return {steps: int(nodes) for steps, nodes in pairs}


# fmt: off
Draft = Annotated[Path | None, model_option("--draft",
    "Draft checkpoint: a small model, or a head trained for the model.", "DIR|ORG/NAME")]
Dtype = Annotated[str, model_option("--dtype",
    "float64, float32, float16, bfloat16. auto: the checkpoint's dtype; on a CPU without native bfloat16, float32 "
    "instead of 16-bit dtypes.")]
Quantized = Annotated[str, model_option("--quantized",
    "Quantized weights: keep (read as they are stored), unpack (into --dtype when they are loaded). auto: keep on a "
    "GPU, unpack on a CPU. int8, on a CPU: round all large weights to 8-bit integers, which is faster and less exact.",
    "keep|unpack|int8")]
Algorithm = Annotated[str, speculation_option("--algorithm",
    "STANDALONE, EAGLE, EAGLE3, MULTI_LAYER_EAGLE, NGRAM, NONE or a plugin. auto: the algorithm of the draft; without "
    "a draft NGRAM on a CPU and NONE on a GPU.", "NAME")]
Steps = Annotated[int | None, speculation_option("--steps",
    "Draft steps per round; with --adaptive, the number to begin with. Default: 3, or the number of heads of a "
    "multi-layer draft.")]
Topk = Annotated[int, speculation_option("--topk", "Branches per draft step; with more than 1 the drafts are trees.")]
Nodes = Annotated[str | None, speculation_option("--num-draft-tokens",
    "Nodes of a verify tree, root included: one number, or numbers by steps as in 1:5,3:16. Default: up to 16.",
    "N|S:N,S:N,…")]
Adaptive = Annotated[str | None, speculation_option("--adaptive",
    "Adapt the draft steps by a table: default, with-zero, zero-to-seven, or a JSON file.", "PRESET|FILE")]
Policy = Annotated[str | None, speculation_option("--policy",
    "How the controller chooses steps: ema (by acceptance), goodput (by acceptance and measured cost).", "ema|goodput")]
Device = Annotated[str, engine_option("--device",
    "cpu, cuda, or a GPU such as cuda:1. auto: a GPU if there is one, else the CPU.")]
Threads = Annotated[int | None, engine_option("--threads",
    "Threads on a CPU. Default: one for small models, else all cores.", min=1)]
Overlap = Annotated[bool | None, engine_option("--overlap/--synchronous",
    "Plan a step while the previous one runs. Default: on a GPU only.")]
PageSize = Annotated[int, engine_option("--page-size", "Tokens of a KV page.")]
MaxRunning = Annotated[int, engine_option("--max-running", "Most requests that are decoded together.")]
ContextLen = Annotated[int | None, engine_option("--context-len",
    "Most tokens of a prompt and its output together. Default: as many as the prompts need; for a server the model's "
    "maximum.")]
KvTokens = Annotated[int | None, engine_option("--kv-tokens",
    "KV slots of the pool. Default: as many as the running requests need.")]
KvDtype = Annotated[str, engine_option("--kv-dtype",
    "Numbers that keys and values are kept in: fp8 (E4M3, with the checkpoint's scales), auto (those of --dtype).",
    "auto|fp8")]
WindowKv = Annotated[str, engine_option("--window-kv",
    "KV of layers with sliding windows: paged (as that of other layers), ring (what a window sees and no more; no "
    "request takes a prefix from another).", "paged|ring")]
TensorParallel = Annotated[int, engine_option("--tensor-parallel",
    "Divide the model among so many GPUs, or processes on a CPU.", "N")]
Disaggregate = Annotated[str | None, engine_option("--disaggregate",
    "Prefill in N processes and decode in M, each on its own GPU if there are GPUs.", "prefill=N,decode=M")]
Debug = Annotated[bool, engine_option("--debug", "Check every index that moves, reads or writes KV; slow.")]
GenerationConfig = Annotated[str, sampling_option("--generation-config",
    "auto: generation_config.json of the model gives the defaults of temperature, top_p, top_k, min_p, "
    "repetition_penalty and max_tokens. none: it does not.", "auto|none")]
AsJson = Annotated[bool, output_option("--json", AS_JSON)]
Quiet = Annotated[bool, output_option("--quiet -q", "Print no progress on standard error.")]
# fmt: on


def _session_options(
    draft: Draft = None, algorithm: Algorithm = "auto", steps: Steps = None, topk: Topk = 1, num_draft_tokens: Nodes = None,
    adaptive: Adaptive = None, policy: Policy = None, device: Device = "auto", threads: Threads = None, dtype: Dtype = "auto",
    quantized: Quantized = "auto", overlap: Overlap = None, page_size: PageSize = 1, max_running: MaxRunning = 32,
    context_len: ContextLen = None, kv_dtype: KvDtype = "auto", kv_tokens: KvTokens = None, window_kv: WindowKv = "paged",
    tensor_parallel: TensorParallel = 1, debug: Debug = False,
) -> None:  # fmt: skip
    """Declare the options of a session that commands have in common, with the names of `SessionOptions`."""


SESSION = signature(_session_options, eval_str=True).parameters
with_session_options: Decorator = with_options("session", _session_options)


def session_values(session: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values for `SessionOptions`: checkpoints of the hub are on this machine then. Raises ConfigError."""
    from ...gpu.session.hub import local_checkpoint

    draft, nodes = session["draft"], tree_nodes(session["num_draft_tokens"])
    return {**session, "draft": None if draft is None else local_checkpoint(draft, "draft"), "num_draft_tokens": nodes}


def given_session_options(session: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not the defaults."""
    return {name: value for name, value in session.items() if value != SESSION[name].default}
