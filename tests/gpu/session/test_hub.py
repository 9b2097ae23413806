"""Checkpoints by their hub name, from a cache folder that is made here; nothing is fetched."""

from __future__ import annotations

from pathlib import Path

import pytest
from foredraft import Session
from foredraft.core.errors import ConfigError
from foredraft.gpu.session.hub import local_checkpoint
from huggingface_hub import constants
from small_checkpoint import write_target

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the cache keeps org/small; there is no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--org--small"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "snapshots" / COMMIT).mkdir(parents=True)
    return repository / "snapshots" / COMMIT


def test_a_name_is_found_in_the_cache(snapshot: Path):
    write_target(snapshot)
    assert local_checkpoint("org/small") == snapshot
    assert Session("org/small").generate("def", max_tokens=3).tokens


def test_heads_that_are_pickles_are_found(snapshot: Path):
    (snapshot / "pytorch_model.bin").write_bytes(b"")
    assert local_checkpoint(Path("org/small")) == snapshot


def test_without_a_network_the_message_says_what_to_do(snapshot: Path):
    (snapshot / "config.json").write_text("{}")  # a download that ended before the weights
    for name in ("org/small", "org/other"):
        with pytest.raises(ConfigError) as caught:
            local_checkpoint(name, "draft")
        message = str(caught.value)
        assert (
            "draft" in message and "HF_HUB_OFFLINE is set" in message and f"hf download {name} --local-dir" in message
        )


def test_directories_and_other_paths_stay_what_they_are(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "small").mkdir(parents=True)
    for path in ("org/small", "../else/where", "/no/such", "name", "./x", "org/misspelt"):
        assert local_checkpoint(path) == Path(path)
