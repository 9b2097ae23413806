"""Ways to serve small models that are made in a moment."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from foretoken.gpu.session.plan import SessionOptions
from foretoken.twin.arms import Arm, open_arms
from small_checkpoint import write_head, write_standalone, write_target


@pytest.fixture(autouse=True)
def _no_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve without the collection before each run: over the objects of all other tests it takes longer than the run."""
    nothing = SimpleNamespace(collect=lambda: None, freeze=lambda: None, unfreeze=lambda: None)
    monkeypatch.setattr("foretoken.twin.served.gc", nothing)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "target": write_target(root / "target"),
        "STANDALONE": write_standalone(root / "standalone"),
        "EAGLE3": write_head(root / "eagle3", "EAGLE3"),
    }


@pytest.fixture(scope="session")
def make_arms(checkpoints: dict[str, Path]):
    def make(**ways: dict) -> list[Arm]:
        options = {}
        for name, given in ways.items():
            draft = given.pop("draft", None)
            options[name] = SessionOptions(
                model=checkpoints["target"], draft=checkpoints.get(draft), device="cpu", threads=1, **given
            )
        return open_arms(options)

    return make
