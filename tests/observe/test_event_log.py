import json

import numpy as np
import pytest
from foredraft.core.contract.events import Aborted, Committed, EngineStarted, Planned, Submitted
from foredraft.core.contract.request import FinishedRequest, FinishReason, Request, SamplingParams
from foredraft.core.contract.step import (
    NO_WRITES,
    DecodeResult,
    DecodeStep,
    MultiStepEnd,
    PrefillResult,
    PrefillStep,
    RoundShape,
    Step,
    StepResult,
)
from foredraft.core.errors import InvalidRequest
from foredraft.core.prompt import Prompt
from foredraft.core.scheduler.engine import Engine
from foredraft.observe.decoding import MalformedRecord, decision, decode_lens, decode_request, decode_result
from foredraft.observe.encoding import LineEncoder
from foredraft.observe.log import EventLog, LogError, read_header, read_log
from observed_run import ALGORITHM, ToyExecutor, drive, make_config, make_controller, recorded_events


def write(path, events, *, complete=True):
    log = EventLog(path, {"scenario": {"name": "toy"}})
    sink = log.sink(0)
    for event in events:
        sink(event)
    log.close(complete)
    return path


def make_step(batch_size=3, *, prefill=2, step_id=7, max_rounds=4):
    decode = None
    if batch_size:
        lens = np.zeros(batch_size, dtype=np.int64)
        decode = DecodeStep(
            np.arange(1, batch_size + 1, dtype=np.int32), lens, lens, lens, RoundShape(3, 1, 4), max_rounds
        )
    chunks = None
    if prefill:
        column = np.arange(prefill, dtype=np.int64)
        is_last = np.ones(prefill, dtype=bool)
        chunks = PrefillStep(column.astype(np.int32) + 9, column, column, column + 1, is_last, None, column)
    return Step(step_id, (), (), NO_WRITES, chunks, decode)


def there_and_back(step, result, finished=()):
    line = LineEncoder(0).encode(Committed(99, step, result, (), None, finished))
    return json.loads(line), decode_result(json.loads(line), step)


REQUESTS = [
    Request("plain", Prompt.of_length(5), 7),
    Request('q"uote\\é\n', Prompt.of_tokens([1, 2, 3]), 1, priority=-2, namespace="ten\tant"),
    Request("s", Prompt.of_blocks([2**63 - 1, 0], 16, 20), 9, sampling=SamplingParams(0.7, 0.9, 40, 2**40)),
    Request("t", Prompt.of_segments([(4, 3)]), 9, stop_tokens=(2, 5), stop_strings=("\n\n",), outputs=("logprobs",)),
    Request("moved", Prompt.of_tokens([1, 2]), 9, shown=Prompt.of_tokens([7, 8])),
    Request("moved, without tokens", Prompt.of_length(3), 9, shown=Prompt.of_length(4)),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: r.request_id[:1])
def test_a_request_comes_back_as_it_was(request_):
    line = LineEncoder(3).encode(Submitted(12, request_, "no: \u201cqueue\u201d full"))
    record = json.loads(line)
    assert line.isascii() and "\n" not in line and (record["r"], record["ns"]) == (3, 12)
    assert decode_request(record) == request_
    assert record["refusal"] == "no: \u201cqueue\u201d full"
    assert "refusal" not in json.loads(LineEncoder(3).encode(Submitted(12, request_, "")))


def test_a_request_that_cannot_be_read_is_named():
    record = json.loads(LineEncoder(0).encode(Submitted(0, REQUESTS[0], "")))
    with pytest.raises(MalformedRecord, match="max_tokens"):
        decode_request({key: value for key, value in record.items() if key != "max_tokens"})
    with pytest.raises(InvalidRequest, match="max_tokens must be >= 1, got 0"):
        decode_request({**record, "max_tokens": 0})
    with pytest.raises(MalformedRecord, match="cannot be read"):
        decode_request({**record, "sampling": [1.0]})


@pytest.mark.parametrize(
    "lens", [[[3, 3, 3]], [[1, 2, 4], [4, 1, 61]], [[0, 62, -1]], [[100000, 1, 1]], [[-1, 2, 1]], [[-1, -1, -1]]]
)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_result_comes_back_as_it_was(lens, dtype):
    step = make_step()
    accept_lens = np.array(lens, dtype=dtype)
    rounds = len(lens)
    stops = np.full((rounds, 3), -1, dtype=np.int32)
    stops[-1, 1], stops[0, 2] = 0, 3
    decode = DecodeResult(rounds, accept_lens, stops, np.array([False, True, False]), MultiStepEnd.REQUEST_ENDED)
    prefill = PrefillResult(None, np.array([False, True]))
    times = np.array([10**15, 10**15 + 7])[:rounds]
    failures = ((2, 'bad "row"'),)
    finished = (FinishedRequest("x", FinishReason.STOP, 12),)
    record, back = there_and_back(step, StepResult(7, prefill, decode, times, failures), finished)
    assert back.decode.accept_lens.tolist() == lens and back.decode.accept_lens.dtype == np.int32
    assert back.decode.stop_index.tolist() == stops.tolist()
    assert back.decode.ended.tolist() == [False, True, False]
    assert back.decode.multi_step_end is MultiStepEnd.REQUEST_ENDED and back.decode.rounds == rounds
    assert back.prefill.stopped.tolist() == [False, True] and back.prefill.tokens is None
    assert back.round_end_ns.tolist() == times.tolist() and back.round_end_ns.dtype == np.int64
    assert back.failures == failures
    assert record["finished"] == [["x", "stop", 12]]


def test_what_did_not_happen_is_not_written():
    decode = DecodeResult(
        1, np.full((1, 3), 2, np.int32), np.full((1, 3), -1, np.int32), np.zeros(3, bool), MultiStepEnd.MAX_ROUNDS
    )
    record, back = there_and_back(make_step(prefill=0), StepResult(7, None, decode, np.array([5])))
    assert record == {"t": "commit", "r": 0, "ns": 99, "step": 7, "rounds": 1, "lens": 2, "at": 5}
    assert back.decode.stop_index is None and back.prefill is None and not back.decode.ended.any()


def test_tokens_are_kept_where_there_are_some():
    step = make_step()
    lens = np.array([[1, 3, 2], [2, 1, 1]], dtype=np.int32)
    tokens = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    tokens[np.arange(4) >= lens[:, :, None]] = -1
    decode = DecodeResult(2, lens, None, np.zeros(3, bool), MultiStepEnd.ASKED, tokens)
    prefill = PrefillResult(np.array([77, 88]), None)
    _, back = there_and_back(step, StepResult(7, prefill, decode, np.array([1, 2])))
    assert back.prefill.tokens.tolist() == [77, 88] and back.prefill.stopped is None
    assert back.decode.tokens.tolist() == tokens[:, :, :3].tolist()
    assert back.decode.multi_step_end is MultiStepEnd.ASKED


def test_a_result_that_does_not_fit_its_step_is_named():
    step = make_step(prefill=0)
    good = {"step": 7, "rounds": 2, "lens": "123321", "at": [4, 5]}
    assert decode_result(good, step).decode.accept_lens.tolist() == [[1, 2, 3], [3, 2, 1]]
    wrong = {
        "of step 7": {"step": 8},
        "5 accept lengths, expected 2 rounds of 3 rows": {"lens": "12332"},
        "expected the characters": {"lens": "12 321"},
        "1 end times, expected 2": {"at": 4},
        "cannot be read": {"ended": [3]},
        "cannot be read.*NoneType": {"rounds": None},
    }
    for message, change in wrong.items():
        with pytest.raises(MalformedRecord, match=message):
            decode_result({**good, **change}, step)
    with pytest.raises(MalformedRecord, match="no decode part"):
        decode_result(good, make_step(0))
    with pytest.raises(MalformedRecord, match="lens"):
        decode_lens("é€", 1, 2)


def test_decode_rows_are_written_once_while_they_stay():
    encoder = LineEncoder(0)
    steps = [make_step(3, prefill=0), make_step(3, prefill=0), make_step(2, prefill=0), make_step(0), make_step(2)]
    records = [json.loads(encoder.encode(Planned(0, step, (), 0, 0))) for step in steps]
    assert [record.get("decode") for record in records] == [[1, 2, 3], "=", [1, 2], None, "="]
    previous = None
    decided = []
    for record in records:
        decided.append(decision(record, previous).get("decode"))
        previous = decided[-1] or previous
    assert decided == [[1, 2, 3], [1, 2, 3], [1, 2], None, [1, 2]]
    with pytest.raises(MalformedRecord, match="no earlier"):
        decision(records[1], None)


def test_a_plan_of_nothing_but_retractions():
    record = json.loads(LineEncoder(0).encode(Planned(4, None, ("a", "b"), 2, np.int64(17))))
    assert record == {"t": "plan", "r": 0, "ns": 4, "step": None, "retracted": ["a", "b"], "waiting": 2, "held": 17}


def test_a_whole_run_is_read_back_in_order(tmp_path):
    events = recorded_events(0, 60)
    path = write(tmp_path / "events.jsonl", events)
    records = list(read_log(path))
    assert [record.line for record in records] == list(range(1, len(events) + 3))
    assert records[0].data["scenario"] == {"name": "toy"} and records[0].data["schema"] == 1
    assert read_header(path) == records[0].data
    kinds = {EngineStarted: "engine", Submitted: "submit", Aborted: "abort", Planned: "plan", Committed: "commit"}
    assert [record.kind for record in records[1:-1]] == [kinds[type(event)] for event in events]
    assert records[-1].data == {"t": "end", "complete": True, "events": len(events)}
    steps = {event.step.step_id: event for event in events if isinstance(event, Committed)}
    for record in records:
        if record.kind == "commit":
            event = steps[record.data["step"]]
            result = decode_result(record.data, event.step)
            assert result.round_end_ns.tolist() == event.result.round_end_ns.tolist()
            if result.decode is not None:
                assert np.array_equal(result.decode.accept_lens, event.result.decode.accept_lens)
                assert np.array_equal(result.decode.ended, event.result.decode.ended)


def test_equal_runs_are_equal_bytes_and_others_are_not(tmp_path):
    def run(name, seed):
        with EventLog(tmp_path / name, {"seed": 0}) as log:
            engine = Engine(make_config(), ALGORITHM, make_controller(), events=log.sink(0))
            drive(engine, ToyExecutor(seed), 1, 40)
        return (tmp_path / name).read_bytes()

    assert run("a", 1) == run("b", 1) != run("c", 2)


def test_an_interrupted_run_leaves_a_readable_log(tmp_path):
    path = tmp_path / "events.jsonl"
    with pytest.raises(RuntimeError), EventLog(path, {}) as log:
        log.sink(0)(Aborted(3, "a"))
        raise RuntimeError
    assert [record.data for record in read_log(path)][-1] == {"t": "end", "complete": False, "events": 1}

    killed = EventLog(tmp_path / "killed.jsonl", {})
    killed.sink(0)(Aborted(3, "a"))
    killed.flush()
    with pytest.raises(LogError, match=r"killed.jsonl:2: .*interrupted"):
        list(read_log(killed.path))
    assert [record.kind for record in read_log(killed.path, allow_truncated=True)] == ["header", "abort"]
    killed.close(False)

    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b'"end"')])
    with pytest.raises(LogError, match=r"events.jsonl:3: .*breaks off inside this line"):
        list(read_log(path))
    assert [record.kind for record in read_log(path, allow_truncated=True)] == ["header", "abort"]


def test_a_log_is_on_disk_before_the_run_ends(tmp_path):
    log = EventLog(tmp_path / "events.jsonl", {})
    sink = log.sink(0)
    for i in range(40_000):
        sink(Aborted(i, "a request with a long name"))
    assert (tmp_path / "events.jsonl").stat().st_size > 1 << 20
    log.close(True)
    log.close(False)
    assert list(read_log(log.path))[-1].data["complete"] is True


GOOD = '{"t":"header","schema":1}\n{"t":"abort","r":0,"ns":3,"id":"a"}\n{"t":"end","complete":true}\n'


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("", "", "is empty"),
        (GOOD.replace('"schema":1', '"schema":9'), ":1", "schema 9; this version reads schema 1"),
        (GOOD.replace('{"t":"abort"', '{"t":"aborts"'), ":2", "did you mean 'abort'"),
        (GOOD.replace('"ns":3', '"ns":"3"'), ":2", "\"ns\" of a 'abort' record is '3'; expected an integer"),
        (GOOD.replace('"ns":3', '"ns":true'), ":2", "is True; expected an integer"),
        (GOOD.replace('"ns":3,', ""), ":2", "is missing; expected an integer"),
        (GOOD.replace('"t":"abort"', '"t":"abort'), ":2", "is not JSON"),
        (GOOD.replace('{"t":"abort","r":0,"ns":3,"id":"a"}', "[1]"), ":2", '"t" is None'),
        (GOOD.split("\n", 1)[1], ":1", "expected the header in line 1"),
        (GOOD.split("\n", 1)[0] + "\n" + GOOD, ":2", "a second header"),
        (GOOD + '{"t":"abort","r":0,"ns":3,"id":"a"}\n', ":4", "after the end"),
    ],
)
def test_a_broken_log_is_named_with_file_and_line(tmp_path, text, place, message):
    path = tmp_path / "events.jsonl"
    path.write_text(text)
    with pytest.raises(LogError) as raised:
        list(read_log(path))
    assert f"{path}{place}: " in str(raised.value) and message in str(raised.value)


def test_what_cannot_be_written_is_named(tmp_path):
    with pytest.raises(LogError, match="cannot be written"):
        EventLog(tmp_path / "no" / "events.jsonl", {})
    with pytest.raises(LogError, match="is no JSON"):
        EventLog(tmp_path / "events.jsonl", {"x": float("nan")})
    with pytest.raises(LogError, match="cannot be read"):
        list(read_log(tmp_path / "missing.jsonl"))
    log = EventLog(tmp_path / "events.jsonl", {})
    log.sink(1)
    with pytest.raises(ValueError, match="replica 1"):
        log.sink(1)


def test_a_full_disk_is_an_error_and_not_a_short_log():
    try:
        log = EventLog("/dev/full", {})
    except LogError as error:
        assert "cannot be written" in str(error)
        return
    pytest.fail(f"{log} was written to a full disk")


def test_a_disk_that_fills_up_is_an_error_when_the_log_is_closed(tmp_path):
    log = EventLog(tmp_path / "events.jsonl", {})
    log._file.close()
    log._file = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115 - the log closes it
    with pytest.raises(LogError, match="cannot be written"):
        log.close(complete=True)
