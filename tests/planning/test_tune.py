"""Tuning over a service whose speeds are known: what is found, what is passed over, and the files that
other servers take."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from foredraft.cli.planning.tune import _table_lines, _verdict
from foredraft.core.adaptive.config import load_adaptive_config
from foredraft.core.adaptive.interchange import import_table
from foredraft.core.errors import ForedraftError
from foredraft.planning.servers.files import server_files
from foredraft.planning.trial import RunOutcome, run_trial
from foredraft.planning.tuning.tables import LocalSearch, TableChoice, TableSpace, is_schedule, settings_of
from foredraft.planning.tuning.tune import MOST_BEHIND, Tune, TuneQuestion
from foredraft.planning.workers import Job
from foredraft.sim.scenario_file import scenario_with
from hypothesis import given
from hypothesis import strategies as st

SMALL = scenario_with({}, {"engine.max_running": 16, "workload.num_requests": 20})
BEST = {"light": 6, "knee": 4, "saturated": 2, "own load": 5}  # steps that are the fastest in each phase of the toy
SIZES = {"light": 1, "knee": 8, "saturated": 16, "own load": 4}


def phase_of(run: Mapping[str, Any]) -> str:
    clients = run.get("workload.concurrency")
    return "own load" if clients is None else "light" if clients < 4 else "knee" if clients < 16 else "saturated"


def steps_in(run: Mapping[str, Any], size: int) -> float:
    """Return the mean of the candidates that a run has at a batch size."""
    if "speculation" in run:
        return 0
    if run.get("speculation.policy") == "goodput":
        return 3
    table = run.get("speculation.adaptive") or {"1": {"candidate_steps": [run.get("speculation.steps")]}}
    slot = table[str(max(int(bound) for bound in table if int(bound) <= size))]
    return sum(slot["candidate_steps"]) / len(slot["candidate_steps"])


class Toy:
    """Workers whose speed falls by 4 % with each step away from the best;
    seeds add noise that is the same for all settings."""

    count = 3

    def __init__(self, worse_tables_from: int | None = None) -> None:
        self.jobs: list[Job] = []
        self.runs: list[Mapping[str, Any]] = []
        self.worse_from = worse_tables_from

    def submit(self, job: Job) -> None:
        self.jobs.append(job)

    def next_ended(self) -> tuple[Job, RunOutcome]:
        job = self.jobs.pop(len(self.runs) % len(self.jobs))
        self.runs.append(job.settings)
        phase, seed = phase_of(job.settings), job.settings["seed"]
        speed = 100 * 0.96 ** abs(steps_in(job.settings, SIZES[phase]) - BEST[phase]) * (1 + 0.1 * (seed % 7))
        if (
            self.worse_from is not None
            and seed < 100
            and "speculation.policy" in job.settings
            and "speculation.adaptive" in job.settings
        ):
            speed *= 0.9  # tables with a choice are worse than the search has seen
        rows = {"mean_running": SIZES[phase], "replicas": 1}
        return job, RunOutcome("done", "", {"mean_e2el_ms": 1e3 / speed, "mean_output_tokens": 1.0, **rows})

    def close(self) -> None:
        pass


def tuned(service: Toy, trials: int = 24) -> Tune:
    tune = Tune(SMALL, TuneQuestion(range(100, 102), range(3), trials, 20))
    for _ in tune.search(service):
        pass
    for _ in tune.compare(service):
        pass
    return tune


@pytest.fixture(scope="module")
def found() -> Tune:
    return tuned(Toy())


def test_the_report_counts_one_step_and_no_gap_of_nothing(found: Tune):
    table = {"1": {"candidate_steps": [3]}, "8": {"candidate_steps": [1]}}
    assert _table_lines(table) == ["  batch 1 to 7       3 steps", "  batch 8 on         1 step"]
    for shortfall, words in ((-0.0001, "as fast as it"), (0.0021, "0.2% behind it"), (-0.0021, "0.2% ahead of it")):
        judged = replace(found.best, shortfall={"light": shortfall})
        assert words in " ".join(_verdict(found, judged))


def test_the_table_is_nowhere_behind_and_gains_where_steps_differ(found: Tune):
    best = found.best
    assert best is not None and max(best.shortfall.values()) <= MOST_BEHIND
    assert {phase.name for phase in found.phases} == set(BEST)
    over = {name: found.gain(best.table, other, found.phases) for name, other in found.others().items()}
    assert over["no speculation"].mean > 0.15 and over["4 steps"].mean > 0.02 and over["default table"].mean > 0
    assert all(gain.half_width < 1e-9 for gain in over.values())  # the noise of a seed is common to all, and cancels
    assert is_schedule(found.best_schedule.table)


def test_the_search_climbs_to_the_best_choice_and_ends_with_its_space():
    space = TableSpace((1, 4), 3)
    search = LocalSearch(space, [TableChoice((0, 0))])

    def score(choice: TableChoice) -> float:
        return -abs(choice.steps[0] - 3) - abs(choice.steps[1] - 1) - choice.width

    tried = []
    while choices := search.propose(2):
        for choice in choices:
            search.learn(choice, score(choice))
        tried += choices
        if len(tried) == 12:
            assert max(tried, key=score) == TableChoice((3, 1))  # the first of thousands
    tables = [repr(space.table(choice)) for choice in tried]
    assert len(set(tables)) == len(tables)
    assert all(choice.steps[0] >= choice.steps[1] for choice in tried)
    assert {choice.steps for choice in tried} == {(a, b) for a in range(4) for b in range(a + 1)}


def test_the_comparison_uses_seeds_of_its_own():
    service = Toy()
    tune = Tune(SMALL, TuneQuestion(range(100, 102), range(3), 4, 20))
    for _ in tune.search(service):
        pass
    assert {run["seed"] for run in service.runs} == {100, 101}
    before = len(service.runs)
    for _ in tune.compare(service):
        pass
    assert {run["seed"] for run in service.runs[before:]} == {0, 1, 2}


def test_what_breaks_on_unseen_seeds_is_passed_over():
    tune = tuned(Toy(worse_tables_from=0))
    behind = [one for one in tune.judged if not one.holds]
    assert all(not is_schedule(one.table) for one in behind)
    assert tune.best is not None and is_schedule(tune.best.table)


def test_the_same_question_asks_for_the_same_runs():
    runs = []
    for count in (1, 3):
        service = Toy()
        service.count = count
        tuned(service, trials=16)
        runs.append(sorted(map(repr, service.runs)))
    assert runs[0] == runs[1]


def test_the_phases_of_a_trace_are_windows_of_its_rate(tmp_path):
    trace = tmp_path / "trace.csv"
    times = [
        60 * minute + 60 * i / count
        for minute, count in enumerate([5, 40, 1, 7, 20, 3, 9, 11, 2, 6, 8, 10])
        for i in range(count)
    ]
    rows = [f"2024-01-01 00:{int(t // 60):02}:{t % 60:09.6f},100,20" for t in times]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    scenario = scenario_with(
        SMALL.model_dump(mode="json"), {"workload.trace": str(trace), "workload.num_requests": None}
    )
    tune = Tune(scenario, TuneQuestion([100], [0, 1], 4, 30))
    requests = {phase.name: phase.settings["workload.num_requests"] for phase in tune.phases}
    assert requests["quiet"] == 1 and requests["busy"] == 30 and 5 <= requests["middle"] <= 10
    for phase in tune.phases:
        trial = run_trial(tune.tables, {**phase.settings, **settings_of({"1": {"candidate_steps": [1]}}), "seed": 0})
        assert trial.status == "done", trial.message
        assert trial.summary["completed"] == requests[phase.name]


def test_a_scenario_without_speculation_and_trees_of_given_size_are_refused():
    for keys, message in [
        ({"speculation.algorithm": "NONE"}, "name the algorithm"),
        ({"speculation.topk": 4, "speculation.num_draft_tokens": 8}, "leave it out"),
    ]:
        with pytest.raises(ForedraftError, match=message):
            Tune(scenario_with({}, keys), TuneQuestion([100], [0, 1], 4, 20))


@given(st.lists(st.integers(0, 7), min_size=5, max_size=5), st.integers(0, 2))
def test_files_say_what_the_table_says(steps: list[int], width: int):
    space = TableSpace.of(16, 7)
    choice = TableChoice(tuple(steps), width, ema_alpha=0.1, update_interval=10, up_hysteresis=0.1)
    table, schedule = space.table(choice), space.table(replace(choice, width=0))
    files, left_out = dict[str, str](), dict[str, str]()
    for profile, name in (("sglang-0.5", "SGLang"), ("vllm-0.18", "vLLM"), ("trtllm-1.x", "TensorRT-LLM")):
        scenario = scenario_with({}, settings_of(table) | {"hardware.server": profile})
        written, missing = server_files(scenario, table, schedule, 16)
        files |= written
        left_out |= {name: missing[name]} if name in missing else {}
        others = {other: reason for other, reason in missing.items() if other != name}
        assert len(others) == 2 and all(f"tuned for {profile}" in reason for reason in others.values())
    config = load_adaptive_config(table)
    assert import_table(files["adaptive.json"]).slots == config.slots
    if "sglang-adaptive.json" in files:
        assert import_table(files["sglang-adaptive.json"]).slots == config.slots
        begin = int(files["sglang.args"].split("--speculative-num-steps ")[1].split()[0])
        assert begin in config.candidate_steps
    lengths = [slot["candidate_steps"][0] for slot in schedule.values()]
    if lengths[0]:
        speculative = json.loads(files["vllm-speculative-config.json"])
        assert speculative["method"] == "eagle3" and speculative["num_speculative_tokens"] == max(lengths)
        assert speculative["num_speculative_tokens_per_batch_size"][0][0] == 1
        assert import_table(json.dumps(speculative)).candidate_steps == tuple(sorted(set(lengths)))
        assert set(import_table(files["trtllm.yaml"]).candidate_steps) == {*lengths, 0}
    else:
        assert set(left_out) >= {"vLLM", "TensorRT-LLM"}
