"""The options of a session, each declared once: type, default, text, known values, least value, and when it does
nothing. The commands that decode have an option for each that has a text (`cli/decode/options.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ...core.errors import Problem, nearest

AUTO = "auto"
KEEP, UNPACK, INT8 = "keep", "unpack", "int8"
FP8 = "fp8"
POLICIES = ("ema", "goodput", "confidence")
ACCEPT_RULES = ("target", "rejection", "block")
PAGED, RING = "paged", "ring"
OPS = (AUTO, "torch", "triton", "flashinfer")
_, TORCH, TRITON, FLASHINFER = OPS

MODEL, SPECULATION, ENGINE = "Model and draft", "Speculation", "Engine and device"  # of the commands' help


@dataclass(frozen=True, slots=True)
class DeclaredOption:
    """What an option of a session declares beside type and default.

    Attributes:
        text: The help of a command; "" for what no command lets a user choose.
        panel: The panel of the help.
        metavar: The placeholder of the value in the help.
        flags: The names of the option, if it is not the field's own with dashes.
        known: All values, beside None.
        least: The least number.
        unused: Why it does nothing, by the name of a reason of `plan.without_effect`.
    """

    text: str = ""
    panel: str = ENGINE
    metavar: str | None = None
    flags: str = ""
    known: Sequence[str] = ()
    least: int | None = None
    unused: str = ""


def _about(text: str = "", panel: str = ENGINE, metavar: str | None = None, **more: Any) -> dict[str, DeclaredOption]:
    return {"declared": DeclaredOption(text, panel, metavar, **more)}


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """What a user may choose. Lengths in tokens; None or "auto" leaves the choice to the session."""

    model: Path = field(
        metadata=_about("Hugging Face checkpoint: a directory, or its name on the hub.", MODEL, "DIR|ORG/NAME")
    )
    draft: Path | None = field(
        default=None,
        metadata=_about("Draft checkpoint: a small model, or a head trained for the model.", MODEL, "DIR|ORG/NAME"),
    )
    algorithm: str = field(
        default=AUTO,
        metadata=_about(
            "STANDALONE, EAGLE, EAGLE3, MULTI_LAYER_EAGLE, NGRAM, NONE or a plugin. auto: the algorithm of the draft; "
            "without a draft NGRAM on a CPU and NONE on a GPU.",
            SPECULATION,
            "NAME",
        ),
    )
    steps: int | None = field(
        default=None,
        metadata=_about(
            "Draft steps per round; with --adaptive, the number to begin with. Default: 3, or the number of heads of a "
            "multi-layer draft.",
            SPECULATION,
            least=0,
            unused="drafts_nothing",
        ),
    )
    topk: int = field(
        default=1,
        metadata=_about("Branches per draft step; with more than 1 the drafts are trees.", SPECULATION, least=1),
    )
    num_draft_tokens: int | dict[str, int] | None = field(
        default=None,
        metadata=_about(
            "Nodes of a verify tree, root included: one number, or numbers by steps as in 1:5,3:16. Default: up to 16.",
            SPECULATION,
            "N|S:N,S:N,…",
            unused="drafts_nothing",
        ),
    )
    adaptive: str | None = field(
        default=None,
        metadata=_about(
            "Adapt the draft steps by a table: default, with-zero, zero-to-seven, or a JSON file.",
            SPECULATION,
            "PRESET|FILE",
            unused="drafts_nothing",
        ),
    )
    policy: str | None = field(
        default=None,
        metadata=_about(
            "How the controller chooses steps: ema (by acceptance), goodput (by acceptance and measured cost), "
            "confidence (also how many drafts each row verifies, by what the draft model says of each one and by measured "
            "cost; with --steps that many are drafted in every round).",
            SPECULATION,
            "ema|goodput|confidence",
            known=POLICIES,
            unused="drafts_nothing",
        ),
    )
    round_times: str | None = field(
        default=None,
        metadata=_about(
            "With --policy confidence and --steps: choose by the times of rounds in SGLang's file "
            "(--speculative-dspark-sps-table-path). Default: they are measured when the session opens.",
            SPECULATION,
            "FILE",
            unused="ignores_confidences",
        ),
    )
    confidence_temperatures: str | None = field(
        default=None,
        metadata=_about(
            "With --policy confidence: read confidences by the temperatures in SGLang's file "
            "(--speculative-dspark-confidence-sts-path). Default: how to read them is learned.",
            SPECULATION,
            "FILE",
            unused="ignores_confidences",
        ),
    )
    accept_rule: str | None = field(
        default=None,
        metadata=_about(
            "Which drafts of requests that sample are kept. target: the draft's likeliest tokens, by the model's "
            "probabilities alone. rejection, block: chains that the draft draws, by both models' probabilities. Default: "
            "target.",
            SPECULATION,
            "target|rejection|block",
            known=ACCEPT_RULES,
            unused="draws_nothing",
        ),
    )
    device: str = field(
        default=AUTO, metadata=_about("cpu, cuda, or a GPU such as cuda:1. auto: a GPU if there is one, else the CPU.")
    )
    ops: str = field(
        default=AUTO,
        metadata=_about(
            "What computes: triton (the kernels, in CUDA graphs), torch (plain torch), flashinfer (on a GPU: attention "
            "and the filters of sampling by FlashInfer, where it has them, the kernels for the rest). auto: triton on a GPU; "
            "on a CPU torch, and compiled loops for small passes.",
            metavar="auto|torch|triton|flashinfer",
            known=OPS,
        ),
    )
    # Of torch, in the whole process.
    threads: int | None = field(
        default=None,
        metadata=_about(
            "Threads on a CPU. Default: one for small models, else one for each idle core that this process may use.",
            least=1,
            unused="not_the_cpu",
        ),
    )
    # AUTO: on a CPU float32 for 16 bits, unless it has native bfloat16 and the model is large.
    dtype: str = field(
        default=AUTO,
        metadata=_about(
            "float64, float32, float16, bfloat16. auto: the checkpoint's dtype; on a CPU without native bfloat16, float32 "
            "instead of 16-bit dtypes.",
            MODEL,
        ),
    )
    # KEEP has products read the matrices as they are stored, UNPACK makes them weights of `dtype`. INT8 then rounds all
    # large matrices but those of experts to 8-bit integers, and what is multiplied with them.
    quantized: str = field(
        default=AUTO,
        metadata=_about(
            "Quantized weights: keep (read as they are stored), unpack (into --dtype when they are loaded). auto: keep on "
            "a GPU, unpack on a CPU. int8, on a CPU: round all large weights to 8-bit integers, which is faster and less "
            "exact.",
            MODEL,
            "keep|unpack|int8",
            known=(AUTO, KEEP, UNPACK, INT8),
        ),
    )
    overlap: bool | None = field(
        default=None,
        metadata=_about(
            "Plan a step while the previous one runs. Default: on a GPU only.",
            flags="--overlap/--synchronous",
            unused="no_overlap",
        ),
    )
    page_size: int = field(default=1, metadata=_about("Tokens of a KV page.", least=1))
    max_running: int = field(default=32, metadata=_about("Most requests that are decoded together.", least=1))
    context_len: int | None = field(
        default=None,
        metadata=_about(
            "Most tokens of a prompt and its output together. Default: as many as the prompts need; for a server the "
            "model's maximum.",
            least=2,
        ),
    )
    kv_dtype: str = field(
        default=AUTO,
        metadata=_about(
            "Numbers that keys and values are kept in: fp8 (E4M3, with the checkpoint's scales), auto (those of --dtype).",
            metavar="auto|fp8",
            known=(AUTO, FP8),
        ),
    )
    kv_tokens: int | None = field(
        default=None, metadata=_about("KV slots of the pool. Default: as many as the running requests need.", least=1)
    )
    window_kv: str = field(
        default=PAGED,
        metadata=_about(
            "KV of layers with sliding windows: paged (as that of other layers), ring (what a window sees and no more; no "
            "request takes a prefix from another).",
            metavar="paged|ring",
            known=(PAGED, RING),
        ),
    )
    tensor_parallel: int = field(
        default=1, metadata=_about("Divide the model among so many GPUs, or processes on a CPU.", metavar="N", least=1)
    )
    debug: bool = field(default=False, metadata=_about("Check every index that moves, reads or writes KV; slow."))
    chunk_size: int = field(default=2048, metadata=_about(least=1))
    prefix_cache: bool = True
    memory_fraction: float = 0.85  # of the device's free memory, weights included
    seed: int = field(default=0, metadata=_about(least=0))
    # Rounds per plan; default: 8 on a CPU, 1 on a GPU, where overlap hides the host.
    multi_step_rounds: int | None = field(default=None, metadata=_about(least=1))
    graphs: bool | None = None  # capture rounds as CUDA graphs; default: on a GPU, unless debugging


DECLARED: dict[str, DeclaredOption] = {
    one.name: one.metadata["declared"] for one in fields(SessionOptions) if "declared" in one.metadata
}


def wrong_values(options: SessionOptions) -> list[Problem]:
    """Return every option with an unknown value or one below the least."""
    problems = []
    for name, declared in DECLARED.items():
        value = getattr(options, name)
        if value is None:
            continue
        if declared.known and value not in declared.known:
            known = ", ".join(declared.known)
            problems.append(Problem(name, f"{value!r} is none of {known}{nearest(value, declared.known)}"))
        elif declared.least is not None and value < declared.least:
            problems.append(Problem(name, f"must be at least {declared.least}, got {value}"))
    return problems
