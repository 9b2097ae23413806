"""A simulation that is too fast for the machine: it says so, and which speed would do."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest
from foredraft.serve.base.pace import HEADROOM, WARN_EVERY_S, ClockPace
from http_server import serving, simulated_body, wait_until

ASKED = {"prompt": "x", "max_tokens": 3000, "ignore_eos": True}


def test_the_possible_speed_is_what_a_machine_does_in_its_time():
    """Turns of 10 ms, of which 2.5 ms are busy: four times the speed would be all that is there."""
    told: list[str] = []
    pace = ClockPace(3.0, told.append)
    for number in range(1000):
        pace.turn(number * 0.01, number * 0.01 + 0.0025, 0.0)
    assert pace.possible_speed == pytest.approx(HEADROOM * 12.0, rel=0.01) and pace.is_kept and not told


def test_a_simulation_that_falls_behind_tells_it_now_and_then():
    """Each turn takes 10 ms and has 5 ms of simulated time at this speed."""
    told: list[str] = []
    pace = ClockPace(8.0, told.append)
    for number in range(6000):
        pace.turn(number * 0.01, (number + 1) * 0.01, number * 0.005)
    assert pace.possible_speed == pytest.approx(HEADROOM * 4.0, rel=0.01) and not pace.is_kept
    assert pace.behind_s == pytest.approx(30, rel=0.01) and len(told) == 60 // WARN_EVERY_S
    assert "--speed 2 would hold" in told[-1] and "(--speed 8)" in told[-1]


@pytest.mark.ci
def test_clients_of_a_server_that_is_too_fast_learn_of_it():
    told: list[str] = []
    body = simulated_body(speed=5000.0)
    body.pace = ClockPace(5000.0, told.append)
    with serving(body) as served:

        async def many() -> None:
            async with httpx.AsyncClient(base_url=served.url, timeout=60, verify=False) as client:
                posts = [asyncio.ensure_future(client.post("/v1/completions", json=ASKED)) for _ in range(12)]
                while not told:
                    await asyncio.sleep(0.01)
                ready = (await client.get("/ready")).json()
                assert ready["ready"] and ready["behind_s"] > 0.2 and "behind real time" in ready["warning"]
                metrics = (await client.get("/metrics")).text
                value = next(line for line in metrics.splitlines() if line.startswith("foredraft:behind_real_time"))
                assert float(value.split()[-1]) > 0.2
                await asyncio.gather(*posts)

        asyncio.run(many())
        assert "--speed 5000" in told[0]
        body.pace = None
        assert "behind_s" not in served.http.get("/ready").json()


def test_a_server_that_keeps_up_says_nothing():
    told: list[str] = []
    body = simulated_body(speed=1.0)
    body.pace = ClockPace(1.0, told.append)
    with serving(body) as served:
        assert served.post("/v1/completions", **{**ASKED, "max_tokens": 150}).status_code == 200
        wait_until(lambda: body.pace.behind_s < 0.2)
        ready = served.http.get("/ready").json()
        assert not told and "warning" not in ready and ready["speed"] == 1


def test_a_server_without_requests_is_not_late():
    """A start that took long makes no client wait, and the end of a burst is forgotten."""
    told: list[str] = []
    late_s = [0.0]
    body = simulated_body(speed=1.0, clock=lambda: time.monotonic() + late_s[0])
    body.pace = ClockPace(1.0, told.append)
    late_s[0] = 3.0
    with serving(body) as served:
        wait_until(lambda: served.frontend.scheduler.is_running)
        assert served.http.get("/ready").json()["behind_s"] == 0 and not told
        assert served.post("/v1/completions", **{**ASKED, "max_tokens": 9}).status_code == 200
        served.wait_until_idle()
        assert served.http.get("/ready").json()["behind_s"] == 0
        assert told, "while the request ran"
