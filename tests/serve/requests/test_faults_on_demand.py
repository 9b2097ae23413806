"""Faults that a client or the admin port asks for, and a start that takes its time."""

from __future__ import annotations

import time

import httpx
import pytest
from fastapi.testclient import TestClient
from foredraft.serve.base.limits import Limits
from foredraft.serve.requests.faults import RequestFaults, admin_app
from http_server import Served, serving, simulated_body, wait_until

ASKED = {"prompt": "x", "max_tokens": 40, "ignore_eos": True}


def _ask(served: Served, *, stream: bool = False, **headers: str) -> httpx.Response:
    return served.http.post("/v1/completions", json=ASKED | {"stream": stream}, headers=headers)


def test_headers_ask_for_faults():
    limits = Limits(stall_s=0.4)
    with serving(simulated_body(), limits, faults=RequestFaults(by_header=True)) as served:
        refused = _ask(served, **{"X-Fault": "503"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "injected") and refused.headers[
            "Retry-After"
        ]
        with pytest.raises(httpx.TransportError):
            _ask(served, **{"X-Fault": "reset"})
        for stream in (False, True):
            begin = time.monotonic()
            with pytest.raises(httpx.RemoteProtocolError):
                _ask(served, stream=stream, **{"X-Fault": "stall"})
            assert time.monotonic() - begin >= 0.4
        delayed = _ask(served, **{"X-Delay-Ms": "300"})
        assert delayed.status_code == 200 and delayed.elapsed.total_seconds() >= 0.3
        slow = _ask(served, stream=True, **{"X-Fault": "slow", "X-Delay-Ms": "20"})
        assert slow.text.endswith("data: [DONE]\n\n") and slow.text.count("the") > 0
        for wrong in ({"X-Fault": "404"}, {"X-Delay-Ms": "-1"}, {"X-Delay-Ms": "soon"}):
            assert _ask(served, **wrong).status_code == 400
        assert _ask(served).status_code == served.http.get("/ready", headers={"X-Fault": "503"}).status_code == 200
        served.wait_until_idle()


def test_headers_do_nothing_unless_they_are_switched_on(simulated: Served):
    assert _ask(simulated, **{"X-Fault": "503"}).status_code == 200
    with serving(simulated_body(), faults=RequestFaults(by_header=False)) as served:
        assert _ask(served, **{"X-Fault": "503"}).status_code == 200


def test_the_admin_port_gives_a_share_of_requests_a_fault():
    faults = RequestFaults(by_header=False)
    admin = TestClient(admin_app(faults))
    with serving(simulated_body(), faults=faults) as served:
        assert admin.get("/faults").json() is None
        assert admin.put("/faults", json={"fault": "503", "share": 0.5}).json()["share"] == 0.5
        statuses = [_ask(served).status_code for _ in range(40)]
        assert 8 <= statuses.count(503) <= 32 and set(statuses) == {200, 503}
        assert served.http.get("/v1/models").status_code == 200
        for wrong in ({"fault": "404"}, {"share": 0}, {"delay_ms": -1}, {"other": 1}):
            assert admin.put("/faults", json=wrong).status_code == 400
        assert admin.delete("/faults").json() is None and _ask(served).status_code == 200


def test_a_start_takes_its_simulated_time():
    """Ten simulated seconds pass in one here."""
    with serving(simulated_body(speed=10.0), start_s=40.0) as served:
        ready = served.http.get("/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "the weights are being loaded")
        refused = _ask(served)
        assert refused.status_code == served.http.get("/health").status_code == 503
        assert 1 <= int(refused.headers["Retry-After"]) <= 4
        wait_until(lambda: served.http.get("/ready").status_code == 200)
        assert served.frontend._left_to_start_s <= 0
        assert _ask(served).status_code == served.http.get("/health").status_code == 200
