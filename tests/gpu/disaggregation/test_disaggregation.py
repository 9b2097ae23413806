"""Prefill and decode in separate processes: their outputs are those of one process, on good links and bad, and after
a worker's death."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
from foredraft.core.contract.request import Grammar, Request, SamplingParams
from foredraft.core.handoff import HandoffTiming
from foredraft.core.prompt import Prompt
from foredraft.gpu.disaggregation.session import TIMING, DisaggregatedSession, plan_disaggregated
from foredraft.gpu.disaggregation.topology import WorkerCounts
from foredraft.gpu.disaggregation.workers import Workers
from foredraft.gpu.parallel.processes import WorkerFailed
from foredraft.gpu.session.plan import SessionOptions
from foredraft.gpu.session.ready import KINDS
from foredraft.gpu.session.session import DecodeSession
from foredraft.gpu.session.text import Tokenizer
from foredraft.gpu.tiny.scoring import score_prompt

ONE_TO_ONE, TWO_TO_TWO = WorkerCounts(1, 1), WorkerCounts(2, 2)
LONGEST = 120
SECOND_NS = 1_000_000_000
# A retry that waits for a lease begins after seconds; all others begin at once.
IMPATIENT = HandoffTiming(lease_ns=3 * SECOND_NS, hold_ns=7 * SECOND_NS, fence_ns=SECOND_NS)

TEXT = """
def read_all(paths):
    for path in paths:
        text = path.read_text()
        yield path, text.splitlines()


class Table:
    def __init__(self, rows):
        self.rows = rows
        self.names = [name for name in rows if name is not None]
"""
# After a death slots come back when a fence has passed.
SHORT_FENCE = replace(TIMING, fence_ns=SECOND_NS // 2)

pytestmark = pytest.mark.xdist_group("nano pair")  # one set of processes serves most of these tests


@pytest.fixture(scope="module")
def pool():
    """Start the worker processes once for most tests, and anew after one of them has died."""
    started: list[Workers] = []
    yield started
    for workers in started:
        workers.close()


@pytest.fixture
def workers(pool):
    if not pool or len(pool[-1].living()) < ONE_TO_ONE.num_workers:
        pool.append(Workers(ONE_TO_ONE.workers(), ONE_TO_ONE.devices("cpu")))
    return pool[-1]


@pytest.fixture(scope="module")
def ask(nano_pair):
    """Requests whose prompts are pieces of a text that the model knows how to go on with."""
    words = Tokenizer.load(nano_pair / "target").encode(TEXT).tolist()
    assert len(words) > 80

    def make(name, length=9, max_tokens=16, start=0, **fields):
        return Request(name, Prompt.of_tokens((words * 2)[start : start + length]), max_tokens, **fields)

    return make


@pytest.fixture(scope="module")
def six(ask):
    return tuple(ask(f"r{i}", 1 + 13 * i, 16, start=5 * i) for i in range(6))


@pytest.fixture(scope="module")
def plain(nano_pair):
    """Outputs of one process without speculation, by request; each is computed once."""
    session = DecodeSession.open(SessionOptions(nano_pair / "target", dtype="float64", device="cpu"))
    known = {}

    def outputs(requests):
        missing = [request for request in requests if request not in known]
        for request, output in zip(missing, session.run(missing).values(), strict=True):
            known[request] = output
        return {request.request_id: known[request] for request in requests}

    return outputs


def options_for(nano_pair, draft=None, **options):
    return SessionOptions(
        nano_pair / "target",
        nano_pair / draft if draft else None,
        **{"dtype": "float64", "device": "cpu", "debug": True, "chunk_size": 16, "max_running": 4, **options},
    )


def open_session(workers, options, topology=ONE_TO_ONE, **settings):
    return DisaggregatedSession.open(plan_disaggregated(options, topology, LONGEST), workers, **settings)


def check_equal(outputs, expected):
    assert outputs.keys() == expected.keys()
    for name, output in outputs.items():
        assert output == expected[name], (output, expected[name])


def check_drained(session):
    """Nothing is held on either side. Returns the reports."""
    reports = session.drain()
    for name, report in reports.items():
        assert report["free_slots"] == report["total_slots"] and report["held_rows"] == 0, (name, report)
        counts = report["transfers"]
        assert counts["started"] == counts["completed"] + counts["failed"] + counts["cancelled"], (name, counts)
    return reports


# -- before the first request ------------------------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.parametrize("seconds", [100.0, pytest.param(0.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("draft", ["eagle3", pytest.param(None, marks=pytest.mark.slow)])
def test_workers_are_ready_before_the_first_request_and_capture_nothing_afterwards(
    workers, nano_pair, draft, seconds, six, plain
):
    options = options_for(nano_pair, draft, graphs=True, max_running=2)
    with open_session(workers, options) as session:
        lines: list[str] = []
        ready = session.make_ready(lines.append, seconds)
        of = {name: [line for line in lines if line.startswith(f"{name}: ")] for name in ("prefill0", "decode0")}
        assert of["prefill0"] == [f"prefill0: compiling: {kind} prompts" for kind in KINDS]
        assert of["decode0"][: len(KINDS)] == [f"decode0: compiling: {kind} rounds" for kind in KINDS]
        captured, kinds = of["decode0"][len(KINDS) :], 2 * 2 * 3 * 3  # sizes, outputs, kinds, changes of logits
        assert len(captured) == ready.num_graphs == (kinds if seconds else 0)
        assert len(ready.left_out) == (0 if seconds else kinds)
        assert all(name.startswith("decode0: batch ") for name in ready.left_out)
        check_equal(session.run(six), plain(six))
        later: list[str] = []
        assert session.make_ready(later.append, 100.0) == ready, "nothing was captured by a round"
        assert not [line for line in later if "capturing" in line]
        check_drained(session)


# -- every algorithm ---------------------------------------------------------------------------------------------------

CELLS = {
    "NONE": (None, {}),
    "NONE, overlap, one chunk per prompt": (None, {"overlap": True, "chunk_size": 2048}),
    "STANDALONE": ("draft", {"algorithm": "STANDALONE"}),
    "STANDALONE tree, overlap": ("draft", {"topk": 2, "overlap": True}),
    "EAGLE3, pages": ("eagle3", {"page_size": 4}),
    "EAGLE3 tree, overlap, pages": ("eagle3", {"topk": 4, "overlap": True, "page_size": 4}),
    "MULTI_LAYER_EAGLE, fewer steps than heads": ("multi_layer_eagle", {"steps": 1}),
    "MULTI_LAYER_EAGLE tree, overlap": ("multi_layer_eagle", {"steps": 2, "topk": 2, "overlap": True}),
    "NGRAM": (None, {"algorithm": "NGRAM", "steps": 5}),
    "NGRAM, overlap": (None, {"algorithm": "NGRAM", "steps": 5, "overlap": True}),
    "steps that adapt to measured costs": (
        "draft",
        {"adaptive": '{"1": {"candidate_steps": [0, 2]}}', "policy": "goodput", "max_running": 2},
    ),
    "lengths by confidences": (
        "eagle3",
        {"adaptive": '{"1": {"candidate_steps": [1, 2]}}', "policy": "confidence", "max_running": 2},
    ),
}


# Each algorithm, and each kind of field that it sends; the rest runs at night.
@pytest.mark.fast(
    *("NONE, overlap, one chunk per prompt", "STANDALONE tree, overlap", "EAGLE3, pages", "NGRAM"),
    "MULTI_LAYER_EAGLE, fewer steps than heads",
)
@pytest.mark.parametrize("cell", CELLS)
def test_the_pair_gives_what_one_process_gives(workers, nano_pair, plain, cell, six):
    draft, options = CELLS[cell]
    with open_session(workers, options_for(nano_pair, draft, **options)) as session:
        check_equal(session.run(six), plain(six))
        reports = check_drained(session)
        prefill, decode = reports["prefill0"], reports["decode0"]
        # The decode worker joins them without a forward pass; the prefill worker decodes none.
        assert decode["prefilled"] == 0 and prefill["verified_rows"] == 0
        assert decode["transfers"] == prefill["transfers"]
        assert decode["transfers"]["completed"] == len(six) and decode["malformed"] == 0
        averages = session.stats().ema_accept_len
        assert set(averages) <= {"decode0"} and all(averages.values()), "of workers that decode, and have one"
    if "adaptive" in options:
        return
    # Draft KV and draft input arrived as they were: every draft has the fate that it has in one process.
    alone = DecodeSession.open(options_for(nano_pair, draft, **options))
    alone.run(six)
    counts = ("verified_rows", "drafted", "correct_drafts")
    assert [decode[name] for name in counts] == [getattr(alone.stats(), name) for name in counts]
    assert cell.startswith("NONE") or decode["correct_drafts"] > 0


def test_sampled_output_and_what_users_ask_to_see_are_those_of_one_process(workers, nano_pair, plain, ask):
    sampling = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=7)
    tokens = plain([ask("whole", 12, 16, start=1)])["whole"].tokens
    requests = [
        ask("sampled", 20, sampling=sampling),
        ask("seedless", 11, start=3, sampling=replace(sampling, seed=0)),
        ask("shown", 9, outputs=("logprobs",)),
        ask("one token", 14, 1, outputs=("logprobs",)),
        ask("stopped", 12, 16, start=1, stop_tokens=(tokens[8],)),
    ]
    with open_session(workers, options_for(nano_pair)) as session:
        outputs = session.run(requests)
        check_drained(session)
    expected = plain(requests)
    for name, output in outputs.items():
        shown = expected[name].logprobs
        assert output.logprobs == pytest.approx(shown, abs=1e-9) and len(shown) in (0, len(output.tokens))
        assert replace(output, logprobs=()) == replace(expected[name], logprobs=())
    assert expected["stopped"].finish == "stop" and len(expected["one token"].logprobs) == 1


def test_a_prefix_that_the_decode_worker_has_is_not_sent_again(workers, nano_pair, plain, ask):
    with open_session(workers, options_for(nano_pair, page_size=4)) as session:
        first, again = ask("first", 33), ask("again", 33)
        check_equal(session.run([first]), plain([first]))
        check_equal(session.run([again]), plain([again]))
        check_drained(session)
        assert session.reports()["prefill0"]["prefilled"] < 2 * 33


def test_a_request_is_given_up_wherever_it_is(workers, nano_pair, ask):
    """Interrupted at its first token: some requests wait, some are on their way, some decode."""
    requests = [ask(f"long{i}", 30, 60, start=i) for i in range(6)]
    told = []
    with open_session(workers, options_for(nano_pair, max_running=2)) as session:
        outputs = session.run(requests, told.append, lambda: bool(told))
        assert {output.finish for output in outputs.values()} <= {"aborted", "length"}
        assert sum(output.finish == "aborted" for output in outputs.values()) >= 4
        check_drained(session)
        stream = session.stream(requests)
        next(stream)
        stream.close()
        check_drained(session)
        assert session.run(requests[:1])["long0"].finish == "length"


# -- bad links ---------------------------------------------------------------------------------------------------------


@pytest.mark.fast("everything twice", ci="*")
@pytest.mark.parametrize(
    "faults",
    [
        {"prefill0": {"duplicate": list(range(1, 60))}, "decode0": {"duplicate": list(range(1, 60))}},
        {"prefill0": {"delay_ms": 30}, "decode0": {"delay_ms": 30}},
        {"prefill0": {"truncate_pages": [1, 3]}},
    ],
    ids=["everything twice", "slow", "pages cut short"],
)
def test_a_bad_link_changes_no_output(workers, nano_pair, plain, faults, six):
    requests = six[1:]
    options = options_for(nano_pair, "draft", page_size=2, chunk_size=64)
    with open_session(workers, options, faults=faults) as session:
        check_equal(session.run(requests), plain(requests))
        decode = check_drained(session)["decode0"]["transfers"]
    if "duplicate" in faults["prefill0"]:
        assert decode["ignored"] > 0
    # Cut pages are refused on arrival and sent again.
    assert decode["retries"] == (2 if "truncate_pages" in faults["prefill0"] else 0)


@pytest.mark.slow  # waits for the lease
def test_a_message_that_is_cut_short_is_sent_again_after_a_lease(workers, nano_pair, plain, ask):
    """Of a single request the prefill worker sends the offer, the pages, the manifest, and over again."""
    options = options_for(nano_pair, chunk_size=64)
    requests = [ask("only", 20)]
    with open_session(workers, options, timing=IMPATIENT, faults={"prefill0": {"truncate_messages": [3]}}) as session:
        check_equal(session.run(requests), plain(requests))
        reports = check_drained(session)
        assert reports["prefill0"]["transfers"]["retries"] == 1
        assert reports["decode0"]["malformed"] > 0


# -- deaths ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_who_dies_takes_only_what_it_had(nano_pair, plain, ask):
    """Four workers; three of them die one after the other, in the middle of their work."""
    options = options_for(nano_pair, "draft")
    requests = [ask(f"d{i}", 20 + i, 24, start=i) for i in range(8)]
    expected = plain(requests)
    with Workers(TWO_TO_TWO.workers(), TWO_TO_TWO.devices("cpu")) as workers:
        # A prefill worker: what it had not handed over begins anew on the other one.
        with open_session(
            workers, options, TWO_TO_TWO, timing=SHORT_FENCE, faults={"prefill0": {"die_before": 4}}
        ) as session:
            check_equal(session.run(requests), expected)
            assert workers["prefill0"].death == "was killed by SIGKILL"
            assert check_drained(session).keys() == {"prefill1", "decode0", "decode1"}
        # A decode worker, when it has shown tokens: they go on elsewhere.
        with open_session(workers, options, TWO_TO_TWO, timing=SHORT_FENCE) as session:
            shown = {}

            def kill_first_decoder(delta):
                shown[delta.request_id] = shown.get(delta.request_id, 0) + len(delta.tokens)
                if shown[delta.request_id] > 1 and not workers["decode0"].death:
                    os.kill(workers["decode0"].pid, signal.SIGKILL)

            check_equal(session.run(requests, kill_first_decoder), expected)
            assert workers["decode0"].death == "was killed by SIGKILL"
            assert check_drained(session).keys() == {"prefill1", "decode1"}
        # The last prefill worker: what it had fails, what decodes goes on, and who comes later is refused.
        with open_session(
            workers, options, TWO_TO_TWO, timing=SHORT_FENCE, faults={"prefill1": {"die_before": 4}}
        ) as session:
            outputs = session.run(requests)
            for name, output in outputs.items():
                if output != expected[name]:
                    assert output.finish == "error"
                    assert (
                        output.message
                        == "worker prefill1 was killed by SIGKILL; there is no other worker for the request"
                    )
            assert any(output.finish == "error" for output in outputs.values())
            (output,) = session.run(requests[:1]).values()
            assert (output.finish, output.message) == ("refused", "no worker is left")
            assert check_drained(session).keys() == {"decode1"}


@pytest.mark.slow
@pytest.mark.parametrize(("draft", "order"), [("draft", 1), ("eagle3", -1)])
def test_a_lost_decode_worker_changes_nothing_of_what_users_get(nano_pair, ask, draft, order):
    """Sampled text behind drafts, too: rounds go on where they were, and every draw is keyed by its position."""
    pytest.importorskip("llguidance", reason="needs the extra grammar")
    warm = SamplingParams(temperature=0.9, top_p=0.95, seed=7)
    schema = Grammar("json_schema", '{"type": "array", "items": {"type": "integer"}, "minItems": 9}')
    requests = [
        ask("greedy", 20, 90),
        ask("sampled", 23, 90, sampling=warm),
        ask("seedless", 11, 90, start=3, sampling=replace(warm, seed=0), outputs=("logprobs",)),
        ask("penalised", 15, 90, start=6, sampling=replace(warm, frequency_penalty=0.7, repetition_penalty=1.2)),
        ask("shaped", 12, 90, start=9, sampling=replace(warm, temperature=1.5, grammar=schema)),
        ask("stopped", 18, 90, start=2, stop_strings=("\n\n", "self"), outputs=("logprobs",)),
    ][::order]
    # The decode workers take turns, and the first one dies when it has all of its long prompt: meanwhile the others are
    # decoded.
    requests[4:4] = [ask("long", 90, 20), ask("long too", 90, 20)]
    topology = WorkerCounts(1, 2)
    options = options_for(nano_pair, draft, overlap=True, page_size=4)
    shown = {}

    def count(delta):
        shown[delta.request_id] = shown.get(delta.request_id, 0) + len(delta.tokens)
        if workers["decode0"].death:
            shown_by_then.update({name: number for name, number in shown.items() if name not in shown_by_then})

    shown_by_then = {}
    with Workers(topology.workers(), topology.devices("cpu")) as workers:
        with open_session(workers, options, topology) as session:
            expected = session.run(requests)
        with open_session(
            workers, options, topology, timing=SHORT_FENCE, faults={"decode0": {"die_before": 6}}
        ) as session:
            outputs = session.run(requests, count)
            assert workers["decode0"].death == "was killed by SIGKILL"
            assert check_drained(session)["decode1"]["transfers"]["completed"] > len(requests) / 2
    assert any(1 < shown_by_then[request.request_id] < 90 for request in requests[:3:2]), "none was in the middle"
    for name, output in outputs.items():
        assert output.logprobs == pytest.approx(expected[name].logprobs, abs=1e-9)
        assert replace(output, logprobs=()) == replace(expected[name], logprobs=()), name
        assert len(output.logprobs) == len(output.tokens) * (name in ("seedless", "stopped"))


# -- what cannot be opened ---------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_a_worker_that_cannot_open_a_session_says_why_and_takes_the_next_one(workers, nano_pair, plain, tmp_path, six):
    plan = plan_disaggregated(options_for(nano_pair), ONE_TO_ONE, LONGEST)
    broken = replace(plan, options=replace(plan.options, model=tmp_path))
    with pytest.raises(WorkerFailed, match=r"worker (prefill|decode)0: .*config\.json"):
        DisaggregatedSession.open(broken, workers, tokenizer=DecodeSession.open(options_for(nano_pair)).tokenizer)
    with DisaggregatedSession.open(plan, workers) as session:
        check_equal(session.run(six[:2]), plain(six[:2]))


# -- a hang: the last test of these processes --------------------------------------------------------------------------


@pytest.mark.ci
def test_a_worker_that_hangs_is_ended(workers, nano_pair, plain, ask):
    workers.silence_s = 6.0
    requests = [ask("caught", 40), ask("later", 12)]
    with open_session(workers, options_for(nano_pair)) as session:
        check_equal(session.run(requests[1:]), plain(requests[1:]))
        os.kill(workers["prefill0"].pid, signal.SIGSTOP)
        (output,) = session.run(requests[:1]).values()
        assert output.finish == "error" and "prefill0 did not answer for 6 s" in output.message, output
        check_drained(session)


def test_a_prefill_worker_judges_a_prompt_while_requests_run(nano_pair, workers, six):
    session = open_session(workers, options_for(nano_pair))
    prompt = six[3].prompt.tokens
    assert session.loop.submit(six[0]) == ""
    judged = [session.loop.score(prompt, 2), session.loop.score(prompt[:5], 1)]
    while not (all(done.done() for done in judged) and session.loop.is_idle):
        session.loop.turn()
    alone = DecodeSession.open(options_for(nano_pair))
    expected = score_prompt(alone.executor.target, prompt, 2)
    assert judged[0].result().logprobs == pytest.approx(expected.logprobs, abs=1e-9)
    assert judged[0].result().tops[7][0][0] == expected.tops[7][0][0]
    assert judged[1].result().logprobs == pytest.approx(expected.logprobs[:4], abs=1e-9)
