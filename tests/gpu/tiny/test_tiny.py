"""Pairs: what is saved, that it is what others can load, that runs repeat, go on where they stopped, and
overwrite nothing."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from foredraft.cli.decode.tiny import learnt_nothing
from foredraft.core.errors import ConfigError
from foredraft.gpu.models.checkpoint import load_draft, load_target
from foredraft.gpu.ops.torch_ops import TorchOps
from foredraft.gpu.tiny.pair import ALGORITHMS, PARTS, make_pair
from foredraft.gpu.tiny.sizes import NANO, PairOptions, Schedule, TinyShape, partial_directory

# Untaught but whole: made in a second.
MICRO = replace(
    NANO,
    name="micro",
    num_modules=40,
    vocab_size=300,
    window=32,
    target=TinyShape(32, 64, 2, 2, 1, 16),
    standalone=TinyShape(16, 32, 1, 1, 1, 16),
    draft_vocab_size=200,
    target_schedule=Schedule(3, 2),
    draft_schedule=Schedule(2, 2),
    block_schedule=Schedule(2, 2),
    num_continuations=4,
    prompt_len=8,
    num_measured=4,
)
OPTIONS = PairOptions(MICRO)


class Seen:
    """Notes which parts are trained; can be interrupted at one."""

    def __init__(self, interrupt_at: str | None = None) -> None:
        self.parts: list[str] = []
        self.interrupt_at = interrupt_at

    def __call__(self, progress) -> None:
        if progress.part not in self.parts:
            self.parts.append(progress.part)
        if progress.part == self.interrupt_at:
            raise KeyboardInterrupt


def weights_of(directory: Path) -> dict[str, bytes]:
    return {part: (directory / part / "model.safetensors").read_bytes() for part in PARTS}


@pytest.fixture(scope="module")
def micro_pair(tmp_path_factory) -> Path:
    return make_pair(tmp_path_factory.mktemp("pairs") / "micro", OPTIONS, Seen()).directory


def test_drafts_of_a_trained_pair_foresee_their_target(nano_pair, record_property):
    summary = json.loads((nano_pair / "pair.json").read_text())
    assert summary["described"] == "size nano, seed 0"
    assert summary["versions"]["torch"] == torch.__version__ and len(summary["corpus"]["digest"]) == 64
    parts = summary["parts"]
    assert list(parts) == list(PARTS)
    assert parts["target"]["held_out_loss"] < 5.0  # a uniform guess among 512 tokens costs 6.2
    for part in ALGORITHMS:
        lengths = parts[part]["accept_lengths"]
        record_property("note", f"nano pair, {part}: agrees {parts[part]['agreement']:.0%}, tokens per round {lengths}")
        assert parts[part]["agreement"] > 0.3 and parts[part]["num_steps"] == 40
        assert lengths["1"] < lengths.get("3", lengths.get("2"))
    assert set(parts["multi_layer_eagle"]["accept_lengths"]) == {"1", "2"}
    assert parts["draft"]["accept_lengths"]["3"] > 1.5 and parts["eagle3"]["accept_lengths"]["3"] > 1.5


def test_heads_load_with_their_target_and_the_draft_vocabulary_is_smaller(nano_pair):
    target = load_target(nano_pair / "target", TorchOps())
    heads = {part: load_draft(nano_pair / part, algorithm, target) for part, algorithm in ALGORITHMS.items()}
    ids = heads["eagle3"].target_ids
    assert ids is not None and len(ids) == NANO.draft_vocab_size < target.vocab_size
    assert not torch.equal(ids, torch.arange(len(ids))) and bool((ids.diff() > 0).all())
    assert len(heads["eagle3"].aux_layers) == 3
    assert heads["multi_layer_eagle"].num_heads == 2 and heads["draft"].hidden_size != target.hidden_size


def test_a_pair_that_is_there_is_used_as_it_is(micro_pair):
    seen = Seen()
    again = make_pair(micro_pair, OPTIONS, seen)
    assert again.reused and seen.parts == []
    assert again.summary == json.loads((micro_pair / "pair.json").read_text())
    assert sorted(path.name for path in micro_pair.iterdir()) == sorted([*PARTS, "pair.json"])


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(micro_pair, tmp_path):
    same = make_pair(tmp_path / "same", OPTIONS, Seen()).directory
    assert weights_of(same) == weights_of(micro_pair)
    other = make_pair(tmp_path / "other", PairOptions(MICRO, seed=1), Seen()).directory
    assert all(weights_of(other)[part] != weights_of(micro_pair)[part] for part in PARTS)


def test_an_interrupted_run_leaves_no_pair_and_the_next_goes_on_from_its_finished_parts(micro_pair, tmp_path):
    directory = tmp_path / "pair"
    with pytest.raises(KeyboardInterrupt):
        make_pair(directory, OPTIONS, Seen(interrupt_at="eagle3"))
    partial = partial_directory(directory, OPTIONS)
    assert not directory.exists()
    assert sorted(path.name for path in partial.iterdir()) == [".lock", "draft", "target"]
    seen = Seen()
    made = make_pair(directory, OPTIONS, seen)
    assert not made.reused and seen.parts == ["own texts", "eagle3", "multi_layer_eagle", "dflash"]
    assert not partial.exists()
    assert weights_of(directory) == weights_of(micro_pair)


def test_a_part_that_was_being_written_is_not_taken_for_whole(tmp_path, monkeypatch):
    """The tensors are written, then the process is killed: no clean-up runs."""
    directory = tmp_path / "pair"
    with pytest.raises(KeyboardInterrupt):
        make_pair(directory, OPTIONS, Seen(interrupt_at="draft"))
    half = partial_directory(directory, OPTIONS) / "draft.tmp"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    seen = Seen()
    make_pair(directory, OPTIONS, seen)
    assert "draft" in seen.parts and not list(directory.glob("*.tmp"))


def test_of_two_runs_at_once_one_makes_the_pair(tmp_path):
    seen = [Seen(), Seen()]
    made = [None, None]

    def run(i: int) -> None:
        made[i] = make_pair(tmp_path / "pair", OPTIONS, seen[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(pair.reused for pair in made) == [False, True]
    assert sorted(bool(item.parts) for item in seen) == [False, True]
    assert [path.name for path in tmp_path.iterdir()] == ["pair"]


def test_what_is_there_is_never_overwritten(micro_pair, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "pair.json").write_text("[]")
    for directory, message in (
        (file, "is a file"),
        (full, r"something else in it \(notes.txt\); expected .* a pair of size micro, seed 0"),
        (broken, "not the summary of a pair"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_pair(directory, OPTIONS, Seen())
    with pytest.raises(ConfigError, match=r"another pair in it \(size micro, seed 0\); expected .* seed 5"):
        make_pair(micro_pair, PairOptions(MICRO, seed=5), Seen())
    assert file.read_text() == "mine" and (full / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "file", "full"]


def test_a_pair_that_has_learnt_nothing_says_so(micro_pair, nano_pair):
    """MICRO has made two steps: its drafts propose what they did before, or its target repeats itself."""
    parts = json.loads((micro_pair / "pair.json").read_text())["parts"]
    assert not all(part["has_learnt"] for part in parts.values())
    said = learnt_nothing(json.loads((micro_pair / "pair.json").read_text()))
    assert said.startswith("This pair has learnt too little: ") and "a larger --size" in said
    summary = json.loads((nano_pair / "pair.json").read_text())
    target = summary["parts"]["target"]
    assert target["held_out_loss"] < target["frequency_loss"] < 6.2 and target["repeats"] < 0.2
    assert learnt_nothing(summary) == ""
    target["has_learnt"] = False
    target["repeats"] = 0.75
    assert "of the tokens that target writes 75% repeat the one before" in learnt_nothing(summary)
    target["held_out_loss"] = 7.0
    assert "target has a loss of 7.00, token frequencies alone one of" in learnt_nothing(summary)
    summary["parts"]["draft"] |= {"has_learnt": False, "untrained_agreement": 0.5}
    assert "draft agrees no more often than before its training (50%)" in learnt_nothing(summary)
