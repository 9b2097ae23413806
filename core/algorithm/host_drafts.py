"""Calls a proposer for an executor, and validates every answer before a verify tree is built from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..contract.arrays import BoolArray
from ..contract.future_map import RelayField
from ..contract.step import RoundShape
from ..errors import ForedraftError
from ..tree.build import MAX_TREE_NODES
from .algorithm import AlgorithmShape, SpecAlgorithm
from .proposer import Proposal, ProposalRequest

_NODE_NUMBERS = np.arange(MAX_TREE_NODES + 1, dtype=np.uint64)


class PluginError(ForedraftError):
    """An algorithm's own code raised, or returned something unusable;
    the message names the algorithm and the method."""


class HostDrafts:
    """Asks a proposer for its executor, and checks what it answers.

    Exceptions of the proposer, and answers of a wrong form, become a `PluginError`. Ids outside the vocabulary, and
    children that repeat a sibling, are rejected with all drafts below them.
    """

    def __init__(self, algorithm: SpecAlgorithm, shape: AlgorithmShape) -> None:
        assert shape.target_vocab_size is not None, "proposed ids are checked against the vocabulary"
        self._name = algorithm.name
        self._vocab_size = shape.target_vocab_size
        self.own_fields: tuple[RelayField, ...] = algorithm.relay_fields(shape)[1:]
        self._proposer = self._answer("make_proposer", algorithm.make_proposer, shape)
        if self._proposer is None:
            raise PluginError(f"algorithm {self._name}: make_proposer gave None, but its drafts come from the host")
        self._roots: dict[int, int] = {}

    def open_row(self, row: int) -> None:
        self._answer("open_row", self._proposer.open_row, row)
        self._roots.pop(row, None)

    def observe(self, row: int, tokens: np.ndarray) -> None:
        """Continue the text of `row` with `tokens` int [n]."""
        if len(tokens):
            self._answer("observe", self._proposer.observe, row, np.asarray(tokens, np.int64))
            self._roots[row] = int(tokens[-1])

    def roots(self, rows: np.ndarray) -> np.ndarray:
        """Return the last observed token of each row, int64 [n]."""
        return np.array([self._roots[row] for row in rows.tolist()], np.int64)

    def first_relay(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return the own fields of rows whose prompt was observed, [n, *shape_suffix]."""
        given = self._answer("first_relay", self._proposer.first_relay, np.asarray(rows, np.int64))
        return self._relay_of("first_relay", given, (len(rows),))

    def propose(self, rows: np.ndarray, shape: RoundShape, relayed: Mapping[str, np.ndarray]) -> Proposal:
        """Return a proposal as `build_proposed_tree` takes it: int64, tokens in the vocabulary, no sibling twice."""
        drafts = (len(rows), shape.nodes - 1)
        if shape.nodes == 1 and not self.own_fields:
            return Proposal(np.zeros(drafts, np.int64), np.zeros(drafts, np.int32))
        own = {f.name: relayed[f.name] for f in self.own_fields}
        request = ProposalRequest(np.asarray(rows, np.int64), *shape, own)
        given = self._answer("propose", self._proposer.propose, request)
        if not isinstance(given, Proposal):
            raise self._wrong("propose", f"gave {type(given).__name__}, expected a Proposal")
        tokens = self._integers("propose", "tokens", given.tokens, drafts)
        parents = self._integers("propose", "parents", given.parents, drafts)
        # Seen as unsigned, a negative number is a huge one, so one comparison covers both ends.
        if ((parents + 1).view(np.uint64) > _NODE_NUMBERS[1 : shape.nodes]).any():
            raise self._wrong("propose", "parents must be −1, 0 (the root) or the number of an earlier node")
        relay = self._relay_of("propose", given.next_relay, (len(rows), shape.nodes))
        rejected = (tokens.view(np.uint64) >= self._vocab_size) | _repeats(tokens, parents)
        if rejected.any():
            tokens, parents = np.where(rejected, 0, tokens), np.where(rejected, -1, parents)
        return Proposal(tokens, parents, relay)

    # -- validation -----------------------------------------------------------------------------------------------

    def _answer(self, method: str, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except ForedraftError as error:
            raise self._wrong(method, str(error)) from error
        except Exception as error:
            raise self._wrong(method, f"raised {type(error).__name__}: {error}") from error

    def _wrong(self, method: str, what: str) -> PluginError:
        return PluginError(f"algorithm {self._name}: {method} {what}")

    def _integers(self, method: str, name: str, given: Any, shape: tuple[int, ...]) -> np.ndarray:
        if not isinstance(given, np.ndarray) or given.shape != shape or given.dtype.kind not in "iu":
            raise self._wrong(method, f"gave {name} {_form(given)}, expected integers {list(shape)}")
        return np.ascontiguousarray(given, np.int64)

    def _relay_of(self, method: str, given: Any, leading: tuple[int, ...]) -> dict[str, np.ndarray]:
        names = [f.name for f in self.own_fields]
        if not isinstance(given, Mapping) or sorted(given) != sorted(names):
            found = sorted(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
            raise self._wrong(method, f"gave values to relay for {found}, expected {names}")
        values = {}
        for f in self.own_fields:
            value, shape, dtype = given[f.name], (*leading, *f.shape_suffix), np.dtype(f.dtype)
            if (
                not isinstance(value, np.ndarray)
                or value.shape != shape
                or not np.can_cast(value.dtype, dtype, "same_kind")
            ):
                raise self._wrong(method, f"gave {f.name} {_form(value)} to relay, expected {f.dtype} {list(shape)}")
            values[f.name] = value.astype(dtype, copy=False)
            if dtype.kind == "i" and (values[f.name] < 0).any():
                raise self._wrong(method, f"gave a negative {f.name} to relay; integers are indices or counts")
        return values


def _form(given: Any) -> str:
    return f"{given.dtype}{list(given.shape)}" if isinstance(given, np.ndarray) else f"as {type(given).__name__}"


def _repeats(tokens: np.ndarray, parents: np.ndarray) -> BoolArray:
    """Return bool [bs, n]: drafts that an earlier sibling has proposed already.
    [bs, 1] of False where no two nodes have one parent."""
    if (parents[:, 1:] > parents[:, :-1]).all():
        return np.zeros((len(tokens), 1), bool)
    same = (tokens[:, :, None] == tokens[:, None, :]) & (parents[:, :, None] == parents[:, None, :])
    earlier = np.tri(tokens.shape[1], k=-1, dtype=bool)
    repeats: BoolArray = (same & earlier).any(axis=2)
    return repeats
