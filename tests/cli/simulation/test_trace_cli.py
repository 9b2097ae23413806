"""`foredraft trace`: what it prints and writes of each format, what it says that a trace does not tell, and
what it refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """One workload of 300 requests in every format."""
    folder = tmp_path_factory.mktemp("traces")
    rng = np.random.default_rng(3)
    times = np.sort(rng.uniform(0, 100, 300)).round(3)
    rows = list(zip(times, rng.integers(100, 3000, 300).tolist(), rng.integers(5, 90, 300).tolist(), strict=True))
    azure = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    azure += [f"2024-05-10 00:{int(t) // 60:02}:{t % 60:06.3f},{i},{o}" for t, i, o in rows]
    burst = ["Timestamp,Session ID,Model,Request tokens,Response tokens,Total tokens,Log Type"]
    burst += [f"{t},s{n % 40},m,{i},{o},{i + o},Conversation log" for n, (t, i, o) in enumerate(rows)]
    mooncake = []
    for n, (t, i, o) in enumerate(rows):
        ids = [n % 5, *range(1000 * n + 10, 1000 * n + 9 - (-i // 512))]
        mooncake.append(
            json.dumps({"timestamp": round(t * 1000), "input_length": i, "output_length": o, "hash_ids": ids})
        )
    for name, lines in (("azure.csv", azure), ("burst.csv", burst), ("mooncake.jsonl", mooncake)):
        (folder / name).write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize(
    ("name", "says", "says_not"),
    [
        ("azure.csv", ["(azure): 300 requests over 1:40 minutes, ", "no block hashes"], ["infinite"]),
        ("burst.csv", ["(burstgpt)", "40 sessions", "no block hashes"], ["belong to one conversation"]),
        ("mooncake.jsonl", ["(mooncake)", "infinite", "20,000", "hit rates count prompts alone"], ["no block hashes"]),
    ],
)
def test_every_format_is_described(command, traces, name, says, says_not):
    asked = ("trace", traces / name, "--cache-tokens", "20000")
    code, out, errors = command(*asked)
    assert (code, errors) == (0, "") and max(map(len, out.splitlines())) <= 80
    told = " ".join(out.split())
    assert all(words in told for words in says) and not any(words in told for words in says_not)
    written = json.loads(command(*asked, "--json").out)
    assert written["description"]["num_requests"] == 300
    assert written["description"]["prompt"]["percentiles"]["50"] == pytest.approx(1500, abs=300)
    assert (written["description"]["reuse"] is None) == (name != "mooncake.jsonl")


def test_columns_say_what_names_do_not(command, refused, tmp_path):
    path = tmp_path / "day.csv"
    path.write_text("when,asked,made\n0,300,4\n2,200,3\n")
    columns = "arrival=when,prompt=asked,output=made"
    assert "reads 'when' as arrival" in command("trace", path, "--columns", columns).out
    run = command("simulate", "--trace", path, "--columns", columns, "--json")
    assert json.loads(run.out)["summary"]["completed"] == 2
    assert "it lacks arrival, prompt, output" in refused("trace", path)
    assert "it lacks output" in refused("trace", path, "--columns", "arrival=when,prompt=asked")


def test_the_synthetic_workload_is_a_scenario_that_runs(command, traces, tmp_path):
    workload = tmp_path / "workload.toml"
    short = ("--set", "workload.num_requests=80", "--quiet")
    code, out, errors = command("trace", traces / "mooncake.jsonl", *short, "--out", workload, "--check")
    assert (code, errors) == (0, "") and max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 80
    assert "hit rate, infinite cache" in out and "TTFT, p99 ms" in out and "Kolmogorov-Smirnov" in out
    code, out, _ = command("simulate", workload, "--quiet", "--set", "workload.num_requests=20")
    assert code == 0 and "20" in out


def test_the_kv_slots_of_a_scenario_are_a_cache(command, traces):
    out = command(
        "trace", traces / "mooncake.jsonl", "--set", "hardware.replicas=2", "--set", "engine.kv_slots=30000"
    ).out
    assert "KV slots of the scenario" in out and "60,000" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.csv"], "nowhere.csv: cannot be read"),
        (["azure.csv", "--cache-tokens", "0"], "--cache-tokens: 0 is no integer from 1 on"),
        (["azure.csv", "--set", "workload.start_s=5000.0"], "the workload has no requests"),
        (["azure.csv", "--set", "hardware.gpu=H10"], "did you mean 'H100'"),
    ],
)
def test_bad_input_is_one_message(refused, traces, monkeypatch, arguments, message):
    monkeypatch.chdir(traces)
    assert message in refused("trace", *arguments)
