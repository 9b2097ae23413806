"""Sampling parameters on the device against `core.tree.verify.target_distribution`, and keyed sampling."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from foredraft.core.tree.verify import sample_tokens, target_distribution
from foredraft.gpu.kernels import host
from foredraft.gpu.kernels.rounds.target_probs import target_probs_torch as target_probs
from foredraft.gpu.kernels.rounds.verify_sampling import sample_torch


@pytest.fixture(params=["compiled", "torch"])
def way(request, monkeypatch):
    """Both ways of a CPU: the kernel that Numba compiles, and torch's operations."""
    if request.param == "torch":
        monkeypatch.setattr(host, "HAS_NUMBA", False)
    elif not host.HAS_NUMBA:
        pytest.skip("Numba is not installed")


def cases(rng: np.random.Generator, n: int, vocab: int):
    logits = rng.choice(np.linspace(-4, 4, 17), (n, vocab))  # ties at every edge
    logits[rng.random((n, vocab)) < 0.2] = -np.inf
    for value in (np.nan, np.inf):
        logits[rng.random(n) < 0.1, rng.integers(vocab)] = value
    logits[rng.random(n) < 0.1] = -np.inf
    temperature = rng.choice([0.0, 0.5, 1.0, 2.0], n)
    return logits, temperature, rng.choice([0.0, 0.1, 0.5, 0.9, 1.0], n), rng.choice([0, -1, 1, 2, 5, 50], n)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("n", [0, 1, 40])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_distribution_is_as_specified(dtype, n):
    rng = np.random.default_rng(0)
    for _ in range(20):
        logits, temperature, top_p, top_k = cases(rng, n, 12)
        expected = target_distribution(logits, temperature, top_p, top_k)
        found = target_probs(torch.from_numpy(logits).to(dtype), *map(torch.from_numpy, (temperature, top_p, top_k)))
        assert found.dtype == dtype
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12 if dtype == torch.float64 else 1e-5, atol=0)


def test_without_filters_the_distribution_is_as_specified():
    logits, temperature, *_ = cases(np.random.default_rng(1), 40, 12)
    ones, zeros = torch.ones(40, dtype=torch.float64), torch.zeros(40, dtype=torch.int64)
    arguments = torch.from_numpy(logits), torch.from_numpy(temperature), ones, zeros
    expected = target_distribution(logits, temperature)
    np.testing.assert_allclose(target_probs(*arguments, filtered=False).numpy(), expected, rtol=1e-12)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", ["peaked", "flat", "coarse", "all alike", "mostly forbidden"])
def test_filters_that_look_at_few_logits_keep_what_a_sort_keeps(kind):
    """Flat distributions need further looks, coarse logits have ties at the edges of all of them."""
    rng = np.random.default_rng(3)
    n, vocab = 12, 20_000
    logits = rng.normal(size=(n, vocab)) * {"peaked": 6.0, "flat": 0.5}.get(kind, 3.0)
    if kind == "coarse":
        logits = np.round(logits * 2) / 2
    if kind == "all alike":
        logits[:] = 7.0
    if kind == "mostly forbidden":
        logits[:, rng.random(vocab) < 0.999] = -np.inf
    temperature, top_p = np.ones(n), np.tile([0.3, 0.9, 1.0], n // 3)
    top_k = np.repeat([0, 20, 100, 3000], n // 4)
    expected = target_distribution(logits, temperature, top_p, top_k)
    found = target_probs(*map(torch.from_numpy, (logits, temperature, top_p, top_k))).numpy()
    assert ((found > 0) == (expected > 0)).all()
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_half_precision_logits_give_float32():
    logits = torch.tensor([[1.0, 3.0, 2.0]], dtype=torch.bfloat16)
    one = torch.ones(1)
    found = target_probs(logits, one, one, torch.zeros(1, dtype=torch.int64))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.softmax(logits.float(), 1))


def test_samples_follow_the_coins():
    rng = np.random.default_rng(2)
    probs = rng.random((200, 9)) * (rng.random((200, 9)) < 0.4)
    probs[:, 8] = np.where(probs.sum(axis=1) == 0, 1.0, probs[:, 8])
    coins = rng.choice([0.0, 0.3, 0.999, 1.0 - 2.0**-53], 200)
    found = sample_torch(torch.from_numpy(probs), torch.from_numpy(coins))
    assert found.tolist() == sample_tokens(probs, coins).tolist()
    assert found.dtype == torch.int64
    broken = torch.tensor([[0.5, torch.nan], [0.0, 0.0], [torch.inf, 1.0], [0.0, 2.0]])
    assert sample_torch(broken, torch.full((4,), 0.5, dtype=torch.float64)).tolist() == [-1, -1, -1, 1]
    assert sample_torch(torch.zeros(0, 4), torch.zeros(0, dtype=torch.float64)).tolist() == []
