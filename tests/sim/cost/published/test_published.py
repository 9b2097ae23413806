"""What published points say of a deployment: the factor on its passes, intervals, and the model behind both."""

import csv
import importlib
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from foredraft.core.model_shape import lookup_model
from foredraft.sim.cost.hardware import Parallelism, lookup_gpu
from foredraft.sim.cost.published.evidence import REQUEST, TPOT, TTFT, Load, about_releases, published_evidence
from foredraft.sim.cost.published.hierarchy import Observation, Posterior, Term, fit, gram
from foredraft.sim.cost.published.places import format_of, kind_of, place_of
from foredraft.sim.cost.published.spread import Spread
from foredraft.sim.cost.round import RoundCost

BENCHMARKS = Path(__file__).parents[4] / "benchmarks"
LLAMA = lookup_model("llama-3.1-70b")
PLACE = place_of(LLAMA.with_dtypes("fp8", None), "H200", "vllm-0.18", Parallelism(4))
FLAT = {"load": 0.0, "size": 0.0, "waves": 0.0, "equal": 0.0}
SERVER, RUN = Term(("server",)), Term(("server", "gpu", "run"))


def observed(mean, count=1.0, **fields):
    return Observation(PLACE._replace(**fields), mean, count, FLAT)


class TestHierarchy:
    def test_places_covary_as_far_as_they_share_levels(self):
        rows = [observed(0.0), observed(0.0, gpu="B200"), observed(0.0, server="sglang-0.5")]
        assert gram(rows, rows, SERVER).tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
        slope = [replace(rows[0], slopes=FLAT | {"load": 2.0}), rows[1]]
        assert gram(slope, slope, Term(("server",), "load")).tolist() == [[4, 0], [0, 0]]

    def test_more_points_say_more(self):
        deviations = {SERVER: 0.1, RUN: 0.1}
        means, effects = zip(
            *(Posterior([observed(0.3, count)], deviations, 0.2).predict(PLACE, FLAT) for count in (1, 4, 100)),
            strict=True,
        )
        assert list(means) == sorted(means)
        assert list(effects) == sorted(effects, reverse=True)
        assert means[-1] == pytest.approx(0.3, abs=0.01)

    def test_a_place_without_points_has_what_it_shares(self):
        posterior = Posterior([observed(0.3, 100.0)], {SERVER: 0.2, RUN: 0.2}, 0.1)
        here, other = (posterior.predict(place, FLAT) for place in (PLACE, PLACE._replace(gpu="B300")))
        assert 0 < other.mean < here.mean
        assert other.deviation > here.deviation

    def test_effects_that_two_points_share_cancel(self):
        posterior = Posterior([observed(0.3, 4.0)], {SERVER: 0.2, RUN: 0.1}, 0.1)
        here, other = (PLACE, FLAT), (PLACE._replace(gpu="B300"), FLAT)
        same = posterior.difference((here, here))
        assert (same.mean, same.deviation) == (pytest.approx(0.0), pytest.approx(0.0, abs=1e-9))
        found, alone = posterior.difference((here, other)), [posterior.predict(*point) for point in (here, other)]
        assert found.mean == pytest.approx(alone[0].mean - alone[1].mean)
        assert 0 < found.deviation < math.hypot(*(one.deviation for one in alone))
        # Without anything in common nothing cancels but the mean of all observations.
        strange = Posterior([], {RUN: 0.1}, 0.1).difference((here, other))
        assert strange.deviation == pytest.approx(0.1 * math.sqrt(2))

    def test_the_fit_finds_the_deviations_of_effects_and_noise(self):
        draws = np.random.default_rng(5)
        servers = draws.normal(0, 0.2, 40)
        rows = [
            observed(servers[i] + draws.normal(0, 0.05), server=f"server {i}", run=str(j))
            for i in range(40)
            for j in range(5)
        ]
        deviations, noise = fit(rows, [SERVER])
        # The half-normal prior draws large deviations down a little.
        assert deviations[SERVER] == pytest.approx(0.19, abs=0.04)
        assert noise == pytest.approx(0.05, abs=0.01)


class TestEvidence:
    def test_our_own_executor_has_no_published_points(self):
        assert published_evidence(PLACE._replace(server="foredraft"), "measured") is None

    def test_comparisons_are_surer_than_single_times(self):
        here, load = published_evidence(PLACE, "measured"), Load()
        single = math.log(here.interval(TPOT, load).high / here.interval(TPOT, load).low) / 2
        itself = here.compare(TPOT, load, here, load)
        assert (itself.mean, itself.half_width) == (pytest.approx(0.0), pytest.approx(0.0, abs=1e-6))
        busier = here.compare(TPOT, load, here, Load(clients=256.0)).half_width
        wider = published_evidence(PLACE._replace(parallel="8 x 1, 1"), "measured")
        other_gpu = published_evidence(PLACE._replace(gpu="L40S"), "measured")
        widths = [here.compare(TPOT, load, one, load).half_width for one in (wider, other_gpu)]
        assert 0 < busier < single
        assert busier < widths[0] < widths[1]
        apart = published_evidence(PLACE, "roofline").compare(TPOT, load, here, load)
        assert apart.half_width > single, "two fits have nothing in common"

    def test_a_release_without_points_has_the_spread_of_releases(self):
        effects = published_evidence(PLACE, "measured").effects
        known = next(place for place in effects.counts if place._replace(run="") == PLACE)
        assert effects.predict(TPOT, PLACE, Load()).deviation > effects.predict(TPOT, known, Load()).deviation

    @pytest.mark.parametrize(
        ("server", "says"),
        [
            ("vllm-0.18", "its published points are of releases 0.12.0 to 0.19.0"),
            ("trtllm-1.x", "its published points are of releases 1.0.0 to 1.2.0"),
            ("vllm-0.9", ""),
        ],
    )
    def test_it_names_the_releases_of_the_points(self, server, says):
        assert about_releases(server) == says

    def test_it_says_what_it_rests_on(self):
        rows = rows_of("measured")

        def count(*fields):
            return sum(all(row[name] == getattr(PLACE, name) for name in fields) for row in rows)

        own = count("model", "gpu", "server")
        same = count("model", "gpu", "server", "number_format", "parallel")
        words = f"{own} published points of this model, GPU and server ({same} of its format and parallelism)"
        assert published_evidence(PLACE, "measured").about == words
        other = published_evidence(PLACE._replace(model="another"), "measured")
        assert other.about == f"none of this model; {count('gpu', 'server')} published points of this GPU and server"
        nowhere = published_evidence(PLACE._replace(model="another", gpu="L4"), "measured")
        assert nowhere.about.startswith("none of this GPU and server; ")
        assert published_evidence(PLACE._replace(server="vllm-0.9"), "measured").factor == 1.0

    @pytest.mark.parametrize("time", [TPOT, TTFT, REQUEST])
    def test_intervals_are_wider_where_nothing_near_was_measured(self, time):
        def width(place):
            low, high = published_evidence(place, "measured").interval(time, Load())
            assert low < high
            return math.log(high / low)

        own, model = width(PLACE), width(PLACE._replace(model="another"))
        assert own < model < width(PLACE._replace(model="another", gpu="L4", kind="another", parallel="another"))

    def test_the_interval_of_what_has_the_factor_lies_around_it(self):
        found = published_evidence(PLACE, "measured")
        low, high = found.interval(TPOT, Load())
        assert low * high == pytest.approx(1.0)
        assert 0.9 < found.factor < 1.1

    def test_the_factor_is_on_the_whole_pass_and_is_explained(self):
        found = published_evidence(PLACE._replace(model="another"), "measured")
        plain = RoundCost(LLAMA, lookup_gpu("H200"), 4)
        cost = RoundCost(LLAMA, lookup_gpu("H200"), 4, published=found)
        for price in (
            lambda each: each.decode_ns(16, 0, 1, 1, 16_000),
            lambda each: each.step_ns([(1024, 0)], (16, 0, 1, 1, 16_000)),
        ):
            assert price(cost) == pytest.approx(found.factor * price(plain), rel=1e-6)
        assert ("passes: published / simulated", found.factor, "", found.about) in cost.explain()


def test_a_spread_is_that_of_effects_and_noise():
    spread = Spread(0.03, 2.0, {"vllm-0.18": math.log(2), "load": math.log(3)})
    assert spread.deviation(PLACE, FLAT, 0.0) == pytest.approx(0.06)
    assert spread.deviation(PLACE, FLAT | {"load": 1.0}, 0.0) == pytest.approx(0.18)
    assert spread.deviation(PLACE, FLAT, 0.04) == pytest.approx(0.1)


def test_kinds_and_formats_of_models():
    assert [kind_of(lookup_model(name)) for name in ("llama-3.1-8b", "qwen3-30b-a3b")] == ["dense", "experts"]
    formats = [format_of(LLAMA.with_dtypes(name, None)) for name in ("bf16", "fp8", "nvfp4", "mxfp4", "int4-g128")]
    assert formats == ["16 bits", "FP8", "FP4", "FP4", "INT4"]


def rows_of(kernels):
    with (BENCHMARKS / "published" / "serving.csv").open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["kernels"] == kernels]


@pytest.mark.slow
def test_the_shipped_effects_are_those_of_a_fresh_fit(monkeypatch):
    """`python benchmarks/published_fit.py --write` writes them."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    tool = importlib.import_module("published_fit")
    shipped, rows = published_evidence(PLACE, "measured").effects, tool.read_rows()
    found = tool.fitted(tool.points_of([row for row in rows if row.kernels == "measured"], TPOT), tool.terms_of(TPOT))
    fresh = Posterior(found.points.observations(), found.deviations, found.noise)
    for place in list(shipped.by_deployment)[::10]:
        mean, effects = fresh.predict(place, FLAT)
        assert shipped.posteriors[TPOT].predict(place, FLAT) == pytest.approx((mean, effects), abs=0.01)
