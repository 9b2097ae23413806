"""Our trees, their verification, compaction and moves behind the acceptance contract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ...core.kv.moves import apply_moves
from ...core.tree.build import (
    Candidates,
    VerifyTree,
    build_chain,
    build_proposed_tree,
    build_tree,
    expand_topk,
    first_candidates,
    replace_invalid_tokens,
    trie_of_paths,
)
from ...core.tree.chains import AcceptRule, verify_chains
from ...core.tree.outputs import Finalized, NodeOutputs, finalize
from ...core.tree.verify import (
    Coins,
    Verified,
    argmax_tokens,
    draw_coins,
    target_distribution,
    verify_greedy,
    verify_sampling,
)
from ...properties.accept.contract import AcceptCapabilities, AcceptConfig, DraftModel, LaunchBatch, capacity


@dataclass(slots=True)
class TreeRound:
    """A round with all that finishing it needs."""

    tree: VerifyTree
    windows: np.ndarray  # int64 [bs, nd]
    verified: Verified | None = None
    final: Finalized | None = None


class TreeAccept:
    """`core.tree` and `core.kv.moves`; chains with known draft distributions by `rule`."""

    capabilities = replace(AcceptCapabilities.all(), constraints=False, in_order=False)
    rule = AcceptRule.REJECTION

    def __init__(self, config: AcceptConfig) -> None:
        self.vocab_size = config.vocab_size
        self.shape = (0, 1, 1)

    def configure(self, num_steps: int, topk: int, num_nodes: int) -> None:
        self.shape = (num_steps, topk, num_nodes)

    def launch(self, batch: LaunchBatch) -> TreeRound:
        steps, topk, nodes = self.shape
        tokens = replace_invalid_tokens(batch.tokens, self.vocab_size)
        if topk == 1 and nodes == steps + 1:
            return TreeRound(build_chain(batch.roots, tokens, batch.seq_lens, batch.max_position), batch.windows)
        edges = [0, *(capacity(step, topk) for step in range(1, steps + 1))]
        levels = [
            Candidates(tokens[:, start:end], batch.scores[:, start:end], batch.parents[:, start:end])
            for start, end in pairwise(edges)
        ]
        return TreeRound(build_tree(batch.roots, levels, batch.seq_lens, nodes, batch.max_position), batch.windows)

    def propose(self, batch: LaunchBatch) -> TreeRound:
        tree = build_proposed_tree(batch.roots, batch.tokens, batch.parents, batch.seq_lens, batch.max_position)
        return TreeRound(tree, batch.windows)

    def look_up(self, paths: Sequence[Sequence[Sequence[int]]], num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
        tokens, parents = trie_of_paths(paths, num_nodes)
        return tokens.ravel(), parents.ravel()

    def tree(self, round: TreeRound) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return round.tree.tokens, round.tree.parents.ravel(), round.tree.positions

    def links(self, round: TreeRound) -> tuple[np.ndarray, ...]:
        tree = round.tree
        links = tree.retrieve_next_token.ravel(), tree.retrieve_next_sibling.ravel()
        return *links, tree.ancestor_mask.astype(np.int8).ravel(), tree.num_nodes

    def draft(self, batch: LaunchBatch, model: DraftModel) -> TreeRound:
        steps, _, nodes = self.shape
        tokens, shares = model(0, batch.roots[:, None], np.zeros((len(batch.roots), 1), np.int64))
        level, beam = first_candidates(tokens[:, 0], shares[:, 0], self.vocab_size)
        levels = [level]
        for step in range(1, steps):
            level, beam = expand_topk(beam, *model(step, beam.tokens, beam.sources), self.vocab_size)
            levels.append(level)
        return TreeRound(build_tree(batch.roots, levels, batch.seq_lens, nodes, batch.max_position), batch.windows)

    def distribution(
        self, logits: np.ndarray, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray
    ) -> np.ndarray:
        return target_distribution(logits, temperature, top_p, top_k)

    def coins(self, seed: int, requests: np.ndarray, seq_lens: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        coins = draw_coins(seed, requests, seq_lens, width)
        return coins.accept, coins.bonus

    def verify_greedy(self, round: TreeRound, logits: np.ndarray) -> tuple[np.ndarray, ...]:
        return self.verdict(round, verify_greedy(round.tree, argmax_tokens(logits)))

    def verify_sampling(
        self, round: TreeRound, probs: np.ndarray, accept_coins: np.ndarray, bonus_coins: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        return self.verdict(round, verify_sampling(round.tree, probs, Coins(accept_coins, bonus_coins)))

    def verify_drafted(
        self,
        round: TreeRound,
        probs: np.ndarray,
        draft_probs: np.ndarray,
        accept_coins: np.ndarray,
        bonus_coins: np.ndarray,
    ) -> tuple[np.ndarray, ...]:
        drafts = draft_probs.reshape(*round.windows.shape, probs.shape[-1])[:, :-1]
        coins = Coins(accept_coins, bonus_coins)
        return self.verdict(round, verify_chains(round.tree, probs, drafts, coins, self.rule))

    def verdict(self, round: TreeRound, verified: Verified) -> tuple[np.ndarray, ...]:
        round.verified = verified
        round.final = finalize(verified, round.windows, NodeOutputs({}))
        # Both have the bonus tokens; none is right where they differ.
        final = round.final.bonus_tokens
        bonus = np.where(verified.bonus_tokens == final, final, -1)
        return verified.accept_index.ravel(), verified.accept_lens, verified.predict, bonus

    def compact(self, round: TreeRound, outputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return NodeOutputs(outputs).compact(round.verified.accept_index, round.tree.num_draft_tokens).entries

    def moves(self, round: TreeRound) -> tuple[np.ndarray, np.ndarray]:
        return round.final.moves.src, round.final.moves.dst

    def move(self, round: TreeRound, pools: np.ndarray) -> np.ndarray:
        for pool in pools:
            apply_moves(pool, round.final.moves)
        return pools


class BlockAccept(TreeAccept):
    """The same with block verification."""

    rule = AcceptRule.BLOCK


make = TreeAccept
make_block = BlockAccept
