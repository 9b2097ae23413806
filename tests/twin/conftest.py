"""Ways to serve small models that are made in a moment."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from foredraft.gpu.session.plan import SessionOptions
from foredraft.twin.arms import TwinArm, open_arms


@pytest.fixture(autouse=True)
def _no_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve without the collection before each run:
    over the objects of all other tests it takes longer than the run."""
    nothing = SimpleNamespace(collect=lambda: None, freeze=lambda: None, unfreeze=lambda: None)
    monkeypatch.setattr("foredraft.gpu.measure.served.gc", nothing)


@pytest.fixture(autouse=True)
def _little_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take prompts from less text: encoding it takes longer than the steps that are measured."""
    monkeypatch.setattr("foredraft.gpu.measure.prompts.CORPUS_BYTES", 400_000)


@pytest.fixture(scope="session")
def make_arms(models: dict[str, Path]):
    def make(**ways: dict) -> list[TwinArm]:
        options = {}
        for name, given in ways.items():
            draft = given.pop("draft", None)
            options[name] = SessionOptions(
                model=models["target"], draft=models.get(draft), device="cpu", threads=1, **given
            )
        return open_arms(options)

    return make
