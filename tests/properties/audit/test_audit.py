"""The audit of a log: true histories pass, whichever engine wrote them; every falsified one is caught, at its line."""

import json
from dataclasses import replace
from functools import cache

import pytest
from cells import pairwise_cells
from foredraft.core.contract.request import SamplingParams
from foredraft.core.errors import ForedraftError
from foredraft.core.prompt import Prompt
from foredraft.observe.log import EventLog, LogError
from foredraft.properties.audit.findings import AUDITED, MAX_FINDINGS
from foredraft.properties.audit.log import audit_log
from foredraft.properties.harness.invariants import all_invariants
from foredraft.sim.running.run import Simulation
from foredraft.sim.scenario_file import load_scenario
from hostile_driver import Dice, Disturbance, HostileDriver
from serving_matrix import build_cell, requests_of
from tampered_logs import OF_RETRACTIONS, QUEUE_MISCOUNTED, TAMPERINGS, TOKEN_LOST, commit_of, places, records_of

TIGHT = ("workload.num_requests=60", "workload.rate=60", "engine.kv_slots=6000")
VARIANTS = {
    "default": ("workload.num_requests=40",),
    "synchronous": ("workload.num_requests=40", 'engine.mode="synchronous"', "engine.page_size=16"),
    "retraction": TIGHT,
    "SGLang's rules": (
        *TIGHT,
        'hardware.server="sglang-0.5"',
        'hardware.kernels="roofline"',
        "engine.guarantee_output=0.05",
    ),
    "vLLM's rules": (*TIGHT, 'hardware.server="vllm-0.18"', 'hardware.kernels="roofline"', "engine.page_size=16"),
    "unmixed": (*TIGHT, "engine.mixed=false", 'engine.mode="synchronous"'),
    "two engines": ("workload.num_requests=60", "hardware.replicas=2"),
    "many cancel": ("workload.num_requests=60", "clients.cancel_share=0.5"),
    "queue": (*TIGHT, "engine.max_queue=4", "engine.max_running=3"),
    "unequal rows": (
        "workload.num_requests=40",
        "workload.max_tokens=output",
        "workload.output.mean=20",
        "speculation.policy=fixed",
        "speculation.steps=7",
        "speculation.verify=remaining",
    ),
    "chosen rows": (
        "workload.num_requests=60",
        "workload.output.mean=20",
        "workload.max_tokens=output",
        "workload.rate=100",
        "speculation.policy=confidence",
        "speculation.verify=remaining",
    ),
} | {
    name: ("workload.num_requests=30", f'speculation.algorithm="{name}"')
    for name in ("NONE", "NGRAM", "EAGLE", "EAGLE3", "STANDALONE", "MULTI_LAYER_EAGLE", "DFLASH")
}


def simulated(path, *settings):
    """The log of a simulation; returns its path and its number of tokens."""
    scenario, _ = load_scenario(None, list(settings))
    with EventLog(path, {}) as log:
        simulation = Simulation(scenario, sinks=lambda replica: [log.sink(replica)])
        simulation.run()
        log.close(True)
    return path, simulation


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Logs of simulations by the name of their variant, made once."""
    made = {}

    def log(variant):
        if variant not in made:
            path = tmp_path_factory.mktemp("log") / "events.jsonl"
            made[variant], _ = simulated(path, *VARIANTS[variant])
        return made[variant]

    return log


# -- what is true passes -----------------------------------------------------------------------------------------------


@pytest.mark.fast(
    "synchronous",
    "retraction",
    "vLLM's rules",
    "EAGLE",
    "unequal rows",
    "chosen rows",
    ci=("SGLang's rules", "two engines", "many cancel", "queue"),
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_simulations_do_not_contradict_themselves(logs, variant):
    audit = audit_log(logs(variant))
    assert audit.ok and audit.complete, audit.text()
    records = [json.loads(line) for line in logs(variant).read_text().splitlines()]
    submitted = [r for r in records if r["t"] == "submit" and "refusal" not in r]
    finished = [end for r in records for end in r.get("finished", ())]
    assert audit.num_requests == len(submitted) and audit.num_records == len(records)
    if variant != "many cancel":
        assert audit.num_tokens == sum(num_output for _, _, num_output in finished)
    assert audit.evaluations["ACCEPT-12"] == len(finished) and audit.evaluations["SIM-02"] > len(records) - 10
    assert (audit.evaluations["ENGINE-03"] > 0) == (
        variant in ("retraction", "SGLang's rules", "vLLM's rules", "unmixed")
    )
    assert (audit.evaluations["ENGINE-13"] > 0) == (variant == "many cancel")
    assert audit.evaluations["STEPS-01"] == 0, "the log does not name the candidates"


CELLS = cache(pairwise_cells)
SHOWN = Prompt.of_tokens([1, 2])


class DemandingDriver(HostileDriver):
    """Asks for retractions, which the next plan grants;
    its parent retracts between plans, and a log says it only at the next one."""

    def _retract(self):
        if self._live and self.engine.requests.demand_retraction(self.dice.choose(self._live)):
            self.num_disturbances += 1


@pytest.mark.fast("12", "18", ci="*")
@pytest.mark.parametrize("number", range(0, 24, 6))
def test_the_reference_does_not_contradict_itself(tmp_path, number):
    """Trees, stops in the text, priorities, aborts, failing rows, with tokens.
    It has no clock: its times are those of no run."""
    cell = CELLS()[number]
    dice = Dice(number)
    with EventLog(tmp_path / "log", {}) as log:
        engine, executor, _ = build_cell(cell, log.sink(0))
        # Those of a lost worker go on from their last token.
        requests = [
            replace(r, sampling=SamplingParams(1.0)) if i % 2 else r for i, r in enumerate(requests_of(cell, dice))
        ]
        requests += [replace(r, request_id=f"moved {r.request_id}", shown=SHOWN) for r in requests if r.max_tokens > 2]
        DemandingDriver(engine, executor, requests, dice, Disturbance(submit=30, abort=3, retract=8)).run()
    audit = audit_log(tmp_path / "log", candidates=engine.controller.candidates)
    assert {flaw.id for flaw in audit.flaws} <= {"SIM-02", "SIM-03"}, audit.text()
    assert all(audit.evaluations[id] > 0 for id in ("RELAY-05", "ACCEPT-02", "STEPS-01", "ENGINE-03"))


def test_what_is_audited_is_in_the_catalogue():
    assert set(AUDITED) <= {item.id for item in all_invariants()}


# -- what is false is caught -------------------------------------------------------------------------------------------


def audited(tmp_path, records, **options):
    """The audit of a log with these records; the last line says how many there are, as that of an
    honest writer would."""
    if records[-1]["t"] == "end":
        records[-1]["events"] = len(records) - 2
    path = tmp_path / "tampered.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return audit_log(path, **options)


def test_a_row_that_emits_more_than_it_verified_is_caught(logs, tmp_path):
    records = records_of(logs("unequal rows"))
    plan = next(
        i for i in places(records, "plan", "row_nodes") if set(str(records[commit_of(records, i)]["lens"])) - {"1"}
    )
    records[plan]["row_nodes"] = [1] * len(records[plan]["row_nodes"])
    found = [(flaw.id, flaw.line) for flaw in audited(tmp_path, records).flaws]
    assert found == [("ACCEPT-02", commit_of(records, plan) + 1)]


@pytest.mark.parametrize(("key", "value", "id"), [("budget", 0, "DRAFT-02"), ("row_nodes", 1, "DRAFT-03")])
def test_a_row_that_verifies_what_it_was_not_given_is_caught(logs, tmp_path, key, value, id):
    records = records_of(logs("chosen rows"))
    chosen = [i for i in places(records, "plan", "row_nodes") if records[i].get("budget")]
    plan = next(i for i in chosen if set(str(records[commit_of(records, i)]["nodes"])) - {"1"})
    records[plan][key] = value if key == "budget" else [value] * len(records[plan][key])
    assert id in [flaw.id for flaw in audited(tmp_path, records).flaws]


@pytest.mark.parametrize("tamper", TAMPERINGS, ids=lambda tamper: tamper.__name__)
def test_a_falsified_log_is_caught_where_it_is_false(logs, tmp_path, tamper):
    records = records_of(logs("default"))
    place, id = tamper(records)
    audit = audited(tmp_path, records)
    found = [(flaw.id, flaw.line) for flaw in audit.flaws]
    assert (id, place + 1) in found, audit.text()
    assert not audit.ok and found[0][1] == place + 1 and f"line {place + 1}," in audit.text()


@pytest.mark.parametrize("tamper", OF_RETRACTIONS, ids=lambda tamper: tamper.__name__)
def test_falsified_retractions_are_caught(logs, tmp_path, tamper):
    records = records_of(logs("retraction"))
    place, id = tamper(records)
    audit = audited(tmp_path, records)
    assert (id, place + 1) in [(flaw.id, flaw.line) for flaw in audit.flaws], audit.text()
    assert audit.flaws[0].line == place + 1


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("retracted_to", "tail", "is a rule by itself, which only older versions write"),
        ("rules", "tgi", "'tgi' is none of"),
    ],
)
def test_a_log_with_rules_that_are_not_known_is_one_line(logs, tmp_path, key, value, message):
    records = records_of(logs("default"))
    place = places(records, "engine", "config")[0]
    records[place]["config"][key] = value
    with pytest.raises(LogError, match=rf":{place + 1}: .*config\.{key}: {message}"):
        audited(tmp_path, records)


def test_a_token_after_an_abort_is_caught(logs, tmp_path):
    """An abort is put before the end of a running request: what is planned for it afterwards has no request."""
    records = records_of(logs("default"))
    place = places(records, "plan", "joins")[0]
    request_id = records[place]["joins"][0][0]
    commit = places(records, "commit", "lens")[0]
    records.insert(commit + 1, {"t": "abort", "r": 0, "ns": records[commit]["ns"], "id": request_id})
    audit = audited(tmp_path, records)
    first = audit.flaws[0]
    assert first.id == "ENGINE-13" and first.line > commit and request_id in first.was, audit.text()


def test_steps_that_are_no_candidate_are_caught(logs, tmp_path):
    records = records_of(logs("default"))
    used = {records[i]["S"] for i in places(records, "plan", "S")}
    assert audited(tmp_path, records, candidates=used).evaluations["STEPS-01"] > 10
    place = places(records, "plan", "S")[2]
    records[place]["S"] = 61
    flaws = audited(tmp_path, records, candidates=used).flaws
    assert flaws[0].id == "STEPS-01" and flaws[0].line == place + 1 and "61" in flaws[0].was


def test_a_placeholder_that_is_delivered_is_caught(tmp_path):
    cell = CELLS()[0]
    dice = Dice(3)
    with EventLog(tmp_path / "log", {}) as log:
        engine, executor, _ = build_cell(cell, log.sink(0))
        HostileDriver(engine, executor, requests_of(cell, dice), dice).run()
    records = records_of(tmp_path / "log")
    place = places(records, "commit", "tokens")[0]
    records[place]["tokens"][0] = -1
    assert ("RELAY-05", place + 1) in {(flaw.id, flaw.line) for flaw in audited(tmp_path, records).flaws}


def test_one_flaw_does_not_drag_all_others_behind_it(logs, tmp_path):
    records = records_of(logs("default"))
    TOKEN_LOST(records)
    assert audited(tmp_path, records).num_flaws == 1
    records = records_of(logs("default"))
    QUEUE_MISCOUNTED(records)
    assert audited(tmp_path, records).num_flaws <= 2


def test_many_flaws_are_counted_and_few_are_kept(logs, tmp_path):
    records = records_of(logs("default"))
    for place in places(records, "plan"):
        records[place]["held"] = -1
    audit = audited(tmp_path, records)
    assert audit.num_flaws == len(places(records, "plan")) > MAX_FINDINGS == len(audit.flaws)
    assert f"and {audit.num_flaws - 2:,} more" in audit.text(limit=2)
    report = audit.to_json()
    assert report["num_findings"] == audit.num_flaws and not report["ok"]
    assert report["findings"][0]["invariant"] == "ALLOC-01" and json.loads(json.dumps(report)) == report


# -- what is no log is said to be none ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda lines: [], "is empty"),
        (lambda lines: lines[:-1], "breaks off"),
        (lambda lines: lines[1:], "expected the header in line 1"),
        (lambda lines: [*lines[:9], lines[9][:-5], *lines[10:]], "is not JSON"),
        (lambda lines: [*lines[:2], *lines[3:]], "lines are lost"),
        (lambda lines: [lines[0], *lines[2:]], "no 'engine' record"),
        (lambda lines: [*lines[:2], *lines[1:]], "starts twice"),
        (lambda lines: [line.replace('"joins":[[', '"joins":[[1,2],[', 1) for line in lines], "cannot be read"),
        (lambda lines: [line.replace('"decode":[', '"decode":[-4,') for line in lines], "expected row numbers"),
    ],
)
def test_a_damaged_log_says_where(logs, tmp_path, damage, words):
    path = tmp_path / "damaged.jsonl"
    path.write_text("".join(line + "\n" for line in damage(logs("default").read_text().splitlines())))
    with pytest.raises(LogError, match=r"damaged\.jsonl") as caught:
        audit_log(path)
    assert words in str(caught.value) and isinstance(caught.value, ForedraftError)


def test_a_run_that_was_killed_is_audited_as_far_as_it_went(logs, tmp_path):
    path = tmp_path / "killed.jsonl"
    text = logs("default").read_text()
    path.write_text(text[: len(text) // 2])
    audit = audit_log(path, allow_truncated=True)
    assert audit.ok and not audit.complete and "did not end as it should" in audit.text()


def test_a_log_without_limits_is_audited_for_the_rest(logs, tmp_path):
    """Another engine need not say how large its pool is."""
    records = records_of(logs("default"))
    records[1]["config"] = {}
    audit = audited(tmp_path, records)
    assert audit.ok and audit.evaluations["ALLOC-01"] == audit.evaluations["ENGINE-08"] == 0
    assert "not evaluated: ALLOC-01" in audit.text()


def test_what_is_kept_does_not_grow_with_the_log(logs):
    from foredraft.observe.log import read_log
    from foredraft.properties.audit.engine_history import EngineHistory
    from foredraft.properties.audit.findings import Tally

    history = None
    most = 0
    for record in read_log(logs("retraction")):
        if record.kind == "engine":
            history = EngineHistory(record.data["config"], None, Tally())
        elif record.kind not in ("header", "end"):
            history.follow(record.kind, record.data)
            most = max(most, len(history.requests.live))
    requests = history.requests
    assert most > 5 and not requests.live and not history.in_flight and requests.num_waiting == 0
    assert sum(map(len, requests._waiting.values())) <= 60 and not requests.out_of_order


NONSENSE = [None, True, -1, 0, 10**9, 10**30, 1.5, "", "x", [], [[]], [-1], ["x"], {}, {"a": 1}]


@pytest.mark.fast("0")
@pytest.mark.parametrize("seed", range(3))
def test_whatever_stands_in_a_record_is_a_flaw_or_a_damaged_line(logs, tmp_path, seed):
    """Values of all kinds in the places of others: there is an audit, or an error with its line, and nothing else."""
    original = records_of(logs("retraction"))[:300]
    dice = Dice(seed)
    outcomes = {"audited": 0, "refused": 0}
    for _ in range(60):
        records = json.loads(json.dumps(original))
        for _ in range(1 + dice.below(2)):
            record = records[1 + dice.below(len(records) - 1)]
            place = dice.choose(sorted(record))
            value = record[place]
            if isinstance(value, list) and value and dice.chance(60):
                inner = value[dice.below(len(value))]
                target = inner if isinstance(inner, list) and inner and dice.chance(60) else value
                target[dice.below(len(target))] = dice.choose(NONSENSE)
            else:
                record[place] = dice.choose(NONSENSE)
        path = tmp_path / "nonsense.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        try:
            audit_log(path, candidates=(3,), allow_truncated=True)
            outcomes["audited"] += 1
        except LogError as error:
            assert error.line >= 1 and "nonsense.jsonl:" in str(error)
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 2, outcomes
