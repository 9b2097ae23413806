"""Reads the logs of servers about the accepted drafts of each request, and fits the acceptance process to them.

events      `events.jsonl` of `foredraft simulate` and `generate`: every round of every request, in order
responses   of vLLM under `--per-request-spec-decode-metrics`, JSON or JSON lines, with `metrics.speculative_decoding`,
            and aiperf's `profile_export.jsonl` with `spec_decode_acceptance`: every round under `detailed`, a histogram
            per request under `summary`

`means.py` reads the numbers that servers give for all requests together. A file that contradicts itself, or
breaks off, is one error with its line.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ....core.acceptance.fit import MIN_REQUESTS, MIN_ROUNDS, AcceptanceFit, fit, fit_counts, fit_histograms
from ....core.acceptance.process import GaussianAcceptance
from ....core.errors import ConfigError, ForedraftError
from ....core.parsing import ParseError, parse_json
from ....observe.decoding import decode_lens
from ....observe.input_files import read_lines, read_text
from ....observe.log import LogLine, read_log

MAX_STEPS = 16
"""The depth of the deepest draft in a fitted process."""
EVENTS = "Foredraft's events"
DETAILED = "per-request metrics (vLLM, aiperf), every round"
SUMMARY = "per-request metrics (vLLM, aiperf), histograms"
_RETRACTED = -1
_UNREADABLE = (LookupError, TypeError, ValueError, ArithmeticError, ForedraftError)


@dataclass(frozen=True, slots=True)
class AcceptanceLog:
    """The content of files of one form, in one of `rounds`, `histograms` and `counts`; each of these has less
    information than the one before.

    form:       what was recognised
    left_out:   kinds of records that cannot be used, and how many of each there are
    rounds:     int64 [4, n]: request, position, steps and correct drafts of each round with drafts
    histograms: int64 [requests, steps + 1]: rounds by their correct drafts
    counts:     float64 [steps + 1]: rounds by their correct drafts, of all requests
    """

    form: str
    left_out: Mapping[str, int] = field(default_factory=dict)
    rounds: np.ndarray | None = None
    histograms: np.ndarray | None = None
    counts: np.ndarray | None = None

    @property
    def num_requests(self) -> int | None:
        """The requests with rounds; None if the log does not tell requests apart."""
        if self.rounds is not None:
            return len(np.unique(self.rounds[0]))
        return None if self.histograms is None else len(self.histograms)

    @property
    def steps(self) -> int:
        """The draft steps of the rounds."""
        if self.rounds is not None:
            return int(self.rounds[2][0])
        if self.histograms is not None:
            return int(self.histograms.shape[1]) - 1
        return len(self._counts()) - 1

    def fit(self, start: GaussianAcceptance) -> AcceptanceFit:
        """Fit the process to the log, and take the rest from `start`. With few rounds or requests only the counts are
        fitted.

        Positions that no round reached are left out: the fit then has fewer steps than the log.
        """
        counts = self._counts()
        depth = min(self.steps, int(np.flatnonzero(counts > 1e-6)[-1]) + 1)
        if self.rounds is not None and _are_enough(self.rounds.shape[1], self.num_requests):
            requests, positions, steps, correct = self.rounds
            return fit(requests, positions, np.minimum(steps, depth), correct, seed=start.seed)
        if self.histograms is not None and _are_enough(int(self.histograms.sum()), self.num_requests):
            return fit_histograms(self.histograms[:, : depth + 1], start)
        return fit_counts(counts[: depth + 1], start)

    def _counts(self) -> np.ndarray:
        if self.counts is not None:
            return self.counts
        if self.histograms is not None:
            return np.asarray(self.histograms.sum(axis=0))
        assert self.rounds is not None, "a log tells one of the three"
        return np.bincount(self.rounds[3], minlength=self.steps + 1)


def _are_enough(num_rounds: int, num_requests: int | None) -> bool:
    return num_requests is not None and num_rounds >= MIN_ROUNDS and num_requests >= MIN_REQUESTS


def wrong(path: str | os.PathLike[str], place: int | str, message: str) -> ConfigError:
    """Return the error of a file at a line (0: the file as a whole) or at a key."""
    key = (f"line {place}" if place else "") if isinstance(place, int) else place
    return ConfigError.of(os.fspath(path), key, message)


# -- events -----------------------------------------------------------------------------------------------------------


def read_events(paths: Sequence[str], allow_truncated: bool = False) -> AcceptanceLog:
    """Read the rounds of Foredraft's own logs; with `allow_truncated` also of a run that was killed.

    Errors: ConfigError and LogError, with file and line.
    """
    left_out: dict[str, int] = {}
    columns: list[np.ndarray] = []
    requests: dict[tuple[str, str], int] = {}
    for path in paths:
        replicas: dict[int, _Engine] = {}
        for record in read_log(path, allow_truncated=allow_truncated):
            if record.kind not in ("plan", "commit", "lost"):
                continue
            engine = replicas.setdefault(record.data["r"], _Engine(path, requests))
            try:
                rounds = engine.follow(record)
            except _UNREADABLE as error:
                message = f"a {record.kind!r} record whose rounds cannot be read: {error}"
                raise wrong(path, record.line, message) from None
            if rounds is not None:
                columns.append(rounds)
    rounds = np.concatenate(columns, axis=1) if columns else np.empty((4, 0), np.int64)
    return _log_of_rounds(EVENTS, paths[0], rounds, left_out)


class _Engine:
    """Follows the records of one replica: which request is in which row, and which rows a step decodes."""

    def __init__(self, path: str, requests: dict[tuple[str, str], int]) -> None:
        self._path, self._requests = path, requests
        self._owner: dict[int, int] = {}
        self._rows: list[int] = []
        self._steps: dict[int, tuple[np.ndarray, Mapping[str, Any]]] = {}
        self._emitted: dict[int, int] = {}
        self._ended: set[int] = set()

    def follow(self, record: LogLine) -> np.ndarray | None:
        """Return the rounds of a commit, int64 [4, n]."""
        data = record.data
        if record.kind == "plan":
            self._plan(data)
        elif record.kind == "lost":
            for step in data["steps"]:
                self._steps.pop(step, None)
        else:
            return self._commit(data)
        return None

    def _number(self, request_id: str) -> int:
        return self._requests.setdefault((self._path, request_id), len(self._requests))

    def _plan(self, data: Mapping[str, Any]) -> None:
        for request_id in data.get("retracted", ()):
            for owners, _ in self._steps.values():  # what these steps decode for it is thrown away
                owners[owners == self._number(request_id)] = _RETRACTED
        for request_id, row, *_ in data.get("joins", ()):
            self._owner[row] = self._number(request_id)
        if "decode" not in data:
            return
        if data["decode"] != "=":
            self._rows = list(data["decode"])
        if type(data["S"]) is not int:
            raise ValueError(f"its draft steps S are {data['S']!r}; expected a whole number")
        if data["k"] != 1 and data["S"]:
            raise ValueError(f"a draft tree of top-{data['k']}: acceptance is fitted to chains (speculation.topk = 1)")
        if unknown := [row for row in self._rows if row not in self._owner]:
            raise ValueError(f"it decodes row {unknown[0]}, which no request has joined")
        owners = np.array([self._owner[row] for row in self._rows], np.int64)
        self._steps[data["step"]] = owners, data

    def _commit(self, data: Mapping[str, Any]) -> np.ndarray | None:
        planned = self._steps.pop(data["step"], None)
        rounds = None
        if planned is not None:
            owners, plan = planned
            num_rounds, ends = data["rounds"], data["at"] if isinstance(data["at"], list) else [data["at"]]
            if num_rounds != len(ends):
                raise ValueError(f"{len(ends)} end times of {num_rounds} rounds")
            lens = decode_lens(data["lens"], num_rounds, len(owners)).astype(np.int64)
            if lens.size and lens.min() < 1:
                raise ValueError("a round that accepts less than the bonus token")
            rounds = self._rounds(owners, lens, plan["S"])
        self._ended.update(self._number(request_id) for request_id, *_ in data.get("finished", ()))
        return rounds

    def _rounds(self, owners: np.ndarray, lens: np.ndarray, steps: int) -> np.ndarray:
        alive = np.array([owner != _RETRACTED and owner not in self._ended for owner in owners.tolist()], bool)
        owners, lens = owners[alive], lens[:, alive]
        before = np.array([self._emitted.get(owner, 0) for owner in owners.tolist()], np.int64)
        positions = before + np.cumsum(lens, axis=0) - lens
        self._emitted.update(zip(owners.tolist(), (before + lens.sum(axis=0)).tolist(), strict=True))
        correct = np.minimum(lens - 1, steps)  # look-ups accept beyond their steps
        columns = (np.broadcast_to(owners, lens.shape), positions, np.full(lens.shape, steps, np.int64), correct)
        return np.stack([column.reshape(-1) for column in columns])


# -- vLLM -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Response:
    """The checked metrics of one request: its histogram;
    the accepted and the offered drafts of each round, if the file has them."""

    steps: int | None
    histogram: np.ndarray
    rounds: tuple[np.ndarray, np.ndarray] | None
    drafted_less: bool


def read_responses(paths: Sequence[str]) -> AcceptanceLog:
    """Read vLLM's per-request metrics. Errors: ConfigError with file and line or key."""
    left_out: dict[str, int] = {}
    responses: list[_Response] = []
    for path in paths:
        for place, value in _documents(path):
            metrics = _metrics_of(path, place, value)
            why, response = "requests without rounds", None
            if metrics is None:
                why = "records without metrics"
            elif _warms_up(value):
                why = "requests to warm up"
            else:
                response = _Checked(path, place, metrics).response()
            if response is None or not response.histogram.any():
                left_out[why] = left_out.get(why, 0) + 1
                continue
            if response.steps not in (None, first := responses[0].steps if responses else response.steps):
                message = f"{response.steps} drafts in a round, {first} before: expected the requests of one setting"
                raise wrong(path, f"{place}, num_spec_tokens".removeprefix(", "), message)
            responses.append(response)
    if not responses:
        message = (
            "no request with speculative rounds: expected metrics.speculative_decoding (vLLM: "
            "--per-request-spec-decode-metrics detailed) or spec_decode_acceptance (aiperf: --export-level records)"
        )
        raise wrong(paths[0], 0, message)
    detailed = [response.rounds for response in responses if response.rounds is not None]
    if len(detailed) == len(responses):
        columns = [
            np.stack([np.full(len(accepted), number), np.cumsum(accepted + 1) - accepted - 1, drafted, accepted])
            for number, (accepted, drafted) in enumerate(detailed)
        ]
        return _log_of_rounds(DETAILED, paths[0], np.concatenate(columns, axis=1), left_out)
    width = max(len(response.histogram) for response in responses)
    histograms = np.array([np.pad(r.histogram, (0, width - len(r.histogram))) for r in responses])
    if drafted_less := sum(response.drafted_less for response in responses):
        left_out["requests with rounds of fewer drafts, counted as rejected"] = drafted_less
    return AcceptanceLog(SUMMARY, left_out, histograms=histograms)


def _documents(path: str) -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of each JSON document:
    one in each line, or one in the file, a list as its items."""
    lines = ((number, line.strip().removeprefix("data:").strip()) for number, line in enumerate(read_lines(path), 1))
    lines = ((number, line) for number, line in lines if line and line != "[DONE]")
    number, line = next(lines)
    try:
        value = parse_json(line, long_integers=True)
    except ParseError as error:
        if next(lines, None) is None:
            raise wrong(path, number, f"is not JSON (a truncated line?): {error}") from None
        value = None
    if not isinstance(value, dict):
        yield from _whole_document(path)
        return
    yield f"line {number}", value
    for number, line in lines:
        try:
            yield f"line {number}", parse_json(line, long_integers=True)
        except ParseError as error:
            raise wrong(path, number, f"is not JSON (a truncated line?): {error}") from None


def _whole_document(path: str) -> Iterator[tuple[str, Any]]:
    try:
        value = parse_json(read_text(path), long_integers=True)
    except ParseError as error:
        raise wrong(path, 0, f"is not JSON (a truncated file?): {error}") from None
    if isinstance(value, list):
        yield from ((f"[{i}]", item) for i, item in enumerate(value))
    else:
        yield "", value


def _metrics_of(path: str, place: str, value: Any) -> dict[str, Any] | None:
    """Return the object with the metrics of a request, from the place where this kind of file has it; None if there is
    none."""
    if not isinstance(value, dict):
        raise wrong(path, place, f"{str(value)[:80]!r}: expected an object, the response of one request")
    found = value.get("spec_decode_acceptance")
    if found is None and isinstance(value.get("metrics"), dict):
        found = value["metrics"].get("speculative_decoding")
    if found is None:
        found = value.get("speculative_decoding", value if "acceptance_histogram" in value else None)
    if found is not None and not isinstance(found, dict):
        raise wrong(path, place, f"the metrics of a request are {str(found)[:80]!r}: expected an object")
    return found


def _warms_up(value: dict[str, Any]) -> bool:
    metadata = value.get("metadata")
    return isinstance(metadata, dict) and metadata.get("benchmark_phase") == "warmup"


class _Checked:
    """Reads the metrics of one request and refuses numbers that contradict each other."""

    def __init__(self, path: str, place: str, metrics: Mapping[str, Any]) -> None:
        self._path, self._place, self._metrics = path, place, metrics

    def response(self) -> _Response:
        histogram = self._histogram()
        rounds, accepted_sum = int(histogram.sum()), int(histogram @ np.arange(len(histogram)))
        self._agree("num_spec_steps", rounds, "the sum of acceptance_histogram")
        self._agree("num_accepted_draft_tokens", accepted_sum, "what acceptance_histogram counts")
        drafts = self._metrics.get("num_draft_tokens")
        if drafts is not None and self._count("num_draft_tokens", drafts) < accepted_sum:
            raise self._wrong("num_draft_tokens", f"{drafts}: expected at least the {accepted_sum} that were accepted")
        mean = self._metrics.get("mean_acceptance_length")
        if rounds and mean is not None:
            if isinstance(mean, bool) or not isinstance(mean, int | float):
                raise self._wrong("mean_acceptance_length", f"{str(mean)[:80]!r}: expected a number")
            if abs(mean - 1 - accepted_sum / rounds) > 0.01:
                message = f"{mean}: expected {1 + accepted_sum / rounds:.3f}, by the histogram"
                raise self._wrong("mean_acceptance_length", message)
        accepted, drafted = (self._steps_of(key) for key in ("per_step_accepted", "per_step_drafted"))
        if accepted is None or drafted is None:
            less = drafts is not None and drafts < rounds * (len(histogram) - 1)
            return _Response(self._metrics.get("num_spec_tokens"), histogram, None, less)
        if len(accepted) != rounds or len(drafted) != rounds:
            message = f"{len(accepted)} accepted and {len(drafted)} drafted: expected {rounds} each, one for each round"
            raise self._wrong("per_step_accepted", message)
        if (accepted > drafted).any():
            at = int(np.argmax(accepted > drafted))
            raise self._wrong(f"per_step_accepted[{at}]", f"{accepted[at]} accepted of {drafted[at]} drafted")
        if not np.array_equal(np.bincount(accepted, minlength=len(histogram)), histogram):
            raise self._wrong("per_step_accepted", "not what acceptance_histogram counts")
        return _Response(self._metrics.get("num_spec_tokens"), histogram, (accepted, drafted), False)

    def _histogram(self) -> np.ndarray:
        value = self._metrics.get("acceptance_histogram")
        if isinstance(value, dict):
            if not all(key.isascii() and key.isdecimal() and len(key) < 4 for key in value):
                raise self._wrong("acceptance_histogram", "expected numbers of accepted drafts as keys")
            pairs = {int(key): count for key, count in value.items()}
            value = [pairs.get(i, 0) for i in range(max(pairs, default=0) + 1)]
        if not isinstance(value, list):
            raise self._wrong("acceptance_histogram", f"{str(value)[:80]!r}: expected a list or an object of counts")
        counts = [self._count("acceptance_histogram", count) for count in value]
        steps = self._metrics.get("num_spec_tokens")
        most = max((i for i, count in enumerate(counts) if count), default=0)
        steps = max(len(counts) - 1, most) if steps is None else self._count("num_spec_tokens", steps)
        if most > steps:
            raise self._wrong("acceptance_histogram", f"a round accepts {most} drafts of {steps} (num_spec_tokens)")
        if steps > MAX_STEPS:
            message = f"{steps}: expected at most {MAX_STEPS}, the deepest draft that is simulated"
            raise self._wrong("num_spec_tokens", message)
        return np.array([*counts, *[0] * (steps + 1 - len(counts))][: steps + 1], np.int64)

    def _steps_of(self, key: str) -> np.ndarray | None:
        value = self._metrics.get(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self._wrong(key, f"{str(value)[:80]!r}: expected a list of counts")
        return np.array([self._count(key, count, MAX_STEPS) for count in value], np.int64)

    def _agree(self, key: str, expected: int, what: str) -> None:
        value = self._metrics.get(key)
        if value is not None and self._count(key, value) != expected:
            raise self._wrong(key, f"{value}: expected {expected}, {what}")

    def _count(self, key: str, value: Any, most: int = 200_000) -> int:
        if type(value) is not int or not 0 <= value <= most:
            raise self._wrong(key, f"{str(value)[:80]!r}: expected a whole number, 0 ... {most}")
        return value

    def _wrong(self, key: str, message: str) -> ConfigError:
        return wrong(self._path, ", ".join(filter(None, (self._place, key))), message)


def _log_of_rounds(form: str, path: str, rounds: np.ndarray, left_out: dict[str, int]) -> AcceptanceLog:
    """Keep the rounds of the commonest step count above 0; if two are equally common, those of the greater one."""
    steps, numbers = np.unique(rounds[2], return_counts=True)
    drafting = steps > 0
    if not drafting.any():
        raise wrong(path, 0, "no round with drafts: nothing was speculated in this run")
    if steps.max() > MAX_STEPS:
        message = f"rounds of {steps.max()} steps: expected at most {MAX_STEPS}, the deepest draft that is simulated"
        raise wrong(path, 0, message)
    chosen = max(zip(numbers[drafting].tolist(), steps[drafting].tolist(), strict=True))[1]
    for count, number in zip(steps.tolist(), numbers.tolist(), strict=True):
        if count != chosen:
            left_out[f"rounds of {count} steps"] = number
    return AcceptanceLog(form, left_out, rounds=rounds[:, rounds[2] == chosen])
