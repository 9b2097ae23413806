"""Stored digests of event logs: a rewrite of the scheduler or of the simulator changes no decision and no time."""

from __future__ import annotations

import corpus
import pytest
from foredraft.sim.actors.clock import Environment


def test_every_service_has_a_digest():
    assert list(corpus.stored()) == corpus.names()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if number % 8 == 0 else pytest.mark.slow)
        for number, name in enumerate(corpus.names())
    ],
)
def test_events_are_as_stored(name: str):
    assert corpus.digest_of(name) == corpus.stored()[name], (
        "the events have changed: see `python tests/support/corpus.py`, and store new digests if that is meant"
    )


@pytest.mark.fast("service-4-faults", "disaggregated-1", ci="*")
@pytest.mark.parametrize("name", ["service-0", "service-4-faults", "disaggregated-1", "builtin-1"])
def test_an_engine_that_takes_every_wait_from_the_calendar_has_the_same_events(name, monkeypatch):
    num_waits = []
    monkeypatch.setattr(Environment, "passed", lambda env, at_ns: num_waits.append(at_ns))
    assert corpus.digest_of(name) == corpus.stored()[name] and num_waits
