"""A handoff in the log: both workers' decisions replay without the link, the other worker, or any message."""

import json

import pytest
from foredraft.core.adaptive import fixed_controller
from foredraft.core.algorithm.registry import get_algorithm
from foredraft.core.contract.events import HandoffMove, HandoffMoved
from foredraft.core.contract.request import Request
from foredraft.core.draws import Purpose, uniform
from foredraft.core.handoff import HandoffTiming
from foredraft.core.handoff.messages import Manifest
from foredraft.core.prompt import Prompt
from foredraft.core.scheduler.config import EngineConfig, EngineRole
from foredraft.core.scheduler.engine import Engine
from foredraft.observe.log import EventLog
from foredraft.observe.measuring.metrics import RunMetrics
from foredraft.observe.perfetto import PerfettoTrace
from foredraft.observe.replay import replay
from foredraft.properties.executor.reference import HashDraft, HashLanguageModel, ReferenceExecutor
from foredraft.properties.executor.reference.handoff import HandoffPair

MS = 1_000_000
ROLES = ("prefill", "decode")
POOLS = {"prefill": 90, "decode": 70}


def make_engine(role, events):
    config = EngineConfig(
        num_pages=POOLS[role],
        context_len=96,
        max_running=4,
        chunk_size=8,
        multi_step_rounds=8,
        track_tokens=True,
        role=role,
    )
    return Engine(config, get_algorithm("EAGLE"), fixed_controller(3), events=events)


def recorded(tmp_path, seed, sinks=()):
    """A lossy, cancelling, retracting run of a pair as a log;
    returns its path and the number of handoff moves by kind."""
    path = tmp_path / "events.jsonl"
    moves = []
    with EventLog(path, {}) as log:

        def sink_of(replica):
            write = log.sink(replica)

            def take(event):
                write(event)
                for sink in sinks:
                    sink(replica)(event)
                moves.extend([event] if isinstance(event, HandoffMoved) else [])

            return take

        workers = []
        for replica, role in enumerate(ROLES):
            engine = make_engine(role, sink_of(replica))
            draft = HashDraft(HashLanguageModel(seed=3, vocab_size=24), 0.7)
            workers.append((engine, ReferenceExecutor(engine, draft)))
        calls = iter(range(10**6))

        def lose(messages):
            return [m for m in messages if uniform(seed, Purpose.MODEL, next(calls), 0) > 0.08]

        pair = HandoffPair(*workers, timing=HandoffTiming(30 * MS, 70 * MS, 5 * MS), meddle=lose)
        for i in range(8):
            prompt = Prompt.of_tokens([(3 * i + 5 * j) % 24 for j in range(5 + 3 * i)])
            shown = Prompt.of_tokens([3, 1, 4][: i % 4])  # by a worker that was lost
            stops = (7,) if i % 3 == 0 else ()
            pair.prefill.submit(Request(f"r{i}", prompt, 20, stop_tokens=stops, shown=shown), pair.now_ns)
            pair.turn()
            if i == 4:
                pair.prefill.abort("r3", pair.now_ns)
            if i == 6:
                pair.decode.abort("r2", pair.now_ns)
        pair.run()
        log.close(True)
    return path, moves


@pytest.mark.parametrize("seed", range(4))
def test_both_workers_decide_the_same_again(tmp_path, seed):
    path, moves = recorded(tmp_path, seed)
    report = replay(path, lambda header, replica, events: make_engine(ROLES[replica], events))
    assert report.identical and report.complete and report.num_replicas == 2, report.difference
    kinds = [event.move for event in moves]
    assert {HandoffMove.HOLD, HandoffMove.RELEASE, HandoffMove.END, HandoffMove.RESERVE, HandoffMove.JOIN} <= set(kinds)


@pytest.mark.parametrize("change", ["row", "missing join", "unknown request"])
def test_another_decision_is_noticed(tmp_path, change):
    path, _ = recorded(tmp_path, 0)
    lines = path.read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if f'"move":"{"reserve" if change == "row" else "join"}"' in line)
    record = json.loads(lines[place])
    if change == "row":
        record["row"] += 1
    elif change == "unknown request":
        record["id"] = "unknown"
    lines[place : place + 1] = [] if change == "missing join" else [json.dumps(record)]
    path.write_text("\n".join(lines) + "\n")
    report = replay(path, lambda header, replica, events: make_engine(ROLES[replica], events))
    assert not report.identical and report.difference.line >= place + 1


def test_a_role_that_changes_is_in_the_log(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path, {}) as log:
        make_engine("decode", log.sink(0)).transfers.change_role(EngineRole.PREFILL, 5)
        log.close(True)
    assert replay(path, lambda header, replica, events: make_engine("decode", events)).identical


def test_metrics_and_traces_follow_a_handoff(tmp_path):
    metrics = RunMetrics()
    sinks = {replica: metrics.sink(replica) for replica in (0, 1)}
    trace = PerfettoTrace(tmp_path / "trace.json")
    spans = {replica: trace.sink(replica) for replica in (0, 1)}
    _, moves = recorded(tmp_path, 1, [sinks.__getitem__, spans.__getitem__])
    trace.close()
    metrics.flush()
    ended = [event for event in moves if event.move is HandoffMove.END and not event.detail]
    assert metrics.measured.counts["transferred"] == len(ended) > 0
    # A request counts once, on whichever engine it is: a transfer is no end.
    assert sum(metrics.measured.counts.values()) - len(ended) == metrics.measured.totals["submitted"] == 8
    assert metrics.measured.counts["abort"] >= 1 and metrics.summary()["unfinished"] == 0
    assert metrics.lives.running == metrics.lives.waiting == 0
    assert any(isinstance(event.first_token, int) for event in moves), Manifest
