"""`foredraft tiny`: what it prints, where the pair goes, and how it ends."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """Size nano becomes one of a second, and the cache an empty directory."""
    pytest.importorskip("torch")
    from foredraft.gpu.tiny import sizes

    quick = replace(
        sizes.NANO,
        num_modules=40,
        vocab_size=300,
        window=32,
        draft_vocab_size=200,
        target_schedule=sizes.Schedule(3, 2),
        draft_schedule=sizes.Schedule(2, 2),
        block_schedule=sizes.Schedule(2, 2),
        num_continuations=4,
        num_measured=4,
    )
    monkeypatch.setitem(sizes.SIZES, "nano", quick)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_pair_is_made_shown_and_found_again(command, tmp_path):
    first = command("tiny", tmp_path / "pair", "--size", "nano")
    assert first.code == 0, first.err
    assert "is ready" in first.out and "S=3" in first.out
    for part in ("target", "draft", "eagle3", "multi_layer_eagle", "dflash"):
        assert part in first.out
        assert f"\n{part}: step" in f"\n{first.err}"
    loss = json.loads((tmp_path / "pair" / "pair.json").read_text())["parts"]["target"]["held_out_loss"]
    assert f"{loss:.2f}" in first.out
    again = command("tiny", tmp_path / "pair", "--size", "nano")
    assert again.code == 0 and "is already there" in again.out and again.err == ""
    assert again.out.splitlines()[1:] == first.out.splitlines()[1:]


def test_without_a_directory_the_pair_goes_to_the_users_cache(command, tmp_path):
    assert command("tiny", "--size", "nano", "--quiet").code == 0
    assert command("tiny", "--size", "nano", "--seed", 3, "-q").err == ""
    cache = tmp_path / "cache" / "foredraft"
    assert sorted(path.name for path in cache.iterdir()) == ["nano", "nano-seed3"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size", "nanp"], "did you mean 'nano'"),
        (["--size", "small"], "none of nano, tiny"),
        (["--size", "nano", "--device", "cuda"], "tiny --device is gone"),
        (["--time-budget-s=60"], "tiny --time-budget-s is gone: use `foredraft tiny`, whose training has"),
    ],
)
def test_bad_options_are_one_message_and_exit_code_2(refused, tmp_path, options, message):
    assert message in refused("tiny", tmp_path / "pair", *options)
    assert not (tmp_path / "pair").exists()


def test_an_interruption_says_what_is_kept(command, tmp_path, monkeypatch):
    from foredraft.gpu.tiny import pair

    whole = pair.distillation_loss

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(pair, "distillation_loss", interrupted)
    outcome = command("tiny", tmp_path / "pair", "--size", "nano")
    assert outcome.code == 130
    assert "continues from them" in outcome.err and not (tmp_path / "pair").exists()
    monkeypatch.setattr(pair, "distillation_loss", whole)
    outcome = command("tiny", tmp_path / "pair", "--size", "nano")
    assert outcome.code == 0 and not outcome.err.startswith("target:")
