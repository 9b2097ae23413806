"""The trial of acceptance: rounds are launched and finished, the KV of their nodes is written, moved and
looked at again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from ..harness.operation import Handles, Operation, operation
from ..harness.text import listed
from ..harness.trial import Trial
from . import inputs
from . import invariants as invariants  # registers the checkers
from .contract import MAX_NODES, AcceptCapabilities, AcceptConfig, LaunchBatch, TreeAcceptance, capacity
from .expected import PathDrafter, RecordedCoins, node_paths
from .model import AcceptAnswer, AcceptModel, AcceptMoment, LaunchedRound, depths_of, shares_of, verdict_in_words
from .reading import read_cells, read_compacted, read_flat, read_links, read_moves, read_round, read_table

ROUNDS = Handles("abc")
SEEDS = tuple(range(24))
DRAFTED_SHAPES = ((1, 2, 3), (2, 2, 5), (3, 2, 6), (3, 3, 9), (4, 2, 8), (2, 4, 12), (5, 1, 6), (3, 4, 30), (6, 2, 20))
COIN_ROWS, COIN_WIDTH = 40, 30
CHAINS = ((1, 1, 2), (0, 1, 1), (2, 1, 3), (3, 1, 4), (5, 1, 6), (8, 1, 9))
# k = 1 with fewer nodes than steps; nd below, at and above S + 1; all that there is; the largest; one wide step;
# several 0 steps.
TREES = (
    *((1, 2, 3), (2, 2, 3), (2, 2, 4), (2, 2, 7), (3, 2, 6), (3, 2, 9), (3, 1, 3), (2, 3, 8), (4, 4, 10), (5, 2, 5)),
    *((0, 2, 1), (1, 2, 2), (3, 8, 33), (8, 4, 64), (1, 16, 17), (2, 16, 40)),
)
ROWS = ((0,), (0,), (1,), (2,), (3,), (0, 1), (1, 0), (0, 2), (2, 1, 0), (0, 1, 2, 3), (0, 1, 2, 3), ())


def _shapes(config: AcceptConfig, has: AcceptCapabilities) -> list[tuple[int, ...]]:
    return [shape for shape in CHAINS + (TREES if has.trees else ()) if shape[1] <= config.vocab_size]


def _garbage(config: AcceptConfig, has: AcceptCapabilities) -> tuple[str, ...]:
    return inputs.GARBAGE_SCORES + (inputs.GARBAGE_IDS if has.raw_drafts else ())


def _is_shape(t: AcceptTrial, shape: tuple[int, ...]) -> bool:
    if len(shape) != 3:
        return False
    steps, topk, nodes = shape
    if not (0 <= steps <= 8 and 1 <= topk <= min(16, t.config.vocab_size) and 1 <= nodes <= MAX_NODES):
        return False
    is_chain = topk == 1 and nodes == steps + 1
    return nodes - 1 <= capacity(steps, topk) and (is_chain or t.capabilities.trees)


def _can_launch(t: AcceptTrial, round: str, rows: tuple[int, ...]) -> bool:
    return round not in t.rounds and (not rows or bool(t.free_rows(rows)))


def _in_flight(t: AcceptTrial, round: str) -> bool:
    return round in t.rounds


class AcceptTrial(Trial):
    """`subject` under operations. Paths are followed as far as they make sense;
    where they do not, the request is replaced."""

    contract = "accept"
    looks = ("tree",)
    quick = 6_000
    run_length = 60
    limit_s = 10.0
    values: ClassVar = {
        "round": ROUNDS,
        "rows": ROWS,
        **dict.fromkeys(("drafts", "target", "seed"), SEEDS),
        "topk": lambda c, has: (1, 2, 3) if has.trees else (1,),
        "agreement": (3, 2, 4, 1, 0),
        "row": lambda c, has: range(c.num_rows),
        "num_tokens": lambda c, has: (1, 2, 3, c.context_len - 2),
    }

    subject: TreeAcceptance
    config: AcceptConfig
    capabilities: AcceptCapabilities
    moment: AcceptMoment

    @classmethod
    def twin_config(cls, kind: str, config: AcceptConfig) -> AcceptConfig:
        """Return the configuration of the same component on another rank."""
        return replace(config, rank=config.rank + 1)

    def prepare(self) -> None:
        self.model = AcceptModel(self.config)
        self.shape = (1, 1, 2)
        self.rounds: dict[str, LaunchedRound] = {}
        self.moment = AcceptMoment(self.config, self.capabilities, self.model)
        self.must(self.subject.configure, *self.shape)

    def begin(self, operation: Operation | str) -> None:
        self.moment = AcceptMoment(self.config, self.capabilities, self.model, operation)

    # -- what is only asked for a value: trees that it drafts itself, distributions, coins -----------------------------

    @operation(needs="beams", weight=2, shape=DRAFTED_SHAPES)
    def draft(self, shape: tuple[int, ...], seed: int) -> None:
        """Let the component draft below two roots by itself."""
        m, num_rows = self.moment, 2
        self.only_if(len(shape) == 3 and 1 <= shape[1] <= self.config.vocab_size)
        m.drafted = tuple(shape)
        m.drafter = PathDrafter.of(seed, self.config.vocab_size, shape[1], num_rows)
        nothing = (np.zeros((num_rows, 0), kind) for kind in (np.int64, np.float32, np.int64))
        roots, seq_lens = np.arange(num_rows) % self.config.vocab_size, np.ones(num_rows, np.int64)
        windows = np.zeros((num_rows, shape[2]), np.int64)
        batch = LaunchBatch(roots, seq_lens, self.config.context_len - 1, windows, *nothing)
        m.round = self._ask_once(shape, batch, self.subject.draft, m.drafter.answer)

    @operation(needs="lookups", weight=1, nodes=(1, 2, 4, 8))
    def look_up(self, seed: int, nodes: int) -> None:
        """Ask for the tries of several rows, some of which do not fit into their trees."""
        self.only_if(1 <= nodes <= MAX_NODES)
        rows = inputs.continuations(4, self.config.vocab_size, seed)
        answer = self.must(self.subject.look_up, [[list(path) for path in paths] for paths in rows], nodes)
        rest = nodes - 1
        tokens, parents = read_flat(self, answer, "look_up()", 2, len(rows) * rest)
        for number, paths in enumerate(rows):
            own = slice(number * rest, (number + 1) * rest)
            wanted = list(dict.fromkeys(tuple(path[:end]) for path in paths for end in range(1, len(path) + 1)))[:rest]
            links, there = (-1, *parents[own]), None
            if depths_of(links) is not None:
                there = [path for path in node_paths((-1, *tokens[own]), links)[1:] if path is not None]
            if there != wanted:
                was = f"row {number} of {rows}: the tree of {nodes} nodes has {there}"
                raise self.misbehaviour("ANSWER", was, f"{wanted}: the first beginnings of its own paths")

    # -- what is sampled from, and with what --------------------------------------------------------------------------

    @operation(needs="parameters", weight=2, failing=(False, False, True))
    def filter(self, seed: int, failing: bool) -> None:
        """Ask for the distributions that sampling parameters make of logits, some of them with ties or
        without an answer."""
        m, vocab, num_rows = self.moment, self.config.vocab_size, 12
        logits, temperature, top_k, top_p = inputs.sampled_logits(vocab, num_rows, seed, failing)
        m.parameters = list(zip(temperature.tolist(), top_k.tolist(), top_p.tolist(), strict=True))
        given = map(inputs.frozen, (logits.copy(), temperature, top_k, top_p))
        answer = self.must(self.subject.distribution, *given)
        m.filtered = logits, read_table(self, answer, "distribution()", logits.shape)

    @operation(needs="keyed_coins", weight=1)
    def coins(self, seed: int) -> None:
        """Ask for the coins of many requests, of some of them again as if rounds of other widths began a
        few tokens later."""
        m = self.moment
        m.coins = RecordedCoins()
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
            m.coins.note(first, rows, begins, [read_table(self, part, "coins()", (len(rows), width)) for part in parts])
        self.transcript.append(sorted(m.coins.given.items())[:50])

    # -- the distribution of what is emitted --------------------------------------------------------------------------

    @operation(
        needs="sampling",
        weight=1,
        when=lambda t, target, topk: topk <= t.config.vocab_size and (topk == 1 or t.capabilities.trees),
    )
    def distribution(self, target: int, topk: int) -> None:
        """Verify many equal rows under coins that cover the unit square evenly:
        what is emitted must have the target's distribution."""
        shape = (2, topk, 1 + 2 * topk)
        round = self._ask_once(shape, inputs.equal_rows(self.config, shape, target, inputs.GRID), self.subject.launch)
        row = [np.array(rows[:1], np.int64) for rows in (round.tokens, round.parents)]
        probs = inputs.probabilities(*row, self.config.vocab_size, target, 2)
        self._measure(round, np.full(inputs.GRID, 1 / inputs.GRID), probs)

    @operation(needs="draft_probabilities", weight=1)
    def distribution_drafted(self, target: int) -> None:
        """Do the same with drafts from a known distribution, each as often as it is drawn."""
        batch, probs, drafts, weights = inputs.drafted_rows(self.config, target)
        self._measure(self._ask_once((1, 1, 2), batch, self.subject.launch), weights, probs, drafts)

    def _ask_once(
        self, shape: Sequence[int], batch: LaunchBatch, method: Callable[..., object], *more: object
    ) -> LaunchedRound:
        """Ask for a round of another shape; the one in force comes back at once."""
        self.must(self.subject.configure, *shape)
        handle = self.must(method, batch, *more)
        self.must(self.subject.configure, *self.shape)
        return read_round(self, self.shape, batch, handle)

    def _measure(self, round: LaunchedRound, weights: np.ndarray, *probs: np.ndarray) -> None:
        """Verify by the target's probabilities of a row's nodes, and by the draft's if they are given, which are those
        of all rows.

        Chance plays no part in the answer. The coins that lead to one token form a box, or a few. A grid of midpoints
        measures a box's share with an error whose bound is known beforehand.

        The shares are counted if every row is a path; what is wrong with others is found where rows have KV."""
        many = [np.tile(array, (round.num_rows, 1)) for array in probs]
        coins = [np.tile(coin, (round.num_rows // inputs.GRID, 1)) for coin in inputs.grid(round.num_coins)]
        method = self.subject.verify_sampling if len(probs) == 1 else self.subject.verify_drafted
        verdict = read_flat(self, self.must(method, round.handle, *many, *coins), "the verdict", 4)
        answer = AcceptAnswer(*verdict).read(round)
        if answer.is_formed and len(answer.walks) == round.num_rows:
            self.moment.shares = shares_of(answer, weights, round.tokens[0], round.parents[0], probs[0])

    # -- launching ------------------------------------------------------------------------------------------------

    @operation(weight=10, when=_is_shape, shape=_shapes)
    def configure(self, shape: tuple[int, ...]) -> None:
        """Launch rounds of another shape from now on: (steps, topk, nodes)."""
        self.shape = tuple(shape)
        self.must(self.subject.configure, *shape)

    @operation(
        weight=2, when=lambda t, row, num_tokens: bool(t.free_rows((row,))) and 1 <= num_tokens < t.config.context_len
    )
    def replace(self, row: int, num_tokens: int) -> None:
        """Let the request in a row leave, and another one come with a prompt of so many tokens."""
        self.model.replace(row, num_tokens)

    @operation(weight=20, when=_can_launch, padding=(0, 0, 0, 1, 2))
    def launch(self, round: str, rows: tuple[int, ...], drafts: int, padding: int) -> None:
        """Launch a round of these rows, except those in flight, and of so many rows of padding.
        The drafts follow from `drafts`."""
        self._start(round, rows, drafts, padding=padding)

    @operation(weight=8, hostile=True, when=_can_launch, garbage=_garbage)
    def launch_garbage(self, round: str, rows: tuple[int, ...], drafts: int, garbage: str) -> None:
        """Launch a round with drafts that are garbage."""
        self.only_if(garbage in _garbage(self.config, self.capabilities))
        self._start(round, rows, drafts, garbage=garbage)

    @operation(needs="proposals", weight=6, when=_can_launch)
    def propose(self, round: str, rows: tuple[int, ...], drafts: int) -> None:
        """Launch a round of trees that are given node by node."""
        self._start(round, rows, drafts, is_proposed=True)

    def free_rows(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Return those of the rows that exist and are not in flight."""
        busy = {row for round in self.rounds.values() for row in round.rows}
        return tuple(row for row in dict.fromkeys(rows) if 0 <= row < self.config.num_rows and row not in busy)

    def _start(
        self, name: str, rows: Sequence[int], seed: int, padding: int = 0, garbage: str = "", is_proposed: bool = False
    ) -> None:
        rows, nodes, vocab = self.free_rows(rows), self.shape[2], self.config.vocab_size
        num_rows = len(rows) + max(padding, 0)
        if is_proposed:
            drafts = inputs.proposals(nodes, num_rows, vocab, seed)
        else:
            drafts = inputs.candidates(self.shape, num_rows, vocab, seed, garbage)
        batch = self.model.batch(rows, num_rows, nodes, drafts)
        handle = self.must(self.subject.propose if is_proposed else self.subject.launch, batch)
        drawn = (nodes - 1, 1, nodes) if is_proposed else self.shape
        round = read_round(self, drawn, batch, handle, rows, garbage, is_proposed)
        self.rounds[name] = self.moment.round = round
        self.transcript.append((round.tokens, round.parents, round.positions))
        if self.capabilities.links:
            self.moment.links = read_links(self, self.must(self.subject.links, handle), num_rows, nodes)

    @operation(needs="constraints", weight=8, when=_in_flight, grammar=SEEDS[:8])
    def constrain(self, round: str, grammar: int) -> None:
        """Give a launched round a grammar."""
        self.only_if(self.rounds[round].states is None)
        found = self.moment.round = self.rounds[round]
        table, states = inputs.grammar(self.config.vocab_size, found.num_rows, grammar)
        found.constrain(table, states)
        self.must(self.subject.constrain, found.handle, table, states)

    @operation(weight=2, when=_in_flight)
    def abandon(self, round: str) -> None:
        """Leave a launched round unfinished for ever."""
        self.moment.round = self.rounds.pop(round)

    # -- finishing ------------------------------------------------------------------------------------------------

    @operation(weight=16, when=_in_flight)
    def greedy(self, round: str, target: int, agreement: int) -> None:
        """Finish a round; the target agrees with about `agreement` of four drafts."""
        self._verify_greedy(round, target, agreement)

    @operation(needs="sampling", weight=14, when=_in_flight)
    def sample(self, round: str, target: int, agreement: int) -> None:
        """Finish a round by sampling."""
        self._verify_sampling(round, target, agreement)

    @operation(needs="draft_probabilities", weight=10, when=_in_flight, broken=inputs.BROKEN_DRAFTS)
    def sample_drafted(self, round: str, target: int, agreement: int, broken: str) -> None:
        """Finish a chain that was drawn from known distributions; `broken` says how some of these are none."""
        chain = self.rounds[round]
        self.only_if(not chain.is_proposed and chain.shape[1] == 1 and broken in inputs.BROKEN_DRAFTS)
        drafts = inputs.draft_probabilities(*chain.tree(), self.config.vocab_size, target, broken)
        self._verify_sampling(round, target, agreement, drafts=drafts)

    @operation(needs="target_failures", weight=4, when=_in_flight)
    def fail_target(self, round: str, target: int, sampled: bool) -> None:
        """Finish a round; for some nodes the target gives no numbers."""
        verify = self._verify_sampling if sampled and self.capabilities.sampling else self._verify_greedy
        verify(round, target, agreement=3, failing=True)

    def _verify_greedy(self, name: str, target: int, agreement: int, failing: bool = False) -> None:
        round = self.rounds.pop(name)
        logits = inputs.logits(*round.tree(), self.config.vocab_size, target, agreement, failing)
        allowed, fails = round.allowed(), ~np.isfinite(logits).all(axis=1)
        masked = logits if allowed is None else np.where(allowed, logits, -np.inf)
        self.moment.wanted = round.rows_of(np.where(fails, -1, masked.argmax(axis=1)))
        self._finish(round, fails, self.subject.verify_greedy, logits)

    def _verify_sampling(
        self, name: str, target: int, agreement: int, failing: bool = False, drafts: np.ndarray | None = None
    ) -> None:
        round = self.rounds.pop(name)
        allowed = round.allowed()
        probs = inputs.probabilities(*round.tree(), self.config.vocab_size, target, agreement, allowed, failing)
        self.moment.probs = probs if allowed is None else probs * allowed  # what the grammar leaves of them
        fails, coins = ~np.isfinite(probs).all(axis=1), inputs.coins(round.num_rows, round.num_coins, target)
        if drafts is None:
            self._finish(round, fails, self.subject.verify_sampling, probs, *coins)
        else:
            self._finish(round, fails, self.subject.verify_drafted, probs, drafts, *coins)

    def _finish(self, round: LaunchedRound, fails: np.ndarray, verify: Callable[..., object], *numbers: object) -> None:
        """Take the verdict, carry out what follows from it, and commit what was accepted."""
        m, has = self.moment, self.capabilities
        m.round, m.failing = round, round.rows_of(fails)
        verdict = self.must(verify, round.handle, *numbers)
        parts = read_flat(self, verdict, "the verdict", 4)
        self.transcript.append(tuple(parts))
        answer = m.answer = AcceptAnswer(*parts).read(round)
        self.model.write_nodes(round)
        if has.outputs:
            answer.given = inputs.outputs(round.num_rows * round.nodes)
            got = self.must(self.subject.compact, round.handle, dict(answer.given))
            answer.compacted = read_compacted(self, got, answer.given)
        if has.kv:
            answer.before = self.model.pools.copy()
            after = self.must(self.subject.move, round.handle, self.model.pools.copy())
            answer.after = read_cells(self, after, answer.before.shape)
            self.model.pools = answer.after.copy()
        if has.kv and has.plan:
            answer.moves = read_moves(self, self.must(self.subject.moves, round.handle))
            self.transcript.append(answer.moves)
        ended = self.model.commit(m)
        m.wrong_kv = self.model.first_wrong() if has.kv else None
        for row in ended:
            self.model.replace(row, 1)

    # -- the end --------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Finish every round in flight, in the order in which they were launched;
        then let the request of row 0 go on to its end."""
        for name in list(self.rounds):
            self.greedy(name, 1, 3)
        request, rest = self.model.requests[0], self.config.context_len
        while self.model.requests[0] is request and rest > 0:
            self.launch("last", (0,), rest, 0)
            self.greedy("last", rest, 3)
            rest -= 1
        if self.model.requests[0] is request:
            raise self.misbehaviour("HANGS", "row 0's request does not come to its end", "every round emits a token")

    def describe(self) -> str:
        m, round, answer = self.moment, self.moment.round, self.moment.answer
        if answer is not None:
            return "-> " + ("; ".join(verdict_in_words(m, number) for number in m.live()) or "nothing")
        if round is None or getattr(m.operation, "tag", "") not in ("launch", "launch-garbage", "propose"):
            return "done"
        trees = (
            f"row {row}: tokens {listed(round.tokens[number])} below {listed(round.parents[number])}"
            for number, row in enumerate(round.rows)
        )
        return "-> " + ("; ".join(trees) or "an idle batch")
