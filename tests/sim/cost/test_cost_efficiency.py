"""The mechanisms of the worn-off roofline: roll-off, tiles and waves, the soft corner, query tiles."""

from dataclasses import replace

import pytest
from foredraft.sim.cost.efficiency import DEFAULT_EFFICIENCY, Tile, default_efficiency
from foredraft.sim.cost.hardware import known_gpus, lookup_gpu

H100 = lookup_gpu("H100")


def test_the_last_wave_counts_in_full():
    one_tile = replace(DEFAULT_EFFICIENCY, tiles=(Tile(128, 128, 1.0),), split_k_max=1)
    full = one_tile.tiles_ns(H100, 128, 4096, 128 * H100.sm_count, 1.0, "bf16")
    one_more = one_tile.tiles_ns(H100, 128, 4096, 128 * (H100.sm_count + 1), 1.0, "bf16")
    assert one_more == pytest.approx(2 * full)
    # Splitting the inner dimension is what a library does against this.
    split = replace(one_tile, split_k_max=8).tiles_ns(H100, 128, 4096, 128 * (H100.sm_count + 1), 1.0, "bf16")
    assert full < split < one_more


@pytest.mark.parametrize("name", known_gpus())
def test_every_device_has_explained_fractions(name):
    efficiency = default_efficiency(lookup_gpu(name))
    assert all(source for *_, source in efficiency.explain())


@pytest.mark.parametrize("change", [{"bandwidth": 0.0}, {"compute": 1.1}, {"soft_exponent": 0.5}, {"tiles": ()}])
def test_impossible_parameters_are_refused(change):
    with pytest.raises(AssertionError):
        replace(DEFAULT_EFFICIENCY, **change)
