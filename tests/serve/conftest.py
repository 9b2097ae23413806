"""Servers that the tests of both bodies share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra server is not installed")

from foretoken.serve.metrics import ServerMetrics
from http_server import Served, serving, simulated_body


@pytest.fixture(scope="session")
def simulated() -> Iterator[Served]:
    metrics = ServerMetrics()
    with serving(simulated_body(metrics=metrics), metrics=metrics, model="served") as served:
        yield served


@pytest.fixture(scope="session")
def small_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and its draft, with random weights."""
    from small_checkpoint import write_standalone, write_target

    root = tmp_path_factory.mktemp("checkpoints")
    return write_target(root / "target"), write_standalone(root / "draft")


@pytest.fixture(scope="session")
def real(small_checkpoints: tuple[Path, Path]) -> Iterator[Served]:
    from foretoken.gpu.session.plan import SessionOptions
    from foretoken.gpu.session.session import DecodeSession
    from foretoken.serve.bodies.real import RealBody

    target, draft = small_checkpoints
    metrics = ServerMetrics()
    options = SessionOptions(target, draft, dtype="float64", max_running=16, block_rounds=1)
    session = DecodeSession.open(options, make_sinks=lambda spec: [metrics.sink(0)])
    with serving(RealBody(session, "target"), metrics=metrics, model="served") as served:
        yield served


@pytest.fixture(params=["simulated", "real"])
def served(request: pytest.FixtureRequest) -> Served:
    """Each body in turn."""
    return request.getfixturevalue(request.param)
