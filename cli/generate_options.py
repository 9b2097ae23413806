"""The options of `foretoken generate`, in the groups that its help shows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MODEL, SPECULATION, PROMPTS = "Model and draft", "Speculation", "Prompts"
SAMPLING, ENGINE, OUTPUT = "Sampling", "Engine and device", "Output"


def option(flags: str, panel: str, text: str, **settings: object) -> typer.models.OptionInfo:
    """Return an option that the help shows in `panel`."""
    return typer.Option(*flags.split(), rich_help_panel=panel, help=text, **{"show_default": False, **settings})


Model = Annotated[
    Path, option("--model", MODEL, "Hugging Face checkpoint: config.json, safetensors, tokenizer.json.", metavar="DIR")
]
Draft = Annotated[
    Path | None,
    option("--draft", MODEL, "Draft checkpoint: a small model, or a head made for the model.", metavar="DIR"),
]
Dtype = Annotated[
    str,
    option(
        "--dtype",
        MODEL,
        "float64, float32, float16, bfloat16. auto: the checkpoint's, at least float32 on a CPU.",
        show_default=True,
    ),
]
Algorithm = Annotated[
    str,
    option(
        "--algorithm",
        SPECULATION,
        "STANDALONE, EAGLE, EAGLE3, MULTI_LAYER_EAGLE, NGRAM, NONE or a plugin. auto: by the draft.",
        metavar="NAME",
        show_default=True,
    ),
]
Steps = Annotated[
    int | None,
    option(
        "--steps", SPECULATION, "Draft steps per round; 3 if nothing is said. Where they adapt: those to begin with."
    ),
]
Topk = Annotated[
    int, option("--topk", SPECULATION, "Branches per draft step; more than 1 drafts trees.", show_default=True)
]
Nodes = Annotated[
    int | None,
    option(
        "--num-draft-tokens", SPECULATION, "Nodes of a verify tree, its root included; up to 16 if nothing is said."
    ),
]
Adaptive = Annotated[
    str | None,
    option(
        "--adaptive",
        SPECULATION,
        "Steps that adapt: default, with-zero, or a JSON file of candidates.",
        metavar="PRESET|FILE",
    ),
]
Policy = Annotated[
    str | None,
    option(
        "--policy",
        SPECULATION,
        "What chooses the steps: ema (by acceptance), goodput (by acceptance and measured cost).",
        metavar="ema|goodput",
    ),
]
PromptText = Annotated[
    str | None,
    option(
        "--prompt",
        PROMPTS,
        "One prompt; the answer is streamed. Without --prompt and --prompts: standard input.",
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
        "A text prompt is the message of a user, in the model's chat template.",
        show_default=True,
    ),
]
MaxTokens = Annotated[int, option("--max-tokens", SAMPLING, "Most tokens of an output.", show_default=True)]
Temperature = Annotated[float, option("--temperature", SAMPLING, "0 is greedy.", show_default=True)]
TopP = Annotated[
    float,
    option("--top-p", SAMPLING, "Sample from the most likely tokens that make up this probability.", show_default=True),
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
IgnoreEos = Annotated[bool, option("--ignore-eos", SAMPLING, "Go on past the end of text, up to --max-tokens.")]
Device = Annotated[
    str, option("--device", ENGINE, "cpu, cuda, cuda:1. auto: a GPU if there is one.", show_default=True)
]
Disaggregate = Annotated[
    str | None,
    option(
        "--disaggregate",
        ENGINE,
        "Prefill and decode in processes of their own, so many of each; KV goes from pool to pool. On GPUs each has one of its own.",
        metavar="prefill=N,decode=M",
    ),
]
Threads = Annotated[
    int | None,
    option("--threads", ENGINE, "Threads on a CPU; one for small models, else all cores, if nothing is said.", min=1),
]
Overlap = Annotated[
    bool | None,
    option("--overlap/--synchronous", ENGINE, "Plan a step while the one before runs; the default on a GPU."),
]
PageSize = Annotated[int, option("--page-size", ENGINE, "Tokens of a KV page.", show_default=True)]
MaxRunning = Annotated[int, option("--max-running", ENGINE, "Requests that are decoded together.", show_default=True)]
ContextLen = Annotated[
    int | None,
    option("--context-len", ENGINE, "Tokens of a prompt with its output; what the prompts need if nothing is said."),
]
KvTokens = Annotated[
    int | None,
    option("--kv-tokens", ENGINE, "Size of the KV pool; what the running requests need if nothing is said."),
]
Debug = Annotated[bool, option("--debug", ENGINE, "Check every index that moves or writes KV; slow.")]
Logprobs = Annotated[bool, option("--logprobs", OUTPUT, "Log-probability of each token; the output is JSON.")]
Json = Annotated[bool, option("--json", OUTPUT, "A line of JSON per prompt, as for --prompts.")]
Stats = Annotated[
    bool, option("--stats", OUTPUT, "Accept length, tokens/s and where the time went, on standard error.")
]
Out = Annotated[
    Path | None, option("--out", OUTPUT, "Keep events.jsonl, outputs.jsonl and summary.json here.", metavar="DIR")
]
Quiet = Annotated[bool, option("--quiet -q", OUTPUT, "No progress on standard error.")]
