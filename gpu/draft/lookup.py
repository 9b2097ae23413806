"""NGRAM: continuations of earlier occurrences, from the core's look-up over each row's prompt and output."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ...core.ngram import NgramIndex
from ...core.tree.build import build_lookup_tree
from ..chunks import Chunks
from ..ops import Ops
from ..tree import DeviceTree
from .port import Accepted, Relayed, RoundBatch, root_only


class LookupDraft:
    """Works on the host, so a round begins when the tokens of the one before it are known there."""

    aux_layers: tuple[int, ...] = ()
    wants_hidden = False
    on_host = True

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._histories: dict[int, NgramIndex] = {}

    def open_row(self, row: int, cached: np.ndarray) -> None:
        self._histories[row] = index = NgramIndex()
        index.append(cached)

    def observe(self, row: int, tokens: np.ndarray) -> None:
        self._histories[row].append(tokens)

    def prefill(self, chunks: Chunks, captured: Tensor | None, sampled: Tensor) -> Relayed:
        return {}

    def propose(self, batch: RoundBatch, relayed: Mapping[str, Tensor]) -> DeviceTree:
        nodes = batch.num_draft_tokens
        if batch.steps == 0 or nodes == 1:
            return root_only(self._ops, batch)
        branches = max(1, min(batch.topk, nodes - 1))
        histories = [self._histories[row] for row in batch.row_numbers.tolist()]
        paths = [list(history.draft(nodes, num_branches=branches).paths) for history in histories]
        roots = np.array([history.tokens[-1] for history in histories], np.int64)
        # Depths are all that the host can know of positions: lengths may be on their way on the device.
        tree = build_lookup_tree(roots, paths, np.zeros(len(histories), np.int64), nodes)
        depths = tree.positions.reshape(tree.parents.shape)
        bits = tree.ancestor_bits.view(np.int64)
        tokens, parents, depths, following, siblings, bits = (
            torch.from_numpy(np.ascontiguousarray(array)).to(batch.rows.device, non_blocking=True)
            for array in (
                tree.tokens.reshape(tree.parents.shape).astype(np.int64),
                tree.parents,
                depths,
                tree.retrieve_next_token,
                tree.retrieve_next_sibling,
                bits,
            )
        )
        positions = (batch.lengths[:, None] + depths).clamp(max=batch.max_position)
        return DeviceTree(tokens, parents, positions, depths, following, siblings, bits, tree.width)

    def catch_up(self, batch: RoundBatch, accepted: Accepted, relayed: Mapping[str, Tensor]) -> Relayed:
        return {}
