"""Pages of metrics as workloads. The pages have the form of those of vLLM 0.19 and SGLang 0.5."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from foredraft.cli.app import app
from foredraft.core.errors import ConfigError
from foredraft.sim.load import make_workload
from foredraft.sim.scenario_file import load_scenario, scenario_with
from foredraft.sim.workload.prometheus import LengthHistogram, is_page, read_workload
from typer.testing import CliRunner

VLLM = ("vllm:request_prompt_tokens", "vllm:request_generation_tokens")
SGLANG = ("sglang:prompt_tokens_histogram", "sglang:generation_tokens_histogram")
BOUNDS = (1, 10, 100, 1000, 10_000)


def histogram(name: str, lengths: list[int], labels: str = 'engine="0",', time: str = "") -> list[str]:
    """The lines of a histogram of these lengths."""
    lines = [f"# HELP {name} Number of tokens.", f"# TYPE {name} histogram"]
    model = f'{labels}model_name="meta-llama/Llama-3.1-8B-Instruct"'
    for bound in (*map(float, BOUNDS), float("inf")):
        le = "+Inf" if bound == float("inf") else bound
        count = float(sum(length <= bound for length in lengths))
        lines.append(f'{name}_bucket{{{labels}le="{le}",model_name="meta-llama/Llama-3.1-8B-Instruct"}} {count}{time}')
    lines += [
        f"{name}_count{{{model}}} {float(len(lengths))}{time}",
        f"{name}_sum{{{model}}} {float(sum(lengths))}{time}",
    ]
    return [*lines, f"{name}_created{{{model}}} 1.764e+09{time}"]


def page(path: Path, prompts: list[int], outputs: list[int], names: tuple[str, str] = VLLM, **more: str) -> str:
    lines = ["# TYPE process_start_time_seconds gauge", "process_start_time_seconds 1.764e+09"]
    lines += [*histogram(names[0], prompts, **more), *histogram(names[1], outputs, **more)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


PROMPTS, OUTPUTS = [5, 50, 60, 700, 20_000], [1, 20, 30, 40, 300]


@pytest.mark.parametrize("names", [VLLM, SGLANG])
def test_samples_whose_colon_was_escaped_are_the_same(tmp_path, names):
    """So vLLM answers a Prometheus 2.x, whose OpenMetrics has no escaping; TYPE lines keep the colon."""
    plain = page(tmp_path / "plain.prom", PROMPTS, OUTPUTS, names)
    lines = (tmp_path / "plain.prom").read_text(encoding="utf-8").splitlines()
    escaped = [line if line.startswith("#") else line.replace(":", "_", 1) for line in lines]
    assert any(line.startswith(names[0].replace(":", "_")) for line in escaped)
    for number, text in enumerate((escaped, [line for line in escaped if not line.startswith("#")][1:])):
        (tmp_path / f"{number}.prom").write_text("\n".join(text) + "\n", encoding="utf-8")
        assert is_page(str(tmp_path / f"{number}.prom"))
        assert read_workload(str(tmp_path / f"{number}.prom"), None, 10.0) == read_workload(plain, None, 10.0)


@pytest.mark.parametrize("names", [VLLM, SGLANG])
def test_lengths_keep_their_means_and_classes(tmp_path, names):
    found = read_workload(page(tmp_path / "m.prom", PROMPTS, OUTPUTS, names), None, 10.0)
    assert (found.server, found.requests, found.rate) == (names[0].partition(":")[0], 5, 0.5)
    for one, lengths in ((found.prompt, PROMPTS), (found.output, OUTPUTS)):
        assert one.mean == np.mean(lengths)
        table = one.table()
        assert np.average(table["values"], weights=table["weights"]) == pytest.approx(np.mean(lengths), rel=0.02)
        classes = [sum(length <= bound for length in lengths) for bound in BOUNDS]
        assert np.cumsum(table["weights"])[-1] == 5 and set(np.cumsum(table["weights"])) >= {*classes} - {0}
        assert sorted(table["values"]) == table["values"]
    assert (found.prompt.percentile(0.5), found.prompt.percentile(0.99)) == (100, None)
    workload = found.table()
    assert workload["rate"] == 0.5
    assert scenario_with({"workload": workload}, {}).workload.prompt.kind == "empirical"


def test_the_workload_of_a_time_is_the_difference_of_two_pages(tmp_path):
    early = page(tmp_path / "a.prom", [5, 5], [1, 2], time=" 1764000000000")
    late = page(tmp_path / "b.prom", [5, 5, *PROMPTS], [1, 2, *OUTPUTS], time=" 1764000004000")
    found = read_workload(late, early, None)
    assert found.prompt == read_workload(page(tmp_path / "c.prom", PROMPTS, OUTPUTS), None, None).prompt
    assert (found.requests, found.seconds, found.rate) == (5, 4.0, 1.25)
    assert read_workload(late, early, 2.0).rate == 2.5
    untimed = [page(tmp_path / f"{name}.prom", [9] * count, [9] * count) for name, count in (("d", 1), ("e", 3))]
    assert read_workload(untimed[1], untimed[0], None).rate is None
    assert "rate" not in read_workload(untimed[1], untimed[0], None).table()


def test_engines_are_added(tmp_path):
    for name, labels in (("a", 'engine="0",'), ("b", 'engine="1",')):
        page(tmp_path / name, PROMPTS, OUTPUTS, labels=labels)
    both = tmp_path / "both"
    both.write_text((tmp_path / "a").read_text() + (tmp_path / "b").read_text())
    found = read_workload(str(both), None, None)
    assert found.requests == 10 and found.output.mean == np.mean(OUTPUTS)


def test_a_class_may_hold_more_tokens_than_its_bounds_allow():
    """A sum that a server counted otherwise gives values at the bounds, and no error."""
    table = LengthHistogram((10.0, 100.0), (1.0, 1.0, 0.0), 5_000.0).table()
    assert table["values"] == [10, 100]
    assert LengthHistogram((10.0, 100.0), (0.0, 0.0, 2.0), 5_000.0).table()["values"] == [2500]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "vllm:num_requests_running 3\n", "has no histograms of lengths: expected vllm:request_prompt_tokens_bucket"),
        (lambda text: text.replace('le="+Inf"', 'le="20000.0"'), 'expected classes up to le="+Inf"'),
        (lambda text: text.replace('le="10.0"', 'le="ten"'), 'le="ten": expected a number of tokens'),
        (lambda text: text.replace('le="10.0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 1', 'le="10.0"} 9'),
            "counts fall with le"),
        (lambda text: "".join(line for line in text.splitlines(True) if "_sum" not in line), "_sum: is missing or 0"),
        (lambda text: text.replace("} 5.0", "} NaN", 1), "is 'NaN': expected a finite number"),
        (lambda text: text + 'vllm:request_prompt_tokens_sum{model_name="other"} 1.0\n', "histograms of several models"),
        (lambda text: text + "vllm:request_prompt_tokens_sum{\n", "expected name{labels} value (a truncated line?)"),
        (lambda text: text.replace("} 1.0", "} 0.0").replace("} 3.0", "} 0.0").replace("} 4.0", "} 0.0").replace("} 5.0", "} 0.0"),
            "counts no request"),
    ],
)  # fmt: skip
def test_a_page_that_tells_nothing_is_one_message(tmp_path, change, message):
    path = tmp_path / "m.prom"
    page(path, PROMPTS, OUTPUTS)
    path.write_text(change(path.read_text()))
    with pytest.raises(ConfigError) as caught:
        read_workload(str(path), None, None)
    assert message in str(caught.value) and str(caught.value).startswith(str(path))


def test_pages_that_do_not_follow_each_other_are_refused(tmp_path):
    early, late = (page(tmp_path / f"{count}.prom", [5] * count, [5] * count) for count in (2, 3))
    with pytest.raises(ConfigError, match=r"counts fewer prompts than .*: the server was started again"):
        read_workload(early, late, None)
    with pytest.raises(ConfigError, match="has other histograms than"):
        read_workload(page(tmp_path / "s.prom", [5], [5], SGLANG), early, None)
    times = [page(tmp_path / f"t{i}.prom", [5] * 2, [5] * 2, time=f" {2 - i}000") for i in (0, 1)]
    with pytest.raises(ConfigError, match="its samples are 1 s older than those of"):
        read_workload(times[1], times[0], None)


def test_a_page_of_metrics_becomes_a_workload_that_runs(tmp_path):
    def command(*words: object) -> str:
        done = CliRunner().invoke(app, list(map(str, words)))
        return f"{done.output}{done.exception or ''}"

    early = page(tmp_path / "a.prom", [5, 5], [1, 2])
    late = page(tmp_path / "b.prom", [5, 5, 50, 60, 70, 80], [1, 2, 3, 4, 5, 6])
    asked = ("trace", late, "--since", early, "--seconds", 8, "--out", tmp_path / "w.toml")
    out = command(*asked)
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 80
    assert "4 requests more than a.prom, 0.5 per second" in out and "nothing about prefix reuse" in " ".join(
        out.split()
    )
    assert tomllib.loads((tmp_path / "w.toml").read_text())["workload"]["rate"] == 0.5
    document = json.loads(command("trace", late, "--since", early, "--seconds", 8, "--json"))
    assert (
        document["trace_format"] == "prometheus" and document["inferred"] == [] and document["rows_without_work"] == 0
    )
    resolved, _ = load_scenario(tmp_path / "w.toml", ["workload.num_requests=20"])
    assert len(list(make_workload(resolved, 131_072))) == 20
    assert "does not tell how long they took" in " ".join(command("trace", late).split())
    assert "--check: has no effect: a page of metrics has no single requests" in command("trace", late, "--check")
    trace = tmp_path / "t.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.0,10,5\n")
    assert "--since: has no effect: only pages of metrics" in command("trace", trace, "--since", early)
