"""One server for all tests of a worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("uvicorn", reason="the extra server is not installed")

from page_server import PageServer, page_server


@pytest.fixture(scope="session")
def served(tmp_path_factory) -> Iterator[PageServer]:
    with page_server(tmp_path_factory.mktemp("ui")) as server:
        yield server
