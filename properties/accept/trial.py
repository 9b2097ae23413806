"""The trial of acceptance: rounds are launched and finished, the KV of their nodes is written, moved and looked at again."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from ..harness.trial import Trial
from ..invariants.registry import Invariant
from . import inputs, shares
from . import operations as ops
from .contract import MAX_NODES, METHODS, Accept, AcceptCapabilities, AcceptConfig, Batch, capacity
from .model import AcceptModel, Round
from .moment import Answer, Moment
from .telling import tell


class AcceptTrial(Trial):
    """`subject` under operations. Paths are followed as far as they make sense; where they do not, the request is replaced."""

    methods = METHODS

    def __init__(
        self,
        subject: Accept,
        config: AcceptConfig,
        capabilities: AcceptCapabilities,
        invariants: Iterable[Invariant],
    ) -> None:
        super().__init__(subject, config, capabilities, invariants)
        self.model = AcceptModel(config)
        self.shape = (1, 1, 2)
        self.rounds: dict[str, Round] = {}
        self.moment = Moment(config, capabilities, self.model)
        self.must(subject.configure, *self.shape)
        self.check()

    def _begin(self, operation: ops.Operation | str, round: Round | None = None) -> Moment:
        m = self.moment
        m.operation, m.round = operation, round
        m.answer = m.wanted = m.probs = m.failing = m.shares = m.wrong_kv = None
        return m

    # -- launching ------------------------------------------------------------------------------------------------

    def _configure(self, op: ops.Configure) -> bool:
        if not self._is_shape(op.shape):
            return False
        self._begin(op)
        self.shape = tuple(op.shape)
        self.must(self.subject.configure, *op.shape)
        return True

    def _is_shape(self, shape: tuple[int, ...]) -> bool:
        if len(shape) != 3:
            return False
        steps, topk, nodes = shape
        if not (0 <= steps <= 8 and 1 <= topk <= min(16, self.config.vocab_size) and 1 <= nodes <= MAX_NODES):
            return False
        is_chain = topk == 1 and nodes == steps + 1
        return nodes - 1 <= capacity(steps, topk) and (is_chain or self.capabilities.trees)

    def _replace(self, op: ops.Replace) -> bool:
        in_flight = {row for round in self.rounds.values() for row in round.rows}
        if not 0 <= op.row < self.config.num_rows or op.row in in_flight:
            return False
        if not 1 <= op.num_tokens < self.config.context_len:
            return False
        self._begin(op)
        self.model.replace(op.row, op.num_tokens)
        return True

    def _launch(self, op: ops.Launch) -> bool:
        return self._start(op, op.drafts, max(op.padding, 0), "", self.subject.launch)

    def _launch_garbage(self, op: ops.LaunchGarbage) -> bool:
        known = (*inputs.GARBAGE_SCORES, *(inputs.GARBAGE_IDS if self.capabilities.raw_drafts else ()))
        if op.garbage not in known:
            return False
        return self._start(op, op.drafts, 0, op.garbage, self.subject.launch)

    def _propose(self, op: ops.Propose) -> bool:
        return self._start(op, op.drafts, 0, "", self.subject.propose)

    def _start(self, op: Any, seed: int, padding: int, garbage: str, launch: Any) -> bool:
        """Launch a round of the rows that are free; none of them, but some were asked for, makes no sense."""
        busy = {row for round in self.rounds.values() for row in round.rows}
        rows = tuple(row for row in dict.fromkeys(op.rows) if 0 <= row < self.config.num_rows and row not in busy)
        if op.round in self.rounds or (op.rows and not rows) or padding > 4:
            return False
        self._begin(op)
        is_proposed = isinstance(op, ops.Propose)
        batch = self._batch(rows, padding, seed, garbage, is_proposed)
        handle = self.must(launch, batch)
        round = self._looked_at(op.round, rows, batch, handle, garbage, is_proposed)
        self.rounds[op.round] = self.moment.round = round
        self.transcript.append((round.tokens, round.parents, round.positions))
        return True

    def _batch(self, rows: tuple[int, ...], padding: int, seed: int, garbage: str, is_proposed: bool) -> Batch:
        nodes, vocab = self.shape[2], self.config.vocab_size
        num_rows = len(rows) + padding
        if is_proposed:
            drafts = inputs.proposals(nodes, num_rows, vocab, seed)
        else:
            drafts = inputs.candidates(self.shape, num_rows, vocab, seed, garbage)
        roots, seq_lens = np.zeros(num_rows, np.int64), np.ones(num_rows, np.int64)
        windows = np.zeros((num_rows, nodes), np.int64)
        for number, row in enumerate(rows):
            roots[number] = self.model.requests[row].root
            seq_lens[number] = self.model.seq_len(row)
            windows[number] = self.model.window(row, nodes)
        for array in (roots, seq_lens, windows):
            array.setflags(write=False)
        return Batch(roots, seq_lens, self.config.context_len - 1, windows, *drafts)

    def _looked_at(
        self, name: str, rows: tuple[int, ...], batch: Batch, handle: object, garbage: str, is_proposed: bool
    ) -> Round:
        """The round as the component shows it. Raises Violation unless there is a tree per row."""
        num_rows, nodes = batch.windows.shape
        tokens, parents, positions = self._flat(self.must(self.subject.tree, handle), "tree()", 3, num_rows * nodes)
        tokens, parents, positions = (
            [list(flat[at : at + nodes]) for at in range(0, num_rows * nodes, nodes)]
            for flat in (tokens, parents, positions)
        )
        found: dict[tuple[int, ...], tuple[list[int], list[bool]]] = {}
        for row, links in enumerate(parents):
            if tuple(links) not in found:
                found[tuple(links)] = self._depths(row, links)
        depths, present = ([found[tuple(links)][part] for links in parents] for part in (0, 1))
        shape = self.shape if not is_proposed else (nodes - 1, 1, nodes)
        return Round(
            name, shape, is_proposed, rows, garbage, batch, handle, nodes, tokens, parents, positions, depths, present
        )

    def _depths(self, row: int, parents: list[int]) -> tuple[list[int], list[bool]]:
        """How far below the root each node is, and whether it is one."""
        depths, present = [0], [True]
        for node, parent in enumerate(parents):
            if not -1 <= parent < node and not node == 0 == parent + 1:
                raise self.misbehaviour(
                    "TYPE",
                    f"the parents of row {row} are {parents}",
                    "-1 for the root and for no node, else the number of an earlier node",
                )
            if node:
                depths.append(depths[parent] + 1 if parent >= 0 else 0)
                present.append(parent >= 0)
        return depths, present

    def _flat(self, answer: object, what: str, count: int, *lengths: int) -> list[tuple[int, ...]]:
        """`count` flat sequences of integers, each of the given length (of any, if none is given)."""
        try:
            parts = list(answer)  # type: ignore[call-overload]
        except TypeError:
            parts = []
        if len(parts) != count:
            raise self.misbehaviour("TYPE", f"{what} is {type(answer).__name__}", f"{count} sequences of integers")
        found = [self.integers(part, f"part {number} of {what}") for number, part in enumerate(parts)]
        for number, part in enumerate(found):
            if lengths and len(part) != lengths[0]:
                raise self.misbehaviour(
                    "TYPE", f"part {number} of {what} has {len(part)} entries", f"{lengths[0]} entries"
                )
        return found

    def _constrain(self, op: ops.Constrain) -> bool:
        round = self.rounds.get(op.round)
        if round is None or round.states is not None:
            return False
        self._begin(op, round)
        table, states = inputs.grammar(self.config.vocab_size, round.num_rows, op.grammar)
        round.constrain(table, states)
        self.must(self.subject.constrain, round.handle, table, states)
        return True

    def _abandon(self, op: ops.Abandon) -> bool:
        if op.round not in self.rounds:
            return False
        self._begin(op, self.rounds.pop(op.round))
        return True

    # -- finishing ------------------------------------------------------------------------------------------------

    def _greedy(self, op: ops.Greedy) -> bool:
        if op.round not in self.rounds:
            return False
        self._by_logits(op, failing=False)
        return True

    def _by_logits(self, op: ops.Greedy | ops.FailTarget, failing: bool) -> None:
        round = self.rounds.pop(op.round)
        m = self._begin(op, round)
        agreement = op.agreement if isinstance(op, ops.Greedy) else 3
        logits = inputs.logits(*self._tree(round), self.config.vocab_size, op.target, agreement)
        if failing:
            inputs.with_failures(logits, op.target)
            m.failing = _rows_of(~np.isfinite(logits).all(axis=1), round)
        allowed = round.allowed()
        masked = logits if allowed is None else np.where(allowed, logits, -np.inf)
        wanted = np.where(np.isfinite(logits).all(axis=1), masked.argmax(axis=1), -1)
        m.wanted = _rows_of(wanted, round)
        logits.setflags(write=False)
        self._finish(round, self.must(self.subject.verify_greedy, round.handle, logits))

    def _sample(self, op: ops.Sample) -> bool:
        if op.round not in self.rounds:
            return False
        self._by_probabilities(op, op.agreement)
        return True

    def _by_probabilities(self, op: ops.Sample | ops.FailTarget, agreement: int) -> None:
        round = self.rounds.pop(op.round)
        m = self._begin(op, round)
        probs = self._target(round, op.target, agreement)
        if isinstance(op, ops.FailTarget):
            inputs.with_failures(probs, op.target)
            m.failing = _rows_of(~np.isfinite(probs).all(axis=1), round)
        probs.setflags(write=False)
        coins = inputs.coins(round.num_rows, round.num_coins, op.target)
        self._finish(round, self.must(self.subject.verify_sampling, round.handle, probs, *coins))

    def _sample_drafted(self, op: ops.SampleDrafted) -> bool:
        round = self.rounds.get(op.round)
        if round is None or round.is_proposed or round.shape[1] != 1 or op.broken not in inputs.BROKEN_DRAFTS:
            return False
        del self.rounds[op.round]
        self._begin(op, round)
        probs = self._target(round, op.target, op.agreement)
        drafts = inputs.draft_probabilities(*self._tree(round), self.config.vocab_size, op.target, op.broken)
        for array in (probs, drafts):
            array.setflags(write=False)
        coins = inputs.coins(round.num_rows, round.num_coins, op.target)
        self._finish(round, self.must(self.subject.verify_drafted, round.handle, probs, drafts, *coins))
        return True

    def _fail_target(self, op: ops.FailTarget) -> bool:
        if op.round not in self.rounds:
            return False
        if op.sampled and self.capabilities.sampling:
            self._by_probabilities(op, 3)
        else:
            self._by_logits(op, failing=True)
        return True

    def _tree(self, round: Round) -> tuple[np.ndarray, np.ndarray]:
        shape = (round.num_rows, round.nodes)
        return tuple(np.array(rows, np.int64).reshape(shape) for rows in (round.tokens, round.parents))

    def _target(self, round: Round, seed: int, agreement: int) -> np.ndarray:
        """The target's distributions; the moment has what is left of them under the grammar."""
        allowed = round.allowed()
        probs = inputs.probabilities(*self._tree(round), self.config.vocab_size, seed, agreement, allowed)
        self.moment.probs = probs.copy() if allowed is None else probs * allowed
        return probs

    def _finish(self, round: Round, verdict: object) -> None:
        """Take the verdict, carry out what follows from it, and commit what was accepted."""
        m, has = self.moment, self.capabilities
        parts = self._flat(verdict, "the verdict", 4)
        answer = m.answer = Answer(*parts)
        self.transcript.append(tuple(parts))
        self._understand(round, answer)
        self.model.write_nodes(round)
        if has.outputs:
            self._compact(round, answer)
        if has.kv:
            self._move(round, answer)
        ended = self._commit(round, answer) if answer.is_formed else round.rows
        m.wrong_kv = self.model.first_wrong() if has.kv else None
        for row in ended:
            self.model.replace(row, 1)

    def _understand(self, round: Round, answer: Answer) -> None:
        """Split the flat sequences by their own width; find out which rows say something that can be followed."""
        rows, nodes = round.num_rows, round.nodes
        lens, flat = answer.accept_lens, answer.accept_index
        fits = len(lens) == len(answer.bonus) == rows and len(answer.predict) == rows * nodes
        if not fits or (rows and len(flat) % rows) or (not rows and flat):
            return
        answer.is_formed = True
        answer.width = width = len(flat) // rows if rows else 0
        for row in range(rows):
            lanes = flat[row * width : (row + 1) * width]
            path = [node - row * nodes for node in lanes[: max(lens[row], 0)]]
            answer.paths.append(path)
            links = round.parents[row]
            answer.is_path.append(
                bool(path)
                and len(path) == lens[row]
                and path[0] == 0
                and all(0 < node < nodes and links[node] == above for above, node in pairwise(path))
            )

    def _compact(self, round: Round, answer: Answer) -> None:
        answer.given = inputs.outputs(round.num_rows * round.nodes)
        got = self.must(self.subject.compact, round.handle, dict(answer.given))
        if not hasattr(got, "keys") or set(got.keys()) != set(answer.given):
            raise self.misbehaviour("TYPE", f"compact() gave {type(got).__name__}", f"{', '.join(answer.given)}")
        answer.compacted = {name: np.asarray(got[name]) for name in answer.given}

    def _move(self, round: Round, answer: Answer) -> None:
        answer.before = self.model.pools.copy()
        after = np.asarray(self.must(self.subject.move, round.handle, self.model.pools.copy()))
        if after.shape != answer.before.shape or after.dtype.kind not in "iu":
            raise self.misbehaviour(
                "TYPE", f"move() gave {after.dtype} {list(after.shape)}", f"integers {list(answer.before.shape)}"
            )
        answer.after = after.astype(np.int64)
        self.model.pools = answer.after.copy()
        if self.capabilities.plan:
            sources, targets = self._flat(self.must(self.subject.moves, round.handle), "moves()", 2)
            if len(sources) != len(targets):
                raise self.misbehaviour("TYPE", f"{len(sources)} sources for {len(targets)} targets", "one for each")
            answer.moves = sources, targets
            self.transcript.append(answer.moves)

    def _commit(self, round: Round, answer: Answer) -> list[int]:
        """What was accepted is final, up to the end of the context, where the request ends. What makes no sense ends it, too.

        Returns the rows whose requests have ended.
        """
        ended = []
        for number, row in enumerate(round.rows):
            request, path = self.model.requests[row], answer.paths[number]
            bonus = answer.bonus[number]
            if not answer.is_path[number] or not 0 <= bonus < self.config.vocab_size or self.moment.fails(number):
                ended.append(row)
                continue
            for node in path[: self.config.context_len - len(request.codes)]:
                request.commit(round.tokens[number][node])
            request.root = bonus
            if len(request.codes) >= self.config.context_len - 1:
                ended.append(row)
        return ended

    # -- the distribution -----------------------------------------------------------------------------------------

    def _distribution(self, op: ops.Distribution) -> bool:
        topk = op.topk if self.capabilities.trees else 1
        shape = (2, topk, 1 + 2 * topk if topk > 1 else 3)
        if not self._is_shape(shape):
            return False
        m = self._begin(op)
        batch = shares.equal_rows(self.config, shape, op.target, inputs.GRID)
        round = self._out_of_turn(shape, batch)
        tokens, parents = round.tokens[0], round.parents[0]
        row = np.array([tokens], np.int64), np.array([parents], np.int64)
        probs = inputs.probabilities(*row, self.config.vocab_size, op.target, 2)
        many = np.tile(probs, (inputs.GRID, 1))
        answer = self._understood(
            round, self.must(self.subject.verify_sampling, round.handle, many, *inputs.grid(round.num_coins))
        )
        if answer is not None:
            m.shares = shares.shares_of_tree(answer, tokens, parents, probs, shape[2])
        return True

    def _distribution_drafted(self, op: ops.DistributionDrafted) -> bool:
        m = self._begin(op)
        batch, probs, drafts, coins, weights = shares.drafted_rows(self.config, op.target)
        round = self._out_of_turn((1, 1, 2), batch)
        answer = self._understood(round, self.must(self.subject.verify_drafted, round.handle, probs, drafts, *coins))
        if answer is not None:
            m.shares = shares.shares_of_drafts(answer, weights, probs[0])
        return True

    def _out_of_turn(self, shape: tuple[int, int, int], batch: Batch) -> Round:
        """Launch a round of another shape; the one in force comes back at once."""
        self.must(self.subject.configure, *shape)
        handle = self.must(self.subject.launch, batch)
        self.must(self.subject.configure, *self.shape)
        return self._looked_at("", (), batch, handle, "", False)

    def _understood(self, round: Round, verdict: object) -> Answer | None:
        """The answer, if every row of it is a path; what is wrong with others is found where rows have KV."""
        answer = Answer(*self._flat(verdict, "the verdict", 4))
        self._understand(round, answer)
        return answer if answer.is_formed and all(answer.is_path) else None

    actions: ClassVar = {
        ops.Configure: _configure,
        ops.Replace: _replace,
        ops.Launch: _launch,
        ops.LaunchGarbage: _launch_garbage,
        ops.Propose: _propose,
        ops.Constrain: _constrain,
        ops.Abandon: _abandon,
        ops.Greedy: _greedy,
        ops.Sample: _sample,
        ops.SampleDrafted: _sample_drafted,
        ops.FailTarget: _fail_target,
        ops.Distribution: _distribution,
        ops.DistributionDrafted: _distribution_drafted,
    }

    # -- the end --------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Every round in flight is finished, in the order in which they were launched; then the request of row 0 goes on to its end."""
        for name in list(self.rounds):
            self.apply(ops.Greedy(name, 1, 3))
        request, rest = self.model.requests[0], self.config.context_len
        while self.model.requests[0] is request and rest > 0:
            self.apply(ops.Launch("last", (0,), rest, 0))
            self.apply(ops.Greedy("last", rest, 3))
            rest -= 1
        if self.model.requests[0] is request:
            raise self.misbehaviour(
                "HANGS", "the request of row 0 does not come to its end", "every round emits a token"
            )

    def describe(self) -> str:
        return tell(self.moment)


def _rows_of(flat: np.ndarray, round: Round) -> list[list]:
    return flat.reshape(round.num_rows, round.nodes).tolist()
