"""What published points say of a deployment: what is known of it, intervals, the factor on its passes."""

import csv
import importlib
import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
from foredraft.core.contract.step import PLAIN_ROUND
from foredraft.core.model_shape import lookup_model
from foredraft.sim.cost.deployments.evidence import (
    DRAFTS,
    NOTHING,
    OTHERS,
    OWN,
    RELEASE,
    REQUEST,
    TABLE,
    TPOT,
    TTFT,
    Place,
    about_releases,
    format_of,
    place_of,
    published_evidence,
)
from foredraft.sim.cost.hardware import Parallelism, lookup_gpu
from foredraft.sim.cost.passes.decode_work import DecodeWork
from foredraft.sim.cost.round import RoundCost

BENCHMARKS = Path(__file__).parents[4] / "benchmarks"
LLAMA = lookup_model("llama-3.1-70b")
PLACE = place_of(LLAMA.with_dtypes("fp8", None), "H200", "vllm-0.18", Parallelism(4))
ELSEWHERE = {
    RELEASE: Place("61 x 7168, 129280", "B200", "trtllm-1.x", "FP4", "4 x 1, 1", "1.1"),
    OWN: PLACE,
    OTHERS: PLACE._replace(model="another"),
    NOTHING: PLACE._replace(gpu="RTX4090"),
}
NEAR = PLACE._replace(gpu="B300", server="trtllm-1.x")
KERNELS = ("measured", "roofline")


@pytest.mark.parametrize("time", [TPOT, TTFT, REQUEST])
@pytest.mark.parametrize("kernels", KERNELS)
def test_who_knows_less_is_never_surer(time, kernels):
    found = {name: published_evidence(place, kernels) for name, place in ELSEWHERE.items()}
    assert {name: one.knowledge for name, one in found.items()} == {name: name for name in ELSEWHERE}
    assert set(found[OWN].errors.times[time]) <= {*ELSEWHERE}
    ends = [found[OWN].errors.times[time][name] for name in ELSEWHERE if name in found[OWN].errors.times[time]]
    assert published_evidence(NEAR, kernels).knowledge == OTHERS
    assert all(after[0] <= before[0] and before[1] <= after[1] for before, after in pairwise(ends))
    for one in found.values():
        low, high = one.interval(time)
        assert low <= 1.0 <= high and low < high
    measured = published_evidence(ELSEWHERE[NOTHING], "measured").interval(time)
    roofline = published_evidence(ELSEWHERE[NOTHING], "roofline").interval(time)
    assert roofline.low <= measured.low and measured.high <= roofline.high


@pytest.mark.parametrize("kernels", KERNELS)
def test_times_with_drafts_are_no_surer_than_plain_ones_where_none_are_published(kernels):
    for place in ELSEWHERE.values():
        plain, drafts = (published_evidence(place, kernels, each) for each in (False, True))
        assert drafts.interval(TPOT).low <= plain.interval(TPOT).low
        assert drafts.interval(TPOT).high >= plain.interval(TPOT).high
        assert drafts.interval(TTFT) == plain.interval(TTFT)
    sglang = published_evidence(PLACE._replace(server="sglang-0.5"), kernels, True)
    h100 = published_evidence(PLACE._replace(gpu="H100"), kernels, True)
    assert 0.05 < sglang.speed_up_error < h100.speed_up_error < drafts.speed_up_error, "drafts: of a GPU without points"


def test_rounds_with_drafts_have_rows_of_their_own():
    place = place_of(lookup_model("llama-3.1-8b"), "H200", "sglang-0.5", Parallelism(1))
    plain, drafts = (published_evidence(place, "measured", each) for each in (False, True))
    assert [one.has_drafts for one in drafts.own] == [True] and drafts.knowledge == OWN
    assert not any(one.has_drafts for one in plain.own)
    assert "published points of this deployment with drafts, which took" in drafts.about
    low, high = drafts.errors.times[DRAFTS][OWN]
    assert drafts.interval(TPOT, is_corrected=True) == pytest.approx((math.exp(low), math.exp(high)))


def test_a_named_release_has_its_own_rows_or_none():
    known = published_evidence(ELSEWHERE[RELEASE], "measured")
    assert {one.place.release for one in known.own} == {"1.1.0"}
    every = published_evidence(ELSEWHERE[RELEASE]._replace(release=""), "measured")
    assert every.knowledge == OWN and len(every.own) > 1
    assert published_evidence(ELSEWHERE[RELEASE]._replace(release="0.1"), "measured").knowledge == OTHERS


def test_the_intervals_are_around_a_deployments_own_points():
    found = published_evidence(PLACE, "measured")
    low, high = found.errors.times[TPOT][OWN]
    mean = math.log(found.factor)
    assert found.interval(TPOT) == pytest.approx((math.exp(min(0.0, mean + low)), math.exp(max(0.0, mean + high))))
    assert found.interval(TPOT, is_corrected=True) == pytest.approx((math.exp(low), math.exp(high)))
    assert published_evidence(ELSEWHERE[OTHERS], "measured").factor == 1.0


def test_comparisons_are_as_sure_as_what_two_deployments_share():
    here = published_evidence(PLACE, "measured")
    others = [
        PLACE,
        PLACE._replace(parallel="8 x 1, 1"),
        PLACE._replace(model="another"),
        PLACE._replace(gpu="B200", model="another"),
        PLACE._replace(gpu="RTX4090"),
    ]
    widths = [here.compare(TPOT, published_evidence(place, "measured")) for place in others]
    assert widths[0] == 0 and widths == sorted(widths) and widths[1] < widths[-1]
    assert here.compare(TPOT, published_evidence(PLACE, "roofline")) > 0, "two sources of kernels"


@pytest.mark.parametrize(
    ("server", "says"),
    [
        ("vllm-0.18", "its published points are of releases 0.12.0 to 0.19.0"),
        ("trtllm-1.x", "its published points are of releases 1.0.0 to 1.2.0"),
        ("vllm-0.9", ""),
    ],
)
def test_it_names_the_releases_of_the_points(server, says):
    assert about_releases(server) == says


def test_it_says_what_it_rests_on():
    def count(*fields):
        return sum(all(row[name] == getattr(PLACE, name) for name in fields) for row in rows_of("measured"))

    measured, fields = rows_of("measured"), ("model", "gpu", "server", "number_format", "parallel")
    priced = {tuple(row[name] for name in fields) for row in measured}
    others = [row for row in rows_of("roofline") if tuple(row[name] for name in fields) not in priced]
    trtllm = sum(row["server"] == "trtllm-1.x" for row in [*measured, *others])
    about = {name: published_evidence(place, "measured").about for name, place in ELSEWHERE.items()}
    own = count("model", "gpu", "server", "number_format", "parallel")
    factor = published_evidence(PLACE, "measured").factor
    took = f"which took {factor:.2f} × the simulated time per token"
    assert about[OWN] == f"{own} published points of this deployment, {took}"
    assert about[OTHERS] == f"none of this deployment; {count('gpu', 'server')} published points of this GPU and server"
    near = published_evidence(NEAR, "measured").about
    assert near == f"none of this GPU and server; {trtllm:,} published points of this server"
    assert about[NOTHING] == "no benchmark of this GPU: order of magnitude"
    ours = published_evidence(PLACE._replace(server="foredraft"), "measured")
    assert ours.about == "no benchmark of this server: order of magnitude"


def test_the_factor_is_on_the_whole_pass_and_is_explained():
    found = published_evidence(PLACE, "measured")
    plain = RoundCost(LLAMA, lookup_gpu("H200"), 4)
    cost = RoundCost(LLAMA, lookup_gpu("H200"), 4, published=found)
    for price in (
        lambda each: each.decode_ns(16, PLAIN_ROUND, 16_000),
        lambda each: each.step_ns([(1024, 0)], DecodeWork(16, PLAIN_ROUND, 16_000)),
    ):
        assert price(cost) == pytest.approx(found.factor * price(plain), rel=1e-6)
    assert ("passes: published / simulated", found.factor, "", found.about) in cost.explain()


def test_formats_of_models():
    formats = [format_of(LLAMA.with_dtypes(name, None)) for name in ("bf16", "fp8", "nvfp4", "mxfp4", "int4-g128")]
    assert formats == ["16 bits", "FP8", "FP4", "FP4", "INT4"]


def rows_of(kernels):
    with (BENCHMARKS / "published" / "serving.csv").open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["kernels"] == kernels]


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("accuracy")


def test_the_shipped_table_is_that_of_the_published_points(tool):
    """`python benchmarks/accuracy.py --kept` writes it."""
    text, lines = tool.document(tool.rows_of_points())
    assert json.loads(text) == json.loads(TABLE.read_text(encoding="utf-8"))
    page = (BENCHMARKS.parent / "docs" / "evidence" / "accuracy.md").read_text(encoding="utf-8")
    assert "\n".join(lines) in page
    for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]):
        if cells[4] != "earns nothing":
            assert 74 <= int(cells[5].removesuffix("%")) <= 86, cells
            assert not cells[7] or float(cells[6]) < float(cells[7]), cells


@pytest.fixture
def two_units(tool):
    intervals = importlib.import_module("intervals")
    values = {"a": (0.1, -0.1), "b": (0.5, 0.5, 0.5)}
    return intervals.Errors([intervals.ErrorItem(v, unit, v, unit) for unit, of in values.items() for v in of])


def test_the_widest_class_is_the_worst_unit(two_units):
    assert two_units.worst() == (-0.5, 0.5) and two_units.quantiles() == (-0.1, 0.5)
    assert two_units.quantiles("b") == (-0.1, 0.1) and two_units.quantiles("a") == (0.0, 0.5)


def test_ends_are_stretched_until_they_hold_what_was_left_out(two_units):
    assert two_units.stretch() == pytest.approx(5.0), "b is five times as far as a"
    assert two_units.ends() == pytest.approx((-0.5, 2.5))
    assert two_units.judge([])[0] == 0.8, "a's lower one is outside: nothing in b is below 0"
    assert two_units.stretch([(-0.5, 0.5)]) == 1.0 and two_units.judge([(-0.5, 0.5)])[0] == 1.0


def test_a_score_is_the_width_and_ten_times_what_lies_outside(two_units):
    held, score = two_units.judge([])
    assert score == pytest.approx((0.8 * 0 + 3 * 1.0 + 2 * 2.5 + 10 * 0.1) / 5) and held == 0.8
    assert two_units.score_with(two_units) == pytest.approx(score)
