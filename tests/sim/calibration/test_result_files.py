"""Result files: every tool's numbers come through, and what cannot be used is refused with its file and key."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from benchmark_files import COUNT, aiperf, guidellm, sglang, table, vllm
from foredraft.core.errors import ConfigError
from foredraft.sim.calibration.points import BenchmarkPoint
from foredraft.sim.calibration.result_files import read_points

PLAIN = {
    "concurrency": 8, "input_tokens": 512.0, "output_tokens": 128.0, "output_tokens_per_s": 1400.0, "mean_tpot_ms": 5.5,
    "mean_ttft_ms": 30.0,
}  # fmt: skip
SPEC = PLAIN | {
    "algorithm": "EAGLE3",
    "steps": 3,
    "accept_length": 2.5,
    "output_tokens_per_s": 2400.0,
    "mean_tpot_ms": 3.2,
}


@pytest.fixture
def read(tmp_path):
    def write_and_read(text, name="run.json", settings=""):
        (tmp_path / name).write_text(text)
        return read_points([f"{tmp_path / name}{settings}"])

    return write_and_read


def numbers(point: BenchmarkPoint):
    return {name: getattr(point, name) for name in SPEC if name not in ("algorithm", "steps", "accept_length")}


@pytest.mark.parametrize("write", [vllm, sglang, aiperf, lambda run: guidellm([run]), lambda run: table([run])])
def test_every_format_gives_the_same_point(read, write):
    (point,) = read(write(PLAIN))
    assert numbers(point) == pytest.approx(PLAIN)
    assert not point.is_speculative and point.algorithm == "NONE"
    assert point.num_requests in (COUNT, None)


def test_a_key_that_is_not_read_may_have_an_integer_of_any_length(read):
    (point,) = read(vllm(PLAIN, run_id=2**127))
    assert numbers(point) == pytest.approx(PLAIN)


@pytest.mark.parametrize("write", [vllm, sglang, lambda run: table([run])])
def test_speculation_is_read(read, write):
    (point,) = read(write(SPEC))
    assert (point.algorithm, point.steps, point.topk, point.num_draft_tokens) == ("EAGLE3", 3, 1, 4)
    assert point.accept_length == 2.5
    assert "EAGLE3 3 steps, 8 clients, 512 → 128 tokens" in point.title


def test_several_runs_of_a_file_and_several_files(read, tmp_path):
    slower = PLAIN | {"concurrency": 16, "mean_tpot_ms": 7.0, "output_tokens_per_s": 2000.0}
    assert [p.concurrency for p in read(f"{vllm(PLAIN)}\n{vllm(slower)}")] == [8, 16]
    assert [p.concurrency for p in read(f"{sglang(PLAIN)}\n{sglang(slower)}\n", "lines.jsonl")] == [8, 16]
    assert [p.source.rpartition(" ")[2] for p in read(guidellm([PLAIN, slower]), "g.json")] == [
        "benchmarks[0]",
        "benchmarks[1]",
    ]
    (tmp_path / "t.csv").write_text(table([SPEC]))
    assert len(read_points([str(tmp_path / "run.json"), str(tmp_path / "t.csv")])) == 3


def test_what_a_file_does_not_say_stands_behind_its_name(read):
    unnamed = {key: value for key, value in json.loads(vllm(SPEC)).items() if key != "algorithm"}
    (point,) = read(json.dumps(unnamed), settings=":algorithm=EAGLE")
    assert (point.algorithm, point.steps) == ("EAGLE", 3)
    (point,) = read(guidellm([SPEC]), settings=":algorithm=EAGLE3,steps=5,topk=4,num_draft_tokens=16,accept_length=3.1")
    assert (point.steps, point.topk, point.num_draft_tokens, point.accept_length) == (5, 4, 16, 3.1)
    with pytest.raises(ConfigError, match=r"per_position|steps.*is 3, but the command line says '5'"):
        read(vllm(SPEC), settings=":steps=5")
    with pytest.raises(ConfigError, match=r"stepz: unknown column \(did you mean 'steps'"):
        read(vllm(SPEC), settings=":stepz=5")


def test_lengths_of_single_requests_are_taken(read):
    lens = {"input_lens": [500, 524] * (COUNT // 2), "output_lens": [64, 192] * (COUNT // 2)}
    (point,) = read(vllm(PLAIN, **lens))
    assert set(point.output_lens) == {64, 192}
    (point,) = read(aiperf(PLAIN, output_sequence_length={"unit": "tokens", "avg": 128.0, "std": 40.0}))
    assert point.output_std == 40.0


def test_a_load_without_limit_is_all_requests_at_once(read):
    (point,) = read(sglang(PLAIN | {"concurrency": 40}, max_concurrency=None))
    assert point.concurrency == COUNT
    (point,) = read(vllm(PLAIN, max_concurrency=None, request_rate=3.5))
    assert (point.concurrency, point.rate_per_s) == (None, 3.5)
    strategy = {"type_": "poisson", "rate": 2.5}
    report = json.loads(guidellm([PLAIN]))
    report["benchmarks"][0]["config"]["strategy"] = strategy
    assert read(json.dumps(report))[0].rate_per_s == 2.5
    phases = {"phases": [{"name": "warmup", "concurrency": 1}, {"name": "profiling", "concurrency": 8}]}
    assert read(aiperf(PLAIN, input_config=phases))[0].concurrency == 8


def test_a_sweep_of_guidellm_has_runs_with_a_load_and_one_without(tmp_path):
    """Its own order: synchronous, throughput, then constant rates. The run without clients and rate is named."""
    report = json.loads(guidellm([PLAIN] * 4))
    strategies = [
        {"type_": "synchronous"},
        {"type_": "throughput", "max_concurrency": None},
        {"type_": "constant", "rate": 10.0},
        {"type_": "constant", "rate": 30.0},
    ]
    for benchmark, strategy in zip(report["benchmarks"], strategies, strict=True):
        benchmark["config"]["strategy"] = strategy
        benchmark["metrics"]["output_tokens_per_second"]["successful"]["mean"] = 150.0  # as one client gets
    (tmp_path / "sweep.json").write_text(json.dumps(report))
    left_out: list[str] = []
    points = read_points([str(tmp_path / "sweep.json")], left_out.append)
    assert [(point.concurrency, point.rate_per_s) for point in points] == [(1, None), (None, 10.0), (None, 30.0)]
    assert [what.partition("json ")[2] for what in left_out] == [
        "benchmarks[1]: throughput, which has neither clients nor a rate"
    ]


@pytest.mark.parametrize(
    "totals", [("scheduler_metrics", "requests_made"), ("run_stats", "requests_made"), ("request_totals",)]
)
def test_earlier_reports_of_guidellm_have_their_totals_elsewhere(read, totals):
    report = json.loads(guidellm([PLAIN]))
    (benchmark,) = report["benchmarks"]
    benchmark["args"] = {"strategy": benchmark.pop("config")["strategy"]}
    counted = benchmark["metrics"].pop("request_totals")
    for name in reversed(totals):
        counted = {name: counted}
    assert read(json.dumps(report | {"benchmarks": [benchmark | counted]}))[0].num_requests == COUNT
    ours = {"successful": 10, "errored": 9}
    for name in reversed(totals):
        ours = {name: ours}
    with pytest.raises(ConfigError, match="9 of 19 requests failed"):
        read(json.dumps(report | {"benchmarks": [benchmark | ours]}))


def broken_guidellm(**changes):
    report = json.loads(guidellm([PLAIN]))
    for path, value in changes.items():
        place = report["benchmarks"][0]
        *tables, last = path.split("__")
        for table_name in tables:
            place = place[table_name]
        place[last] = value
    return json.dumps(report)


BAD = {
    "empty": ("  \n", "is empty"),
    "other text": ("hello\nworld\n", "unknown format"),
    "a list": ("[1, 2]", "is list"),
    "other JSON": ('{"a": 1}', "unknown format"),
    "truncated": (vllm(PLAIN)[:200], "is not JSON"),
    "truncated line": (f"{sglang(PLAIN)}\n{sglang(PLAIN)[:100]}", r"line 2: is not JSON.*truncated"),
    "vllm without requests": (vllm(PLAIN, completed=0), "completed: no request was completed"),
    "vllm failed": (vllm(PLAIN, completed=30), "completed: 30 of 40 requests"),
    "vllm missing": (vllm(PLAIN).replace('"total_input_tokens"', '"tokens"'), "total_input_tokens: is missing"),
    "vllm NaN": (vllm(PLAIN, mean_tpot_ms=math.nan), "mean_tpot_ms: is NaN"),
    "vllm negative": (vllm(PLAIN, mean_tpot_ms=-2.0), "mean_tpot_ms: expected 0.001 … 60,000 milliseconds"),
    "vllm text": (vllm(PLAIN, mean_tpot_ms="fast"), "mean_tpot_ms: expected a finite number"),
    "vllm sum": (vllm(PLAIN, output_throughput=2800.0), "output_throughput: 2800 contradicts"),
    "vllm impossible": (vllm(PLAIN, mean_tpot_ms=9.0), "output_throughput: 1,400 tokens/s contradict a mean TPOT of 9 ms"),
    "vllm ramp": (vllm(PLAIN, ramp_up_strategy="linear"), "ramp_up_strategy"),
    "vllm bursty": (vllm(PLAIN, request_rate=2.0, max_concurrency=None, burstiness=0.5), "burstiness: 0.5"),
    "vllm both limits": (vllm(PLAIN, request_rate=2.0), "request_rate: is given beside a concurrency"),
    "vllm unnamed draft": (vllm(SPEC).replace('"algorithm"', '"x"'), "algorithm: is missing, but the run speculates"),
    "vllm throughput": ('{"elapsed_time": 3, "num_requests": 4, "tokens_per_second": 1}', "vllm bench throughput"),
    "vllm latency": ('{"avg_latency": 3, "latencies": [], "percentiles": {}}', "vllm bench latency"),
    "sglang infinity": (sglang(PLAIN, mean_tpot_ms=math.inf), "mean_tpot_ms: is Infinity"),
    "sglang accept": (sglang(SPEC, accept_length=5.5), "accept_length: 5.5 with 3 steps"),
    "sglang tree": (sglang(SPEC | {"topk": 1, "num_draft_tokens": 9}), "num_draft_tokens: 9 with 3 steps and topk 1"),
    "guidellm without benchmarks": ('{"benchmarks": []}', "benchmarks: expected a list"),
    "guidellm of another version": ('{"metadata": {"version": 9}, "benchmarks": [{"a": 1}]}', r"config.strategy: is missing.*this file: 9"),
    "guidellm throughput alone": (broken_guidellm(config__strategy={"type_": "throughput"}), r"type_: 'throughput': has neither"),
    "guidellm unknown": (broken_guidellm(config__strategy={"type_": "waves"}), r"type_: 'waves': expected synchronous"),
    "guidellm failed": (broken_guidellm(metrics__request_totals={"successful": 10, "errored": 9}), "errored: 9 of 19 requests failed"),
    "guidellm nothing": (broken_guidellm(metrics__request_totals={"successful": 0}), "no request was completed"),
    "guidellm missing": (broken_guidellm(metrics__inter_token_latency_ms={}), "inter_token_latency_ms.successful.mean: is missing"),
    "aiperf schema": (aiperf(PLAIN, schema_version="2.0"), "schema_version: '2.0'"),
    "aiperf cancelled": (aiperf(PLAIN, was_cancelled=True), "was_cancelled"),
    "aiperf unit": (aiperf(PLAIN, inter_token_latency={"unit": "s", "avg": 0.005}), "inter_token_latency.unit: 's'"),
    "aiperf spread": (
        aiperf(PLAIN, output_sequence_length={"unit": "tokens", "avg": 128.0, "std": 1e300}),
        "output_sequence_length.std: expected 0 … 1,000,000 tokens",
    ),
    "aiperf missing": (aiperf(PLAIN, inter_token_latency=None), "inter_token_latency.avg: is missing"),
    "aiperf errors": (aiperf(PLAIN, error_request_count={"avg": 30}), "error_request_count.avg: 30 of \\d+ requests failed"),
    "aiperf records": ('{"metadata": {}, "metrics": {}}', "export of single requests"),
    "aiperf without load": (aiperf(PLAIN, input_config={}), "input_config.loadgen.concurrency: is missing"),
    "csv header": (table([PLAIN | {"tpot": 3}]), "tpot: unknown column"),
    "csv without rows": ("concurrency,input_tokens,output_tokens\n", "has no rows"),
    "csv twice": ("concurrency,concurrency,input_tokens\n1,2,3\n", "concurrency: is there twice"),
    "csv fields": ("concurrency,input_tokens,output_tokens\n1,2\n", "line 2: 2 fields, expected 3"),
    "csv number": (table([PLAIN | {"mean_tpot_ms": "5,5"}]), "line 2: mean_tpot_ms: expected a finite number"),
    "csv NaN": (table([PLAIN | {"mean_tpot_ms": "nan"}]), "line 2: mean_tpot_ms: expected a finite number"),
    "csv fraction": (table([PLAIN | {"concurrency": 1.5}]), "line 2: concurrency: expected a whole number"),
    "csv other unit": (table([PLAIN | {"mean_tpot_ms": 1e12}]), "line 2: mean_tpot_ms: expected 0.001 … 60,000 millisec"),
    "vllm other unit": (vllm(PLAIN, mean_ttft_ms=1e9), "mean_ttft_ms: expected 0.001 … 86,400,000 milliseconds"),
    "csv zero": (table([PLAIN | {"output_tokens": 0}]), "line 2: output_tokens: expected 1 … 1,000,000 tokens"),
    "csv without result": ("concurrency,input_tokens,output_tokens\n1,2,3\n", "mean_tpot_ms: is missing"),
    "csv without load": ("mean_tpot_ms,input_tokens,output_tokens\n1,2,3\n", "concurrency: is missing"),
    "csv open loop": ("rate_per_s,input_tokens,output_tokens,output_tokens_per_s\n1,2,3,4\n", "throughput of an open loop"),
    "csv without accept length": (table([SPEC | {"accept_length": ""}]), "accept_length: is missing for a run of EAGLE3"),
    "csv without steps": (table([SPEC | {"steps": ""}]), "steps: is missing for a run of EAGLE3"),
    "csv quotes": ('concurrency,input_tokens,output_tokens\n1,"2,3\n', "is no CSV"),
    "csv no TPOT": (table([PLAIN | {"output_tokens": 1}]), "line 2: output_tokens: is 1: there is no output token after"),
    "copied run": (table([PLAIN, SPEC, PLAIN]), "line 4: is .*line 2 once more, number by number"),
    "repeated run": (
        table([PLAIN, PLAIN | {"mean_tpot_ms": 5.7}, PLAIN | {"mean_tpot_ms": 5.5 / 1.5}]),
        r"line 4: mean_tpot_ms: 3.66.* contradicts 5.5 of .*line 2",
    ),
    "two models": (table([PLAIN | {"model": "llama-3.1-8b"}, PLAIN | {"model": "qwen3-32b"}]), "model: .*a profile holds for one"),
    "two GPUs": (table([PLAIN | {"gpu": "H100"}, PLAIN | {"gpu": "H200"}]), "gpu: H200, but"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_used_is_refused_with_file_and_key(read, name):
    text, message = BAD[name]
    with pytest.raises(ConfigError, match=message) as caught:
        read(text, "bad.json")
    assert "bad.json" in caught.value.source
    assert len(str(caught.value)) < 1000


def test_files_that_are_not_there_or_given_twice(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_points([str(tmp_path / "absent.json")])
    (tmp_path / "run.csv").write_text(table([PLAIN]))
    with pytest.raises(ConfigError, match="is given twice"):
        read_points([str(tmp_path / "run.csv")] * 2)


def test_runs_that_differ_in_anything_do_not_contradict(read):
    other = PLAIN | {"mean_tpot_ms": 11.0, "output_tokens_per_s": 700.0}
    assert len(read(table([PLAIN, other | {"concurrency": 16}, other | {"input_tokens": 2000.0}]))) == 3
    near = PLAIN | {"mean_tpot_ms": 5.9}
    points = read(table([PLAIN, near]))
    assert points[0].setting == replace(points[1], mean_tpot_ms=5.5).setting
