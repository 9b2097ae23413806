"""Keyed draws: pure, uniform, equal for integers and arrays, and the same for ever."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from foredraft.core.draws import Purpose, hash64, normal, normal_at, request_key, stream_keys, uniform, uniform_at


def chi_square_bound(degrees: int, sigmas: float = 4.5) -> float:
    """An upper quantile of chi-square by the cube-root approximation of Wilson and Hilferty."""
    spread = 2.0 / (9.0 * degrees)
    return degrees * (1.0 - spread + sigmas * np.sqrt(spread)) ** 3


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


GRIDS = {
    "positions of one request": {"request": 3, "position": np.arange(200_000)},
    "requests at one position": {"request": np.arange(200_000), "position": 0},
    "lanes": {"request": 1, "position": 2, "lane": np.arange(200_000)},
    "grid": {"request": np.arange(400)[:, None], "position": np.arange(500)},
    "high bits only": {"request": np.arange(200_000, dtype=np.uint64) << np.uint64(40), "position": 0},
}


@pytest.mark.parametrize("key", GRIDS.values(), ids=GRIDS.keys())
def test_uniform_over_every_kind_of_neighbourhood(key):
    draws = uniform(7, Purpose.ACCEPT_COIN, **key).ravel()
    assert draws.dtype == np.float64
    assert draws.min() >= 0.0 and draws.max() < 1.0
    counts = np.bincount((draws * 256).astype(int), minlength=256)
    assert chi_square(counts) < chi_square_bound(255)
    low = hash64(7, Purpose.ACCEPT_COIN, **key).ravel() & np.uint64(255)
    assert chi_square(np.bincount(low.astype(int), minlength=256)) < chi_square_bound(255)


def test_integers_arrays_and_broadcasts_agree_without_warnings():
    requests = np.array([0, 1, 2**63, 2**64 - 1], dtype=np.uint64)
    positions = np.array([0, 5, 2**40], dtype=np.int64)
    lanes = np.arange(2, dtype=np.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grid = uniform(11, Purpose.DRAFT, requests[:, None, None], positions[:, None], lanes)
        normals = normal(11, Purpose.DRAFT, requests[:, None, None], positions[:, None], lanes)
        assert grid.shape == (4, 3, 2)
        assert np.array_equal(uniform(11, Purpose.DRAFT, requests, 5, 1), grid[:, 1, 1])
        assert np.array_equal(uniform(11, Purpose.DRAFT, 2**63, positions, 1), grid[2, :, 1])
        assert np.array_equal(uniform(11, Purpose.DRAFT, 2**63, 5, lanes), grid[2, 1])
        for i, request in enumerate(requests.tolist()):
            for j, position in enumerate(positions.tolist()):
                for k in range(2):
                    assert uniform(11, Purpose.DRAFT, request, position, k) == grid[i, j, k]
                    assert uniform(11, 3, np.uint64(request), np.int64(position), lanes[k]) == grid[i, j, k]
                    assert normal(11, Purpose.DRAFT, request, position, k) == normals[i, j, k]


def test_known_values_never_change():
    # Logs and recorded cases depend on these; a change here is a change of every simulation.
    assert int(hash64(0, Purpose.ACCEPT_COIN, 0, 0)) == KNOWN[0]
    assert int(hash64(42, Purpose.ARRIVAL, 7, 1000, 3)) == KNOWN[1]
    assert request_key("request-1") == KNOWN[2]


KNOWN = (15746410006632323747, 4248773163210358119, 7239539881221587450)


def test_cached_stream_keys_give_the_same_draws():
    requests, positions = np.arange(6)[:, None], np.arange(10)
    keys = stream_keys(3, Purpose.ACCEPTANCE, requests, 2)
    before = keys.copy()
    assert np.array_equal(uniform_at(keys, positions), uniform(3, Purpose.ACCEPTANCE, requests, positions, 2))
    assert np.array_equal(normal_at(keys, positions), normal(3, Purpose.ACCEPTANCE, requests, positions, 2))
    assert np.array_equal(keys, before)
    single = stream_keys(3, Purpose.ACCEPTANCE, 5, 2)
    assert uniform_at(single, 4) == uniform(3, Purpose.ACCEPTANCE, 5, 4, 2)


def test_arguments_are_left_as_they_are():
    requests = np.arange(5, dtype=np.uint64)
    positions = np.arange(5, dtype=np.uint64)
    hash64(1, 2, requests, positions, requests)
    assert np.array_equal(requests, np.arange(5)) and np.array_equal(positions, np.arange(5))


def test_normal_has_the_moments_and_the_tails_of_a_normal():
    draws = normal(1, Purpose.ACCEPTANCE_FIELD, np.arange(500)[:, None], np.arange(800))
    assert np.isfinite(draws).all()
    assert abs(draws.mean()) < 0.008
    assert abs(draws.std() - 1.0) < 0.006
    assert abs((draws**3).mean()) < 0.02
    assert abs((draws**4).mean() - 3.0) < 0.05
    assert abs((draws > 1.959964).mean() - 0.025) < 0.0012


def test_empty_and_refused_keys():
    assert uniform(1, 1, np.zeros(0, np.int64), 3).shape == (0,)
    assert uniform(1, 1, [], 3).dtype == np.float64
    assert hash64(1, 1, np.zeros((0, 1), np.int64), np.arange(3)).shape == (0, 3)
    with pytest.raises(TypeError, match="integer"):
        uniform(1, 1, np.array([0.5]), 0)


def test_negative_seeds_and_positions_are_legal_and_distinct():
    values = {float(uniform(seed, 1, 0, position)) for seed in (-1, 0, 1) for position in (-1, 0, 1)}
    assert len(values) == 9
    assert uniform(1, 1, 0, np.array([-1]))[0] == uniform(1, 1, 0, -1)


def test_request_keys_are_stable_and_distinct():
    assert len({request_key(f"r{i}") for i in range(10_000)}) == 10_000
    assert 0 <= request_key("") < 2**64
    assert request_key("é") != request_key("e")


def test_purposes_have_distinct_numbers():
    assert len({int(purpose) for purpose in Purpose}) == len(Purpose.__members__)
