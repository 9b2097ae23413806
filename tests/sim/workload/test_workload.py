"""Synthetic workloads: lengths, shared prefixes, and streams that are the beginning of longer ones."""

import itertools
import tracemalloc

import numpy as np
import pytest
from foredraft.core.draws import Purpose
from foredraft.core.errors import ConfigError
from foredraft.sim.load import make_workload
from foredraft.sim.scenario_file import load_scenario, scenario_from_dict
from foredraft.sim.workload.arrivals import ArrivalProcess
from foredraft.sim.workload.lengths import EmpiricalLength, FixedLength, LognormalLength, SharedPrefixes, UniformLength
from foredraft.sim.workload.workload import SyntheticWorkload

INDEX = np.arange(50_000, dtype=np.uint64)


def draw(distribution, seed=1):
    lengths = distribution.draw(seed, Purpose.LENGTH, INDEX)
    assert lengths.dtype == np.int64
    assert lengths.shape == INDEX.shape
    return lengths


class TestLengths:
    def test_fixed(self):
        assert set(draw(FixedLength(7)).tolist()) == {7}

    def test_uniform_has_both_ends_equally_often(self):
        values, counts = np.unique(draw(UniformLength(3, 7)), return_counts=True)
        assert values.tolist() == [3, 4, 5, 6, 7]
        assert counts / len(INDEX) == pytest.approx(0.2, abs=0.01)

    def test_lognormal_has_its_mean_and_spread(self):
        lengths = draw(LognormalLength(800.0, 0.9))
        assert lengths.mean() == pytest.approx(800.0, rel=0.03)
        assert np.log(lengths).std() == pytest.approx(0.9, rel=0.02)
        clipped = draw(LognormalLength(800.0, 0.9, low=100, high=1000))
        assert (clipped.min(), clipped.max()) == (100, 1000)

    def test_empirical_repeats_its_sample(self):
        values, counts = np.unique(draw(EmpiricalLength((5, 9), (3.0, 1.0))), return_counts=True)
        assert values.tolist() == [5, 9]
        assert counts[0] / len(INDEX) == pytest.approx(0.75, abs=0.01)

    @pytest.mark.parametrize(
        "distribution", [UniformLength(1, 999), LognormalLength(90, 1), EmpiricalLength((1, 9), (1.0, 1.0))]
    )
    def test_a_request_has_its_length_by_key(self, distribution):
        whole = draw(distribution)
        np.testing.assert_array_equal(distribution.draw(1, Purpose.LENGTH, INDEX[700:900]), whole[700:900])
        assert not np.array_equal(draw(distribution, seed=2), whole)


class TestPrefixes:
    PREFIXES = SharedPrefixes(4, UniformLength(50, 90), popularity=1.0)

    def test_a_group_shares_its_prefix_and_nothing_else(self):
        index = INDEX[:60]
        groups = self.PREFIXES.groups(1, index)
        prompts = self.PREFIXES.prompts(1, index, np.full(60, 200))
        tokens = [prompt.materialize() for prompt in prompts]
        assert {len(row) for row in tokens} == {200}
        shared_lens = {}
        for i, j in itertools.combinations(range(60), 2):
            same = tokens[i] == tokens[j]
            if groups[i] != groups[j]:
                assert not same.any()
            else:
                length = int(np.argmin(same))
                assert not same[length:].any()
                assert shared_lens.setdefault(int(groups[i]), length) == length
        assert len(shared_lens) >= 3
        assert all(50 <= length <= 90 for length in shared_lens.values())
        assert len(set(shared_lens.values())) > 1

    def test_popularity_follows_zipf(self):
        shares = np.bincount(self.PREFIXES.groups(1, INDEX), minlength=4) / len(INDEX)
        assert shares == pytest.approx(np.array([12, 6, 4, 3]) / 25, abs=0.01)
        alike = np.bincount(SharedPrefixes(4, FixedLength(5)).groups(1, INDEX), minlength=4) / len(INDEX)
        assert alike == pytest.approx(0.25, abs=0.01)

    def test_a_short_prompt_has_a_cut_prefix_and_one_token_of_its_own(self):
        prompts = SharedPrefixes(1, FixedLength(50)).prompts(1, INDEX[:3], np.array([1, 2, 60]))
        one, two, sixty = (prompt.materialize() for prompt in prompts)
        assert [len(one), len(two), len(sixty)] == [1, 2, 60]
        assert two[0] == sixty[0]
        assert two[1] != sixty[1]
        assert one[0] != sixty[0]


OPEN = {
    "prompt_len": LognormalLength(300, 1.0),
    "output_len": UniformLength(1, 100),
    "arrivals": ArrivalProcess.poisson(50.0),
    "prefixes": SharedPrefixes(5, FixedLength(64)),
    "urgent_share": 0.2,
}


class TestWorkload:
    def test_a_longer_workload_begins_with_the_shorter(self):
        long = list(SyntheticWorkload(**OPEN, num_requests=9000))
        assert list(SyntheticWorkload(**OPEN, num_requests=300)) == long[:300]
        assert [arrival.row for arrival in long] == list(range(9000))
        assert long[0] != next(iter(SyntheticWorkload(**OPEN, num_requests=1, seed=1)))
        assert np.mean([arrival.priority for arrival in long]) == pytest.approx(0.2, abs=0.02)

    def test_one_distribution_moves_nothing_else(self):
        changed = {**OPEN, "output_len": FixedLength(5), "prefixes": None, "urgent_share": 0.0}
        pairs = zip(
            SyntheticWorkload(**OPEN, num_requests=200), SyntheticWorkload(**changed, num_requests=200), strict=True
        )
        for one, two in pairs:
            assert (one.time_ns, one.prompt.length) == (two.time_ns, two.prompt.length)
            assert two.output_len == 5
            assert two.prompt.materialize() is None

    def test_it_stops_at_a_time(self):
        arrivals = list(SyntheticWorkload(**OPEN, stop_s=3.0))
        assert 100 < len(arrivals) < 200
        assert arrivals[-1].time_ns < 3e9

    def test_a_closed_loop_has_no_times(self):
        workload = SyntheticWorkload(FixedLength(9), FixedLength(4), concurrency=8, num_requests=20)
        arrivals = list(workload)
        assert len(arrivals) == 20
        assert {arrival.time_ns for arrival in arrivals} == {None}
        endless = SyntheticWorkload(FixedLength(9), FixedLength(4), concurrency=8)
        assert len(list(itertools.islice(endless, 20_000))) == 20_000

    def test_the_longest_prompt_leaves_room_for_an_output_of_the_mean_length(self):
        prompts = {"prompt": {"mean": 9000.0, "sigma": 1.0}, "output": {"kind": "fixed", "value": 500}}
        scenario = scenario_from_dict({"workload": prompts | {"num_requests": 300}}, "test")
        assert max(arrival.prompt.length for arrival in make_workload(scenario, 4096)) == 4096 - 500

    def test_memory_is_bounded(self):
        workload = SyntheticWorkload(FixedLength(9), FixedLength(4), ArrivalProcess.poisson(9.0), num_requests=60_000)
        tracemalloc.start()
        assert sum(1 for _ in workload) == 60_000
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8e6


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("workload.burstiness=-1.0", "workload.burstiness"),
        ("workload.amplitude=1.5", "workload.amplitude"),
        ("workload.rate=0.0", "workload.rate"),
        ("workload.num_requests=0", "workload.num_requests"),
        ("workload.prompt={value=0}", "workload.prompt.value"),
        ("workload.prompt={kind='uniform', low=5, high=4}", "workload.prompt"),
        ("workload.prompt={sigma=-1.0}", "workload.prompt.sigma"),
        ("workload.output={values=[]}", "workload.output.values"),
        ("workload.output={values=[1, 2], weights=[1.0]}", "workload.output"),
        ("workload.output={values=[1], weights=[0.0]}", "workload.output"),
        ("workload.output={value=2147483648}", "workload.output.value"),
        ("workload.prefixes={groups=0}", "workload.prefixes.groups"),
        ("workload.prefixes={zipf=-1.0}", "workload.prefixes.zipf"),
        ("workload={trace='t.csv', start_s=5, stop_s=4}", "workload"),
    ],
)
def test_what_no_workload_has_is_refused_with_its_key(setting, key):
    with pytest.raises(ConfigError) as caught:
        load_scenario(None, [setting])
    assert [problem.key for problem in caught.value.problems] == [key]
