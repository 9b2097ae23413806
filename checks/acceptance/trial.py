"""The trial of simulated acceptance: the same questions asked in several ways, and shares of many requests. There is no
state.

ACCEPT-24 … 26: it is a function of its keys, has the law that was configured, and follows its seed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np

from ...core.draws import Purpose, hash64
from ...properties.harness.invariants import Finding, Outcome, checks
from ...properties.harness.operation import Operation, operation
from ...properties.harness.trial import Trial
from . import model
from .contract import Process, ProcessCapabilities, ProcessConfig
from .model import Moment, Share, tolerance_of

CONTRACT = "acceptance-process"


@checks("ACCEPT-24", CONTRACT, on=("ask", "measure", "measure-mean", "measure-recordings", "tree", "day"))
def answers_are_functions(m: Moment) -> Outcome:
    for what, was, should in m.differences:
        return Finding(f"{what}: {was}", f"{should}", "another batch, block or step count would be another simulation")
    return True if m.asked or m.shares else None


@checks("ACCEPT-25", CONTRACT, on=("measure", "measure-mean", "measure-recordings"))
def shares_are_as_configured(m: Moment) -> Outcome:
    for share in m.shares:
        if abs(share.measured - share.due) > share.tolerance:
            was, should = (
                f"{share.measured:.3f} of the {share.what}",
                f"{share.due:.3f}, give or take {share.tolerance:.3f}",
            )
            return Finding(was, should, "a simulation of it says nothing about what was configured")
    return True if m.shares else None


@checks("ACCEPT-26", CONTRACT, twin="with another seed")
def another_seed_is_another_set_of_requests(runs: tuple[Trial, Trial]) -> Outcome:
    first, second = (trial.transcript for trial in runs)
    if len({value for answer in first for row in answer for value in row}) < 2:
        return None  # these requests are all alike
    if first == second:
        was = f"{len(first)} answers are those of another seed"
        return Finding(was, "other ones", "repetitions of a simulation would be one simulation")
    return True


SEEDS = tuple(range(12))
MANY = 6_000
WIDTH = 60


class ProcessTrial(Trial):
    """`subject` under questions."""

    contract = "acceptance-process"
    quick = 1_500
    run_length = 12
    limit_s = 10.0
    values: ClassVar = {
        "seed": SEEDS,
        "begin": (0, 3_000),
        "topk": (1, 2, 4),
        "share": (0, 1, 2),
        "percent": (60, 0, 100),
    }

    subject: Process
    config: ProcessConfig
    capabilities: ProcessCapabilities
    moment: Moment

    @classmethod
    def twin_config(cls, kind: str, config: ProcessConfig) -> ProcessConfig:
        """Return the same process with another seed."""
        return replace(config, seed=config.seed + 1)

    def begin(self, operation: Operation | str) -> None:
        self.moment = Moment(self.config, operation)

    def _runs(self, requests: np.ndarray, positions: np.ndarray, shift: float = 0.0) -> np.ndarray:
        """Ask for the longest runs of requests [n] at positions [m]: [n, m]."""
        shifts = np.full((len(requests), 1), shift)
        answer = self.must(self.subject.longest_run, requests[:, None], positions[None, :], shifts)
        return self._integers(answer, "longest_run()", (len(requests), len(positions)))

    def _integers(self, answer: object, what: str, shape: tuple[int, ...]) -> np.ndarray:
        found = np.asarray(answer)
        if found.shape != shape or found.dtype.kind not in "iu":
            raise self.misbehaviour("TYPE", f"{what} gave {found.dtype} {list(found.shape)}", f"integers {list(shape)}")
        return found.astype(np.int64)

    # -- the same in several ways -------------------------------------------------------------------------------------

    @operation(weight=6, steps=(0, 1, 2, 5), rounds=(1, 3, 7), start=(0, 1, 7, 30))
    def ask(self, seed: int, steps: int, rounds: int, start: int) -> None:
        """Ask about some requests position by position, then in windows, in another order, and as rounds."""
        m = self.moment
        m.asked = True
        requests = hash64(seed, Purpose.SWARM, 6, np.arange(5))
        positions = np.arange(start, start + WIDTH)
        runs = self._runs(requests, positions)
        most = int(runs.max())
        if runs.min() < 0 or most > self.config.max_depth:
            m.differences.append(("longest runs", f"{runs.min()} … {most}", f"0 … {self.config.max_depth}"))
        turned = self._runs(requests[::-1].copy(), positions[::-1].copy())[::-1, ::-1]
        self._compare("runs in another order", turned, runs)
        alone = self._runs(requests[2:3], positions[9:10])
        self._compare("a run asked for alone", alone, runs[2:3, 9:10])
        self._compare("runs asked for again", self._runs(requests, positions), runs)
        starts = np.full(len(requests), start)
        width = 1 + 11 * (seed % 5)
        windows = self.must(self.subject.windows, requests, starts, width)
        self._compare("a window", self._integers(windows, "windows()", (len(requests), width)), runs[:, :width])
        lens = self.must(self.subject.accept_lens, requests, starts, steps, rounds)
        lens = self._integers(lens, "accept_lens()", (rounds, len(requests)))
        should = [model.walked(row, steps, rounds, WIDTH) for row in runs.tolist()]
        self._compare("successive rounds", lens.T, np.array(should))
        if start == 0:
            self._compare_to_end(requests, runs, steps)
        if self.config.kind != "recorded" or len(self.config.recorded) > 1:
            self.transcript.append(runs.tolist())

    def _compare_to_end(self, requests: np.ndarray, runs: np.ndarray, steps: int) -> None:
        lengths = np.array([WIDTH, 1, 10, 11, 37])
        lens = np.asarray(self.must(self.subject.to_end, requests, lengths, steps, WIDTH))
        for row, (given, length) in enumerate(zip(runs.tolist(), lengths.tolist(), strict=True)):
            should = model.walked(given, steps, None, length)
            found = lens[:, row].tolist()
            padded = should + [0] * (len(found) - len(should))
            self._compare(f"rounds until {length} tokens", np.array(found), np.array(padded))

    def _compare(self, what: str, was: np.ndarray, should: np.ndarray) -> None:
        if was.shape != should.shape or (was != should).any():
            self.moment.differences.append((what, was.tolist(), should.tolist()))

    # -- shares -------------------------------------------------------------------------------------------------------

    @operation(weight=4, when=lambda t, seed, begin, tenths: t.config.kind == "gaussian", tenths=(0, 0, 8))
    def measure(self, seed: int, begin: int, tenths: int) -> None:
        """Compare many requests with what was configured: how far runs reach, and how runs of one request go together.
        The quality is shifted by so many tenths."""
        config, shares, shift = self.config, self.moment.shares, tenths / 10
        requests = hash64(seed, Purpose.SWARM, 7, np.arange(MANY))
        length = config.correlation_len
        offsets = sorted({0, 1, length - 1, length, length + 1, 3 * length + 2})
        positions = np.array([begin + offset for offset in offsets])
        runs = self._runs(requests, positions, shift)
        for column, position in enumerate(positions.tolist()):
            for depth in (1, 2, 3, 5):
                due = model.reaches(config, depth, position, shift)
                reached = float((runs[:, column] >= depth).mean())
                what = f"runs at position {position} that reach depth {depth}"
                shares.append(Share(what, reached, due, tolerance_of(due, MANY)))
        few = self._runs(requests[:7].copy(), positions, shift)
        self._compare("runs of a few of the requests", few, runs[:7])
        good = runs >= 1
        if not shift and not config.stretch_len and not config.drift and 0 < config.conditional[0] < 1:
            for column, position in enumerate(positions.tolist()[1:], 1):
                due = model.both_reach(config, begin, position)
                both = float((good[:, 0] & good[:, column]).mean())
                what = f"requests whose runs at positions {begin} and {position} both reach depth 1"
                shares.append(Share(what, both, due, tolerance_of(due, MANY)))
        self._measure_strangers(good, positions, shift)

    def _measure_strangers(self, good: np.ndarray, positions: np.ndarray, shift: float) -> None:
        """Check that two requests have nothing in common, and neither have two seeds."""
        due = model.reaches(self.config, 1, int(positions[0]), shift) ** 2
        both = float((good[:-1, 0] & good[1:, 0]).mean())
        self.moment.shares.append(
            Share("pairs of requests that both reach depth 1", both, due, tolerance_of(due, MANY // 2))
        )

    @operation(weight=3, when=lambda t, seed: t.config.kind == "fixed")
    def measure_mean(self, seed: int) -> None:
        """Compare many requests with the mean: two neighbouring integers, independent from position to position."""
        config, shares = self.config, self.moment.shares
        runs = self._runs(hash64(seed, Purpose.SWARM, 8, np.arange(MANY)), np.arange(3))
        whole = int(config.mean)
        part = config.mean - whole
        values = set(np.unique(runs).tolist())
        if not values <= {whole, whole + 1}:
            self.moment.differences.append(("runs", sorted(values), [whole, whole + 1]))
        for position in range(3):
            share = float((runs[:, position] > whole).mean())
            shares.append(Share(f"runs of {whole + 1} at position {position}", share, part, tolerance_of(part, MANY)))
        both = float(((runs[:, 0] > whole) & (runs[:, 1] > whole)).mean())
        shares.append(Share("runs of both", both, part * part, tolerance_of(part * part, MANY)))

    @operation(weight=4, when=lambda t, seed: t.config.kind == "recorded")
    def measure_recordings(self, seed: int) -> None:
        """Compare many requests with the recordings:
        each replays one from its start, and each is replayed by its share."""
        m, recorded = self.moment, self.config.recorded
        m.asked = True
        count = 600
        runs = self._runs(hash64(seed, Purpose.SWARM, 9, np.arange(count)), np.arange(24)).tolist()
        texts = [[recording[at % len(recording)] for at in range(24)] for recording in recorded]
        chosen = [texts.index(row) if row in texts else -1 for row in runs]
        if -1 in chosen:
            m.differences.append(("what a request replays", runs[chosen.index(-1)], texts))
        for number in range(len(recorded)):
            share, due = chosen.count(number) / count, 1 / len(recorded)
            m.shares.append(Share(f"requests that replay recording {number}", share, due, tolerance_of(due, count)))
        if len(recorded) > 1:
            self.transcript.append([chosen])

    # -- beside the process -------------------------------------------------------------------------------------------

    @operation(
        needs="trees",
        weight=2,
        when=lambda t, topk, steps, share, percent: t.config.kind == "gaussian",
        steps=(1, 2, 3, 5),
    )
    def tree(self, topk: int, steps: int, share: int, percent: int) -> None:
        """Compare the survival in a tree with the sum over its nodes;
        `share` of two halves of all candidates are nodes."""
        self.moment.asked = True
        ratio = percent / 100
        capacity = topk + (steps - 1) * topk * topk
        nodes = 2 + share * (capacity - 1) // 2
        answer = np.asarray(self.must(self.subject.tree_survival, topk, steps, nodes, ratio)).tolist()
        should = model.tree_survival(self.config, topk, steps, nodes, ratio)
        if len(answer) != steps or not np.allclose(answer, should, rtol=0, atol=1e-9):
            self.moment.differences.append((f"survival with topk {topk} and {nodes} nodes", answer, should))

    @operation(needs="days", weight=1, tenths=(0, 5, -10), best_hour=(3, 15, 0), hour=(0, 3, 9, 21, 30))
    def day(self, tenths: int, best_hour: int, hour: int) -> None:
        """Compare an hour's shift with a wave of a day."""
        self.moment.asked = True
        answer = float(self.must(self.subject.day_shift, tenths / 10, float(best_hour), float(hour)))
        should = tenths / 10 * (1 - 2 * np.sin((hour - best_hour) / 24 * np.pi) ** 2)
        if not abs(answer - should) < 1e-9:
            self.moment.differences.append((f"the shift at {hour} h", answer, should))

    def describe(self) -> str:
        return f"-> {len(self.moment.shares)} shares" if self.moment.shares else "done"
