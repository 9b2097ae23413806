"""The mechanisms of the worn-off roofline: roll-off, tiles and waves, the soft corner, query tiles."""

import itertools
from dataclasses import replace

import pytest
from foretoken.sim.cost.efficiency import DEFAULT_EFFICIENCY, Tile, default_efficiency
from foretoken.sim.cost.hardware import known_gpus, lookup_gpu

H100 = lookup_gpu("H100")


def gemm(efficiency, rows, inner=4096, columns=28672):
    return efficiency.gemm_ns(H100, rows, inner, columns, dtype="bf16", weight_bytes=2)


def test_small_transfers_reach_a_smaller_fraction():
    sizes = (1e4, 1e6, 1e8, 1e10)
    floors_ns = [size / H100.memory_bandwidth_bytes_per_s * 1e9 for size in sizes]
    fractions = [floor / DEFAULT_EFFICIENCY.stream_ns(H100, size) for floor, size in zip(floors_ns, sizes, strict=True)]
    assert fractions == sorted(fractions)
    assert fractions[0] < 0.01
    assert fractions[-1] == pytest.approx(DEFAULT_EFFICIENCY.bandwidth, rel=1e-3)


def test_one_token_takes_the_time_of_its_weights():
    weights = 4096 * 28672 * 2
    floor_ns = weights * 1e9 / (H100.memory_bandwidth_bytes_per_s * DEFAULT_EFFICIENCY.bandwidth)
    assert floor_ns < gemm(DEFAULT_EFFICIENCY, 1) < 1.1 * floor_ns


def test_many_tokens_take_the_time_of_their_operations():
    rows = 16_384
    floor_ns = 2.0 * rows * 4096 * 28672 * 1e9 / (H100.peak_flops["bf16"] * DEFAULT_EFFICIENCY.compute)
    assert floor_ns < gemm(DEFAULT_EFFICIENCY, rows) < 1.1 * floor_ns


def test_time_never_falls_with_more_tokens():
    times = [gemm(DEFAULT_EFFICIENCY, rows) for rows in range(1, 1025)]
    assert all(later >= earlier for earlier, later in itertools.pairwise(times))


def test_compute_is_a_step_function_of_whole_tiles():
    one_tile = replace(DEFAULT_EFFICIENCY, tiles=(Tile(64, 128, 1.0),), split_k_max=1)
    steps = [one_tile.tiles_ns(H100, rows, 4096, 28672, 1.0, "bf16") for rows in (1, 64, 65, 128, 129)]
    assert steps[0] == steps[1] < steps[2] == steps[3] < steps[4]


def test_the_last_wave_counts_in_full():
    one_tile = replace(DEFAULT_EFFICIENCY, tiles=(Tile(128, 128, 1.0),), split_k_max=1)
    full = one_tile.tiles_ns(H100, 128, 4096, 128 * H100.sm_count, 1.0, "bf16")
    one_more = one_tile.tiles_ns(H100, 128, 4096, 128 * (H100.sm_count + 1), 1.0, "bf16")
    assert one_more == pytest.approx(2 * full)
    # Splitting the inner dimension is what a library does against this.
    split = replace(one_tile, split_k_max=8).tiles_ns(H100, 128, 4096, 128 * (H100.sm_count + 1), 1.0, "bf16")
    assert full < split < one_more


def test_the_corner_is_soft_and_the_ends_are_not():
    assert DEFAULT_EFFICIENCY.soft_max(100.0, 100.0) == pytest.approx(100 * 2 ** (1 / 1.5))
    assert DEFAULT_EFFICIENCY.soft_max(100.0, 0.1) == pytest.approx(100.0, rel=1e-3)
    assert DEFAULT_EFFICIENCY.soft_max(0.0, 0.0) == 0.0
    assert replace(DEFAULT_EFFICIENCY, soft_exponent=1.0).soft_max(3.0, 4.0) == 7.0
    assert replace(DEFAULT_EFFICIENCY, soft_exponent=2.0).soft_max(3.0, 4.0) == 5.0


def test_queries_are_padded_to_query_tiles():
    assert [DEFAULT_EFFICIENCY.padded_queries(queries) for queries in (1, 16, 17, 64, 65, 129)] == [
        16, 16, 64, 64, 128, 256,
    ]  # fmt: skip


def test_wide_trees_pay_for_attention_in_steps():
    def per_token(queries):
        return DEFAULT_EFFICIENCY.attention_ns_per_token(
            H100, heads=8, queries=queries, query_flops=4 * 128, token_bytes=2 * 8 * 128 * 2, dtype="bf16"
        )

    read_ns = 2 * 8 * 128 * 2 * 1e9 / (H100.memory_bandwidth_bytes_per_s * DEFAULT_EFFICIENCY.attention_bandwidth)
    assert per_token(1) == per_token(16) == pytest.approx(read_ns, rel=0.05)
    assert per_token(16) < per_token(17) == per_token(64) < per_token(65)
    # 1,024 rows per KV head are far beyond the ridge: compute decides.
    compute_ns = 4 * 1024 * 128 * 8 * 1e9 / (H100.peak_flops["bf16"] * DEFAULT_EFFICIENCY.attention_compute)
    assert per_token(1024) == pytest.approx(compute_ns, rel=0.1)


@pytest.mark.parametrize("name", known_gpus())
def test_every_device_has_explained_fractions(name):
    efficiency = default_efficiency(lookup_gpu(name))
    assert all(source for *_, source in efficiency.explain())


@pytest.mark.parametrize("change", [{"bandwidth": 0.0}, {"compute": 1.1}, {"soft_exponent": 0.5}, {"tiles": ()}])
def test_impossible_parameters_are_refused(change):
    with pytest.raises(AssertionError):
        replace(DEFAULT_EFFICIENCY, **change)
