"""Drafts of one pass and suffix look-ups in the words of the servers, there and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from foredraft.core.adaptive.lengths.interchange import load_round_times
from foredraft.core.errors import ConfigError
from foredraft.planning.servers.export.sglang import arguments as sglang_arguments
from foredraft.planning.servers.export.trtllm import arguments as trtllm_arguments
from foredraft.planning.servers.export.vllm import arguments as vllm_arguments
from foredraft.planning.servers.launch import LaunchCommand
from foredraft.sim.assembly import assemble
from foredraft.sim.scenario_file import load_scenario
from launch_commands import launch_of, problems_of, scenario_of

DFLASH2 = {"architectures": ["DFlash2DraftModel"], "block_size": 8, "dflash_config": {"selector_rank": 256}}
DSPARK = {"architectures": ["Qwen3DSparkModel"], "block_size": 5, "markov_rank": 256}


def vllm(**keys: Any) -> str:
    return f"vllm serve llama-3.1-8b --speculative-config '{json.dumps(keys)}'"


def trtllm(folder: Path, **keys: Any) -> str:
    (folder / "options.yaml").write_text(json.dumps({"speculative_config": keys}))
    return f"trtllm-serve llama-3.1-8b --config {folder / 'options.yaml'}"


def sglang(words: str) -> str:
    return f"sglang serve --model-path llama-3.1-8b {words}"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"method": "dflash", "model": "z-lab/x-DFlash-b16", "num_speculative_tokens": 15}, ("DFLASH", 15)),
        ({"model": "z-lab/x-DFlash-b16", "num_speculative_tokens": 15}, ("DFLASH", 15)),  # by its name
        ({"method": "dflash", "model": "z-lab/x-DFlash2", "num_speculative_tokens": 7}, ("DFLASH2", 7)),
        (
            {"method": "dspark", "model": "deepseek-ai/dspark_qwen3_8b_block7", "num_speculative_tokens": 7},
            ("DSPARK", 7),
        ),
        ({"method": "eagle3", "model": "a/b", "num_speculative_tokens": 4, "parallel_drafting": True}, ("P_EAGLE", 4)),
        ({"method": "peagle", "model": "a/b", "num_speculative_tokens": 4}, ("P_EAGLE", 4)),
        (
            {"method": "draft_model", "model": "llama-3.2-1b", "num_speculative_tokens": 8, "parallel_drafting": True},
            ("PARD", 8),
        ),
        (
            {"method": "draft_model", "model": "llama-3.2-1b", "num_speculative_tokens": 8, "parallel_drafting": False},
            ("STANDALONE", 8),
        ),
        ({"method": "suffix"}, ("SUFFIX", 24)),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 12}, ("SUFFIX", 12)),
    ],
)
def test_vllms_methods(keys: dict[str, Any], expected: tuple[str, int]):
    scenario = scenario_of("vllm", vllm(**keys))
    assert (scenario.speculation.algorithm, scenario.speculation.steps) == expected
    assert scenario.speculation.policy == "fixed"
    assemble(scenario)


def test_what_is_not_simulated_of_a_method_is_named():
    shared = {"method": "dspark", "model": "a/b", "num_speculative_tokens": 7}
    for adapts, policy in ((True, "confidence"), (False, "fixed")):
        asked = launch_of(vllm(**shared, enable_adaptive_verification=adapts))
        assert not asked.not_modelled and asked.settings["speculation"]["policy"] == policy
    suffix = launch_of(vllm(method="suffix", num_speculative_tokens=8, suffix_decoding_min_token_prob=0.2))
    assert list(suffix.not_modelled) == ["--speculative-config suffix_decoding_min_token_prob"]
    looked_up = launch_of(vllm(method="ngram", num_speculative_tokens=3, enable_adaptive_verification=True))
    assert looked_up.settings["speculation"]["policy"] == "fixed"


ROUND_TIMES, TEMPERATURES = (
    "--speculative-dspark-sps-table-path t.json",
    "--speculative-dspark-confidence-sts-path c.json",
)


def ragged(words: str, mode: str = "compact") -> LaunchCommand:
    return launch_of(f"SGLANG_RAGGED_VERIFY_MODE={mode} " + sglang(words), "sglang")


def test_the_files_of_sglangs_adaptive_verification_are_keys_of_the_scenario(tmp_path: Path):
    found = ragged(f"--speculative-algorithm DSPARK {ROUND_TIMES} {TEMPERATURES}")
    files = {"round_times": "t.json", "confidence_temperatures": "c.json"}
    assert found.settings["speculation"] == {"algorithm": "DSPARK", "policy": "confidence", "steps": 7, **files}
    assert not found.not_modelled and not any("WARNING" in note for note in found.assumed)
    table = {"sample_batch_tokens": [1, 8], "sample_steps_per_sec": [90.0, 80.0], "max_batch_tokens": 8}
    script = tmp_path / "serve.sh"
    script.write_text("SGLANG_RAGGED_VERIFY_MODE=compact " + sglang(f"--speculative-algorithm DSPARK {ROUND_TIMES}"))
    (tmp_path / "t.json").write_text(json.dumps(table))
    given = {"--from": launch_of(str(script), "sglang").settings}
    scenario, _ = load_scenario(given=given)
    assert scenario.speculation.round_times == str(tmp_path / "t.json")
    assert assemble(scenario).spec.cost_table == load_round_times(table, 7, "a table")


@pytest.mark.parametrize(
    ("words", "mode", "lacks"),
    [
        ("--speculative-algorithm DSPARK", "compact", "--speculative-dspark-sps-table-path"),
        (f"--speculative-algorithm DSPARK {TEMPERATURES}", "compact", "--speculative-dspark-sps-table-path"),
        (f"--speculative-algorithm DSPARK {ROUND_TIMES}", "static", "SGLANG_RAGGED_VERIFY_MODE=compact"),
        (f"--speculative-algorithm DFLASH {ROUND_TIMES}", "compact", "an algorithm with confidences"),
    ],
)
def test_sglang_verifies_all_drafts_unless_it_has_all_that_it_needs(words, mode, lacks):
    found = ragged(words, mode)
    assert found.settings["speculation"]["policy"] == "fixed"
    (warning,) = [note for note in found.assumed if "WARNING" in note]
    assert f"without {lacks}" in warning and "verifies all drafts" in warning


def test_modes_of_verification_are_named():
    found = ragged(f"--speculative-algorithm DSPARK {ROUND_TIMES}", "cap-accept")
    assert found.settings["speculation"]["policy"] == "fixed"
    assert "all drafts are verified" in found.not_modelled["SGLANG_RAGGED_VERIFY_MODE"]
    with pytest.raises(ConfigError, match="is 'packed'; expected static or cap-accept or compact"):
        ragged("--speculative-algorithm DSPARK", "packed")


def test_the_file_of_a_drafter_says_what_the_command_leaves_out(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DFLASH2))
    launch = launch_of(vllm(method="dflash", model=str(tmp_path), num_speculative_tokens=7))
    assert launch.settings["speculation"]["algorithm"] == "DFLASH2"
    launch = launch_of(sglang(f"--speculative-algorithm DFLASH --speculative-draft-model-path {tmp_path}"), "sglang")
    assert launch.settings["speculation"] == {"algorithm": "DFLASH2", "policy": "fixed", "steps": 7}
    path.write_text(json.dumps(DSPARK))
    launch = launch_of(vllm(method="dspark", model=str(tmp_path)))
    assert launch.settings["speculation"] == {"algorithm": "DSPARK", "policy": "fixed", "steps": 5}
    launch = launch_of(sglang(f"--speculative-algorithm DSPARK --speculative-draft-model-path {tmp_path}"), "sglang")
    assert launch.settings["speculation"] == {"algorithm": "DSPARK", "policy": "fixed", "steps": 5}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--speculative-algorithm DFLASH", ("DFLASH", 15)),  # a block of 16
        ("--speculative-algorithm DFLASH --speculative-num-draft-tokens 8", ("DFLASH", 7)),
        ("--speculative-algorithm DFLASH --speculative-dflash-block-size 8", ("DFLASH", 7)),
        ("--speculative-algorithm DSPARK", ("DSPARK", 7)),
        ("--speculative-algorithm dspark --speculative-dspark-block-size 5", ("DSPARK", 5)),
        ("--speculative-algorithm DSPARK --speculative-num-draft-tokens 6 --speculative-num-steps 1", ("DSPARK", 5)),
    ],
)
def test_sglangs_blocks(words: str, expected: tuple[str, int]):
    scenario = scenario_of("sglang", sglang(f"{words} --speculative-draft-model-path a/b"))
    assert (scenario.speculation.algorithm, scenario.speculation.steps) == expected
    assemble(scenario)


@pytest.mark.parametrize(
    ("keys", "expected", "named"),
    [
        ({"decoding_type": "DFlash", "max_draft_len": 7, "mask_token_id": 5}, ("DFLASH", 7), ()),
        (
            {"decoding_type": "DSpark", "max_draft_len": 5, "enable_confidence_scheduling": True},
            ("DSPARK", 5),
            ("enable_confidence_scheduling",),
        ),
        ({"decoding_type": "PARD", "max_draft_len": 4, "speculative_model": "llama-3.2-1b"}, ("PARD", 4), ()),
        (
            {"decoding_type": "SA", "max_draft_len": 4, "max_matching_ngram_size": -1},
            ("SUFFIX", 4),
            ("max_matching_ngram_size",),
        ),
        ({"decoding_type": "Eagle3", "max_draft_len": 3, "sa_config": {}}, ("EAGLE3", 3), ("sa_config",)),
    ],
)
def test_tensorrt_llms_types(tmp_path: Path, keys: dict[str, Any], expected: tuple[str, int], named: tuple[str, ...]):
    launch = launch_of(trtllm(tmp_path, **keys), "trtllm")
    assert tuple(launch.settings["speculation"][key] for key in ("algorithm", "steps")) == expected
    assert tuple(launch.not_modelled) == tuple(f"speculative_config.{name}" for name in named)


@pytest.mark.parametrize(
    ("server", "command", "message"),
    [
        ("vllm", vllm(method="dflash", model="a/b"), "num_speculative_tokens is None"),
        ("vllm", vllm(method="dspark", model="a/b"), "num_speculative_tokens is None"),
        ("vllm", vllm(method="medusa", model="a/b", num_speculative_tokens=3), "'medusa' is not simulated"),
        ("sglang", "--speculative-algorithm DFLASH --speculative-dflash-block-size 8 --speculative-num-draft-tokens 9", "is 9; expected 8"),
        ("sglang", "--speculative-algorithm DSPARK --speculative-dspark-block-size 8 --speculative-num-draft-tokens 8", "is 8; expected 9"),
        ("sglang", "--speculative-algorithm DFLASH --speculative-num-draft-tokens 1", "is 1; expected an integer from 2 on"),
    ],
)  # fmt: skip
def test_commands_that_their_servers_refuse(server: str, command: str, message: str):
    text = command if server == "vllm" else f"--model-path llama-3.1-8b {command}"
    assert message in problems_of(server, text)


@pytest.mark.parametrize("keys", [
    {"method": "dflash", "model": "z-lab/x-DFlash-b16", "num_speculative_tokens": 15},
    {"method": "dflash", "model": "z-lab/x-DFlash2", "num_speculative_tokens": 7},
    {"method": "dspark", "model": "a/b", "num_speculative_tokens": 7},
    {"method": "eagle3", "parallel_drafting": True, "model": "a/b", "num_speculative_tokens": 4},
    {"method": "draft_model", "parallel_drafting": True, "model": "llama-3.2-1b", "num_speculative_tokens": 8},
    {"method": "suffix", "num_speculative_tokens": 8},
])  # fmt: skip
def test_vllms_configuration_is_written_as_it_was_read(keys: dict[str, Any]):
    words = vllm_arguments(assemble(scenario_of("vllm", vllm(**keys)))).words
    assert json.loads(words[words.index("--speculative-config") + 1]) == keys


@pytest.mark.parametrize(("algorithm", "nodes"), [("DFLASH", 16), ("DSPARK", 8)])
def test_sglang_gets_what_a_block_verifies_and_no_steps(algorithm: str, nodes: int):
    given = f"--speculative-algorithm {algorithm} --speculative-draft-model-path a/b"
    words = sglang_arguments(assemble(scenario_of("sglang", sglang(given)))).words
    start = words.index("--speculative-algorithm")
    assert words[start:] == [*given.split(), "--speculative-num-draft-tokens", str(nodes)]


def test_tensorrt_llm_gets_its_types(tmp_path: Path):
    keys = {"decoding_type": "PARD", "speculative_model": "llama-3.2-1b", "max_draft_len": 4}
    made = trtllm_arguments(assemble(scenario_of("trtllm", trtllm(tmp_path, **keys))))
    assert "decoding_type: PARD" in made.files["trtllm.yaml"] and "max_draft_len: 4" in made.files["trtllm.yaml"]
