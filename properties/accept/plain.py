"""Acceptance row by row and node by node: the suite's own positive control for all that happens to a round.

Chains whose drafts were drawn from a known distribution q are accepted with probability min(1, p/q); else a token is
drawn from what p has over q (Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding",
ICML 2023). Everything else never looks at q, as `core.tree.verify`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf, isfinite

import numpy as np

from .contract import AcceptCapabilities, AcceptConfig, LaunchBatch, capacity


@dataclass(slots=True)
class PlainRound:
    """Trees of bs rows, node by node, and the accepted paths."""

    nodes: int
    windows: list[list[int]]
    tokens: list[list[int]] = field(default_factory=list)
    parents: list[list[int]] = field(default_factory=list)
    positions: list[list[int]] = field(default_factory=list)
    table: list[list[int]] | None = None
    states: list[int] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)


class PlainAccept:
    """Lists and loops: no arrays, no tables of children."""

    capabilities = replace(
        AcceptCapabilities.all(), lookups=False, links=False, beams=False, parameters=False, keyed_coins=False
    )

    def __init__(self, config: AcceptConfig) -> None:
        self.vocab_size = config.vocab_size
        self.shape = (0, 1, 1)

    def configure(self, num_steps: int, topk: int, num_nodes: int) -> None:
        self.shape = (num_steps, topk, num_nodes)

    # -- building -------------------------------------------------------------------------------------------------

    def launch(self, batch: LaunchBatch) -> PlainRound:
        """Keep the best candidates in the order of their ids;
        none counts as better than its parent, the lowest id wins among equals."""
        steps, topk, nodes = self.shape
        assert batch.tokens.shape[1] == capacity(steps, topk)
        round = PlainRound(nodes, batch.windows.tolist())
        for row, scores in enumerate(np.nan_to_num(batch.scores, nan=0.0).tolist()):
            tokens, above = batch.tokens[row].tolist(), batch.parents[row].tolist()
            values: list[float] = []
            for score, parent in zip(scores, above, strict=True):
                values.append(min(score, values[parent]) if parent >= 0 else score)
            kept = sorted(
                sorted(range(len(values)), key=lambda candidate: (-values[candidate], candidate))[: nodes - 1]
            )
            number = {-1: 0} | {candidate: at for at, candidate in enumerate(kept, 1)}
            self.add_row(round, batch, row, [tokens[c] for c in kept], [number[above[c]] for c in kept])
        return round

    def propose(self, batch: LaunchBatch) -> PlainRound:
        round = PlainRound(batch.tokens.shape[1] + 1, batch.windows.tolist())
        for row, tokens in enumerate(batch.tokens.tolist()):
            parents: list[int] = []
            for parent in batch.parents[row].tolist():
                parents.append(parent if parent == 0 or (parent > 0 and parents[parent - 1] >= 0) else -1)
            self.add_row(round, batch, row, tokens, parents)
        return round

    def add_row(self, round: PlainRound, batch: LaunchBatch, row: int, tokens: list[int], parents: list[int]) -> None:
        depths = [0]
        for parent in parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        good = [token if 0 <= token < self.vocab_size else 0 for token in tokens]
        round.tokens.append([int(batch.roots[row]), *good])
        round.parents.append([-1, *parents])
        round.positions.append([min(int(batch.seq_lens[row]) + depth, batch.max_position) for depth in depths])

    def tree(self, round: PlainRound) -> tuple[list[int], list[int], list[int]]:
        return tuple([item for row in rows for item in row] for rows in (round.tokens, round.parents, round.positions))

    def constrain(self, round: PlainRound, table: np.ndarray, states: np.ndarray) -> None:
        round.table, round.states = table.tolist(), states.tolist()

    # -- verifying ------------------------------------------------------------------------------------------------

    def allowed(self, round: PlainRound, state: int) -> list[bool]:
        """Return [V]: which tokens the grammar allows."""
        return [True] * self.vocab_size if round.table is None else [next >= 0 for next in round.table[state]]

    def next_state(self, round: PlainRound, state: int, token: int) -> int:
        return round.table[state][token] if round.table is not None else 0

    def verify_greedy(self, round: PlainRound, logits: np.ndarray) -> tuple[list[int], ...]:
        def decide(row: int, node: int, depth: int, allowed: list[bool], children: list[int]) -> tuple[int, int]:
            scores = logits[row * round.nodes + node].tolist()
            if not all(map(isfinite, scores)):
                return -1, -1
            masked = [score if may else -inf for score, may in zip(scores, allowed, strict=True)]
            wanted = masked.index(max(masked))
            return next((child for child in children if round.tokens[row][child] == wanted), -1), wanted

        return self.walk(round, decide)

    def verify_sampling(
        self, round: PlainRound, probs: np.ndarray, accept_coins: np.ndarray, bonus_coins: np.ndarray
    ) -> tuple[list[int], ...]:
        return self.verify_drafted(round, probs, None, accept_coins, bonus_coins)

    def verify_drafted(
        self,
        round: PlainRound,
        probs: np.ndarray,
        draft_probs: np.ndarray | None,
        accept_coins: np.ndarray,
        bonus_coins: np.ndarray,
    ) -> tuple[list[int], ...]:
        """Verify against the draft's distributions, and against the target alone where these are none."""

        def decide(row: int, node: int, depth: int, allowed: list[bool], children: list[int]) -> tuple[int, int]:
            given = probs[row * round.nodes + node].tolist()
            draft = draft_probs[row * round.nodes + node].tolist() if draft_probs is not None and children else []
            if not self.is_distribution(given):
                return -1, -1
            masked = [mass if may else 0.0 for mass, may in zip(given, allowed, strict=True)]
            if not sum(masked) > 0:
                return -1, -1
            target = [mass / sum(masked) for mass in masked]
            coins = accept_coins[row, depth], bonus_coins[row, depth]
            if draft and self.is_distribution(draft):
                return self.from_draft(children[0], round.tokens[row][children[0]], target, draft, *coins)
            return self.from_target(round.tokens[row], children, target, *coins)

        return self.walk(round, decide)

    def is_distribution(self, probs: list[float]) -> bool:
        return all(map(isfinite, probs)) and min(probs) >= 0 and sum(probs) > 0

    def from_target(
        self, tokens: list[int], children: list[int], target: list[float], coin: float, bonus_coin: float
    ) -> tuple[int, int]:
        """Return (accepted child or −1, emitted token) with one coin for all children, and one for what the target
        has beside them."""
        residual, reached, last = target[:], 0.0, -1
        for child in children:
            mass, residual[tokens[child]] = residual[tokens[child]], 0.0
            reached += mass
            if mass > 0 and coin < reached:
                return child, tokens[child]
            last = child if mass > 0 else last
        return (-1, self.drawn(residual, bonus_coin)) if sum(residual) > 0 else (last, tokens[last])

    def from_draft(
        self, child: int, token: int, target: list[float], draft: list[float], coin: float, bonus_coin: float
    ) -> tuple[int, int]:
        """Return (accepted child or −1, emitted token) for a draft that was drawn from `draft`."""
        if coin * draft[token] < target[token]:
            return child, token
        for masses in (self.beyond(target, draft), target[:]):
            masses[token] = 0.0
            if sum(masses) > 0:
                return -1, self.drawn(masses, bonus_coin)
        return child, token

    def beyond(self, target: list[float], draft: list[float]) -> list[float]:
        total = sum(draft)
        return [max(p - q / total, 0.0) for p, q in zip(target, draft, strict=True)]

    def drawn(self, masses: list[float], coin: float) -> int:
        """Return the token at `coin` of the way through the masses; one with mass."""
        left, found = coin * sum(masses), 0
        for token, mass in enumerate(masses):
            if mass > 0:
                left, found = left - mass, token
            if left < 0:
                break
        return found

    def walk(self, round: PlainRound, decide: Callable[..., tuple[int, int]]) -> tuple[list[int], ...]:
        """Go on from the root of every row while `decide(row, node, depth, allowed, children)` gives a child; it gives
        the emitted token, too."""
        predict = [0] * (len(round.windows) * round.nodes)
        round.paths, bonus = [], []
        for row, parents in enumerate(round.parents):
            node, state, path = 0, round.states[row] if round.table is not None else 0, [0]
            while True:
                children = [child for child, parent in enumerate(parents) if parent == node]
                child, token = decide(row, node, len(path) - 1, self.allowed(round, state), children)
                predict[row * round.nodes + node] = token
                if child < 0:
                    break
                node, state = child, self.next_state(round, state, token)
                path.append(node)
            round.paths.append(path)
            bonus.append(max(token, 0))
        return self.index(round), [len(path) for path in round.paths], predict, bonus

    def index(self, round: PlainRound) -> list[int]:
        """Return accept_index, nd lanes per row."""
        found: list[int] = []
        for row, path in enumerate(round.paths):
            found += [row * round.nodes + node for node in path] + [-1] * (round.nodes - len(path))
        return found

    # -- what follows -----------------------------------------------------------------------------------------------

    def compact(self, round: PlainRound, outputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        found = {name: values.copy() for name, values in outputs.items()}
        for name, values in outputs.items():
            for row, path in enumerate(round.paths):
                for lane, node in enumerate(path):
                    found[name][row * round.nodes + lane] = values[row * round.nodes + node]
        return found

    def moves(self, round: PlainRound) -> tuple[list[int], list[int]]:
        """Return the copies from the first lane on:
        a node's number is at least its lane, so none overwrites what a later one reads."""
        pairs = [
            (window[node], window[lane])
            for window, path in zip(round.windows, round.paths, strict=True)
            for lane, node in enumerate(path)
            if lane != node
        ]
        return [source for source, _ in pairs], [target for _, target in pairs]

    def move(self, round: PlainRound, pools: np.ndarray) -> np.ndarray:
        for source, target in zip(*self.moves(round), strict=True):
            pools[:, target] = pools[:, source]
        return pools


make = PlainAccept
