"""The audit of logs of services in trouble and of pairs of engines: true ones pass, falsified ones are caught."""

import json

import pytest
from foredraft.core.adaptive import fixed_controller
from foredraft.core.algorithm.registry import get_algorithm
from foredraft.core.contract.request import Request
from foredraft.core.draws import Purpose, uniform
from foredraft.core.handoff import HandoffTiming
from foredraft.core.prompt import Prompt
from foredraft.core.scheduler.config import EngineConfig, EngineRole
from foredraft.core.scheduler.engine import Engine
from foredraft.observe.log import EventLog
from foredraft.properties.audit.log import audit_log
from foredraft.properties.executor.reference import HashDraft, HashLanguageModel, ReferenceExecutor
from foredraft.properties.executor.reference.handoff import HandoffPair
from foredraft.sim.faults.plan import swarm_plan
from foredraft.sim.running.run import Simulation
from foredraft.sim.scenario_file import scenario_from_dict
from tampered_logs import places, records_of

MS = 1_000_000
SERVICE = {
    "model": {"context_len": 2048},
    "engine": {"kv_slots": 4800, "max_running": 8, "max_queue": 20, "chunk_size": 256},
    "workload": {"num_requests": 60, "rate": 12.0, "prompt": {"mean": 150.0, "high": 900}, "output": {"mean": 50.0, "high": 300}},
}  # fmt: skip


def in_trouble(path, seed):
    """The log of a service under faults that follow from `seed`."""
    with EventLog(path, {}) as log:
        scenario = scenario_from_dict({"seed": seed, **SERVICE}, "test")
        Simulation(scenario, faults=swarm_plan(seed), sinks=lambda replica: [log.sink(replica)]).run()
    return path


@pytest.fixture(scope="module")
def troubled(tmp_path_factory):
    """The log of a service that has lost steps and had them back."""
    for seed in range(20):
        path = in_trouble(tmp_path_factory.mktemp("log") / "events.jsonl", seed)
        records = records_of(path)
        if any(len(records[i]["steps"]) > 1 for i in places(records, "lost")):
            return path
    raise AssertionError("no step was lost")


@pytest.mark.fast("0", "1", "5", ci="*")
@pytest.mark.parametrize("seed", range(6))
def test_services_in_trouble_do_not_contradict_themselves(tmp_path, seed):
    audit = audit_log(in_trouble(tmp_path / "log", seed))
    assert audit.ok and not audit.not_audited, audit.text()


def audited(tmp_path, records):
    records[-1]["events"] = len(records) - 2
    path = tmp_path / "tampered.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return audit_log(path)


def a_lost_step_is_committed(records):
    """The result of a step that was lost comes after all."""
    place = places(records, "lost")[0]
    commit = next(i for i in reversed(places(records, "commit")) if i < place)
    records.insert(place + 1, {**records[commit], "step": records[place]["step"], "ns": records[place]["ns"]})
    return place + 1, "RELAY-07"


def a_step_survives(records):
    """Of two steps in flight only the first is said to be lost."""
    place = next(i for i in places(records, "lost") if len(records[i]["steps"]) > 1)
    records[place]["steps"] = records[place]["steps"][:1]
    return place, "RELAY-07"


def the_quiet_is_not_awaited(records):
    place = places(records, "resume")[0]
    del records[place]
    return next(i for i in places(records, "plan") if i >= place and records[i]["step"]), "RELAY-01"


def the_lost_is_delivered(records):
    """Tokens of a lost step count as delivered."""
    lost = places(records, "lost")[0]
    retracted = records[lost]["retracted"]
    for place in places(records, "plan", "joins"):
        for join in records[place]["joins"]:
            if place > lost and join[0] in retracted and join[4]:
                join[4] += 2
                return place, "ENGINE-03"
    raise AssertionError("no engine begins again")


@pytest.mark.parametrize(
    "tamper",
    [a_lost_step_is_committed, a_step_survives, the_quiet_is_not_awaited, the_lost_is_delivered],
    ids=lambda tamper: tamper.__name__,
)
def test_falsified_losses_are_caught(troubled, tmp_path, tamper):
    records = records_of(troubled)
    place, id = tamper(records)
    audit = audited(tmp_path, records)
    assert audit.flaws[0].line == place + 1 and audit.flaws[0].id == id, audit.text()


# -- two engines and a transfer ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The log of a prefill and a decode worker over a link that loses messages, with aborts.
    Its executors have no clock."""
    path = tmp_path_factory.mktemp("pair") / "events.jsonl"
    with EventLog(path, {}) as log:
        workers = []
        for replica, role in enumerate((EngineRole.PREFILL, EngineRole.DECODE)):
            config = EngineConfig(
                num_pages=90 - 20 * replica, context_len=96, max_running=4, chunk_size=8, track_tokens=True, role=role
            )
            engine = Engine(config, get_algorithm("EAGLE"), fixed_controller(3), events=log.sink(replica))
            draft = HashDraft(HashLanguageModel(seed=3, vocab_size=24), 0.7)
            workers.append((engine, ReferenceExecutor(engine, draft)))
        calls = iter(range(10**6))

        def lose(messages):
            return [m for m in messages if uniform(2, Purpose.MODEL, next(calls), 0) > 0.08]

        service = HandoffPair(*workers, timing=HandoffTiming(30 * MS, 70 * MS, 5 * MS), meddle=lose)
        for i in range(8):
            prompt = Prompt.of_tokens([(3 * i + 5 * j) % 24 for j in range(5 + 3 * i)])
            service.prefill.submit(Request(f"r{i}", prompt, 20), service.now_ns)
            service.turn()
            if i == 4:
                service.prefill.abort("r3", service.now_ns)
        service.run()
    return path


def flaws_of(audit):
    """What is found, the times aside, which a reference executor does not have."""
    return [flaw for flaw in audit.flaws if flaw.id not in ("SIM-02", "SIM-03")]


def test_a_pair_of_engines_does_not_contradict_itself(pair):
    audit = audit_log(pair)
    assert not flaws_of(audit), audit.text()
    evaluated = {id for id, count in audit.evaluations.items() if count}
    assert {"HANDOFF-01", "HANDOFF-02", "HANDOFF-04"} <= evaluated
    assert audit.num_replicas == 2 and not audit.not_audited


def moves(records, move):
    return [i for i in places(records, "handoff") if records[i]["move"] == move]


def decoded_before_it_has_arrived(records):
    place = moves(records, "join")[0]
    request_id = records[place]["id"]
    del records[place]
    plan = next(
        i for i in places(records, "plan", "joins") for j in records[i]["joins"] if i >= place and j[0] == request_id
    )
    return plan, "HANDOFF-01"


def released_twice(records):
    place = moves(records, "release")[0]
    records.insert(place + 1, dict(records[place]))
    return place + 1, "HANDOFF-02"


def ends_twice(records):
    place = moves(records, "end")[0]
    records.insert(place + 1, dict(records[place]))
    return place + 1, "HANDOFF-04"


def reserved_where_a_transfer_holds(records):
    held = {}
    for place in places(records, "handoff"):
        record = records[place]
        if record["move"] == "release" and record["r"] == 1:
            held.pop(record["row"])
        elif record["move"] == "reserve":
            if held:
                record["row"] = next(iter(held))
                return place, "HANDOFF-02"
            held[record["row"]] = place
    raise AssertionError("never two at once")


def changes_its_role_in_the_middle(records):
    place = places(records, "submit")[0]
    role = {"t": "handoff", "r": 0, "ns": records[place]["ns"], "move": "role", "detail": "decode"}
    records.insert(place + 1, role)
    return place + 1, "HANDOFF-10"


@pytest.mark.parametrize(
    "tamper",
    [decoded_before_it_has_arrived, released_twice, ends_twice, reserved_where_a_transfer_holds, changes_its_role_in_the_middle],
    ids=lambda tamper: tamper.__name__,
)  # fmt: skip
def test_falsified_transfers_are_caught(pair, tmp_path, tamper):
    records = records_of(pair)
    place, id = tamper(records)
    audit = audited(tmp_path, records)
    found = flaws_of(audit)
    assert found and found[0].id == id and found[0].line == place + 1, audit.text()
