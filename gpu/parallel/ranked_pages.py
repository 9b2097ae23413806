"""Pages of KV whose parts are in the pools of several ranks: rank i of one worker sends its part to rank i of another.

worker    its handoff's messages ═══ link ═══►  worker
rank i    its parts of the pages ═══ link ═══►  rank i
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from ...core.handoff import PageFormat, PageSeal
from .link import PageParcel
from .ranks import RankedExecutor

_MASK = 0xFFFF_FFFF_FFFF_FFFF


class RankedPages:
    """The pools of all ranks, with what `PageTensors` has for those of one process. A page has the bytes of all ranks,
    and one seal of all its parts."""

    def __init__(self, executor: RankedExecutor, session: int) -> None:
        """`session`: the number of parcels that ranks send each other."""
        self._ranks, self._session = executor.ranks, session
        one = PageFormat(**executor.page_format)
        self.row_bytes: int = one.target_bytes + one.draft_bytes  # that one rank sends
        size = len(self._ranks.all)
        self.format: PageFormat = replace(
            one,
            target_bytes=size * one.target_bytes,
            draft_bytes=size * one.draft_bytes,
            layout=f"{size} ranks of {one.layout}",
        )
        self._num_sent: Counter[str] = Counter()

    def send(self, peer: str, slots: np.ndarray) -> tuple[list[PageSeal], Tensor | None, int]:
        """Have every rank send its part of the pages at `slots` int32 [n, page_size]. Returns their seals, nothing for
        the parcel, and the number by which the peer's ranks find them."""
        self._num_sent[peer] += 1
        number = self._num_sent[peer]
        return self._ask("send_pages", peer=peer, number=number, slots=slots.tolist()), None, number

    def arrived(self, parcel: PageParcel, peer: str, num_pages: int) -> list[PageSeal]:
        """Have every rank take its part of the pages of a parcel, and return a seal for each of `num_pages`."""
        return self._ask("take_pages", peer=peer, number=parcel.number, num_pages=num_pages)

    def write_arrived(self, slots: np.ndarray, rows: Sequence[int]) -> None:
        """Have every rank write the pages with these numbers in the last parcel to `slots` int32 [n, page_size]."""
        self._ranks.tell({"do": "write_pages", "slots": slots.tolist(), "rows": list(rows)})

    def _ask(self, order: str, **values: Any) -> list[PageSeal]:
        self._ranks.tell({"do": order, "session": self._session, **values})
        answers = self._ranks.gather("sealed", must_progress=True).values()
        return [_joined(parts) for parts in zip(*(answer["seals"] for answer in answers), strict=True)]


def _joined(parts: Sequence[Sequence[int]]) -> PageSeal:
    """Return one seal of the parts of a page, in the order of the ranks; which part has which checksum counts."""
    target, draft = (sum(part[i] for part in parts) for i in (0, 2))
    sums = [sum((2 * rank + 1) * part[i] for rank, part in enumerate(parts)) & _MASK for i in (1, 3)]
    return PageSeal(target, sums[0], draft, sums[1])
