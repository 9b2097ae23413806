"""The torch twin of chain verification decides as core does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from foredraft.core.tree.build import build_chain
from foredraft.core.tree.chains import AcceptRule, draw_chain_coins, verify_chains
from foredraft.gpu.ops.torch_ops import TorchOps
from foredraft.gpu.types.ops import DrawnDrafts


@pytest.mark.parametrize("rule", [AcceptRule.REJECTION, AcceptRule.BLOCK])
@pytest.mark.parametrize("steps, vocab, candidates", [(1, 5, 5), (3, 5, 2), (5, 300, 16), (0, 4, 2)])
def test_the_twin_decides_as_core_does(rule, steps, vocab, candidates):
    """Drafts come from a few candidates, some rows of target and draft are no distributions."""
    rng, bs = np.random.default_rng(steps + vocab), 64
    target = rng.dirichlet(np.full(vocab, 0.5), (bs, steps + 1))
    draft = np.zeros((bs, steps, vocab))
    ids = np.argsort(-target[:, :steps], axis=2, kind="stable")[:, :, :candidates]
    shares = rng.dirichlet(np.ones(candidates), (bs, steps))
    drafts = ids[:, :, 0] if steps else np.zeros((bs, 0), int)
    shares[rng.random((bs, steps)) < 0.05] = np.nan
    np.put_along_axis(draft, ids, shares, axis=2)
    target[rng.random((bs, steps + 1)) < 0.05] = np.nan
    lens = rng.integers(1, 99, bs)
    _, coins = draw_chain_coins(4, np.arange(bs), lens, steps)
    tree = build_chain(np.zeros(bs, int), drafts, lens)
    wanted = verify_chains(tree, target.reshape(-1, vocab), draft, coins, rule)

    ops = TorchOps()
    made = ops.build_chain(*map(torch.as_tensor, (np.zeros(bs, int), drafts, lens)), 1000)
    made = replace(made, drawn=DrawnDrafts(torch.as_tensor(ids), torch.as_tensor(shares)))
    both = (torch.as_tensor(one) for one in (coins.accept, coins.bonus))
    found = ops.verify_chains(made, torch.as_tensor(target).reshape(-1, vocab), *both, rule)
    assert found.accept_index.tolist() == wanted.accept_index.tolist()
    assert found.failed.tolist() == wanted.target_failed.tolist()
    path = wanted.accept_index[wanted.accept_index >= 0]
    assert found.predict.numpy()[path].tolist() == wanted.predict[path].tolist()
    if steps > 1:
        assert len(set(wanted.accept_lens.tolist())) > 2
