"""What is dropped on a page: recognised, read, or refused with one message."""

from __future__ import annotations

from pathlib import Path

import pytest
from foredraft.core.errors import ForedraftError
from foredraft.ui.dropped import place_of, read_dropped

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2024-05-10 00:00:{second:02}.000000,{100 + second},20\n" for second in range(30)
)
GIVEN = {"hardware.gpu": "H200", "workload.rate": 4.0, "speculation.steps": 3}


def read(text: str, tmp_path: Path, name: str = "pasted text"):
    return read_dropped(name, text, GIVEN, str(tmp_path))


def test_a_scenario_replaces_all_keys(tmp_path: Path):
    found = read('[hardware]\ngpu = "L40S"\n[workload.prompt]\nmean = 100\n', tmp_path)
    assert found["kind"] == "scenario" and found["given"] == {"hardware.gpu": "L40S", "workload.prompt.mean": 100}


def test_a_launch_command_keeps_gpu_and_load(tmp_path: Path):
    found = read("docker run vllm/vllm-openai:v0.18.0 --model meta-llama/Llama-3.1-8B-Instruct -tp 2", tmp_path)
    given = found["given"]
    assert found["kind"] == "launch" and given["hardware.tensor_parallel"] == 2
    assert given["hardware.gpu"] == "H200" and given["workload.rate"] == 4.0 and "speculation.steps" not in given
    assert any("release 0.18.0" in note for note in found["notes"])


def test_a_trace_is_kept_once(tmp_path: Path):
    found = read(TRACE, tmp_path, "my requests.csv")
    path = found["given"]["workload.trace"]
    assert found["kind"] == "trace" and "30 requests" in found["notes"][0] and "workload.rate" not in found["given"]
    assert Path(place_of(path, str(tmp_path))).read_text() == TRACE
    assert read(TRACE, tmp_path, "my requests.csv")["given"] == found["given"]
    assert (
        read('{"timestamp": 0, "input_length": 9, "output_length": 3, "hash_ids": [1]}\n', tmp_path)["kind"] == "trace"
    )


def test_a_log_is_a_trace_by_its_lines(tmp_path: Path):
    line = "INFO 11-27 00:00:0{0} [logger.py:40] {1}"
    asked = "Request r-{0} details: prompt: None, prompt_token_ids: [1, 2, 3], prompt_embeds shape: None."
    told = "Generated response r-{0}: output: 'x', output_token_ids: [4, 5], finish_reason: stop"
    lines = [line.format(i, text.format(i)) for i in range(3) for text in (asked, told)]
    found = read("\n".join(lines), tmp_path)
    assert found["kind"] == "trace" and "3 requests (vllm-log)" in found["notes"][0]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("notes.txt", "Dear diary", "notes.txt: is none of a scenario"),
        ("a.toml", "", "is empty"),
        ("a.toml", "[hardware]\ngpus = 3\n", "did you mean"),
        ("a.toml", "x = " + "[" * 200 + "]" * 200, "nested"),
        ("a.csv", "a,b\n1,2\n", "a.csv, line 1"),
        ("a.csv", TRACE.replace(",20\n", ",many\n", 1), "a.csv, line 2"),
        ("pasted text", "vllm serve x --no-such-flag", "--no-such-flag"),
        ("pasted text", "sglang serve --model-path $MODEL", "variable"),
        ("deploy.yaml", "a: &a [*a, *a]\n", "none of a scenario"),
    ],
)
def test_what_is_none_is_one_message(tmp_path: Path, name: str, text: str, words: str):
    with pytest.raises(ForedraftError) as caught:
        read(text, tmp_path, name)
    assert words in str(caught.value)
    assert str(tmp_path) not in str(caught.value), "the folder is no concern of the user"


@pytest.mark.parametrize("path", ["dropped:0/x.csv", "dropped:../../x.csv", "dropped:/etc/passwd", "dropped:"])
def test_a_trace_that_is_not_there_is_refused(tmp_path: Path, path: str):
    (tmp_path / "x.csv").touch()
    with pytest.raises(ForedraftError, match=r"drop the file on the page again"):
        place_of(path, str(tmp_path / "traces" / "below"))
