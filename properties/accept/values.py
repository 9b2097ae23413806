"""Operations that ask a component for a value and leave everything as it is: distributions, coins, trees that it drafts itself.

Is what is emitted distributed as the target's? Chance plays no part in the answer. The coins that lead to one token form a box, or a few
boxes. A grid of midpoints measures a box's share with an error whose bound is known beforehand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from ...core.draws import Purpose, hash64
from ..harness.operation import operation
from ..harness.trial import Trial
from . import inputs
from .contract import Accept, AcceptCapabilities, AcceptConfig, Batch
from .expected import Coins, Drafter
from .model import Answer, Moment, Round, Shares, depths_of


def equal_rows(config: AcceptConfig, shape: tuple[int, int, int], seed: int, num_rows: int) -> Batch:
    """Make rows without KV of their own (all windows are the sink), with the same root and candidates."""
    found = inputs.candidates(shape, 1, config.vocab_size, seed)
    candidates = (inputs.frozen(np.repeat(array, num_rows, axis=0)) for array in found)
    roots, seq_lens = (np.full(num_rows, value, np.int64) for value in (seed % config.vocab_size, 1))
    return Batch(roots, seq_lens, config.context_len - 1, np.zeros((num_rows, shape[2]), np.int64), *candidates)


def drafted_rows(config: AcceptConfig, seed: int) -> tuple[Batch, np.ndarray, np.ndarray, np.ndarray]:
    """Make one-step chains, as many as the grid has coins for each token that the draft may draw. Returns the batch, the target's
    and the draft's probabilities float64 [2, V] of a row's nodes, and the rows' weights."""
    vocab = config.vocab_size
    no_tree = np.zeros((1, 1), np.int64), np.full((1, 1), -1, np.int64)
    target, leaf = (inputs.probabilities(*no_tree, vocab, seed + more, 0)[0] for more in (0, 1))
    draft = np.zeros(vocab)
    for place, mass in ((seed, 0.5), (seed * 3 + 1, 0.25), (seed * 5 + 2, 0.25)):
        draft[place % vocab] += mass
    drawn = np.flatnonzero(draft)
    rows = len(drawn) * inputs.GRID
    batch = equal_rows(config, (1, 1, 2), seed, rows)._replace(tokens=np.repeat(drawn, inputs.GRID)[:, None])
    weights = np.repeat(draft[drawn], inputs.GRID) / inputs.GRID
    return batch, np.stack([target, leaf]), np.stack([draft, draft]), weights


def shares_of(answer: Answer, weights: np.ndarray, tokens: list[int], parents: list[int], probs: np.ndarray) -> Shares:
    """Add up what the rows emit, each with its weight. `tokens` and `parents` of one row, `probs` float64 [nd, V] of its nodes."""
    first, second = Counter(), Counter()
    impossible = None
    for (row, path, emitted), weight in zip(answer.walks, weights.tolist(), strict=True):
        first[emitted[0]] += weight
        if len(emitted) > 2:
            second[emitted[0], emitted[1]] += weight
        for node, token in zip(path, emitted, strict=True):
            if not (0 <= token < probs.shape[1] and probs[node, token] > 0):
                impossible = impossible or (row, token)
    should = {token: float(mass) for token, mass in enumerate(probs[0])}
    should_second: dict[tuple[int, int], float] = {}
    for node, parent in enumerate(parents):
        if parent > 0 and parents[parent] == 0:
            pair = (tokens[parent], tokens[node])
            should_second[pair] = float(probs[0, pair[0]] * probs[parent, pair[1]])
    return Shares(
        {token: (first[token], should.get(token, 0.0)) for token in sorted({*first, *should})},
        {pair: (second[pair], should_second.get(pair, 0.0)) for pair in sorted({*second, *should_second})},
        impossible,
    )


SEEDS = tuple(range(24))
DRAFTED_SHAPES = ((1, 2, 3), (2, 2, 5), (3, 2, 6), (3, 3, 9), (4, 2, 8), (2, 4, 12), (5, 1, 6), (3, 4, 30), (6, 2, 20))
COIN_ROWS, COIN_WIDTH = 40, 30


def _fits_vocabulary(t: Values, shape: tuple[int, ...], seed: int) -> bool:
    return len(shape) == 3 and 1 <= shape[1] <= t.config.vocab_size


class Values(Trial):
    """Base of the trial of acceptance, which looks at the rounds of requests."""

    subject: Accept
    config: AcceptConfig
    capabilities: AcceptCapabilities
    moment: Moment
    shape: tuple[int, int, int]

    values: ClassVar = {"seed": SEEDS, "target": SEEDS, "topk": lambda c, has: (1, 2, 3) if has.trees else (1,)}

    def _look_at(
        self, batch: Batch, handle: object, rows: tuple[int, ...] = (), garbage: str = "", is_proposed: bool = False
    ) -> Round:
        """Return the round as the component shows it. Raises Violation unless there is a tree per row."""
        num_rows, nodes = batch.windows.shape
        flat = self._flat(self.must(self.subject.tree, handle), "tree()", 3, num_rows * nodes)
        tokens, parents, positions = (
            [list(part[at : at + nodes]) for at in range(0, num_rows * nodes, nodes)] for part in flat
        )
        depths = [depths_of(tuple(links)) for links in parents]
        if None in depths:
            row = depths.index(None)
            message = "-1 for the root and for no node, else the number of an earlier node"
            raise self.misbehaviour("TYPE", f"the parents of row {row} are {parents[row]}", message)
        shape = (nodes - 1, 1, nodes) if is_proposed else self.shape
        return Round(shape, is_proposed, rows, garbage, batch, handle, nodes, tokens, parents, positions, depths)

    def _flat(self, answer: Any, what: str, count: int, length: int | None = None) -> list[tuple[int, ...]]:
        """Return an answer of `count` flat sequences of integers, each of the given length, or of any."""
        answer = list(answer) if isinstance(answer, Iterable) else answer
        parts = enumerate(self.sequence(answer, what, f"{count} sequences of integers", count))
        return [self.integers(part, f"part {number} of {what}", length) for number, part in parts]

    def _table(self, answer: object, what: str, shape: Sequence[int]) -> np.ndarray:
        """Return an answer of numbers of this shape."""
        found = np.asarray(answer)
        if found.shape != tuple(shape) or found.dtype.kind != "f":
            was = f"{what} gave {found.dtype} {list(found.shape)}"
            raise self.misbehaviour("TYPE", was, f"numbers {list(shape)}")
        return found.astype(np.float64)

    # -- trees --------------------------------------------------------------------------------------------------------

    @operation(needs="beams", weight=2, when=_fits_vocabulary, shape=DRAFTED_SHAPES)
    def draft(self, shape: tuple[int, ...], seed: int) -> None:
        """Let the component draft below two roots by itself."""
        m, num_rows = self.moment, 2
        m.drafted = tuple(shape)
        m.drafter = Drafter.of(seed, self.config.vocab_size, shape[1], num_rows)
        nothing = (np.zeros((num_rows, 0), kind) for kind in (np.int64, np.float32, np.int64))
        roots, seq_lens = np.arange(num_rows) % self.config.vocab_size, np.ones(num_rows, np.int64)
        windows = np.zeros((num_rows, shape[2]), np.int64)
        batch = Batch(roots, seq_lens, self.config.context_len - 1, windows, *nothing)
        self.must(self.subject.configure, *shape)
        handle = self.must(self.subject.draft, batch, m.drafter.answer)
        self.must(self.subject.configure, *self.shape)
        m.round = self._look_at(batch, handle)

    # -- what is sampled from, and with what --------------------------------------------------------------------------

    @operation(needs="parameters", weight=2, failing=(False, False, True))
    def filter(self, seed: int, failing: bool) -> None:
        """Ask for the distributions that sampling parameters make of logits, some of them with ties or without an answer."""
        m, vocab, num_rows = self.moment, self.config.vocab_size, 12
        bits = hash64(seed, Purpose.SWARM, 5, np.arange(num_rows * (vocab + 4))).reshape(num_rows, -1) >> np.uint64(20)
        logits = (bits[:, 4:] % np.uint64(13)).astype(np.float64) / 4.0
        if failing:
            logits[bits[:, 4:] % np.uint64(29) == 0] = -np.inf
            logits[seed % num_rows, seed % vocab] = np.nan
            logits[(seed + 1) % num_rows] = -np.inf
            logits[(seed + 2) % num_rows, seed % vocab] = np.inf
        temperature = np.array([0.0, 0.5, 1.0, 1.0, 2.0])[(bits[:, 0] % np.uint64(5)).astype(int)]
        top_k = np.array([0, 0, 1, 2, 3, vocab, vocab + 1])[(bits[:, 1] % np.uint64(7)).astype(int)]
        top_p = np.array([1.0, 1.0, 0.95, 0.7, 0.5, 0.3, 0.01])[(bits[:, 2] % np.uint64(7)).astype(int)]
        m.parameters = list(zip(temperature.tolist(), top_k.tolist(), top_p.tolist(), strict=True))
        given = map(inputs.frozen, (logits.copy(), temperature, top_k, top_p))
        answer = self.must(self.subject.distribution, *given)
        m.filtered = logits, self._table(answer, "distribution()", logits.shape)

    @operation(needs="keyed_coins", weight=1)
    def coins(self, seed: int) -> None:
        """Ask for the coins of many requests, of some of them again as if rounds of other widths began a few tokens later."""
        m = self.moment
        m.coins = Coins()
        requests = np.arange(COIN_ROWS, dtype=np.uint64) + np.uint64(1000 * seed)
        starts = np.arange(COIN_ROWS, dtype=np.int64) % 7
        for who, first, later, width in (
            (slice(None), seed, 0, COIN_WIDTH),
            (slice(0, 9), seed, 3, 4),
            (slice(5, 6), seed, 11, 1),
            (slice(8, None, -1), seed, 1, 9),
            (slice(0, 4), seed + 1, 0, 6),
        ):
            rows, begins = requests[who].copy(), starts[who] + later
            answer = self.must(self.subject.coins, first, inputs.frozen(rows), inputs.frozen(begins), width)
            parts = self.sequence(answer, "coins()", "accept and bonus coins", 2)
            m.coins.note(first, rows, begins, [self._table(part, "coins()", (len(rows), width)) for part in parts])
        self.transcript.append(sorted(m.coins.given.items())[:50])

    # -- the distribution of what is emitted --------------------------------------------------------------------------

    @operation(
        needs="sampling",
        weight=1,
        when=lambda t, target, topk: topk <= t.config.vocab_size and (topk == 1 or t.capabilities.trees),
    )
    def distribution(self, target: int, topk: int) -> None:
        """Verify many equal rows under coins that cover the unit square evenly: what is emitted must have the target's distribution."""
        shape = (2, topk, 1 + 2 * topk)
        round = self._launch_once(shape, equal_rows(self.config, shape, target, inputs.GRID))
        row = [np.array(rows[:1], np.int64) for rows in (round.tokens, round.parents)]
        probs = inputs.probabilities(*row, self.config.vocab_size, target, 2)
        self._measure(round, np.full(inputs.GRID, 1 / inputs.GRID), probs)

    @operation(needs="draft_probabilities", weight=1)
    def distribution_drafted(self, target: int) -> None:
        """Do the same with drafts from a known distribution, each as often as it is drawn."""
        batch, probs, drafts, weights = drafted_rows(self.config, target)
        self._measure(self._launch_once((1, 1, 2), batch), weights, probs, drafts)

    def _launch_once(self, shape: tuple[int, int, int], batch: Batch) -> Round:
        """Launch a round of another shape; the one in force comes back at once."""
        self.must(self.subject.configure, *shape)
        handle = self.must(self.subject.launch, batch)
        self.must(self.subject.configure, *self.shape)
        return self._look_at(batch, handle)

    def _measure(self, round: Round, weights: np.ndarray, *probs: np.ndarray) -> None:
        """Verify by the target's probabilities of a row's nodes, and by the draft's if they are given, which are those of all rows.

        The shares are counted if every row is a path; what is wrong with others is found where rows have KV."""
        many = [np.tile(array, (round.num_rows, 1)) for array in probs]
        coins = [np.tile(coin, (round.num_rows // inputs.GRID, 1)) for coin in inputs.grid(round.num_coins)]
        method = self.subject.verify_sampling if len(probs) == 1 else self.subject.verify_drafted
        verdict = self._flat(self.must(method, round.handle, *many, *coins), "the verdict", 4)
        answer = Answer(*verdict).read(round)
        if answer.is_formed and len(answer.walks) == round.num_rows:
            self.moment.shares = shares_of(answer, weights, round.tokens[0], round.parents[0], probs[0])
