"""The options of `foretoken generate`, in the groups that its help shows."""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ...core.errors import Problem

MODEL, SPECULATION, PROMPTS = "Model and draft", "Speculation", "Prompts"
SAMPLING, ENGINE, OUTPUT = "Sampling", "Engine and device", "Output"


def option(flags: str, panel: str, text: str, **settings: object) -> typer.models.OptionInfo:
    """Return an option that the help shows in `panel`."""
    return typer.Option(*flags.split(), rich_help_panel=panel, help=text, **{"show_default": False, **settings})


def problems_name_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with problems of its arguments written as `--adaptive: …`, where they have the names of parameters."""

    @wraps(command)
    def run(**arguments: Any) -> None:
        from ...core.errors import ConfigError, ForetokenError

        try:
            command(**arguments)
        except ConfigError as error:
            if error.source != "<arguments>":
                raise
            raise ForetokenError("\n".join(_named(problem, arguments) for problem in error.problems)) from error

    return run


def _named(problem: Problem, parameters: Container[str]) -> str:
    """Return a problem as text, its key as the option that it is a value of."""
    name, dot, rest = problem.key.partition(".")
    if name in parameters:
        return f"--{name.replace('_', '-')}{dot}{rest}: {problem.message}"
    return str(problem) if name.startswith("--") else f"<arguments>: {problem}"


def tree_nodes(text: str | None) -> int | dict[str, int] | None:
    """Return what `--num-draft-tokens` says: one number, or the nodes of each step count. Raises ConfigError."""
    from ...core.errors import ConfigError, Problem

    if text is None:
        return None
    pairs = re.findall(r"([0-9]{1,9}):([0-9]{1,9})(?:,|$)", text)
    if re.fullmatch(r"[0-9]{1,9}", text):
        return int(text)
    if not pairs or ",".join(map(":".join, pairs)) != text or len(dict(pairs)) < len(pairs):
        message = f"{text!r}; expected a whole number, or one for each step count, as in 1:5,3:16"
        raise ConfigError("<arguments>", [Problem("--num-draft-tokens", message)])
    return {steps: int(nodes) for steps, nodes in pairs}


Model = Annotated[
    Path,
    option("--model", MODEL, "Hugging Face checkpoint: a directory, or its name on the hub.", metavar="DIR|ORG/NAME"),
]
Draft = Annotated[
    Path | None,
    option("--draft", MODEL, "Draft checkpoint: a small model, or a head made for the model.", metavar="DIR|ORG/NAME"),
]
Dtype = Annotated[
    str,
    option(
        "--dtype",
        MODEL,
        "float64, float32, float16, bfloat16. auto: the checkpoint's; on a CPU float32 for 16 bits, unless it has native bfloat16.",
        show_default=True,
    ),
]
Algorithm = Annotated[
    str,
    option(
        "--algorithm",
        SPECULATION,
        "STANDALONE, EAGLE, EAGLE3, MULTI_LAYER_EAGLE, NGRAM, NONE or a plugin. auto: by the draft; without one NGRAM on a CPU.",
        metavar="NAME",
        show_default=True,
    ),
]
Steps = Annotated[
    int | None,
    option(
        "--steps",
        SPECULATION,
        "Draft steps per round; 3 by default, of a multi-layer head as many as it has heads. With --adaptive: the first ones.",
    ),
]
Topk = Annotated[
    int, option("--topk", SPECULATION, "Branches per draft step; more than 1 drafts trees.", show_default=True)
]
Nodes = Annotated[
    str | None,
    option(
        "--num-draft-tokens",
        SPECULATION,
        "Nodes of a verify tree, root included, or by steps, as in 1:5,3:16; up to 16 by default.",
        metavar="N|S:N,S:N,…",
    ),
]
Adaptive = Annotated[
    str | None,
    option(
        "--adaptive",
        SPECULATION,
        "Adapt the draft steps: default, with-zero, zero-to-seven, or a JSON file of candidates.",
        metavar="PRESET|FILE",
    ),
]
Policy = Annotated[
    str | None,
    option(
        "--policy",
        SPECULATION,
        "How steps are chosen: ema (by acceptance), goodput (by acceptance and measured cost).",
        metavar="ema|goodput",
    ),
]
PromptText = Annotated[
    str | None,
    option(
        "--prompt",
        PROMPTS,
        "One prompt; its output is streamed. By default standard input.",
        metavar="TEXT",
    ),
]
PromptFile = Annotated[
    Path | None,
    option(
        "--prompts",
        PROMPTS,
        'JSONL, each line {"prompt"|"messages"|"tokens": …, "id", "max_tokens", …}; - is standard input.',
        metavar="FILE",
    ),
]
Chat = Annotated[
    bool,
    option(
        "--chat/--no-chat",
        PROMPTS,
        "Put a text prompt into the model's chat template, as a message of the user.",
        show_default=True,
    ),
]
MaxTokens = Annotated[int, option("--max-tokens", SAMPLING, "Maximal tokens of an output.", show_default=True)]
Temperature = Annotated[float, option("--temperature", SAMPLING, "0 is greedy.", show_default=True)]
TopP = Annotated[
    float,
    option("--top-p", SAMPLING, "Sample from the most likely tokens that make up this probability.", show_default=True),
]
MinP = Annotated[
    float,
    option(
        "--min-p", SAMPLING, "Leave out tokens less likely than this share of the most likely one.", show_default=True
    ),
]
PresencePenalty = Annotated[
    float, option("--presence-penalty", SAMPLING, "Subtracted from logits of tokens in the output.", show_default=True)
]
FrequencyPenalty = Annotated[
    float, option("--frequency-penalty", SAMPLING, "The same, as often as they are in it.", show_default=True)
]
RepetitionPenalty = Annotated[
    float,
    option(
        "--repetition-penalty", SAMPLING, "Divides logits of tokens in prompt or output; 1 is off.", show_default=True
    ),
]
JsonSchema = Annotated[
    Path | None, option("--json-schema", SAMPLING, "The output is JSON that this schema allows.", metavar="FILE")
]
LarkGrammar = Annotated[
    Path | None,
    option("--grammar", SAMPLING, "The output is a text of this grammar in Lark's notation.", metavar="FILE"),
]
TopK = Annotated[
    int, option("--top-k", SAMPLING, "Sample from that many most likely tokens; 0: from all.", show_default=True)
]
Seed = Annotated[
    int, option("--seed", SAMPLING, "Seed of every draw; equal seeds give equal outputs.", show_default=True)
]
Stop = Annotated[
    list[str] | None,
    option("--stop", SAMPLING, "Text that ends an output and is left out of it; repeatable.", metavar="TEXT"),
]
IgnoreEos = Annotated[bool, option("--ignore-eos", SAMPLING, "Continue after the end of text, up to --max-tokens.")]
Device = Annotated[
    str, option("--device", ENGINE, "cpu, cuda, cuda:1. auto: a GPU if there is one.", show_default=True)
]
Disaggregate = Annotated[
    str | None,
    option(
        "--disaggregate",
        ENGINE,
        "Prefill and decode in N and M processes, each on its own GPU if there are any; KV goes from pool to pool.",
        metavar="prefill=N,decode=M",
    ),
]
Threads = Annotated[
    int | None,
    option("--threads", ENGINE, "Threads on a CPU; by default one for small models, else all cores.", min=1),
]
Overlap = Annotated[
    bool | None,
    option("--overlap/--synchronous", ENGINE, "Plan a step while the previous one runs; the default on a GPU."),
]
PageSize = Annotated[int, option("--page-size", ENGINE, "Tokens of a KV page.", show_default=True)]
MaxRunning = Annotated[int, option("--max-running", ENGINE, "Requests decoded together.", show_default=True)]
ContextLen = Annotated[
    int | None,
    option("--context-len", ENGINE, "Tokens of a prompt with its output; by default what the prompts need."),
]
KvTokens = Annotated[
    int | None,
    option("--kv-tokens", ENGINE, "KV slots of the pool; by default what the running requests need."),
]
Debug = Annotated[bool, option("--debug", ENGINE, "Check every index that moves or writes KV; slow.")]
Logprobs = Annotated[bool, option("--logprobs", OUTPUT, "Log-probability of each token; the output is JSON.")]
Json = Annotated[bool, option("--json", OUTPUT, "Print a line of JSON per prompt, as for --prompts.")]
Stats = Annotated[bool, option("--stats", OUTPUT, "Print accept length, tokens/s and time by phase on standard error.")]
Out = Annotated[
    Path | None,
    option("--out", OUTPUT, "Write events.jsonl, outputs.jsonl and summary.json to this directory.", metavar="DIR"),
]
Quiet = Annotated[bool, option("--quiet -q", OUTPUT, "No progress on standard error.")]
