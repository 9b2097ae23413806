"""Rows of one round that verify unequal numbers of nodes: what is planned, committed, taught and priced."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import foredraft
import numpy as np
import pytest
from foredraft.core.contract.events import Committed, Planned
from foredraft.core.contract.step import DecodeResult, DraftBudget, MultiStepEnd, RoundShape
from foredraft.core.errors import ConfigError, InvariantViolation
from foredraft.core.scheduler.rounds import DecodeRounds, Presence, all_nodes, remaining_nodes
from foredraft.core.tree.build import build_chain, shorten_trees
from foredraft.core.tree.verify import verify_greedy
from foredraft.observe.encoding import LineEncoder
from foredraft.observe.log import EventLog
from foredraft.observe.replay import replay
from foredraft.sim.assembly import Assembly, assemble
from foredraft.sim.cost.passes.decode_work import DecodeWork, verified_of
from foredraft.sim.running.run import Simulation
from foredraft.sim.scenario_file import load_scenario

CHAIN = RoundShape.chain(7)
BUSY = (
    "speculation.algorithm=EAGLE3", "speculation.policy=fixed", "speculation.steps=7", "workload.num_requests=60",
    "workload.output.mean=24", "workload.rate=200", "workload.max_tokens=output", "seed=3",
)  # fmt: skip


def run_with(*settings: str) -> Assembly:
    return assemble(load_scenario(None, [*BUSY, *settings])[0])


def played(run: Assembly) -> list[Any]:
    events: list[Any] = []
    Simulation(run.scenario, sinks=lambda replica: (events.append,)).run()
    return events


def result_of(accept_lens: np.ndarray, **chosen: np.ndarray) -> DecodeResult:
    ended = np.zeros(accept_lens.shape[1], bool)
    return DecodeResult(len(accept_lens), accept_lens, None, ended, MultiStepEnd.MAX_ROUNDS, **chosen)


def test_rows_near_their_end_verify_no_more_than_they_may_emit():
    left = np.array([1, 3, 8, 100])
    assert all_nodes(CHAIN, left) is None
    assert remaining_nodes(CHAIN, left).tolist() == [1, 3, 8, 8]
    assert remaining_nodes(CHAIN, np.array([0, 9])).tolist() == [1, 8]  # an ended row whose end is not known yet
    assert remaining_nodes(CHAIN, left[2:]) is None  # equal rows have no column
    assert remaining_nodes(RoundShape(3, 2, 6), left) is None


def test_shortened_chains_accept_what_their_first_nodes_allow():
    tree = build_chain(np.array([5, 5, 5]), np.array([[6, 7, 8]] * 3), np.array([10, 10, 10]))
    short = shorten_trees(tree, np.array([1, 3, 4]))
    target = np.array([6, 7, 8, 9] * 3)
    assert verify_greedy(tree, target).accept_lens.tolist() == [4, 4, 4]
    verified = verify_greedy(short, target)
    assert verified.accept_lens.tolist() == [1, 3, 4]
    assert verified.bonus_tokens.tolist() == [6, 8, 9]
    assert short.num_nodes.tolist() == [1, 3, 4]
    assert short.retrieve_next_token.tolist() == [[-1] * 4, [1, 2, -1, -1], [1, 2, 3, -1]]
    assert short.positions.reshape(3, 4).tolist() == [[10, 10, 10, 10], [10, 11, 12, 10], [10, 11, 12, 13]]


@pytest.mark.parametrize("mode", ["overlap", "synchronous"])
def test_the_same_tokens_are_delivered_with_fewer_verified(mode: str):
    runs = [played(run_with(f"speculation.verify={verify}", f"engine.mode={mode}")) for verify in ("all", "remaining")]
    ends = [
        {
            end.request_id: (end.num_output, end.reason)
            for one in events
            if isinstance(one, Committed)
            for end in one.finished
        }
        for events in runs
    ]
    assert ends[0] == ends[1]
    steps = [[one.step for one in events if isinstance(one, Committed) and one.step.decode] for events in runs]
    assert all(step.decode.row_nodes is None for step in steps[0])
    shortened = [step.decode for step in steps[1] if step.decode.row_nodes is not None]
    assert shortened and all(decode.row_nodes.min() >= 1 and decode.row_nodes.max() <= 8 for decode in shortened)
    assert all(decode.num_verify_tokens < 8 * len(decode.rows) for decode in shortened)
    lines = [LineEncoder(0).encode(one) for one in runs[1] if isinstance(one, Planned)]
    assert any("row_nodes" in json.loads(line) for line in lines)


def test_a_result_beyond_a_rows_nodes_is_refused():
    run = run_with("speculation.verify=remaining")
    engine = run.make_engine(lambda event: None, named_slots=False)
    rounds = engine.rounds
    decode = next(
        one.step for one in played(run) if isinstance(one, Committed) and one.step.decode and one.step.decode.row_nodes is not None
    ).decode  # fmt: skip
    over = np.full((1, len(decode.rows)), 8, np.int32)
    planned = type("Planned", (), {"decode": decode, "index": decode.rows.astype(int)})()
    result = result_of(over)
    with pytest.raises(InvariantViolation, match=r"ACCEPT-02.*rows that verify"):
        rounds.count(planned, result, 0, ())


def test_a_packed_pass_is_priced_by_its_tokens():
    cost = run_with().cost
    whole, none = cost.decode_ns(32, CHAIN, 32_000), cost.decode_ns(32, CHAIN, 32_000, 32 * 8)
    packed = [cost.decode_ns(32, CHAIN, 32_000, tokens) for tokens in (32, 100, 200)]
    assert packed == sorted(packed) and packed[-1] < whole == none
    beside = [cost.step_ns([(512, 0)], DecodeWork(32, CHAIN, 32_000, tokens)) for tokens in (100, 200, None)]
    assert beside == sorted(beside) and beside[0] < beside[-1]


def test_a_budget_beside_prompts_is_priced_by_what_it_verifies():
    decode = replace(planned_by_budget().decode, row_nodes=None)
    assert verified_of(decode) == 3 + 4
    assert verified_of(replace(decode, budget=None)) is None


@pytest.mark.parametrize("clients", [5, 32, 128])
def test_the_table_of_passes_has_the_times_of_rounds(clients: int):
    """Rounds that verify all drafts take what drafting and verifying take in the table of the policy confidence."""
    run = assemble(load_scenario(None, ["speculation.algorithm=EAGLE3", "speculation.policy=confidence"])[0])
    table = run.spec.cost_table
    for steps in table.steps[1:]:
        nodes, shape = steps + 1, RoundShape.chain(steps)
        for size in table.batch_sizes:
            tokens = table.padded(steps, np.array([size * nodes]))
            ours = table.draft_time(steps, size) + table.verify_times(tokens)[0]
            assert ours == pytest.approx(run.cost.decode_ns(size, shape, 0, size * nodes), rel=0.005)
        cut = clients * nodes - clients // 2
        ours = table.draft_time(steps, clients) + table.verify_times(table.padded(steps, np.array([cut])))[0]
        assert ours == pytest.approx(run.cost.decode_ns(clients, shape, 0, cut), rel=0.005)


def test_shortened_rows_teach_nothing():
    """The controller learns from rows that verified all drafts: by the others acceptance would look lower."""
    heard: list[list[int]] = []

    class Controller:
        def on_verify_complete(self, counts: np.ndarray, bs: int, steps: int) -> None:
            heard.append(counts.tolist())

    rounds = object.__new__(DecodeRounds)
    rounds.controller = Controller()  # type: ignore[assignment]
    everyone = np.ones(3, bool)
    run = run_with("speculation.verify=remaining")
    decode = next(one.step.decode for one in played(run) if isinstance(one, Committed) and one.step.decode)
    step = replace(decode, rows=np.arange(3, dtype=np.int32), row_nodes=np.array([8, 2, 8], np.int32))
    result = result_of(np.array([[4, 2, 1]], np.int32))
    rounds.teach_controller(step, result, Presence(everyone, everyone, True))
    assert heard == [[3, 0]]


def test_an_unknown_rule_is_refused():
    with pytest.raises(ConfigError, match=r"speculation\.verify"):
        run_with("speculation.verify=some")


BUDGET = DraftBudget(4, 0.5, (-0.2,) * 7)


def planned_by_budget() -> Any:
    decode = next(one.step.decode for one in played(run_with()) if isinstance(one, Committed) and one.step.decode)
    step = replace(decode, rows=np.arange(3, dtype=np.int32), row_nodes=np.array([8, 2, 8], np.int32), budget=BUDGET)
    return type("Planned", (), {"decode": step, "index": step.rows.astype(int)})()


def test_a_budget_bounds_the_pass():
    step = planned_by_budget().decode
    assert step.num_verify_tokens == 3 + 4
    assert replace(step, budget=replace(BUDGET, drafts=100)).num_verify_tokens == 18
    assert replace(step, row_nodes=None, budget=replace(BUDGET, drafts=100)).num_verify_tokens == 24


@pytest.mark.parametrize(
    ("nodes", "depth", "message"),
    [
        ([3, 2, 3], 7, "DRAFT-02"),
        ([2, 3, 2], 7, "DRAFT-03"),
        ([0, 2, 2], 7, "DRAFT-03"),
        ([3, 2, 2], 6, "DRAFT-02.*confidences of shape"),
        (None, 7, "DRAFT-02"),
    ],
)
def test_a_device_that_verifies_what_it_was_not_given_is_refused(nodes: list[int] | None, depth: int, message: str):
    rounds = run_with().make_engine(lambda event: None, named_slots=False).rounds
    chosen: dict[str, np.ndarray] = {"confidence": np.full((1, 3, depth), 0.5, np.float32)}
    if nodes is not None:
        chosen["row_nodes"] = np.array([nodes], np.int32)
    result = result_of(np.ones((1, 3), np.int32), **chosen)
    with pytest.raises(InvariantViolation, match=message):
        rounds.count(planned_by_budget(), result, 0, ())


CROWDED = (
    "speculation.algorithm=EAGLE3", "workload.num_requests=200", "workload.rate=150", "workload.output.mean=60", "seed=3",
)  # fmt: skip


def rounds_of(events: list[Any]) -> list[tuple[Any, Any]]:
    return [
        (one.step.decode, one.result.decode)
        for one in events
        if isinstance(one, Committed) and one.step.decode and one.step.decode.budget
    ]


@pytest.mark.parametrize("mode", ["overlap", "synchronous"])
def test_confidence_verifies_what_is_worth_its_time(mode: str):
    settings = (*CROWDED, f"engine.mode={mode}", "speculation.steps=7")
    runs = {}
    for policy in ("fixed", "confidence"):
        run = assemble(load_scenario(None, [*settings, f"speculation.policy={policy}"])[0])
        runs[policy] = played(run)
    rounds = rounds_of(runs["confidence"])
    assert len(rounds) > 50
    for step, result in rounds:
        assert int(result.row_nodes.sum()) == step.num_verify_tokens and (result.accept_lens <= result.row_nodes).all()
    assert any(len(set(result.row_nodes[0].tolist())) > 2 for _, result in rounds)
    ends = {policy: max(one.now_ns for one in events if isinstance(one, Committed)) for policy, events in runs.items()}
    assert ends["confidence"] < ends["fixed"]


FLAT = {"sample_batch_tokens": [1, 33], "sample_steps_per_sec": [1e3, 1e3], "max_batch_tokens": 400}
STEEP = {  # a second for each token
    "bias_seconds": 0.001,
    "bs_probes": [1],
    "alpha_seconds": [0.0],
    "m_probes": [1, 1001],
    "theta_seconds": [0.0, 1000.0],
}
TEMPERATURES = {"temperatures": [1.0, 1.0, 2.0]}


@pytest.mark.parametrize(("times", "share"), [(STEEP, 0.0), (FLAT, 1.0)])
def test_the_times_that_were_given_decide_and_the_device_keeps_its_own(times: Any, share: float, tmp_path: Path):
    (tmp_path / "times.json").write_text(json.dumps(times))
    (tmp_path / "temperatures.json").write_text(json.dumps(TEMPERATURES))
    scenario = load_scenario(
        None,
        [
            *CROWDED,
            *("speculation.policy=confidence", "speculation.steps=3", "workload.concurrency=64"),
            f"speculation.round_times={tmp_path / 'times.json'}",
            f"speculation.confidence_temperatures={tmp_path / 'temperatures.json'}",
        ],
    )[0]
    run = assemble(scenario)
    with EventLog(tmp_path / "events.jsonl", {}) as log:
        events: list[Any] = []
        Simulation(scenario, sinks=lambda replica: (log.sink(replica), events.append)).run()
        log.close(True)
    rounds = [(step, result) for step, result in rounds_of(events) if len(step.rows) > 33]
    drafts = sum(step.budget.drafts for step, _ in rounds) / sum(3 * len(step.rows) for step, _ in rounds)
    assert len(rounds) > 20 and drafts == share
    assert {step.budget.slopes for step, _ in rounds} == {(1.0, 1.0, 0.5)}
    report = replay(tmp_path / "events.jsonl", lambda header, replica, sink: run.make_engine(sink))
    assert report.difference is None, report


@pytest.mark.ci
def test_the_policy_is_as_fast_as_its_table_says():
    """The row of 8 clients of docs/frontier.md: five fixed steps, and the steps of the policy's own choice."""
    text = (Path(__file__).parents[3] / "docs/frontier.md").read_text(encoding="utf-8")
    head, *rows = re.findall(r"^\| (?:clients|\d+) \|.*", text[text.index("| clients |") :], re.MULTILINE)
    told = dict(zip(head.split(" | "), next(row for row in rows if row.startswith("| 8 |")).split(" | "), strict=True))
    load = {"workload": {"concurrency": 8, "num_requests": 32, "output": {"mean": 256}}, "seed": 5}
    for column, chosen in (("5", {"policy": "fixed", "steps": 5}), ("own choice", {"policy": "confidence"})):
        found = foredraft.simulate(load | {"speculation": {"algorithm": "EAGLE3", **chosen}}).summary
        assert found["output_throughput"] == pytest.approx(float(told[column].replace(",", "")), rel=0.01), column


def test_a_log_of_chosen_lengths_replays(tmp_path: Path):
    scenario = load_scenario(None, [*CROWDED, "speculation.policy=confidence"])[0]
    run = assemble(scenario)
    with EventLog(tmp_path / "events.jsonl", {}) as log:
        Simulation(scenario, sinks=lambda replica: (log.sink(replica),)).run()
        log.close(True)
    report = replay(tmp_path / "events.jsonl", lambda header, replica, sink: run.make_engine(sink))
    assert report.difference is None, report


@pytest.mark.parametrize("settings", [("speculation.algorithm=NGRAM",), ("speculation.topk=4", "speculation.steps=3")])
def test_drafts_without_chains_of_confidences_are_refused(settings: tuple[str, ...]):
    with pytest.raises(ConfigError, match=r"speculation: policy: confidence chooses among the drafts of chains"):
        assemble(load_scenario(None, ["speculation.policy=confidence", *settings])[0])
