"""Finds the next turn of each request in a trace with block ids, so that outputs are found again in a prefix cache.

The id of a block stands for all tokens up to its end. A request ends inside a block; the next turn of its conversation
has the same tokens there, the output and what follows, and therefore another id. `Prompt.continued` says which ids the
output of a request has. Here the blocks of the next turn get these names.

```
turn 1   5 │ 6 │ 7 ▒▒ output ▒▒│▒▒            names: 9 is 7, 10 is following(7)
turn 2   5 │ 6 │ 9              │ 10  │ 11
```

After one block several prompts may end or go on: turns that are shorter than a block, or many users of one system
prompt. They are turns of one conversation only if each is at least as long as the one before with its output, and at
most the last one goes on. In doubt no block is renamed, and no output is found.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from ...core.prompt import following


class Turn(NamedTuple):
    """The part of one request behind its last shared block."""

    length: int  # of the prompt, in tokens
    end: int  # of its output, from the start of the prompt
    depth: int  # blocks before this part
    ids: tuple[int, ...]  # of the prompt's blocks in this part, as far as an output before it may reach
    goes_on: bool  # whether the prompt fills its first block here


@dataclass(slots=True)
class _Branch:
    """What was seen behind one block, in order."""

    turns: list[Turn] = field(default_factory=list)
    is_conversation: bool = True

    def add(self, turn: Turn) -> None:
        before = self.turns[-1] if self.turns else None
        if before is not None and (before.goes_on or turn.length < before.end):
            self.is_conversation = False
        if self.is_conversation:
            self.turns.append(turn)


def block_names(requests: Iterable[tuple[int, int, Sequence[int]]], block_size: int) -> dict[int, int]:
    """Return another name for each block id that the output of an earlier request ends in or fills.

    requests: (prompt length, output length, ids of the prompt's blocks), in the order of the trace.
    """
    seen: set[int] = set()
    branches: dict[int, _Branch] = {}  # by the block before
    for length, output_len, ids in requests:
        full, end = length // block_size, length + output_len
        ends_here = ids[full - 1] if full else None
        new = next((place for place, block in enumerate(ids) if block not in seen), len(ids))
        seen.update(ids[new:])
        if new and (branch := branches.get(ids[new - 1])) is not None and new < full and branch.turns:
            reach = branch.turns[-1].end
            branch.add(Turn(length, end, new, tuple(ids[new : -(-reach // block_size)]), True))
        if ends_here is not None and new <= full:
            # Where another prompt went on before, the two are no turns of one conversation.
            branch = branches.setdefault(ends_here, _Branch(is_conversation=new < full))
            branch.add(Turn(length, end, full, tuple(ids[full:]), False))
    names: dict[int, int] = {}
    for before, branch in branches.items():
        if branch.is_conversation:
            _name(before, branch.turns, block_size, names)
    return names


def _name(before: int, turns: Sequence[Turn], block_size: int, names: dict[int, int]) -> None:
    """Name the blocks of each turn behind the block `before` like those that continue the turn before."""
    last = names.get(before, before)
    for turn, next_turn in pairwise(turns):
        # A turn that ends inside a block goes on in that block; one that ends with a block, in the next one.
        name = names.get(turn.ids[0], turn.ids[0]) if turn.ids else following(last)
        for place, block in enumerate(next_turn.ids):
            if (turn.depth + place) * block_size >= turn.end or block in names:
                break
            names[block] = name
            name = following(name)
