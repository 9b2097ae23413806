"""Servers that the tests of both bodies share."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra server is not installed")

import httpx
from foredraft.serve.metrics import ServerMetrics
from http_server import Served, serving, simulated_body


@pytest.fixture(scope="session", autouse=True)
def certificates_read_once() -> Iterator[None]:
    """Read the certificates of the machine once: httpx does so again with each client and each `httpx.get`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx._transports.default.create_ssl_context", cache(httpx.create_ssl_context))
        yield


@pytest.fixture(scope="session")
def simulated() -> Iterator[Served]:
    metrics = ServerMetrics()
    with serving(simulated_body(metrics=metrics), metrics=metrics, model="served") as served:
        yield served


@pytest.fixture(scope="session")
def real(models: dict[str, Path]) -> Iterator[Served]:
    from foredraft.gpu.session.plan import SessionOptions
    from foredraft.gpu.session.session import DecodeSession
    from foredraft.serve.bodies.real import RealBody

    metrics = ServerMetrics()
    options = SessionOptions(
        models["target"], models["STANDALONE"], dtype="float64", max_running=16, multi_step_rounds=1
    )
    session = DecodeSession.open(options, make_sinks=lambda spec: [metrics.sink(0)])
    with serving(RealBody(session, "target"), metrics=metrics, model="served") as served:
        yield served


@pytest.fixture(params=["simulated", "real"])
def served(request: pytest.FixtureRequest) -> Served:
    """Each body in turn."""
    return request.getfixturevalue(request.param)
