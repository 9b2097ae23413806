"""SGLang's files of adaptive verification: times of rounds and temperatures, read, used and written."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from foredraft.core.adaptive import costs_from_json
from foredraft.core.adaptive.lengths.confidence import ConfidencePolicy
from foredraft.core.adaptive.lengths.interchange import COLDEST, load_round_times, load_temperatures, round_times_json
from foredraft.core.adaptive.lengths.pass_costs import PassCosts
from foredraft.core.adaptive.lengths.survival import acceptance_of
from foredraft.core.algorithm.builtin import Eagle3
from foredraft.core.contract.step import DecodeResult, DecodeStep, DraftBudget, MultiStepEnd, RoundShape
from foredraft.core.errors import ConfigError
from foredraft.core.scheduler.config import EngineConfig
from foredraft.core.scheduler.spec import EngineSpec, SpeculationChoice, resolve_spec

RATES = {"sample_batch_tokens": [2, 8, 16], "sample_steps_per_sec": [100.0, 90.0, 40], "max_batch_tokens": 64}
SUM = {
    "bias_seconds": 0.01,
    "bs_probes": [1, 8, 32],
    "alpha_seconds": [0.0, 0.001, 0.002],
    "m_probes": [0, 64, 128],
    "theta_seconds": [-0.001, 0.005, 0.02],
}
STS = {"temperatures": [2.0, 1.0, 0.5]}


def seconds_of(table: dict, rows: int, drafts: int) -> float:
    """Return the time of a round as SGLang looks it up."""
    if table is RATES:
        earlier = [i for i, probe in enumerate(RATES["sample_batch_tokens"]) if probe <= rows + drafts]
        return 1 / RATES["sample_steps_per_sec"][max(earlier, default=0)]
    alpha = np.interp(rows, SUM["bs_probes"], SUM["alpha_seconds"])
    return float(SUM["bias_seconds"] + alpha + np.interp(rows + drafts, SUM["m_probes"], SUM["theta_seconds"]))


def our_seconds(costs: PassCosts, rows: int, drafts: int) -> float:
    return (costs.draft_time(3, rows) + float(costs.verify_times(np.array([rows + drafts]))[0])) / 1e9


@pytest.mark.parametrize("table", [RATES, SUM], ids=["rates", "sum"])
def test_times_are_those_that_sglang_looks_up(table):
    costs = load_round_times(table, 3, "a table")
    for rows in (1, 2, 7, 8, 20, 32, 100):
        for drafts in (0, 1, 6, 7, 8, 14, 15, 63, 200, 5000):
            assert our_seconds(costs, rows, drafts) == pytest.approx(seconds_of(table, rows, drafts), abs=4e-9)
    many = np.array([1, 9, 500])
    assert costs.eager_times(many).tolist() == costs.verify_times(many).tolist(), "nothing is known beside prompts"
    assert costs_from_json(json.loads(json.dumps(costs.to_json())), "a log") == costs


def budget_of(policy: ConfidencePolicy, confidence: np.ndarray) -> DraftBudget:
    """Return the budget for rows of which the last result had these confidences."""
    bs, steps = confidence.shape
    rows, epochs = np.arange(1, bs + 1, dtype=np.int32), np.ones(bs, dtype=np.int64)
    step = DecodeStep(rows, epochs, epochs, epochs, RoundShape.chain(steps), 1)
    nodes, ones = np.full((1, bs), steps + 1, np.int32), np.ones((1, bs), np.int32)
    end = MultiStepEnd.MAX_ROUNDS
    result = DecodeResult(1, ones, None, np.zeros(bs, bool), end, row_nodes=nodes, confidence=confidence[None])
    policy.take(step, result, np.ones(bs, bool))
    policy.look(rows, epochs, 0)
    budget = policy.budget_for(RoundShape.chain(steps))
    assert budget is not None
    return budget


@pytest.mark.parametrize("table", [RATES, SUM], ids=["rates", "sum"])
def test_budgets_are_those_that_sglang_chooses(table):
    draw, found = np.random.default_rng(3), []
    for _ in range(60):
        bs = int(draw.integers(1, 33))
        policy = ConfidencePolicy(
            {"1": {"candidate_steps": [3]}}, load_round_times(table, 3, "a"), None, (2.0, 1.0, 0.5)
        )
        confidence = draw.uniform(0.02, 0.98, (bs, 3)).astype(np.float32)
        odds = np.log(confidence.astype(float) / (1 - confidence.astype(float)))
        survival = np.cumprod(1 / (1 + np.exp(-odds / [2.0, 1.0, 0.5])), axis=1)
        tokens = bs + np.concatenate([[0.0], np.cumsum(-np.sort(-survival.ravel()))])
        rates = [count / seconds_of(table, bs, drafts) for drafts, count in enumerate(tokens)]
        budget = budget_of(policy, confidence)
        assert budget.drafts == int(np.argmax(rates))
        found.append(budget.drafts / (3 * bs))
    assert min(found) < 0.5 < max(found), "the table matters"


@pytest.mark.filterwarnings("error")
def test_the_lowest_temperature_is_one_step():
    assert acceptance_of(np.array([[0.1, 0.9]]), (1 / COLDEST,) * 2, (0.0, 0.0)).tolist() == [[0.0, 1.0]]


def test_with_temperatures_nothing_is_learned():
    costs, steps = load_round_times(RATES, 3, "a"), [3]
    policy = ConfidencePolicy({"1": {"candidate_steps": steps}}, costs, None, (2.0, 1.0, 0.5))
    draw = np.random.default_rng(1)
    for _ in range(150):
        budget = budget_of(policy, draw.uniform(0, 1, (4, 3)).astype(np.float32))
    assert budget.slopes == (0.5, 1.0, 2.0) and budget.biases == (0.0,) * 3
    without = ConfidencePolicy({"1": {"candidate_steps": steps}}, costs, None)
    for _ in range(150):
        budget = budget_of(without, draw.uniform(0, 1, (4, 3)).astype(np.float32))
    assert budget.slopes == (budget.slope,) * 3 and budget.biases != (-0.2,) * 3
    p = acceptance_of(np.array([[0.5, 0.8, 0.8]]), (0.5, 1.0, 2.0), (0.0,) * 3)
    assert p[0].tolist() == pytest.approx([0.5, 0.8, 16 / 17])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sample_steps_per_sec": [100.0, 90.0, 90.5]}, r"sample_steps_per_sec\[2\]: is 90.5, more than 90.0"),
        ({"sample_steps_per_sec": [100.0, 90.0]}, "sample_steps_per_sec: is .*; expected a list of 3 numbers"),
        ({"sample_steps_per_sec": [100.0, 0, -1]}, r"sample_steps_per_sec\[1\]: is 0; .*\n.*\[2\]: is -1"),
        ({"sample_steps_per_sec": [math.nan, 90.0, 40]}, r"sample_steps_per_sec\[0\]: is nan"),
        ({"sample_batch_tokens": [2, 2, 16]}, "sample_batch_tokens: is .*; expected ascending integers from 1"),
        ({"sample_batch_tokens": []}, "sample_batch_tokens: is .*; expected ascending integers from 1"),
        ({"sample_batch_tokens": [2, 8.0, 16]}, "sample_batch_tokens: is .*; expected ascending integers from 1"),
        ({"max_batch_tokens": 15}, "max_batch_tokens: is 15; expected an integer from 16"),
        ({"max_tokens": 15}, "max_tokens: is not known .did you mean 'max_batch_tokens'"),
        ({"max_batch_tokens": None}, "max_batch_tokens: is None"),
    ],
)
def test_a_table_of_rates_that_cannot_be_is_refused(changes, says):
    with pytest.raises(ConfigError, match=says):
        load_round_times(RATES | changes, 3, "a table")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"theta_seconds": [0.0, 0.005, 0.004]}, r"theta_seconds\[2\]: is 0.004, less than 0.005"),
        ({"alpha_seconds": [0.0, -0.001, 0.0]}, r"alpha_seconds\[1\]: is -0.001, less than 0.0"),
        ({"bias_seconds": 0}, "bias_seconds: is 0; expected seconds above 0"),
        ({"bias_seconds": math.inf}, "bias_seconds: is inf; expected seconds above 0"),
        ({"bias_seconds": 0.001}, "nothing is left of it"),
        ({"m_probes": [64, 0, 128]}, "m_probes: is .*; expected ascending integers from 0"),
        ({"bs_probes": [1, 8]}, "alpha_seconds: is .*; expected a list of 2 numbers, as bs_probes has"),
        ({"theta_seconds": "none"}, "theta_seconds: is 'none'; expected a list of 3 numbers"),
        ({"sample_batch_tokens": [1]}, "sample_batch_tokens: is not known"),
    ],
)
def test_a_sum_that_cannot_be_is_refused(changes, says):
    with pytest.raises(ConfigError, match=says):
        load_round_times(SUM | changes, 3, "a table")


def test_files_are_named_in_what_is_wrong_with_them():
    texts = {
        "half.json": json.dumps({"bias_seconds": 1}),
        "list.json": "[1]",
        "no.json": "{",
        "nan.json": '{"temperatures": [NaN]}',
        "twice.json": '{"temperatures": [1], "temperatures": [1]}',
    }
    for name, says in (
        ("half.json", "half.json: bs_probes: is missing"),
        ("list.json", "list.json: is a list; expected a JSON object"),
        ("no.json", "no.json: is not JSON"),
        ("nan.json", "nan.json: is not JSON"),
        ("twice.json", "twice.json: temperatures: is written twice"),
    ):
        read = load_temperatures if "temperatures" in texts[name] else load_round_times
        with pytest.raises(ConfigError, match=says):
            read(name, 1, "a place", texts.__getitem__)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"temperatures": [1.0, 0, 1.0]}, r"temperatures\[1\]: is 0; expected a number from"),
        ({"temperatures": [1.0, -2, math.nan]}, r"temperatures\[1\]: is -2.*\n.*temperatures\[2\]: is nan"),
        ({"temperatures": [1.0, True, 1.0]}, r"temperatures\[1\]: is True"),
        ({"temperatures": [1.0, 10**400, math.inf]}, r"temperatures\[1\]: is 10+; expected.*\n.*temperatures\[2\]"),
        ({"temperatures": [1.0]}, "temperatures: is .1.0.; expected a list of 3, one for each draft step"),
        ({"temperature": [1.0] * 3}, "temperature: is not known .did you mean 'temperatures'"),
        ({}, "temperatures: is missing"),
    ],
)
def test_temperatures_that_cannot_be_are_refused(table, says):
    with pytest.raises(ConfigError, match=says):
        load_temperatures(table, 3, "a table")


def test_what_is_written_reads_back_with_the_same_times():
    rows, tokens = (1, 4, 16), (1, 4, 8, 16, 32, 64)
    drafting = ((0, 0, 0), (1000, 1500, 4000))
    for captured, by_rows in ((0, ()), (8, ()), (32, ()), (64, ()), (32, (1, 3, 8)), (64, (1, 5, 6, 16))):
        verify = (9000, 9000, 15_000, 20_000, 30_000, 70_000)
        costs = PassCosts((0, 3), rows, drafting, tokens, verify, (5, 8000), captured, captured_rows=by_rows)
        written = json.loads(round_times_json(costs, 3, kv_tokens_per_row=100))
        read = load_round_times(written, 3, "a file")
        for size in (1, 2, 4, 10, 16):
            for drafts in range(3 * size + 1):
                passes = costs.verify_times(costs.padded(3, np.array([size + drafts])))[0]
                wanted = costs.draft_time(3, size, kv_tokens=100 * size) + passes
                assert our_seconds(read, size, drafts) * 1e9 == pytest.approx(wanted, abs=3), (captured, size, drafts)
    with pytest.raises(ConfigError, match=r"have \[0, 3\]; expected 2 among them"):
        round_times_json(costs, 2)


CONFIG = EngineConfig(num_pages=400, context_len=100, max_running=4)


def test_a_specification_with_files_reads_back_and_one_without_is_written_as_before():
    choice = SpeculationChoice("confidence", 3, round_times=SUM, confidence_temperatures=STS)
    spec = resolve_spec(CONFIG, Eagle3(), choice)
    assert not spec.lacks_costs and spec.temperatures == (2.0, 1.0, 0.5)
    again = EngineSpec.from_json(json.loads(json.dumps(spec.to_json())), "a log")
    assert (again.cost_table, again.temperatures) == (spec.cost_table, spec.temperatures)
    assert again.make_controller().policy.curve.slopes == (0.5, 1.0, 2.0)
    plain = resolve_spec(CONFIG, Eagle3(), SpeculationChoice("confidence", 3))
    assert plain.lacks_costs and "temperatures" not in plain.to_json()
    with pytest.raises(ConfigError, match="a log: temperatures: is"):
        EngineSpec.from_json({**spec.to_json(), "temperatures": [1.0]}, "a log")


def test_round_times_need_one_number_of_steps():
    for choice in (
        SpeculationChoice("confidence", round_times=RATES),
        SpeculationChoice("confidence", 3, adaptive="default", round_times=RATES),
    ):
        with pytest.raises(ConfigError, match="round_times: are of one number of draft steps"):
            resolve_spec(CONFIG, Eagle3(), choice)
    assert resolve_spec(CONFIG, Eagle3(), SpeculationChoice("ema", 3, round_times=RATES)).cost_table is None
