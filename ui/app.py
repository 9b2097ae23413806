"""The application: the page, and its questions, which processes answer (`pool.py`).

GET  /                the page; /page/… its style and scripts
GET  /api/choices     what its controls offer, and the keys that it begins with
POST /api/answer      `cost` and `doctor`, as lines of JSON: by the roofline first, if measured kernels take their time
POST /api/simulate    a simulation with speculation and one without: lines of progress, then the results
POST /api/plan        a plan: lines of progress, then the answer
POST /api/export      the launch command and the Kubernetes files of the scenario, or of a plan that was made
POST /api/read        the keys of a text that was dropped on the page

To leave before the end of an answer cancels it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from ..core.parsing import ParseError, parse_json
from ..serve.base.errors import ApiError
from ..serve.base.limits import Limits
from ..serve.base.turns import LoopTurns
from ..serve.guards import Guards
from .guards import OwnPage
from .pool import Message, ProcessPool

FOLDER = Path(__file__).with_name("page")
SOON_S = 0.5
"""After this time without an answer the page gets one by the roofline, until tables of measured kernels are made."""
NICER = 10  # long runs leave the cores to short answers
MOST_KEYS, MOST_KEY_LENGTH = 500, 200


@dataclass
class AnswerPools:
    """The processes that answer: at once, by the roofline, simulations, and plans."""

    answers: ProcessPool
    rough: ProcessPool
    runs: ProcessPool
    plans: ProcessPool

    @classmethod
    def usual(cls) -> AnswerPools:
        return cls(ProcessPool(2, 0), ProcessPool(1, 0), ProcessPool(2, NICER), ProcessPool(2, NICER))

    @property
    def all(self) -> tuple[ProcessPool, ...]:
        return self.answers, self.rough, self.runs, self.plans


def make_app(choices: Mapping[str, Any], folder: Path, limits: Limits, pools: AnswerPools) -> Starlette:
    """Return the application. choices: what `/api/choices` answers. folder: where dropped traces are kept."""
    api = _Api(choices, folder, pools)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        starting = asyncio.create_task(api.start())
        yield
        starting.cancel()
        for pool in pools.all:
            pool.close()

    routes = [
        Route("/", lambda request: FileResponse(FOLDER / "index.html")),
        Mount("/page", StaticFiles(directory=FOLDER)),
        Route("/api/choices", api.choices),
        *(Route(f"/api/{name}", getattr(api, name), methods=["POST"]) for name in ("answer", "simulate", "plan", "export", "read")),
    ]  # fmt: skip
    return Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[Middleware(OwnPage), Middleware(Guards, limits=limits, turns=LoopTurns(), api_key=None, plain=())],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error},
    )


class _Api:
    def __init__(self, choices: Mapping[str, Any], folder: Path, pools: AnswerPools) -> None:
        self._choices = choices
        self._folder = folder
        self._pools = pools
        self._asking: set[asyncio.Task[Message]] = set()
        self._has_begun = asyncio.Event()  # the first process runs, or cannot be started

    async def start(self) -> None:
        """Start the processes: first one alone, so that the first answer of the page does not wait for others."""
        try:
            await self._pools.answers.start(1)
        finally:
            self._has_begun.set()
        await asyncio.gather(self._pools.answers.start(), self._pools.rough.start())
        await self._pools.runs.start()

    async def choices(self, request: Request) -> Response:
        """Return what the page offers."""
        return JSONResponse(self._choices)

    async def answer(self, request: Request) -> Response:
        """Answer what needs no simulation."""
        asked = await self._asked(request, "answer")
        asked |= {"batch": _count(asked, "batch", 1, 1 << 20), "context": _count(asked, "context", 0, 1 << 30, None)}
        return _stream(self._answers(asked))

    async def _answers(self, asked: Message) -> AsyncGenerator[Message]:
        exact = self._task(self._pools.answers, asked)
        await self._has_begun.wait()  # the roofline, too, would wait for a process to start
        done, _ = await asyncio.wait({exact}, timeout=SOON_S)
        if not done:
            rough = self._task(self._pools.rough, {**asked, "roofline": True})
            await asyncio.wait({exact, rough}, return_when=asyncio.FIRST_COMPLETED)
            if not exact.done() and rough.exception() is None:
                yield {**rough.result(), "is_rough": True}
        yield await asyncio.shield(exact)

    def _task(self, pool: ProcessPool, asked: Message) -> asyncio.Task[Message]:
        """Ask a pool. It goes on where the page asks something else meanwhile: the tables that it makes are kept."""
        task = asyncio.create_task(pool.ask(asked))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        return task

    async def simulate(self, request: Request) -> Response:
        """Simulate the scenario as it is, and without speculation."""
        return _stream(self._told(self._pools.runs, await self._asked(request, "simulate")))

    async def plan(self, request: Request) -> Response:
        """Search the candidates of a plan."""
        return _stream(self._told(self._pools.plans, await self._asked(request, "plan")))

    @staticmethod
    async def _told(pool: ProcessPool, asked: Message) -> AsyncGenerator[Message]:
        async with pool.asking(asked) as messages:
            async for message in messages:
                yield message

    async def export(self, request: Request) -> Response:
        """Return the files of a deployment."""
        return JSONResponse(await self._pools.answers.ask(await self._asked(request, "export")))

    async def read(self, request: Request) -> Response:
        """Read a text that was dropped or pasted."""
        asked = await self._asked(request, "read")
        if not isinstance(asked.get("name"), str) or not isinstance(asked.get("text"), str):
            raise ApiError(400, "name and text: expected texts")
        return JSONResponse(await self._pools.answers.ask(asked))

    async def _asked(self, request: Request, ask: str) -> Message:
        """Return the question of a request. Raises ApiError for a body that is none."""
        try:
            asked = parse_json((await request.body()).decode())
        except (ParseError, UnicodeDecodeError) as error:
            raise ApiError(400, f"the body is no JSON: {error}") from None
        given = asked.get("given") if isinstance(asked, dict) else None
        if not isinstance(given, dict) or len(given) > MOST_KEYS or any(len(key) > MOST_KEY_LENGTH for key in given):
            message = f"given: expected at most {MOST_KEYS} keys of a scenario with their values"
            raise ApiError(400, message, param="given")
        if not isinstance(asked.setdefault("plan", {}), dict):
            raise ApiError(400, "plan: expected an object", param="plan")
        return {**asked, "ask": ask, "folder": str(self._folder)}


def _count(asked: Message, name: str, least: int, most: int, default: int | None = 1) -> int | None:
    value = asked.get(name, default)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most):
        raise ApiError(400, f"{name}: expected a whole number from {least:,} to {most:,}", param=name)
    return value


def _stream(messages: AsyncGenerator[Message]) -> Response:
    """Return messages as lines of JSON, as they come. An error after the first is a line as well."""

    async def lines() -> AsyncIterator[bytes]:
        async with aclosing(messages) as open_messages:
            try:
                async for message in open_messages:
                    yield json.dumps(message, allow_nan=False).encode() + b"\n"
            except ApiError as error:
                yield json.dumps(error.to_json()).encode() + b"\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.to_json(), error.status, error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return await _api_error(request, ApiError(error.status_code, str(error.detail)))
