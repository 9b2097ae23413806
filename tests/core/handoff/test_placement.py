"""Which workers serve a request, and what the loss of one means for it: without engines or processes."""

from __future__ import annotations

import pytest
from foredraft.core.contract.request import Request
from foredraft.core.handoff.placement import LeastLoaded, Placements
from foredraft.core.prompt import Prompt


def ask(name, length=10):
    return Request(name, Prompt.of_tokens(list(range(1, length + 1))), 8)


def placed(router, name, length=10):
    placement = router.place(ask(name, length))
    return placement.prefill, placement.decode


SHOWN = {"shown": [7, 8, 9]}


def router_of(prefill, decode):
    return Placements(
        LeastLoaded(prefill, lambda request: request.prefill_len),
        LeastLoaded(decode, lambda request: 1),
        lambda name: Prompt.of_tokens(SHOWN.get(name, [])),
    )


@pytest.fixture
def router():
    return router_of(["p0", "p1"], ["d0", "d1"])


def test_the_workers_with_the_least_to_do_get_the_next_request(router):
    assert placed(router, "a", 50) == ("p0", "d0")
    assert placed(router, "b", 10) == ("p1", "d1")
    assert placed(router, "c", 10) == ("p1", "d0")  # 50 tokens against 10
    router.handed_over("a")  # p0 is idle, d0 still decodes it
    assert placed(router, "d") == ("p0", "d1")
    router.handed_over("a")  # said twice, counted once
    router.end("b")
    router.end("a")
    assert placed(router, "e", 100) == ("p0", "d0")
    assert placed(router, "f") == ("p1", "d1")
    assert placed(router, "g", 60)[0] == "p1"
    assert placed(router, "h")[0] == "p1"  # 80 tokens against 110


def answer(router, lost, *names):
    """Let the workers `names` answer that `lost` is gone; only the last answer leads to verdicts."""
    *others, last = names
    assert [router.acknowledge_loss(name, lost) for name in others] == [[]] * len(others)
    return router.acknowledge_loss(last, lost)


def test_a_lost_prefill_worker_costs_only_what_it_had_not_handed_over(router):
    for name in ("joined", "on p1", "on its way"):
        router.place(ask(name))
    router.joined("joined")
    assert router["on its way"].prefill == "p0" and router["on its way"].decode == "d0"
    assert router.lose("p0", "p0 died") == []
    assert router.acknowledge_loss("d0", "p1") == []  # an answer to another loss
    (verdict,) = answer(router, "p0", "d1", "d0", "p1")
    assert verdict.request_id == "on its way" and not verdict.failure
    assert (verdict.placement.prefill, verdict.placement.tries) == ("p1", 2)
    assert router["joined"].is_handed_over and router["joined"].lost is None
    assert router["on p1"].tries == 1 and router.acknowledge_loss("d0", "p0") == []


def test_a_request_that_joins_before_the_last_answer_goes_on(router):
    router.place(ask("a"))
    router.lose("p0", "p0 died")
    router.joined("a")  # said before the answer
    assert answer(router, "p0", "d0", "d1", "p1") == []
    router.end("a")
    assert router.request_ids == ()


def test_requests_of_a_lost_decode_worker_go_on_behind_what_was_shown(router):
    for name in ("shown", "elsewhere", "not yet", "d1 too", "given up"):
        router.place(ask(name))
    router.handed_over("shown")
    router.joined("shown")
    router.abort("given up")
    assert router.lose("d0", "d0 died") == [] and router.awaits_answers("d0")
    verdicts = {verdict.request_id: verdict for verdict in answer(router, "d0", "p1", "d1", "p0")}
    assert not router.awaits_answers("d0")
    assert verdicts.keys() == {"shown", "not yet", "given up"}
    assert verdicts["given up"].placement is None and verdicts["given up"].failure == ""
    again = verdicts["shown"].placement
    assert (again.decode, again.tries, again.has_joined, again.is_handed_over) == ("d1", 2, False, False)
    assert again.request.shown.materialize().tolist() == SHOWN["shown"] and again.request.prefill_len == 12
    assert router["not yet"].request.shown.length == 0
    assert "given up" not in router and router["elsewhere"].decode == "d1"


def test_a_request_is_tried_twice(router):
    router.place(ask("a"))
    router.lose("p0", "p0 died")
    (first,) = answer(router, "p0", "p1", "d0", "d1")
    assert first.placement.prefill == "p1"
    router.lose("p1", "p1 died")
    (second,) = answer(router, "p1", "d1", "d0")
    assert second.placement is None and second.failure == "p1 died; the request was tried 2 times"


def test_without_another_worker_the_request_fails():
    router = router_of(["p0"], ["d0"])
    router.place(ask("a"))
    router.place(ask("b"))
    router.joined("a")
    router.lose("p0", "p0 died")
    (verdict,) = router.acknowledge_loss("d0", "p0")
    assert (verdict.request_id, verdict.failure) == ("b", "p0 died; there is no other worker for the request")
    assert router.request_ids == ("a",)
    assert router.place(ask("c")) is None
    router.end("a")


@pytest.mark.parametrize("heard_first", ["d0", "d1"])
def test_two_decode_workers_that_die_at_once_are_one_loss_to_each_request(heard_first):
    """A third one lives. Whichever death is heard first, the dead one is no place to go on, and no second loss."""
    router = router_of(["p0"], ["d0", "d1", "d2"])
    for name in ("a", "b", "c"):
        router.place(ask(name))
    assert [router[name].decode for name in "abc"] == ["d0", "d1", "d2"]
    heard_second = {"d0": "d1", "d1": "d0"}[heard_first]
    assert router.lose(heard_first, "died") == []
    assert (
        router.acknowledge_loss("p0", heard_first) == router.acknowledge_loss("d2", heard_first) == []
    )  # the other one does not answer
    first = router.lose(heard_second, "died")
    second = answer(router, heard_second, "p0", "d2")
    moved = [verdict.placement for verdict in [*first, *second]]
    assert sorted((p.request.request_id, p.decode, p.tries) for p in moved) == [("a", "d2", 2), ("b", "d2", 2)]
    assert router["c"].tries == 1


def test_both_workers_of_a_request_may_die_at_once(router):
    router.place(ask("a"))
    router.lose("p0", "p0 died")
    router.acknowledge_loss("p1", "p0")
    assert router.lose("d0", "d0 died") == []
    assert router.acknowledge_loss("d1", "p0") == []  # the loss of d0 is judged, for which p1 is still to answer
    (verdict,) = answer(router, "d0", "d1", "p1")
    assert (verdict.placement.prefill, verdict.placement.decode, verdict.placement.tries) == ("p1", "d1", 2)
    # Again, with the only workers left.
    router.lose("p1", "p1 died")
    assert router.lose("d1", "d1 died")[0].failure.endswith("the request was tried 2 times")
    assert router.request_ids == ()
