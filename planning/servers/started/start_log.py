"""Reads the lines that vLLM, SGLang and TensorRT-LLM log when they start: release, model, devices, and the memory that
the server found.

Their gigabytes are binary, also where they are written "GB". A group of devices logs the same line several times. vLLM
takes the least memory of its devices for all of them; TensorRT-LLM first makes a small pool to measure with, so its
last one counts. Published logs of vLLM 0.7 to 0.28, SGLang 0.4 to 0.5.10 and TensorRT-LLM 1.0 to 1.3 have these lines,
and so do the sources of vLLM 0.33 and SGLang 0.5.23.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ....core.errors import ConfigError
from ....observe.input_files import read_lines

GIB = 1 << 30
ALIKE = 0.1  # by which the pools of one start may differ among its devices
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_RANK = re.compile(r"\b(?:DP|PP|TP|EP)\d+\b|\bRANK \d+\b|\brank=?\d+\b")


class Fact(NamedTuple):
    """What a line says. `line`: its number, from 1 on."""

    value: Any
    line: int


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of a server. `read` makes the value of a match. `keep` says which of several values counts: "one" if they
    must be equal, "least" or "most", "last", "rank" for the sum of those of one device, "all" for all of them."""

    fact: str
    pattern: re.Pattern[str]
    read: Callable[[str], Any]
    keep: str = "one"


@dataclass(frozen=True)
class StartLog:
    """The start of one server.

    `facts`, as far as the log has them: release, model, tensor, groups (data-parallel), stages, drafts (the algorithm,
    None without one), graph_sizes, no_graphs, weight_bytes, kv_bytes and kv_tokens of a device. `earlier`: starts that
    the file has before this one.
    """

    source: str
    server: str
    facts: Mapping[str, Fact]
    earlier: int = 0

    def value(self, name: str, default: Any = None) -> Any:
        """Return what the log says, or `default`."""
        return self.facts[name].value if name in self.facts else default

    def place(self, name: str) -> str:
        """Return the file and the number of the line that says it."""
        return f"{self.source}:{self.facts[name].line}"


def _argument(name: str, value: str) -> re.Pattern[str]:
    """Return the pattern of one of SGLang's arguments, printed as a call or a dictionary of Python."""
    return re.compile(rf"server_args=.*?(?<![\w-]){name}['\"]?\s*[=:]\s*{value}")


def _trtllm_argument(name: str) -> re.Pattern[str]:
    return re.compile(rf"\b(?:LLM Args|LlmArgs)\b.*?\b{name}=['\"]?([^'\",)\s]+)")


def _gib(text: str) -> int:
    return round(float(text) * GIB)


def _count(text: str) -> int:
    return int(text.replace(",", ""))


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(one) for one in re.findall(r"\d{1,7}", text)}))


def _drafts(text: str) -> str | None:
    word = text.strip("'\"")
    return None if word in ("None", "null") else word


def _true(text: str) -> bool:
    return text == "True"


_ASKED_MODEL = "asked_model"
"""The fact of the model that vLLM was asked for: counts where a log has lost the line of the engine."""
_NUMBER, _SWITCH = r"(\d{1,6})", r"(True|False)"
_VLLM = (
    _Line("release", re.compile(r"(?:LLM engine|server version|█ +version) \(?v?(\d+(?:\.\d+)+)"), str),
    _Line("model", re.compile(r"with config: model=['\"]([^'\"]+)"), str),
    _Line(_ASKED_MODEL, re.compile(r"non-default args: .*?['\"]model(?:_tag)?['\"]: ['\"]([^'\"]+)"), str),
    _Line("tensor", re.compile(r"with config: .*\btensor_parallel_size=(\d{1,6})"), int),
    _Line("stages", re.compile(r"with config: .*\bpipeline_parallel_size=(\d{1,6})"), int),
    _Line("groups", re.compile(r"with config: .*\bdata_parallel_size=(\d{1,6})"), int),
    _Line("drafts", re.compile(r"\bspeculative_config=(None\b|SpeculativeConfig\b)"), _drafts),
    _Line("no_graphs", re.compile(r"with config: .*\benforce_eager=(True|False)"), _true),
    _Line("graph_sizes", re.compile(r"cudagraph_capture_sizes['\"]?\s*[=:]\s*\[([\d,\s]*)\]"), _sizes),
    _Line("weight_bytes", re.compile(r"[Mm]odel (?:loading took|weights take|weights took) ([\d.]+) ?Gi?B"), _gib, "most"),
    _Line("kv_bytes", re.compile(r"Available KV cache memory: (-?[\d.]+) GiB"), _gib, "least"),
    _Line("kv_bytes", re.compile(r"reserved ([\d.]+) GiB memory for KV Cache"), _gib, "least"),
    _Line("kv_tokens", re.compile(r"KV cache size: ([\d,]+) tokens"), _count, "least"),
)  # fmt: skip
_SGLANG = (
    _Line("release", re.compile(r"(?i:sglang version) v?(\d+(?:\.\d+)+)"), str),
    _Line("model", _argument("model_path", r"['\"]?([^'\",)]+)"), str),
    _Line("tensor", _argument("tp_size", _NUMBER), int),
    _Line("stages", _argument("pp_size", _NUMBER), int),
    _Line("groups", _argument("dp_size", _NUMBER), int),
    _Line("shares_groups", _argument("enable_dp_attention", _SWITCH), _true),
    _Line("drafts", _argument("speculative_algorithm", r"(None|null|['\"]\w+['\"])"), _drafts),
    _Line("no_graphs", _argument("disable_cuda_graph", _SWITCH), _true),
    _Line("graph_sizes", re.compile(r"Capture cuda graph bs \[([\d,\s]*)\]"), _sizes),
    _Line("weight_bytes", re.compile(r"Load weight end\..*\bmem usage=([\d.]+) GB"), _gib, "rank"),
    _Line("kv_bytes", re.compile(r"\bK size: ([\d.]+) GB"), _gib, "rank"),
    _Line("kv_bytes", re.compile(r"\bV size: ([\d.]+) GB"), _gib, "rank"),
    _Line("kv_bytes", re.compile(r"\bKV size: ([\d.]+) GB"), _gib, "rank"),
    _Line("kv_bytes", re.compile(r"\bconv_state size: ([\d.]+) ?GB"), _gib, "rank"),
    _Line("kv_bytes", re.compile(r"\bssm_state size: ([\d.]+) ?GB"), _gib, "rank"),
    _Line("kv_tokens", re.compile(r"\bmax_total_num_tokens=(\d{1,12})"), _count, "least"),
)
_TRTLLM = (
    _Line("release", re.compile(r"TensorRT[- ]LLM version: (\d+(?:\.\d+)+)"), str),
    _Line("model", _trtllm_argument("model"), str),
    _Line("tensor", _trtllm_argument("tensor_parallel_size"), int),
    _Line("stages", _trtllm_argument("pipeline_parallel_size"), int),
    _Line("weight_bytes", re.compile(r"Use ([\d.]+) GB for model weights"), _gib, "most"),
    _Line("graph_sizes", re.compile(r"CUDA graph warmup for batch size=(\d{1,6})"), _sizes, "all"),
    _Line("kv_bytes", re.compile(r"Allocated ([\d.]+) GiB for max tokens in paged KV cache"), _gib, "last"),
    _Line("kv_tokens", re.compile(r"for max tokens in paged KV cache \((\d{1,12})\)"), _count, "last"),
)
_BEGINS = {
    "vllm": re.compile(r"non-default args: |LLM engine \(v|server version \d|█ +version "),
    "sglang": re.compile(r"\bserver_args="),
    "trtllm": re.compile(r"TensorRT[- ]LLM version: "),
}
_LINES = {"vllm": _VLLM, "sglang": _SGLANG, "trtllm": _TRTLLM}
_OF_MEMORY = {"kv_tokens", "kv_bytes", "weight_bytes"}
Said = dict[str, list[tuple[Fact, str]]]
"""What a log says, by fact: the values with the devices that say them."""

_EXPECTED = (
    'has no line of a server\'s start; expected lines of vLLM ("GPU KV cache size: … tokens"), SGLang '
    '("max_total_num_tokens=…") or TensorRT-LLM ("Allocated … GiB for max tokens in paged KV cache")'
)


def read_start_log(path: str) -> StartLog:
    """Read the log of a server, of several starts the last one. Raises ConfigError if it has none, or the starts of two
    servers."""
    found: dict[str, Said] = {server: {} for server in _LINES}
    earlier = dict.fromkeys(_LINES, 0)
    for number, text in enumerate(read_lines(path), 1):
        text = _COLOURS.sub("", text)
        for server, lines in _LINES.items():
            if found[server].keys() & _OF_MEMORY and _BEGINS[server].search(text):
                found[server], earlier[server] = {}, earlier[server] + 1
            for line in lines:
                if (match := line.pattern.search(text)) is not None:
                    said = (Fact(line.read(match[1]), number), _rank_of(text))
                    found[server].setdefault(line.fact, []).append(said)
    tells = {server: facts for server, facts in found.items() if facts.keys() & _OF_MEMORY}
    if not tells:
        raise ConfigError.of(path, "", _EXPECTED)
    if len(tells) > 1:
        places = " and ".join(f"{server} (line {_first(facts)})" for server, facts in tells.items())
        raise ConfigError.of(path, "", f"has the starts of {places}; keep the lines of one server")
    ((server, facts),) = tells.items()
    if (asked := facts.pop(_ASKED_MODEL, None)) is not None:
        facts.setdefault("model", asked)
    keep = {line.fact: line.keep for line in _LINES[server]}
    kept = {fact: _kept(path, fact, keep[fact], all_) for fact, all_ in facts.items()}
    return StartLog(path, server, kept, earlier[server])


def _rank_of(text: str) -> str:
    """Return the device of a line as the server names it."""
    return " ".join(_RANK.findall(text[:200]))


def _first(facts: Said) -> int:
    return min(each.line for all_ in facts.values() for each, _ in all_)


def _kept(path: str, name: str, keep: str, all_: list[tuple[Fact, str]]) -> Fact:
    """Return which of several values counts, or raise ConfigError if the servers that say them differ."""
    facts = [fact for fact, _ in all_]
    if keep == "last":
        return facts[-1]
    if keep == "all":
        return Fact(tuple(sorted({size for fact in facts for size in fact.value})), facts[0].line)
    if keep == "rank":
        sums: dict[str, int] = {}
        for fact, rank in all_:
            sums[rank] = sums.get(rank, 0) + fact.value
        return Fact(max(sums.values()), facts[0].line)
    if keep == "most":
        return max(facts, key=lambda fact: fact.value)
    first = min(facts, key=lambda fact: fact.value) if keep == "least" else facts[0]
    margin = ALIKE * abs(first.value) if keep == "least" else 0
    other = next((f for f in facts if f.value != first.value and (not margin or f.value - first.value > margin)), None)
    if other is not None:
        one, two = sorted((first, other), key=lambda fact: fact.line)
        message = f"{one.value} in line {one.line}, {two.value} in line {two.line}; keep the lines of one start"
        raise ConfigError.of(path, name, message)
    return first
