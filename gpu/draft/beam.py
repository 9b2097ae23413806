"""The beam of a drafted tree on a device; the numbering and the order of `core.tree.build`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..batch.tree import DeviceTree
from ..ops.port import Ops
from .port import RoundBatch


@dataclass(frozen=True, slots=True)
class DeviceCandidates:
    """All candidates of one step: n = k in step 0, n = k² later."""

    tokens: Tensor  # int64 [bs, n]
    scores: Tensor  # float32 [bs, n]: products of probabilities from the root
    parents: Tensor  # int32 [bs, n]: candidate id, −1 for the root


@dataclass(frozen=True, slots=True)
class DeviceBeam:
    """The k best candidates of one step, best first, the lowest id first among equals."""

    candidate_ids: Tensor  # int32 [bs, k]
    tokens: Tensor  # int64 [bs, k]
    scores: Tensor  # float32 [bs, k]
    sources: Tensor  # int64 [bs, k]: the parent's place in the beam before
    num_candidates: int


def first_level(tokens: Tensor, probabilities: Tensor) -> tuple[DeviceCandidates, DeviceBeam]:
    """Step 0: the draft's top-k after the root, [bs, k] each."""
    scores = _clean(probabilities)
    bs, topk = tokens.shape
    ids = torch.arange(topk, dtype=torch.int32, device=tokens.device).expand(bs, topk)
    no_parent = torch.full_like(ids, -1)
    beam = DeviceBeam(ids, tokens, scores, torch.zeros_like(tokens), topk)
    return DeviceCandidates(tokens, scores, no_parent), beam


def next_level(beam: DeviceBeam, tokens: Tensor, probabilities: Tensor) -> tuple[DeviceCandidates, DeviceBeam]:
    """Take one further step: return the draft's top-k after each of the beam's nodes, [bs, k, k] each."""
    bs, topk, _ = tokens.shape
    scores = (beam.scores[:, :, None] * _clean(probabilities)).view(bs, topk * topk)
    tokens = tokens.reshape(bs, topk * topk)
    parents = beam.candidate_ids.repeat_interleave(topk, dim=1)
    best_scores, best = scores.sort(dim=1, descending=True, stable=True)
    best = best[:, :topk]
    following = DeviceBeam(
        candidate_ids=(best + beam.num_candidates).int(),
        tokens=tokens.gather(1, best),
        scores=best_scores[:, :topk],
        sources=best // topk,
        num_candidates=beam.num_candidates + topk * topk,
    )
    return DeviceCandidates(tokens, scores, parents), following


def _clean(probabilities: Tensor) -> Tensor:
    """Return what is no number counts as 0, so that garbage ranks last."""
    return torch.nan_to_num(probabilities.float(), nan=0.0, posinf=1.0, neginf=0.0).clamp(0.0, 1.0)


def tree_of(ops: Ops, batch: RoundBatch, levels: list[DeviceCandidates]) -> DeviceTree:
    depths = [depth for depth, level in enumerate(levels, start=1) for _ in range(level.tokens.shape[1])]
    return ops.build_tree(
        batch.roots,
        torch.cat([level.tokens for level in levels], dim=1),
        torch.cat([level.scores for level in levels], dim=1),
        torch.cat([level.parents for level in levels], dim=1),
        depths,
        batch.lengths,
        batch.num_draft_tokens,
        batch.max_position,
    )
