"""The reader of published serving points: what each label served, and which rows are refused."""

import csv
import importlib
from pathlib import Path

import pytest

ROLES = ("", "prefill_", "decode_")
SIZES = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
COLUMNS = [
    "id", "silicon_data_source", "backend", "backend_version", "model_path", "system", "precision", "mode", "isl", "osl",
    "batch_size", *(role + size for role in ROLES for size in SIZES), "prefill_num_workers", "decode_num_workers",
    "silicon_ttft_ms", "silicon_tpot_ms",
]  # fmt: skip


@pytest.fixture
def silicon(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[4] / "benchmarks"))
    return importlib.import_module("silicon")


@pytest.fixture
def read(silicon, tmp_path):
    """Return a function that reads rows with these values, each a run of its own."""

    def read_rows(*rows):
        path = tmp_path / "silicon_sample.csv"
        usual = {
            "silicon_data_source": "source_file=2026-04-06.csv; silicon_concurrency=16; measured=2026-03-01",
            "backend": "vllm", "model_path": "MiniMaxAI/MiniMax-M2.5", "system": "h200_sxm", "precision": "fp8",
            "mode": "agg", "isl": "1024", "osl": "8192", "tp_size": "4", "moe_tp_size": "4", "moe_ep_size": "1",
            "silicon_ttft_ms": "100.0",
        }  # fmt: skip
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(usual | {"id": str(i), "silicon_tpot_ms": str(10 + i)} | row for i, row in enumerate(rows))
        return silicon.served_points(path)

    return read_rows


@pytest.mark.parametrize(
    ("label", "layout"),
    [
        ({}, (4, 1, 1)),
        ({"backend": "sglang", "tp_size": "64", "moe_tp_size": "8", "moe_ep_size": "8"}, (8, 1, 8)),  # written twice
        ({"backend": "trtllm", "tp_size": "1", "attention_dp_size": "16", "moe_ep_size": "4"}, (1, 4, 4)),
        ({"attention_dp_size": "4", "moe_tp_size": "1", "moe_ep_size": "16"}, (4, 1, 4)),
        ({"backend": "sglang", "tp_size": "1", "moe_tp_size": "8", "attention_dp_size": "8"}, (1, 8, 1)),
        ({"tp_size": "8", "moe_tp_size": "8"}, (8, 1, 8)),  # MiniMax in FP8: whole experts
        ({"tp_size": "8", "moe_tp_size": "8", "precision": "fp4"}, (8, 1, 1)),
    ],
)
def test_parallelism_of_labels(read, label, layout):
    ((served,), _) = read(label)
    assert (served.layout.tensor, served.layout.data, served.layout.expert) == layout
    scenario = served.point.scenario("measured")["hardware"]
    assert (scenario["tensor_parallel"], scenario.get("expert_parallel", 1)) == layout[::2]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"tp_size": "72", "moe_tp_size": "72", "backend": "trtllm", "system": "gb200"}, "RACK"),
        ({"mode": "disagg", "decode_tp_size": "8", "prefill_tp_size": "4"}, "ENGINES"),
        ({"silicon_data_source": "kimi.csv"}, "NO_CLIENTS"),
        ({"precision": "int8"}, "NO_FORMAT"),
        ({"model_path": "nvidia/Llama-3.1-8B-Instruct-FP8"}, "CACHED"),
        (
            {
                "model_path": "openai/gpt-oss-120b",
                "precision": "fp4",
                "silicon_data_source": "source_file=x; silicon_concurrency=512; measured=2025-12-03",
            },
            "REPORTED_LATE",
        ),
        (
            {
                "model_path": "deepseek-ai/DeepSeek-R1",
                "backend": "trtllm",
                "backend_version": "1.1.0rc2.post2",
                "silicon_data_source": "source_file=x; silicon_concurrency=4; measured=2026-01-14",
            },
            "DRAFTED",
        ),
    ],
)
def test_refused_rows(silicon, read, row, reason):
    points, refused = read(row)
    assert (points, {key: count for key, count in refused.items() if count}) == ([], {silicon.Refusal[reason]: 1})


def test_copies_of_a_run_are_one_point_with_the_clearest_label(silicon, read):
    twice = {"backend": "sglang", "tp_size": "16", "moe_ep_size": "4", "silicon_tpot_ms": "20.001"}
    clear = {
        "backend": "sglang", "moe_tp_size": "1", "moe_ep_size": "4", "silicon_tpot_ms": "20.004",
        "silicon_data_source": "source_file=2026-03-25.csv; silicon_concurrency=16; measured=2026-03-01",
    }  # fmt: skip
    points, refused = read(twice, clear)
    assert [point.id for point in points] == ["1"]
    assert refused[silicon.Refusal.COPY] == 1


def test_the_prefix_cache_is_off_where_the_script_says_so(read):
    other = {"backend": "sglang", "model_path": "deepseek-ai/DeepSeek-R1"}
    points, _ = read(other | {"model_path": "Qwen/Qwen3.5-397B-A17B", "system": "b200_sxm", "precision": "bf16"}, other)
    engines = [served.point.scenario("measured")["engine"] for served in points]
    assert [engine.get("prefix_cache", True) for engine in engines] == [False, True]


def test_points_that_differ_by_what_was_measured_share_a_simulation(read, monkeypatch):
    simulated = importlib.import_module("simulated")
    points, _ = read({}, {"silicon_ttft_ms": "90.0"}, {"osl": "1024"})
    first, again, other = (simulated.PointJob.served(served, "measured") for served in points)
    assert first == again != other
    assert first.point.scenario("measured") == points[0].point.scenario("measured") | {"name": ""}


def test_engines_of_a_disaggregated_run(read):
    split = {"mode": "disagg", "prefill_tp_size": "4", "prefill_num_workers": "1", "decode_tp_size": "8"}
    ((served,), _) = read(split | {"decode_num_workers": "3"})
    assert (served.layout.tensor, served.engines, served.prefill.tensor, served.prefill_engines) == (8, 3, 4, 1)
    groups = {"decode_tp_size": "1", "decode_attention_dp_size": "32", "decode_moe_tp_size": "32"}
    wide = {"backend": "sglang", "decode_num_workers": "1", "model_path": "deepseek-ai/DeepSeek-R1"} | groups
    ((served,), _) = read(split | wide)
    assert (served.layout.data, served.layout.expert) == (32, 32), "experts exchange tokens by all-to-all"


def test_lengths_are_those_of_the_sources_script(read):
    own = {"silicon_data_source": "source_file=data/Users/h200.csv; silicon_concurrency=8", "backend_version": "0.12.0"}
    (inferencex, equal), _ = read({}, own)
    assert (inferencex.point.shortest, inferencex.point.longest) == (0.8, 1.0)
    assert equal.point.clients_keep_step
