"""Presets: each gives the mean accept lengths that were published of it, and a run takes the one of its algorithm,
family and text."""

import csv
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from foredraft.core.acceptance.fit import simulate_rounds
from foredraft.core.acceptance.presets import PRESETS, choose_preset, presets_like, usual_preset
from foredraft.core.acceptance.process import GaussianAcceptance
from foredraft.core.contract.step import RoundShape
from foredraft.core.errors import ConfigError

PUBLISHED = Path(__file__).resolve().parents[3] / "benchmarks" / "published" / "acceptance.csv"
OTHER_TEXTS = {
    "eagle-llama-code",
    "eagle-llama-math",
    "ngram-code",
}  # fitted to acceptance by depth: see test_acceptance.py
CHAIN_ERROR, TREE_ERROR = 0.015, 0.075  # 0.8 % and 6.7 % measured
WORSE = {
    ("EAGLE", "chat"): 0.05,  # fitted to other traces: +4.4 % at 7 steps
    ("EAGLE3", "qwen3", 60): 0.14,  # a tree of 60 nodes, from a single published chain
}


def published():
    rows = defaultdict(list)
    with PUBLISHED.open(newline="") as file:
        for row in csv.DictReader(file):
            assert row["source"] and row["licence"]
            shape = int(row["steps"]), int(row["topk"]), int(row["num_draft_tokens"])
            rows[row["algorithm"], row["family"], row["text"]].append((shape, float(row["accept_length"])))
    return rows


def accept_length(process, steps, topk, nodes):
    shaped = process if topk == 1 else process.for_tree(RoundShape(steps, topk, nodes))
    lens = simulate_rounds(shaped, steps, 512, 300)
    return lens.sum() / np.count_nonzero(lens)


BY_KEY = {(preset.algorithm, preset.family, preset.text): preset for preset in PRESETS.values()}


@pytest.mark.parametrize(
    ("key", "rows"), published().items(), ids=lambda value: "-".join(value) if type(value) is tuple else ""
)
def test_a_preset_gives_its_published_accept_lengths(key, rows):
    process = BY_KEY[key].process()
    for (steps, topk, nodes), length in rows:
        limit = WORSE.get((key[0], key[2])) or WORSE.get((*key[:2], nodes)) or (TREE_ERROR if topk > 1 else CHAIN_ERROR)
        assert accept_length(process, steps, topk, nodes) == pytest.approx(length, rel=limit), (steps, topk, nodes)


def test_every_preset_was_published():
    assert {preset.name for key, preset in BY_KEY.items() if key not in published()} == OTHER_TEXTS


def test_a_draft_that_is_less_sure_than_it_should_be_spreads_its_tree():
    """SpecBundle, HumanEval: a tree of 8 nodes (top-k 4) accepts 3.13, a chain of 8 nodes 4.91, a chain
    of 4 nodes 3.34."""
    process = PRESETS["eagle3-llama-code"].process()
    chain, tree = accept_length(process, 7, 1, 8), accept_length(process, 7, 4, 8)
    assert tree < accept_length(process, 3, 1, 4) < chain
    sure = GaussianAcceptance(process.conditional, 0, 0.08, 0.43, 8)
    assert accept_length(sure, 7, 4, 8) > 0.95 * chain
    with pytest.raises(ConfigError, match="draft_confidence"):
        GaussianAcceptance((0.5,), draft_confidence=1.0)


def test_the_nearest_preset_is_chosen_and_what_differs_is_said():
    def chosen(*asked):
        choice = choose_preset(*asked)
        return choice.preset.name, choice.differs

    assert chosen("chat", "EAGLE3", "llama") == ("eagle3-llama-chat", ())
    assert chosen("math", "EAGLE3", "qwen3_moe") == ("eagle3-qwen3-math", ())
    assert chosen("math", "EAGLE3", "mistral") == ("eagle3-llama-math", ("family",))
    assert chosen("code", "EAGLE", "qwen3") == ("eagle-llama-code", ("family",))
    assert chosen("chat", "MULTI_LAYER_EAGLE", "llama") == ("multi-layer-eagle-math", ("family", "text"))
    assert chosen("edit", "NGRAM", "qwen2") == ("ngram-edit", ())
    assert chosen("ngram-code", "EAGLE3", "llama") == ("ngram-code", ()), "a preset by its name"
    assert usual_preset("NGRAM", "llama", "ngram-code").preset.name == "ngram-code"
    suffix = usual_preset("SUFFIX", "llama", "ngram-code", "chat")
    assert (suffix.preset.name, suffix.differs) == ("ngram-chat", ("algorithm",))
    with pytest.raises(ConfigError, match="did you mean 'eagle3-llama-chat'"):
        choose_preset("eagle3-lama-chat")
    assert chosen("chat", "MTP", "deepseek_v3") == ("mtp-deepseek3-chat", ())
    assert chosen("code", "MTP", "qwen3_5_moe") == ("mtp-qwen3.5-code", ())
    assert chosen("chat", "MTP", "deepseek_v4") == ("mtp-deepseek3-chat", ("family",)), "another layer than V3's"
    assert chosen("edit", "MTP", "glm4_moe") == ("mtp-glm4-chat", ("text",))


def test_an_acceptance_that_was_not_published_is_between_those_of_such_drafts():
    def names(*asked):
        return {preset.name for preset in presets_like(choose_preset(*asked))}

    assert names("chat", "MTP", "mimo") == {"mtp-deepseek3-chat", "mtp-glm4-chat", "mtp-qwen3.5-chat"}
    assert names("edit", "EAGLE3", "llama") == {name for name in PRESETS if name.startswith("eagle3-")}
    assert names("code", "STANDALONE", "llama") == {name for name in PRESETS if "ngram" not in name}, "one preset alone"
