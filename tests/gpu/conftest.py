"""What tests with real models share: a small trained pair, made once per machine."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
MADE_BY = ("gpu/tiny", "gpu/models", "tests/gpu/conftest.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker runs all that needs the pair: the other ones would wait until it is trained."""
    for item in items:
        if "nano_pair" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("nano pair"))


@pytest.fixture(scope="session")
def nano_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a trained pair of size nano (see `foredraft tiny`): target, draft, eagle3, multi_layer_eagle.

    Kept in pytest's cache until the code that makes it changes.
    """
    from foredraft.gpu.tiny.pair import make_pair
    from foredraft.gpu.tiny.sizes import NANO, PairOptions, Schedule

    digest = hashlib.sha256(f"{torch.__version__} {platform.python_version()}".encode())
    for name in MADE_BY:
        path = ROOT / name
        for source in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(source.read_bytes())
    cache = getattr(request.config, "cache", None)
    root = tmp_path_factory.getbasetemp() if cache is None else Path(cache.mkdir("nano_pair"))
    # Some of nano's steps: the target writes no text that repeats itself, and its drafts foresee most of it.
    drafts = {"draft_schedule": Schedule(40, 16), "block_schedule": Schedule(40, 16)}
    size = replace(NANO, target_schedule=Schedule(90, 16), **drafts, num_continuations=32)
    return make_pair(root / digest.hexdigest()[:16], PairOptions(size), lambda progress: None).directory
