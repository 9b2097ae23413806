"""The arguments of servers that a key of a scenario is read from and written to: part of the key's type (`Annotated`).

`planning/servers/declared.py` reads and writes by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from ...core.model_shape import KV_FORMATS

NOTHING: Any = object()
WORD = "word"

STATES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "auto": None}
"""Formats of recurrent states as servers name them -> our names."""
SGLANG_KV = {
    "auto": None,
    **dict.fromkeys(("fp8_e4m3", "fp8_e5m2"), "fp8"),
    **dict.fromkeys(("nvfp4", "fp4_mx_block16", "fp4_e2m1"), "nvfp4"),  # 8-bit scales of 16 elements
    "mxfp8": "mxfp8",
    "bf16": "bf16",
    "bfloat16": "bf16",
}
VLLM_KV = {
    "auto": None,
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc"), "fp8"),
    "bfloat16": "bf16",
    "float16": "fp16",
    "nvfp4_4over6": "nvfp4",
    **{name: name for name in KV_FORMATS if name not in ("fp8", "mxfp8", "bf16", "fp16")},
}
TRTLLM_KV = {"auto": None, "fp8": "fp8", "nvfp4": "nvfp4", "bfloat16": "bf16", "float16": "fp16"}
OTHER_KV = "KV in {} has no price here"
SGLANG_WEIGHTS = {
    **dict.fromkeys(("fp8", "w8a8_fp8", "modelopt_fp8"), "fp8"),
    **dict.fromkeys(("awq", "awq_marlin", "gptq", "gptq_marlin"), "int4"),
    "w8a8_int8": "int8",
    "modelopt_fp4": "nvfp4",
    "mxfp4": "mxfp4",
    "mxfp8": "mxfp8",
}
VLLM_WEIGHTS = {
    **dict.fromkeys(("fp8", "fbgemm_fp8", "ptpc_fp8", "modelopt"), "fp8"),
    **dict.fromkeys(("fp8_per_tensor", "fp8_per_block", "fp8_per_channel"), "fp8"),
    **dict.fromkeys(("awq", "awq_marlin", "gptq", "gptq_marlin"), "int4"),
    **dict.fromkeys(("experts_int8", "int8_per_channel_weight_only"), "int8"),
    **dict.fromkeys(("mxfp4", "gpt_oss_mxfp4"), "mxfp4"),
    **dict.fromkeys(("mxfp8", "modelopt_mxfp8"), "mxfp8"),
    "modelopt_fp4": "nvfp4",
}
OTHER_WEIGHTS = "{} has no price here; the checkpoint's own format is taken, or give model.weight_dtype"
DTYPES = {"auto": None, "bfloat16": None, "half": "fp16", "float16": "fp16"}
OTHER_DTYPE = "32-bit weights have no price here"
VLLM_PAGE, TRTLLM_PAGE = 16, 32
FREE_FRACTION = 0.9


class Usage(NamedTuple):
    """An argument as in a line of usage: its name without dashes, its other spellings, the key of the object that it
    takes ("": it takes none, or all of it is read), and what follows it ("", "N" or "N...")."""

    name: str
    other_names: tuple[str, ...]
    path: str
    value: str

    def __str__(self) -> str:
        return f"{self.name}.{self.path}" if self.path else self.name


@dataclass(frozen=True, slots=True)
class Flags:
    """How a key is read from the launch command of a server, and written to it.

    Attributes:
        server: sglang, vllm or trtllm.
        names: As in a line of usage: "page-size N" takes a value, "cuda-graph-bs-decode N..." a list, "enforce-eager"
            none. Other spellings, such as those of earlier releases, follow after bars ("nnodes|n N"); the key of an
            argument that takes an object follows after a dot ("kv-cache-config.max_tokens N"). The first argument that
            is given is read; the first one is written.
        by: The function of the server's module that reads them, without the underscore in front of it; "": they are
            read as declared here.
        form: How a value is read and written: a row of `FORMS` in `planning/servers/declared.py`. WORD: only `words`
            are values.
        words: The server's words, or the states of a switch, -> values of the key; None: the key stays as it is.
        otherwise: Why another word is not modelled, where {} stands for it; "": another word is refused.
        usual: The value of the key without these arguments.
        writes: Whether the key is written as declared here; an exporter writes the others.
    """

    server: str
    names: tuple[str, ...]
    by: str
    form: str
    words: Mapping[Any, Any]
    otherwise: str
    usual: Any
    writes: bool

    @property
    def usages(self) -> tuple[Usage, ...]:
        return tuple(map(_usage, self.names))


@cache
def _usage(text: str) -> Usage:
    argument, _, value = text.partition(" ")
    spellings, _, path = argument.partition(".")
    name, *others = spellings.split("|")
    return Usage(name, tuple(others), path, value)


def _flags(
    server: str,
    names: tuple[str, ...],
    by: str = "",
    form: str | None = None,
    words: Mapping[Any, Any] = MappingProxyType({}),
    otherwise: str = "",
    usual: Any = NOTHING,
    writes: bool | None = None,
) -> Flags:
    usual_form = WORD if words else "integer"
    return Flags(server, names, by, form or usual_form, words, otherwise, usual, not by if writes is None else writes)


def sglang(*names: str, **how: Any) -> Flags:
    return _flags("sglang", names, **how)


def vllm(*names: str, **how: Any) -> Flags:
    return _flags("vllm", names, **how)


def trtllm(*names: str, **how: Any) -> Flags:
    return _flags("trtllm", names, **how)
