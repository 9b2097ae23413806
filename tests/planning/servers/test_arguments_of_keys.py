"""Every key of a scenario declares the arguments of servers that it is read from and written to, and nothing else
does."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import tempfile
from pathlib import Path

import pytest
import yaml
from foredraft.planning.servers import command
from foredraft.planning.servers.declared import FORMS, flags_of, other_names, usages_of, values_to_write, words_of
from foredraft.planning.servers.launch import READERS, read_launch
from foredraft.sim.scenario.flags import WORD
from foredraft.sim.scenario_file import scenario_with
from hypothesis import given
from hypothesis import strategies as st

SERVERS = ["sglang", "vllm", "trtllm"]
TABLES = ("model", "hardware", "engine", "front_end")
NUMBERS = {
    "integer": st.integers(1, 4096),
    "bytes": st.integers(1, 10**12),
    "integers": st.lists(st.integers(1, 512), min_size=1),
    **dict.fromkeys(("number", "share"), st.sampled_from([0.125, 0.5, 0.75])),
    "fraction": st.sampled_from([0.0, 0.25]),
}


@pytest.mark.parametrize("server", SERVERS)
def test_every_key_names_arguments_that_its_server_reads(server):
    module = importlib.import_module(f"foredraft.planning.servers.{server}")
    source = inspect.getsource(module) + inspect.getsource(command)
    for key, flags in flags_of(server):
        assert flags.form == WORD or flags.form in FORMS, key
        assert flags.form != WORD or flags.words, key
        if flags.by:
            assert re.search(rf"\b_{flags.by}[,()]", source[source.index("def read(") :]), (key, flags.by)
            names = [usage.path or usage.name.removeprefix("speculative-") for usage in flags.usages]
            unread = [name for name in names if not re.search(rf'"(speculative-)?{name}"', source)]
            assert not [name for name in unread if not _is_constant_of(module, name)], key
    assert {name for name, known in module.SERVER.known.items() if known.reason == ""} == {
        usage.name for usage in usages_of(server)
    }


def _is_constant_of(module, name: str) -> bool:
    return any(isinstance(value, str) and value == name for value in vars(module).values())


@pytest.mark.parametrize("server", SERVERS)
def test_another_spelling_means_one_argument(server):
    known = READERS[server][0]
    pairs = {(other, usage.name) for usage in usages_of(server) for other in usage.other_names}
    assert len({other for other, _ in pairs}) == len(pairs)
    assert all(known.find(other) == name and other not in known.known for other, name in other_names(server).items())
    assert pairs <= set(other_names(server).items())


@pytest.mark.parametrize(
    ("server", "text", "named"),
    [
        ("vllm", {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 4, "odd": 1}, "look-ups rule"),
        ("trtllm", {"decoding_type": "NGram", "max_draft_len": 2, "eagle3_one_model": True, "odd": 1}, "rules"),
    ],
)
def test_keys_of_objects_are_named_with_their_reason(server, text, named, tmp_path):
    if server == "vllm":
        launch = read_launch(server, f"vllm serve m --speculative-config '{json.dumps(text)}'", "--from", "H100")
    else:
        launch = read_launch(server, command_of(server, {"speculative-config": text}, str(tmp_path)), "--from", "H100")
    reasons = [reason for place, reason in launch.not_modelled.items() if "speculative" in place]
    assert len(reasons) == len(named.split())
    assert all(word in reason for word, reason in zip(named.split(), reversed(reasons), strict=True))


def command_of(server: str, values: dict, folder: str) -> str:
    """Return a command with these arguments; those of TensorRT-LLM stand in a file."""
    if server != "trtllm":
        start = {"vllm": "vllm serve llama-3.1-8b", "sglang": "sglang serve --model-path llama-3.1-8b"}[server]
        return " ".join([start, *words_of(values)])
    options: dict = {}
    for argument, value in values.items():
        name, _, path = argument.replace("-", "_").partition(".")
        options.update({name: options.get(name, {}) | {path: value}} if path else {name: value})
    place = Path(folder) / "options.yaml"
    place.write_text(yaml.safe_dump(options))
    return f"trtllm-serve llama-3.1-8b --config {place}"


@pytest.mark.parametrize("server", SERVERS)
@given(data=st.data())
def test_what_a_command_says_is_written_again(server, data):
    both = [(key, flags) for key, flags in flags_of(server) if not flags.by and flags.writes]
    assert len(both) >= 8
    chosen = data.draw(st.lists(st.sampled_from(both), unique_by=lambda one: one[0], min_size=1))
    values = {}
    for _, flags in chosen:
        words = [word for word, value in flags.words.items() if value is not None]
        value = st.sampled_from(words) if flags.form == WORD else NUMBERS[flags.form]
        values[str(flags.usages[0])] = data.draw(value)
    with tempfile.TemporaryDirectory() as folder:
        first = read_launch(server, command_of(server, values, folder), "--from", "H100").settings
        scenario = scenario_with({}, {key: value for key, value in first.items() if key != "speculation"})
        written, notes = values_to_write(scenario, server, *TABLES)
        again = read_launch(server, command_of(server, written, folder), "--from", "H100").settings
    assert not notes and values.items() <= written.items() | _synonyms(chosen, values, written)
    assert {key: again[key] for key, _ in chosen} == {key: first[key] for key, _ in chosen}


def _synonyms(chosen, values: dict, written: dict) -> set:
    """Return the values of a command for which the server has another word of the same meaning, which is written."""
    words = {str(flags.usages[0]): flags.words for _, flags in chosen}
    return {
        (name, value)
        for name, value in values.items()
        if words[name] and words[name].get(value) == words[name].get(written.get(name), written)
    }


@pytest.mark.parametrize(
    ("server", "key", "value"), [("trtllm", "model.kv_dtype", "int8"), ("sglang", "engine.eviction_policy", "fifo")]
)
def test_a_value_that_a_server_has_no_word_for_is_noted(server, key, value):
    written, notes = values_to_write(scenario_with({}, {key: value}), server, key)
    assert not written and notes == [f"{key} is {value}, for which the server has no argument"]


def test_a_command_on_one_line_may_be_longer_than_a_path():
    text = f"vllm serve llama-3.1-8b --max-model-len 4096 --served-model-name {'x' * 300}"
    assert read_launch("vllm", text, "--from", "H100").settings["model.context_len"] == 4096
