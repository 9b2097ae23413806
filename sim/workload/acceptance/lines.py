"""Reads the lines that servers write into their logs about the accepted drafts of all requests.

SGLang  `accept len: 2.83`, a mean over some rounds. Later releases add an `accept rate`, with one of two meanings, and
        all write the draft steps among their arguments
vLLM    `SpecDecoding metrics`: by position, in the first releases in sum. Its first engine wrote `Speculative metrics`,
        counts since its start
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ....core.errors import count_of
from ....observe.input_files import read_lines
from .logs import MAX_STEPS, AcceptanceLog, wrong

SGLANG_LOG = "SGLang's log lines"
CSV_HEADER = "steps,accept_length"
EXPECTED = (
    "events.jsonl of Foredraft; JSON with vLLM's metrics.speculative_decoding or aiperf's spec_decode_acceptance; a result of "
    "vllm bench serve or SGLang's bench_serving; a Prometheus page with vllm:spec_decode_*, llamacpp:spec_decode_* or "
    "sglang:spec_accept_length; "
    'a log of SGLang with "accept len:" or of vLLM with "SpecDecoding metrics:"; '
    f"or CSV with the header {CSV_HEADER}"
)
_ACCEPT_LEN = re.compile(r"accept len: *([^\s,]*)")
_ACCEPT_RATE = re.compile(r"accept rate: *([^\s,]*)")
_SERVER_ARGS = re.compile(
    r"\bspeculative_(num_steps|eagle_topk)(?:=|['\"]: ?)(\d{1,4})\b"
)  # of a call, or of a dictionary
_VLLM_RATES = re.compile(r"Per-position acceptance rate: ([^\sA-Z,]+(?:, [^\sA-Z,]+)*)")
_RUNNING = re.compile(r"#running-req: *(\d{1,9})\b")
_ACCEPT_RATES = (  # SGLang's meanings of a chain's accept rate: whether both counts have the bonus token, and words
    (1, "accept rate = tokens / (rounds × (steps + 1)), SGLang 0.5.4 to 0.5.10"),
    (0, "accept rate = correct drafts / (rounds × steps), SGLang 0.5.11 and later"),
)
LEAST_OF_TREES = 7  # drafts of a round from which on they are as likely the nodes of a tree as a chain
_ROUNDED = 0.005  # of numbers with two decimals


@dataclass(frozen=True, slots=True)
class MeanAcceptance:
    """Mean accept lengths by draft steps, (steps, tokens per round) each, all requests pooled;
    form and left_out as in `AcceptanceLog`. inferred: what the files do not say but imply, in words."""

    form: str
    means: tuple[tuple[int, float], ...]
    left_out: Mapping[str, int] = field(default_factory=dict)
    inferred: tuple[str, ...] = ()


class _Line(NamedTuple):
    """A line of a log, with its place."""

    path: str
    number: int
    text: str

    def field(self, name: str) -> str | None:
        """Return the text behind a name and a colon, up to the next comma; None without the name."""
        found = re.search(rf"\b{name}: *([^\s,]*)", self.text)
        return None if found is None else found[1].rstrip(".%")

    def value(self, name: str) -> float:
        """Return the number of a field. Raises ConfigError if it is missing."""
        text = self.field(name)
        if text is None:
            raise wrong(self.path, self.number, f"has no {name!r} (a truncated line?)")
        return finite_number(self.path, self.number, name, text)


def read_server_logs(paths: Sequence[str], steps: int | None) -> AcceptanceLog | MeanAcceptance:
    """Read the lines of SGLang servers that have `accept len`, or those of vLLM with `SpecDecoding metrics` or
    `Speculative metrics`.

    steps: the server's draft steps, for logs that do not say them. Errors: ConfigError with file and line.
    """
    lines: dict[str, list[_Line]] = {"SpecDecoding metrics:": [], "Speculative metrics:": [], "accept len:": []}
    arguments: list[_Line] = []
    for path in paths:
        has_any = False
        for number, text in enumerate(read_lines(path), 1):
            kind = next((kind for kind in lines if kind in text), None)
            if kind is not None:
                lines[kind].append(_Line(path, number, text))
                has_any = True
            elif "server_args=" in text:
                arguments.append(_Line(path, number, text))
        if not has_any:
            raise wrong(path, 0, f"unknown format: expected {EXPECTED}")
    kinds = [kind for kind, found in lines.items() if found]
    if len(kinds) > 1:
        raise wrong(
            paths[0], 0, f"lines with {kinds[0][:-1]!r} and with {kinds[1][:-1]!r}: expected those of one server"
        )
    read = {
        "SpecDecoding metrics:": _read_vllm,
        "Speculative metrics:": _read_first_vllm,
        "accept len:": lambda found, given: _read_sglang(found, _steps_of_arguments(arguments, given)),
    }[kinds[0]]
    return read(lines[kinds[0]], steps)


def _read_sglang(lines: Sequence[_Line], steps: int | None) -> MeanAcceptance:
    """Return the mean of lines of SGLang, each weighted by its running requests."""
    lengths: list[float] = []
    rates: list[float] = []
    weights: list[int] = []
    for path, number, text in lines:
        found, rate, running = (pattern.search(text) for pattern in (_ACCEPT_LEN, _ACCEPT_RATE, _RUNNING))
        length = 0.0 if found is None else finite_number(path, number, "accept len", found[1])
        if length:
            lengths.append(checked_length(path, number, "accept len", length, steps or MAX_STEPS))
            rates.append(math.nan if rate is None else finite_number(path, number, "accept rate", rate[1]))
            weights.append(1 if running is None else max(int(running[1]), 1))
    path = lines[0].path
    if not lengths:
        raise wrong(path, 0, "no rounds: every accept len is 0")
    mean = float(np.average(lengths, weights=weights))
    known, inferred = steps_by_rates(path, lengths, rates) if steps is None else (steps, ())
    left_out = {"lines without rounds": len(lines) - len(lengths)} if len(lengths) < len(lines) else {}
    mean = checked_length(path, 0, "the mean accept len", mean, known)
    return MeanAcceptance(f"{SGLANG_LOG}, {len(lengths)} with accept len", ((known, mean),), left_out, inferred)


def _steps_of_arguments(lines: Sequence[_Line], given: int | None) -> int | None:
    """Return the draft steps that SGLang's arguments in its log give, or the given ones. Raises ConfigError for trees,
    and for arguments that contradict each other or the given steps."""
    found = {"num_steps": {} if given is None else {given: "--steps"}, "eagle_topk": {}}
    for path, number, text in lines:
        for name, digits in _SERVER_ARGS.findall(text):
            found[name][int(digits)] = f"{path}, line {number}"
    if len(found["num_steps"]) > 1:
        places = "; ".join(f"{steps} ({place})" for steps, place in found["num_steps"].items())
        raise wrong(lines[0].path, 0, f"draft steps of several settings, {places[:300]}: expected those of one")
    if given is None and (topk := max(found["eagle_topk"], default=1)) > 1:
        message = f"a draft tree of top-{topk}: acceptance is fitted to chains; --steps takes the depth as a chain's"
        raise wrong(lines[0].path, lines[0].number, message)
    return next((steps for steps in found["num_steps"] if 1 <= steps <= MAX_STEPS), None)


def steps_by_rates(path: str, lengths: Sequence[float], rates: Sequence[float]) -> tuple[int, tuple[str, ...]]:
    """Return the draft steps that explain each accept length with its accept rate, and the meaning of the rate by
    which they do. Raises ConfigError if none does, or several."""
    pairs = [(length, rate) for length, rate in zip(lengths, rates, strict=True) if not math.isnan(rate)]
    if not any(rate > 0 for _, rate in pairs):
        raise wrong(path, 0, "does not say how many steps were drafted: give --steps")
    possible = [
        (steps, words)
        for bonus, words in _ACCEPT_RATES
        for steps in range(1, MAX_STEPS + 1)
        if max(lengths) <= steps + 1 + _ROUNDED and all(_explains(steps, bonus, *pair) for pair in pairs)
    ]
    several = sorted({steps for steps, _ in possible})
    if not several:
        message = (
            f"accept length and accept rate fit no whole number of draft steps, 1 ... {MAX_STEPS}, in all of "
            f"{count_of(len(pairs), 'line')} (did the steps change, or is it a tree?): give --steps"
        )
        raise wrong(path, 0, message)
    if len(several) > 1:
        meanings = "; ".join(f"{count_of(steps, 'draft step')} if {words}" for steps, words in possible)
        raise wrong(path, 0, f"does not say its draft steps: {meanings}. Give --steps")
    meanings = " or ".join(words for _, words in possible)
    if several[0] >= LEAST_OF_TREES and max(lengths) <= several[0]:
        message = (
            f"does not say its draft steps: {meanings} for {several[0]} drafts of a round, a chain of {several[0]} steps or "
            f"a tree of {several[0] + 1} nodes with fewer. Give --steps"
        )
        raise wrong(path, 0, message)
    return several[0], (f"{count_of(several[0], 'draft step')}: all of {count_of(len(pairs), 'line')} fit {meanings}",)


def _explains(steps: int, bonus: int, length: float, rate: float) -> bool:
    """Return whether a round of so many steps can have this accept length and this accept rate, as they were
    rounded."""
    slack = _rounding(length) + _rounding(rate) * (steps + bonus)
    return abs(length - 1 + bonus - rate * (steps + bonus)) <= slack


def _rounding(value: float) -> float:
    """Return the most by which a printed number may differ from what was measured: half of its last digit."""
    return max(min(_ROUNDED, 0.5 * 10.0 ** -len(repr(value).partition(".")[2])), 1e-9) + 1e-12


def _read_vllm(lines: Sequence[_Line], steps: int | None) -> AcceptanceLog | MeanAcceptance:
    """Return the rounds of lines with `SpecDecoding metrics`, whose fields have another order in each release."""
    busy = [line for line in lines if line.value("Drafted") > 0]
    left_out = {"lines without rounds": len(lines) - len(busy)} if len(busy) < len(lines) else {}
    if not busy:
        raise wrong(lines[0].path, 0, "no rounds: nothing was drafted")
    if all(_VLLM_RATES.search(line.text) is None for line in busy):  # the first releases have only sums
        if steps is None:
            raise wrong(busy[0].path, busy[0].number, "does not say how many steps were drafted: give --steps")
        accepted, drafted = (sum(line.value(name) for line in busy) for name in ("Accepted", "Drafted"))
        mean = checked_length(busy[0].path, 0, "the mean accept length", 1 + accepted / drafted * steps, steps)
        return MeanAcceptance(f"{_vllm_form(busy)}, in sum", ((steps, mean),), left_out)
    return _log_of_lines(busy, [_reached(line) for line in busy], steps, left_out)


def _vllm_form(lines: Sequence[_Line]) -> str:
    return f"vLLM's log lines, {len(lines)} with SpecDecoding metrics"


def _read_first_vllm(lines: Sequence[_Line], steps: int | None) -> MeanAcceptance:
    """Return the mean of `Speculative metrics`, of vLLM's first engine, which count from its start on. A count that
    falls begins anew."""
    drafted = emitted = 0.0
    settings: set[int] = set() if steps is None else {steps}
    for line, after in zip(lines, [*lines[1:], None], strict=True):
        settings.add(int(line.value("Number of speculative tokens")))
        drafts = line.value("Number of draft tokens")
        if after is None or after.path != line.path or after.value("Number of draft tokens") < drafts:
            drafted += drafts
            emitted += line.value("Number of emitted tokens")
    path = lines[0].path
    if len(settings) > 1 or not 1 <= min(settings) <= MAX_STEPS:
        message = (
            f"{' and '.join(map(str, sorted(settings)))} speculative tokens: expected one number, 1 ... {MAX_STEPS}"
        )
        raise wrong(path, 0, message)
    if not drafted:
        raise wrong(path, 0, "no rounds: nothing was drafted")
    known = settings.pop()
    mean = checked_length(path, 0, "emitted tokens / rounds", emitted / (drafted / known), known)
    return MeanAcceptance(f"vLLM's log lines, {len(lines)} with Speculative metrics", ((known, mean),))


def _reached(line: _Line) -> np.ndarray:
    """Return the rounds of a line of vLLM, and those that accepted position 0, 1, …: float64 [steps + 1]."""
    path, number, text = line
    found = _VLLM_RATES.search(text)
    if found is None:
        raise wrong(path, number, "SpecDecoding metrics without rates by position (a truncated line?)")
    rates = np.array([finite_number(path, number, "acceptance rate", rate) for rate in found[1].split(", ")])
    if len(rates) > MAX_STEPS:
        raise wrong(path, number, f"rates of {len(rates)} positions: expected at most {MAX_STEPS}")
    if rates.min() < 0 or rates[0] > 1 or (np.diff(rates) > 0).any():
        raise wrong(path, number, f"rates {found[1][:80]}: expected numbers that do not rise, 0 ... 1")
    mean, accepted, drafted = (line.value(name) for name in ("Mean acceptance length", "Accepted", "Drafted"))
    if accepted > drafted:
        raise wrong(path, number, f"{accepted:g} accepted of {drafted:g} drafted")
    expected = {1 + rates.sum()}
    if line.field("Avg Draft acceptance rate") is None:  # one of the first releases counts no bonus token
        expected.add(rates.sum())
    if all(abs(one - mean) > 0.006 + 0.0006 * len(rates) for one in expected):
        message = f"mean acceptance length {mean:g}: expected {1 + rates.sum():.2f}, by the rates (a truncated line?)"
        raise wrong(path, number, message)
    rounds = accepted / rates.sum() if rates.sum() else drafted / len(rates)
    return rounds * np.array([1.0, *rates])


def _log_of_lines(
    lines: Sequence[_Line], reached: Sequence[np.ndarray], steps: int | None, left_out: Mapping[str, int]
) -> AcceptanceLog:
    path, lengths = lines[0].path, {len(rounds) - 1 for rounds in reached}
    if len(lengths) > 1:
        message = f"lines of {min(lengths)} and of {max(lengths)} positions: expected those of one setting"
        raise wrong(path, 0, message)
    if steps not in (None, *lengths):
        raise wrong(path, 0, f"its lines have {min(lengths)} positions, but --steps is {steps}: leave --steps out")
    rounds = np.sum(reached, axis=0)
    if rounds[0] < 1:
        raise wrong(path, 0, "no rounds: nothing was drafted")
    return AcceptanceLog(_vllm_form(lines), left_out, counts=-np.diff(np.append(rounds, 0.0)))


def checked_length(path: str, place: int | str, what: str, length: float, steps: int) -> float:
    if not 1 <= length <= steps + 1:
        raise wrong(
            path, place, f"{what} {length:g}: expected 1 (bonus token only) ... {steps + 1}, all {steps} drafts".strip()
        )
    return length


def finite_number(path: str, place: int, what: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or abs(value) > 1e15:
        raise wrong(path, place, f"{what} is {text[:40]!r}: expected a finite number")
    return value
