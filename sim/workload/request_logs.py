"""Request logs of servers as the rows of a trace: lines of vLLM, lines of SGLang, and OpenTelemetry spans.

    vllm-log    lines of `vllm serve` with --enable-log-requests and --enable-log-outputs: "Request … details" (with
                VLLM_LOGGING_LEVEL=DEBUG) or "Received request …" have the tokens of the prompt, "Generated response …"
                those of the output. Times have whole seconds and no year.
    sglang-log  lines "Finish: obj=…, out={…}" of --log-requests, as text or (--log-requests-format json) as JSON;
                meta_info has the counts of tokens and the time of arrival.
    otlp        spans as JSON of the OpenTelemetry protocol, a document or a line each, with the token counts of the
                semantic conventions for generative AI, or those of earlier conventions.

A log is in the order in which requests end, so it is read as a whole and sorted by arrival. Requests whose prompt or
output it does not tell have 0 tokens, which leaves them out as in every trace.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Any, NamedTuple

from ...core.errors import shown
from ...core.parsing import ParseError, parse_json
from ...observe.input_files import read_lines, read_text

MAX_TOKENS = 1 << 31
VLLM_HELP = (
    "start vLLM with --enable-log-requests --enable-log-outputs and VLLM_LOGGING_LEVEL=DEBUG, so that its log has the "
    "tokens of prompts and outputs"
)
_VLLM = re.compile(
    r"\b[A-Z]+ (?P<time>\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,]\d+)? .*?"
    r"(?P<what>Received request|Generated response|Request) (?P<id>\S+?):? (?:details|prompt|params|output|\(streaming)"
)
_PROMPT_IDS = re.compile(r"prompt[ _]token[ _]ids: \[([^\]]*)")
_OUTPUT_IDS = re.compile(r"output_token_ids: (?:array\('\w', )?[\[(]([^\])]*)")
_SGLANG_TIME = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
_FINISH, _META = "Finish: obj=", "'meta_info': {"
_EVENT = "request.finished"
_FIELD = re.compile(
    r"'(prompt_tokens|completion_tokens|e2e_latency|request_received_ts)': (\d{1,20}(?:\.\d+)?(?:[eE][+-]?\d{1,2})?)\b"
)
_RECEIVED = re.compile(r"\breceived_time=(\d{1,20}(?:\.\d+)?)\b")
_UNIX_S = 1e9  # a time above this is one since 1970, one below it since the machine's start
_TOKEN_KEYS = (
    ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"),
    ("gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens"),
    ("llm.token_count.prompt", "llm.token_count.completion"),
)
_SESSION_KEYS = ("gen_ai.conversation.id", "session.id")


class LogRow(NamedTuple):
    """One request: when it arrived (nanoseconds from any origin), its tokens, and the line that tells of it."""

    time_ns: int
    prompt: int
    output: int
    line: int
    session: str | None = None


class LogProblem(Exception):
    """What is wrong with a log, and in which line; 0 for the log as a whole."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(line, message)
        self.line: int = line
        self.message: str = message


def log_format(lines: Iterable[str]) -> str | None:
    """Return the format of a log that begins with these lines; None if none of them tells."""
    for line in lines:
        if '"resourceSpans"' in line:
            return "otlp"
        if _FINISH in line or (f'"{_EVENT}"' in line and '"meta_info"' in line):
            return "sglang-log"
        if (": params: " in line or ": prompt: " in line) and _VLLM.search(line):
            return "vllm-log"
    return None


def read_log(path: str, name: str) -> list[LogRow]:
    """Return the requests of a log by arrival. Raises LogProblem, and ConfigError for a file that cannot be read."""
    rows = READERS[name](path)
    if not rows:
        raise LogProblem(0, f"no request in this log; {_EXPECTED[name]}")
    if not any(row.prompt and row.output for row in rows):
        raise LogProblem(0, f"{len(rows)} requests, and the tokens of none; {_EXPECTED[name]}")
    return sorted(rows, key=lambda row: (row.time_ns, row.line))


# -- vLLM -------------------------------------------------------------------------------------------------------------


@dataclass
class _Seen:
    """What is known of a request by the lines so far."""

    time: str
    line: int
    prompt: int = 0
    output: int = 0


def _read_vllm(path: str) -> list[LogRow]:
    found: dict[str, _Seen] = {}
    for number, text in enumerate(read_lines(path), 1):
        matched = _VLLM.search(text)
        if matched is None:
            continue
        name, what = matched["id"], matched["what"]
        if what != "Generated response":
            seen = found.setdefault(name, _Seen(matched["time"], number))
            seen.prompt = max(seen.prompt, _count_ids(text, _PROMPT_IDS))
        elif seen_before := found.get(name) or found.get(name.rpartition("-")[0]) or found.get(f"{name}-0"):
            seen_before.output += _count_ids(text, _OUTPUT_IDS)
    times = _times_without_year([(seen.time, seen.line) for seen in found.values()])
    return [
        LogRow(time_ns, seen.prompt, seen.output, seen.line)
        for time_ns, seen in zip(times, found.values(), strict=True)
    ]


def _count_ids(text: str, name: re.Pattern[str]) -> int:
    """Return the number of token ids in the last list of this name, because a prompt may contain the name, too."""
    lists = name.findall(text)
    return lists[-1].rstrip(", ").count(",") + 1 if lists and lists[-1].strip() else 0


def _times_without_year(texts: list[tuple[str, int]]) -> list[int]:
    """Return times `MM-DD HH:MM:SS` in the order of a log as nanoseconds, in a leap year if the log needs one; a month
    that falls by more than half a year begins another year."""
    year = 2024 if any(text.startswith("02-29") for text, _ in texts) else 2025
    times, last = [], 0
    for text, line in texts:
        month = int(text[:2])
        year += month < last - 6
        last = month
        times.append(_nanoseconds(f"{year}-{text}", line))
    return times


def _nanoseconds(text: str, line: int) -> int:
    try:
        moment = datetime.strptime(text, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
    except ValueError:
        raise LogProblem(line, f"{text!r} is no time") from None
    return int(moment.timestamp()) * 10**9


# -- SGLang -----------------------------------------------------------------------------------------------------------


def _read_sglang(path: str) -> list[LogRow]:
    rows = []
    for number, text in enumerate(read_lines(path), 1):
        if _FINISH in text:
            begin = text.rfind(_META)
            fields = _FIELD.findall(text[begin:]) if begin >= 0 else ()
            rows.append(_sglang_row({key: float(value) for key, value in fields}, text, number))
        elif f'"{_EVENT}"' in text:
            entry = _object(text[text.find("{") :], number)
            if entry.get("event") == _EVENT:
                out = entry.get("out")
                meta = out.get("meta_info") if isinstance(out, dict) else None
                rows.append(_sglang_row(_numbers(meta), str(entry.get("timestamp") or text), number))
    return rows


def _numbers(meta: Any) -> dict[str, float]:
    known = meta.items() if isinstance(meta, dict) else ()
    return {key: float(value) for key, value in known if isinstance(value, int | float) and not isinstance(value, bool)}


def _sglang_row(fields: Mapping[str, float], text: str, line: int) -> LogRow:
    prompt, output = (_tokens(fields.get(key, 0.0), line) for key in ("prompt_tokens", "completion_tokens"))
    return LogRow(_sglang_time(fields, text, line), prompt, output, line)


def _sglang_time(fields: Mapping[str, float], text: str, line: int) -> int:
    """Return when a request arrived: as the server says, or when it ended less the time that it took."""
    received = _RECEIVED.search(text)
    for value in (fields.get("request_received_ts", 0.0), float(received[1]) if received else 0.0):
        if value > _UNIX_S:
            return round(value * 1e6) * 1000  # a number of this size has no more digits
    stamp = _SGLANG_TIME.search(text)
    moment = stamp[1] if stamp else text[:19].replace("T", " ")
    return _nanoseconds(moment, line) - round(fields.get("e2e_latency", 0.0) * 1e9)


def _tokens(value: float, line: int) -> int:
    if not 0 <= value < MAX_TOKENS or value != int(value):
        raise LogProblem(line, f"{value:g} tokens; expected a whole number from 0 to 2**31 - 1")
    return int(value)


# -- OpenTelemetry ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Span:
    id: tuple[str, str]
    parent: tuple[str, str]
    line: int
    start: Any
    attributes: Mapping[str, Any]

    @property
    def tokens(self) -> tuple[Any, Any] | None:
        """The tokens of prompt and output; None if the span does not tell them."""
        for prompt, output in _TOKEN_KEYS:
            if prompt in self.attributes and output in self.attributes:
                return self.attributes[prompt], self.attributes[output]
        return None


def _read_otlp(path: str) -> list[LogRow]:
    spans = list(_spans(path))
    parents = {span.id: span.parent for span in spans}
    above: set[tuple[str, str]] = set()  # spans around others that tell tokens: a client's, an agent's
    for span in spans:
        place = span.parent if span.tokens is not None else ("", "")
        while place in parents and place not in above:
            above.add(place)
            place = parents[place]
    rows = []
    for span in spans:
        if span.tokens is not None and span.id not in above:
            prompt, output = (_tokens(_number(value, span.line), span.line) for value in span.tokens)
            session = next((str(span.attributes[key]) for key in _SESSION_KEYS if key in span.attributes), None)
            rows.append(LogRow(int(_number(span.start, span.line)), prompt, output, span.line, session))
    return rows


def _number(value: Any, line: int) -> float | int:
    """Return a number of the protocol's JSON, in which 64-bit integers are texts."""
    if isinstance(value, str) and re.fullmatch(r"\d{1,20}", value):
        return int(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise LogProblem(line, f"found {shown(value)}; expected a whole number, or its digits")


def _spans(path: str) -> Iterator[_Span]:
    first = next((line for line in read_lines(path) if line.strip()), "")
    try:
        parse_json(first, long_integers=True)
    except ParseError:  # one document over many lines
        yield from _spans_of(_object(read_text(path), 1), 1)
        return
    for number, text in enumerate(read_lines(path), 1):
        if text.strip():
            yield from _spans_of(_object(text, number), number)


def _object(text: str, line: int) -> dict[str, Any]:
    try:
        found = parse_json(text, long_integers=True)
    except ParseError as error:
        raise LogProblem(line, f"is not JSON (a truncated line?): {error}") from None
    if not isinstance(found, dict):
        raise LogProblem(line, f"found {shown(found)}; expected an object")
    return found


def _spans_of(document: Mapping[str, Any], line: int) -> Iterator[_Span]:
    resources = _items(document, "resourceSpans", line)
    for scope in chain.from_iterable(_items(resource, "scopeSpans", line) for resource in resources):
        for span in _items(scope, "spans", line):
            trace = str(span.get("traceId"))
            own, parent = (trace, str(span.get("spanId"))), (trace, str(span.get("parentSpanId") or ""))
            yield _Span(own, parent, line, span.get("startTimeUnixNano"), _attributes(span, line))


def _items(around: Mapping[str, Any], key: str, line: int) -> list[Mapping[str, Any]]:
    found = around.get(key) or []
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise LogProblem(line, f"{key}: found {shown(found)}; expected a list of objects")
    return found


def _attributes(span: Mapping[str, Any], line: int) -> dict[str, Any]:
    found = {}
    for one in _items(span, "attributes", line):
        value = one.get("value")
        if isinstance(value, dict) and len(value) == 1:
            found[str(one.get("key"))] = next(iter(value.values()))
    return found


READERS: dict[str, Callable[[str], list[LogRow]]] = {
    "vllm-log": _read_vllm,
    "sglang-log": _read_sglang,
    "otlp": _read_otlp,
}
_EXPECTED = {
    "vllm-log": VLLM_HELP,
    "sglang-log": 'start SGLang with --log-requests, whose lines "Finish: obj=" have meta_info with the tokens',
    "otlp": "expected spans with the attributes gen_ai.usage.input_tokens and gen_ai.usage.output_tokens",
}
