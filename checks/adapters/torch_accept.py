"""The device operations on trees and KV behind the acceptance contract.

foredraft check accept foredraft.checks.adapters.torch_accept:make         the torch twins, on a CPU
foredraft check accept foredraft.checks.adapters.torch_accept:make_cuda    the Triton kernels, on a GPU
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from ...core.contract.step import RoundShape
from ...core.draws import Purpose
from ...core.tree.chains import AcceptRule
from ...gpu.draft.branches import first_level, next_level, tree_of
from ...gpu.session.devices import ops_for
from ...gpu.types.ops import DeviceCandidates, DeviceTree, DeviceVerified, DrawnDrafts, KVTensors, Ops
from ...properties.accept.contract import AcceptConfig, DraftModel, LaunchBatch


@dataclass(slots=True)
class DeviceRound:
    tree: DeviceTree
    windows: Tensor  # int64 [bs, nd]
    verified: DeviceVerified | None = None


class DeviceAccept:
    """Operations of one device. `raw_drafts` is not declared: a device's draft ids come from its own top-k."""

    capabilities = (
        *("trees", "sampling", "draft_probabilities", "target_failures", "outputs", "kv"),
        *("links", "beams", "parameters", "keyed_coins"),
    )

    def __init__(self, ops: Ops, device: str, rule: AcceptRule = AcceptRule.REJECTION) -> None:
        self.ops = ops
        self.device = device
        self.rule = rule  # of chains with known draft distributions
        self.shape = (0, 1, 1)

    def configure(self, num_steps: int, topk: int, num_nodes: int) -> None:
        self.shape = (num_steps, topk, num_nodes)

    def launch(self, batch: LaunchBatch) -> DeviceRound:
        steps, topk, nodes = self.shape
        roots, seq_lens, tokens = map(self.tensor, (batch.roots, batch.seq_lens, batch.tokens))
        if topk == 1 and nodes == steps + 1:
            tree = self.ops.build_chain(roots, tokens, seq_lens, batch.max_position)
        else:
            depths = tuple(depth for depth in range(1, steps + 1) for _ in range(topk if depth == 1 else topk * topk))
            scores, parents = self.tensor(batch.scores), self.tensor(batch.parents).int()
            candidates = DeviceCandidates(tokens, scores, parents, depths)
            tree = self.ops.build_tree(roots, candidates, seq_lens, nodes, batch.max_position)
        return DeviceRound(tree, self.tensor(batch.windows))

    def draft(self, batch: LaunchBatch, model: DraftModel) -> DeviceRound:
        steps = self.shape[0]
        roots, seq_lens = map(self.tensor, (batch.roots, batch.seq_lens))
        tokens, shares = map(self.tensor, model(0, batch.roots[:, None], np.zeros((len(batch.roots), 1), np.int64)))
        level, beam = first_level(tokens[:, 0], shares[:, 0])
        levels = [level]
        for step in range(1, steps):
            level, beam = next_level(beam, *map(self.tensor, model(step, *map(on_host, (beam.tokens, beam.sources)))))
            levels.append(level)
        shape = RoundShape(*self.shape)
        made = SimpleNamespace(roots=roots, lengths=seq_lens, shape=shape, max_position=batch.max_position)
        return DeviceRound(tree_of(self.ops, made, levels), self.tensor(batch.windows))

    def links(self, round: DeviceRound) -> tuple[Tensor, ...]:
        tree = round.tree
        numbers = torch.arange(tree.num_nodes, device=tree.tokens.device)
        sees = (tree.ancestor_bits[:, :, None] >> numbers) & 1
        there = 1 + (tree.parents >= 0).sum(1)
        return tree.next_token.flatten(), tree.next_sibling.flatten(), sees.flatten(), there

    def distribution(
        self, logits: np.ndarray, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray
    ) -> np.ndarray:
        return on_host(self.ops.target_probs(*map(self.tensor, (logits, temperature, top_p, top_k))))

    def coins(self, seed: int, requests: np.ndarray, seq_lens: np.ndarray, width: int) -> tuple[np.ndarray, ...]:
        positions = self.tensor(seq_lens[:, None] + np.arange(width))
        purposes, keys = (Purpose.ACCEPT_COIN, Purpose.BONUS_COIN), self.tensor(requests.view(np.int64))
        return tuple(on_host(self.ops.coins(keys, positions, seed, purpose)) for purpose in purposes)

    def tree(self, round: DeviceRound) -> tuple[Tensor, ...]:
        return tuple(part.flatten() for part in (round.tree.tokens, round.tree.parents, round.tree.positions))

    def verify_greedy(self, round: DeviceRound, logits: np.ndarray) -> tuple[Tensor, ...]:
        return self.verdict(round, self.ops.verify_greedy(round.tree, self.ops.best_tokens(self.tensor(logits))))

    def verify_sampling(
        self, round: DeviceRound, probs: np.ndarray, accept_coins: np.ndarray, bonus_coins: np.ndarray
    ) -> tuple[Tensor, ...]:
        accept, bonus = (self.tensor(coins[:, : round.tree.width]) for coins in (accept_coins, bonus_coins))
        return self.verdict(round, self.ops.verify_sampling(round.tree, self.tensor(probs), accept, bonus))

    def verify_drafted(
        self,
        round: DeviceRound,
        probs: np.ndarray,
        draft_probs: np.ndarray,
        accept_coins: np.ndarray,
        bonus_coins: np.ndarray,
    ) -> tuple[Tensor, ...]:
        bs, nodes = round.tree.tokens.shape
        drafts = self.tensor(draft_probs).view(bs, nodes, probs.shape[1])[:, :-1]
        tree = replace(
            round.tree, drawn=DrawnDrafts(torch.arange(probs.shape[1], device=self.device).expand(drafts.shape), drafts)
        )
        accept, bonus = (self.tensor(coins[:, : tree.width]) for coins in (accept_coins, bonus_coins))
        return self.verdict(round, self.ops.verify_chains(tree, self.tensor(probs), accept, bonus, self.rule))

    def verdict(self, round: DeviceRound, verified: DeviceVerified) -> tuple[Tensor, ...]:
        round.verified = verified
        index, lens = verified.accept_index, verified.accept_lens
        _, bonus = self.ops.gather_emitted(verified.predict, index, lens)
        return index.flatten(), lens, verified.predict, bonus

    def compact(self, round: DeviceRound, outputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        index, nodes = round.verified.accept_index, round.tree.num_nodes
        return {name: on_host(self.ops.compact(self.tensor(values), index, nodes)) for name, values in outputs.items()}

    def move(self, round: DeviceRound, pools: np.ndarray) -> np.ndarray:
        """Move KV: the first half of the pools are keys of so many layers, the second half their values."""
        keys, values = (self.tensor(half)[:, :, None, None] for half in np.split(pools, 2))
        verified = round.verified
        self.ops.move_accepted_(KVTensors(keys, values), round.windows, verified.accept_index, verified.accept_lens)
        return on_host(torch.cat([keys, values])[:, :, 0, 0])

    def tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(array, order="C")).to(self.device)


def on_host(values: Tensor) -> np.ndarray:
    return values.cpu().numpy()


def make(config: AcceptConfig) -> DeviceAccept:
    return DeviceAccept(ops_for("cpu"), "cpu")


def make_block(config: AcceptConfig) -> DeviceAccept:
    return DeviceAccept(ops_for("cpu"), "cpu", AcceptRule.BLOCK)


def make_cuda(config: AcceptConfig) -> DeviceAccept:
    return DeviceAccept(ops_for("cuda"), "cuda")


make.capabilities = make_block.capabilities = make_cuda.capabilities = DeviceAccept.capabilities
