"""Chains whose drafts were drawn: every rule emits the target's distribution exactly, and which one keeps more."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from foredraft.core.tree.build import build_chain, shorten_trees
from foredraft.core.tree.chains import AcceptRule, chain_chances, draw_chain_coins, verify_chains
from foredraft.core.tree.verify import Coins, sample_tokens, verify_sampling

RULES = tuple(AcceptRule)


class Models:
    """A target and a draft of `vocab` tokens: a distribution for every text, at random, sometimes with zeros, with all
    mass on one token, or alike."""

    def __init__(self, seed: int, vocab: int) -> None:
        self.vocab = vocab
        self._seed = seed
        self._known: dict[tuple[int, tuple[int, ...]], np.ndarray] = {}

    def after(self, which: int, text: tuple[int, ...]) -> np.ndarray:
        if (which, text) not in self._known:
            self._known[which, text] = self._drawn(which, text)
        return self._known[which, text]

    def _drawn(self, which: int, text: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng([self._seed, which, len(text), *text])
        probs = rng.dirichlet(np.full(self.vocab, (0.3, 1.0, 4.0)[rng.integers(3)]))
        kind = rng.integers(6)
        if kind == 0:
            probs = np.eye(self.vocab)[rng.integers(self.vocab)]
        elif kind == 1:
            probs = np.where(np.arange(self.vocab) == rng.integers(self.vocab), 0.0, probs) + 1e-12
        elif kind == 2 and which:
            return self.after(0, text)
        return probs / probs.sum()

    def chains(self, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return every chain [n, steps], its probability, and the distributions of draft and target along it."""
        drafts = np.array([*product(range(self.vocab), repeat=steps)]).reshape(-1, steps)
        draft = np.array([[self.after(1, tuple(c[:i])) for i in range(steps)] for c in drafts.tolist()])
        target = np.array([[self.after(0, tuple(c[:i])) for i in range(steps + 1)] for c in drafts.tolist()])
        of_each = np.take_along_axis(draft, drafts[:, :, None], axis=2)[:, :, 0]
        return drafts, of_each.prod(axis=1), draft, target

    def law(self, length: int) -> np.ndarray:
        """Return the target's distribution of texts of `length` tokens, [vocab] * length."""
        law = np.zeros((self.vocab,) * length)
        for text in product(range(self.vocab), repeat=length):
            law[text] = np.prod([self.after(0, text[:i])[token] for i, token in enumerate(text)])
        return law


def emitted_law(models: Models, steps: int, rule: AcceptRule) -> tuple[np.ndarray, float]:
    """Return the distribution of the first steps + 1 tokens, where the target writes those behind a round, and how many
    drafts stay on average."""
    drafts, likely, draft, target = models.chains(steps)
    found = chain_chances(drafts, draft, target, rule)
    stays = found.chance_of_staying()
    assert np.allclose(stays.sum(axis=1), 1.0)
    law = np.zeros((models.vocab,) * (steps + 1))
    for chain, weight, chances, residuals in zip(drafts.tolist(), likely, stays, found.residuals, strict=True):
        for kept, chance in enumerate(chances):
            residual = residuals[kept] / residuals[kept].sum()
            for rest in product(range(models.vocab), repeat=steps + 1 - kept):
                text = (*chain[:kept], *rest)
                tail = np.prod([models.after(0, text[:i])[text[i]] for i in range(kept + 1, steps + 1)])
                law[text] += weight * chance * residual[rest[0]] * tail
    return law, float(likely @ stays @ np.arange(steps + 1))


@pytest.mark.parametrize("steps, vocab", [(1, 4), (2, 3), (3, 2)])
def test_every_rule_emits_what_the_target_would_and_block_keeps_the_most(steps, vocab):
    gains = []
    for seed in range(12):
        models = Models(seed, vocab)
        law, kept = models.law(steps + 1), {}
        for rule in RULES:
            emitted, kept[rule] = emitted_law(models, steps, rule)
            assert np.abs(emitted - law).max() < 1e-12, (seed, rule)
        assert kept[AcceptRule.BLOCK] >= kept[AcceptRule.REJECTION] - 1e-12, seed
        assert kept[AcceptRule.REJECTION] >= kept[AcceptRule.TARGET] - 1e-12, seed
        gains.append(kept[AcceptRule.BLOCK] - kept[AcceptRule.REJECTION])
    assert steps == 1 or max(gains) > 0.01


def test_the_papers_example():
    """arXiv 2403.10444, section 2: two tokens, target 1/3 and 2/3, draft 2/3 and 1/3, two drafts."""
    drafts = np.array([*product(range(2), repeat=2)])
    draft, target = np.broadcast_to([2 / 3, 1 / 3], (4, 2, 2)), np.broadcast_to([1 / 3, 2 / 3], (4, 3, 2))
    likely = draft[0, 0][drafts].prod(axis=1)
    kept = {
        rule: likely @ chain_chances(drafts, draft, target, rule).chance_of_staying() @ np.arange(3) for rule in RULES
    }
    assert kept[AcceptRule.REJECTION] == pytest.approx(10 / 9)
    assert kept[AcceptRule.BLOCK] == pytest.approx(11 / 9)


def test_a_draft_without_doubt_makes_all_rules_one():
    rng = np.random.default_rng(5)
    drafts = rng.integers(0, 6, (50, 3))
    tree = build_chain(np.zeros(50, int), drafts, np.zeros(50, int))
    target = rng.dirichlet(np.ones(6), (50, 4)).reshape(200, 6)
    certain = np.eye(6)[drafts]
    _, coins = draw_chain_coins(1, np.arange(50), np.zeros(50, int), 3)
    today = verify_sampling(tree, target, coins)
    for rule in (AcceptRule.TARGET, AcceptRule.REJECTION):
        found = verify_chains(tree, target, certain, coins, rule)
        for name in ("accept_index", "accept_lens", "bonus_tokens", "target_failed"):
            assert np.array_equal(getattr(found, name), getattr(today, name)), (rule, name)
    assert 0 < today.num_correct_drafts.sum() < 150


@pytest.mark.parametrize("rule", RULES)
def test_tokens_of_many_rounds_are_distributed_as_the_target(rule):
    """Draws every token of 10,000 requests of five tokens in rounds of three drafts: coins of a round are no later
    round's."""
    models, num, length = Models(11, 3), 10_000, 5
    texts = [()] * num
    while min(map(len, texts)) < length:
        live = np.array([i for i, text in enumerate(texts) if len(text) < length])
        lens = np.array([len(texts[i]) for i in live])
        draft_coins, coins = draw_chain_coins(7, live, lens, 3)
        drafts, q = np.zeros((len(live), 3), int), np.zeros((len(live), 3, 3))
        for step in range(3):
            q[:, step] = [models.after(1, (*texts[i], *drafts[j, :step].tolist())) for j, i in enumerate(live)]
            drafts[:, step] = sample_tokens(q[:, step], draft_coins[:, step])
        p = np.array(
            [[models.after(0, (*texts[i], *drafts[j, :k].tolist())) for k in range(4)] for j, i in enumerate(live)]
        )
        tree = build_chain(np.zeros(len(live), int), drafts, lens)
        found = verify_chains(tree, p.reshape(-1, 3), q, coins, rule)
        emitted = found.predict.reshape(-1, 4)
        for j, i in enumerate(live):
            texts[i] = (*texts[i], *emitted[j, : found.accept_lens[j]].tolist())
    seen = np.bincount([int("".join(map(str, text[:length])), 3) for text in texts], minlength=3**length)
    expected = models.law(length).reshape(-1) * num
    assert seen[expected == 0].sum() == 0
    common = expected > 5
    statistic = ((seen - expected)[common] ** 2 / expected[common]).sum()
    degrees = common.sum()
    assert statistic < degrees + 5 * (2 * degrees) ** 0.5, (statistic, degrees)


def test_drafts_that_cannot_have_been_drawn():
    """Row 0: the second draft is no token; row 1: it has probability 0 and the target does not want it; row 2: its
    distribution is NaN; row 3: the row has one draft only; row 4: the target has no distribution behind the first; row
    5: nor behind the root."""
    drafts = np.array([[1, 9, 1], [1, 0, 1], [1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 1]])
    q = np.broadcast_to([0.0, 1.0], (6, 3, 2)).copy()
    q[2, 1] = np.nan
    p = np.broadcast_to([0.0, 1.0], (6, 4, 2)).copy()
    p[4, 1], p[5, 0] = np.nan, 0.0
    tree = build_chain(np.zeros(6, int), drafts, np.zeros(6, int))
    tree = shorten_trees(tree, np.array([4, 4, 4, 2, 4, 4]))
    coins = Coins(np.full((6, 4), 0.5), np.full((6, 4), 0.5))
    for rule in RULES:
        found = verify_chains(tree, p.reshape(-1, 2), q, coins, rule)
        assert found.accept_lens.tolist() == [2, 2, 4, 2, 2, 1], rule
        assert found.target_failed.tolist() == [False] * 4 + [True] * 2, rule
        assert found.bonus_tokens.tolist() == [1, 1, 1, 1, 0, 0], rule


def test_coins_of_two_rounds_have_nothing_in_common():
    first, at_9 = draw_chain_coins(3, np.arange(4), np.full(4, 9), 3)
    second, at_10 = draw_chain_coins(3, np.arange(4), np.full(4, 10), 3)
    assert not set(first.ravel()) & set(second.ravel())
    assert not set(at_9.accept.ravel()) & set(at_10.accept.ravel())
