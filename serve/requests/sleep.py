"""Sleep and wake-up of a simulated server's engines, as vLLM has them: `/sleep`, `/wake_up`, `/is_sleeping`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from ..bodies.simulated import SimulatedBody
from ..errors import ApiError
from ..frontend import Frontend

LEVELS = ("1", "2")
MODES = ("abort", "keep")
LOOK_S = 0.005


def add_sleep(app: FastAPI, frontend: Frontend, engines: Callable[[Request], Sequence[int]]) -> None:
    """Add the endpoints. `engines` returns the numbers of those that a request is for."""
    body = frontend.body
    if not isinstance(body, SimulatedBody):
        return
    one_at_a_time = asyncio.Lock()

    @app.post("/sleep", response_class=Response)
    async def sleep(request: Request, level: str = "1", mode: str = "abort") -> Response:
        """Let the engines sleep: KV and prefix caches are gone. Level 1 keeps the weights in host memory, 2 drops them.
        Their requests are aborted, or with mode keep wait. Answers once all sleep."""
        _check("level", level, LEVELS)
        _check("mode", mode, MODES)
        if body.why_no_sleep:
            raise ApiError(400, body.why_no_sleep, code="unsupported")
        if level == "2" and not frontend.start_s:
            message = "how long a load of the weights takes is not known: start the server with --start-s"
            raise ApiError(400, message, param="level")
        async with one_at_a_time:
            numbers = engines(request)
            for number in numbers:
                await _call(partial(body.fall_asleep, number, int(level), mode == "keep", frontend.start_s))
            await _wait(numbers, asleep=True)
        return Response()

    @app.post("/wake_up", response_class=Response)
    async def wake_up(request: Request) -> Response:
        """Let the engines wake up. Answers once their weights are on the device again."""
        async with one_at_a_time:
            numbers = engines(request)
            for number in numbers:
                await _call(partial(body.wake_up, number))
            await _wait(numbers, asleep=False)
        return Response()

    @app.get("/is_sleeping")
    async def is_sleeping(request: Request) -> Response:
        """Whether an engine sleeps."""
        return JSONResponse({"is_sleeping": any(body.sleep_level(number) for number in engines(request))})

    async def _call(function: Callable[[], None]) -> None:
        await asyncio.wrap_future(frontend.scheduler.call(function))

    async def _wait(numbers: Sequence[int], *, asleep: bool) -> None:
        while not all(body.is_settled(number, asleep) for number in numbers):
            if not frontend.scheduler.is_running or frontend.is_draining:
                raise ApiError(503, frontend.why_not_ready, code="not_ready")
            await asyncio.sleep(LOOK_S)


def _check(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ApiError(400, f"{value!r} is none of {', '.join(known)}", param=name)
