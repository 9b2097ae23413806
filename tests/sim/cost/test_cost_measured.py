"""Measured kernels: tables are looked up as they are, kept, and refused with a reason; the database itself where it is installed."""

from __future__ import annotations

import importlib
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from foretoken import simulate
from foretoken.core.errors import ConfigError
from foretoken.core.model_shape import lookup_model
from foretoken.sim.assembly import assemble
from foretoken.sim.cost import measured
from foretoken.sim.cost.draft import eagle3_head
from foretoken.sim.cost.efficiency import default_efficiency
from foretoken.sim.cost.forward import ForwardCost
from foretoken.sim.cost.hardware import lookup_gpu
from foretoken.sim.cost.launch import FULL_GRAPH
from foretoken.sim.cost.measured import (
    CHUNKS,
    CONTEXTS,
    KNEE,
    PASTS,
    QUERIES,
    ROWS,
    TOKENS,
    KernelTables,
    MeasuredForward,
    NotMeasured,
    measured_tables,
)
from foretoken.sim.cost.round import RoundCost
from foretoken.sim.cost.server import server_profile
from foretoken.sim.cost.work import Routing
from foretoken.sim.scenario_file import load_scenario

SHAPE, GPU = lookup_model("llama-3.1-8b"), lookup_gpu("H200")
LLAMA_70B = lookup_model("llama-3.1-70b")
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def made_up_tables() -> KernelTables:
    """Tables whose entries are known functions of their places; attention has a knee, as caches have."""
    rows, contexts = np.array(ROWS, float), np.array(CONTEXTS, float)
    per_row = 100.0 + 2.0 * np.minimum(contexts, KNEE) + 3.0 * np.maximum(contexts - KNEE, 0)
    decode = rows[:, None] * per_row
    return KernelTables(
        source="made up",
        layers=1e6 + 10.0 * np.array(TOKENS),
        comm=5.0 * np.array(TOKENS),
        lm_head=7.0 * np.array(TOKENS),
        decode=decode,
        verify=decode[:, None, :] * np.array(QUERIES, float)[None, :, None],
        prefill=np.array(CHUNKS, float)[:, None] * (1000.0 + np.array(PASTS, float)),
        provenance={"attention": "silicon", "add_norm_1": "empirical"},
    )


@pytest.fixture
def forward():
    return MeasuredForward(ForwardCost(SHAPE, GPU, default_efficiency(GPU), 1), made_up_tables())


def test_times_between_the_points_of_a_grid(forward):
    assert forward.layers_ns(8) == 1e6 + 80
    assert forward.layers_ns(70) == pytest.approx(1e6 + 700)  # between 64 and 72
    assert forward.layers_ns(20_000) == pytest.approx(1e6 + 200_000)  # beyond the last, its segment goes on
    assert forward.lm_head_ns(3) == 21 and forward.comm_ns(3) == 15
    assert forward.prefill_attention_ns([(48, 128), (16, 0)]) == pytest.approx(48 * 1128 + 16 * 1000)


@pytest.mark.parametrize("rows", [1, 3, 64, 700])
@pytest.mark.parametrize("queries", [1, 2, 10])
def test_attention_is_two_lines_that_meet_at_the_knee(forward, rows, queries):
    line = forward.decode_attention(rows, queries, 0)
    for context in (0, 100, KNEE, 5000):
        kv, cap = rows * context, rows * forward.knee
        expected = queries * rows * (100.0 + 2.0 * min(context, KNEE) + 3.0 * max(context - KNEE, 0))
        assert line.base_ns + line.slope_ns * kv + line.window_slope_ns * min(kv, cap) == pytest.approx(expected)


def test_a_round_is_made_of_the_tables():
    draft = eagle3_head(SHAPE)
    cost = RoundCost(SHAPE, GPU, 1, draft, tables=made_up_tables(), draft_tables=made_up_tables())
    parts = cost.decode_parts(4, 3, 1, 4, 4 * 100)
    assert parts["verify"] == 1_000_160 and parts["lm_head"] == 7 * 16
    assert parts["attention"] == 4 * 4 * (100 + 2 * 100)
    assert parts["draft"] >= 2 * 1_000_000  # two passes after the catch-up's drafts
    assert sum(parts.values()) == cost.decode_ns(4, 3, 1, 4, 4 * 100)
    sources = [row[3] for row in cost.explain() if row[0].startswith("kernel")]
    assert sources and set(sources) == {"made up"}


def test_fewer_experts_save_of_measured_kernels_what_they_save_of_the_roofline():
    sparse = lookup_model("qwen3-30b-a3b")
    roofline = ForwardCost(sparse, GPU, default_efficiency(GPU), 1)
    forward = MeasuredForward(roofline, made_up_tables())
    whole = forward.layers_ns(8)
    assert forward.layers_ns(8, Routing(8, 8.0)) == pytest.approx(whole)
    assert forward.layers_ns(8, Routing(8, 3.0)) / whole == pytest.approx(
        roofline.layers_ns(8, Routing(8, 3.0)) / roofline.layers_ns(8)
    )
    assert forward.layers_ns(8, Routing(8, 3.0)) < 0.8 * whole
    assert (
        MeasuredForward(ForwardCost(SHAPE, GPU, default_efficiency(GPU), 1), made_up_tables()).layers_ns(
            8, Routing(8, 3.0)
        )
        == 1e6 + 80
    )


def test_tables_are_kept_and_a_damaged_file_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    monkeypatch.setattr(measured, "_package_version", lambda: "9.9")
    asked = []
    monkeypatch.setattr(measured, "_compile", lambda *given: asked.append(given))
    monkeypatch.setattr(measured, "_query", lambda handle, source: made_up_tables())
    first = measured_tables(SHAPE, "H200", "sglang", 1)
    again = measured_tables(SHAPE, "H200", "sglang", 1)
    assert len(asked) == 1 and again.provenance == first.provenance
    assert all(np.array_equal(getattr(first, name), getattr(again, name)) for name in measured._ARRAYS)
    measured_tables(SHAPE, "H200", "sglang", 2)
    assert len(asked) == 2  # another parallelism has tables of its own
    for file in (tmp_path / "kernels").iterdir():
        file.write_bytes(file.read_bytes()[:100])
    measured_tables(SHAPE, "H200", "sglang", 1)
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("change", "gpu", "server", "words"),
    [
        ({}, "MI300X", "sglang", "MI300X: no measured kernels; there are some of A100"),
        ({}, "H100", "llama.cpp", "no measured kernels of this server"),
        ({"attention_dtype": "fp8"}, "H100", "vllm", "layers that differ"),
    ],
)
def test_what_is_not_measured_is_refused_with_the_reason(change, gpu, server, words):
    shape = replace(SHAPE, **change)
    with pytest.raises(NotMeasured, match=words):
        measured_tables(shape, gpu, server, 1)


def test_without_the_package_auto_takes_the_roofline(monkeypatch):
    monkeypatch.setattr(measured, "PACKAGE", "no_such_package")
    with pytest.raises(NotMeasured, match=r"pip install 'foretoken\[measured\]'"):
        assemble(load_scenario(None, ["hardware.kernels=measured"])[0])
    for kernels in ("auto", "roofline"):
        run = assemble(load_scenario(None, [f"hardware.kernels={kernels}"])[0])
        assert ("kernels of the target", "roofline") in [row[:2] for row in run.explain()]


class TestDatabase:
    """Against the installed database."""

    @pytest.fixture(autouse=True)
    def _installed(self):
        pytest.importorskip("aiconfigurator_core", reason="needs the extra measured")

    def test_a_scenario_is_priced_and_says_by_what(self, tmp_path, monkeypatch):
        monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
        run = assemble(load_scenario(None, ["hardware.kernels=measured"])[0])
        assert any(row[0] == "kernel qkv_gemm" and row[1] == "silicon" for row in run.explain())

    def test_times_are_near_the_roofline_and_grow(self, tmp_path, monkeypatch):
        """A unit or a group of operations that went astray would show; how near the two are is in docs/simulate.md."""
        monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
        for shape, gpu, tp in ((SHAPE, "H200", 1), (SHAPE, "H100", 2), (LLAMA_70B, "H200", 4)):
            roofline = RoundCost(shape, lookup_gpu(gpu), tp)
            cost = RoundCost(shape, lookup_gpu(gpu), tp, tables=measured_tables(shape, gpu, "sglang", tp))
            for rows in (1, 8, 64, 256):
                for context in (256, 2048):
                    ratio = cost.decode_ns(rows, 0, 1, 1, rows * context) / roofline.decode_ns(
                        rows, 0, 1, 1, rows * context
                    )
                    assert 0.6 < ratio < 2.0, (shape.name, gpu, tp, rows, context, ratio)
            times = [cost.decode_ns(64, 0, 1, 1, 64 * context) for context in (64, 512, 1024, 2048, 8192)]
            assert times == sorted(times)


class TestServers:
    def test_a_profile_brings_host_launch_and_kernels(self):
        run = assemble(load_scenario(None, ["hardware.server=sglang-0.5"])[0])
        assert (run.host.name, run.cost.launch.name) == ("sglang-overlap", "sglang-0.5")
        assert "sglang-0.5" in run.timing and "the roofline" in run.timing
        own = assemble(
            load_scenario(None, ["hardware.server=sglang-0.5", "hardware.host=vllm-0.10", "hardware.launch=piecewise"])[
                0
            ]
        )
        assert (own.host.name, own.cost.launch.name) == ("vllm-0.10", "piecewise")

    def test_a_round_pays_for_its_rows_its_draft_steps_and_for_a_tree(self):
        times = {"graph_gap_ns": 3e5, "row_gap_ns": 1e4, "draft_step_ns": 1e5, "eagle3_step_ns": 5e4, "tree_ns": 7e5}
        draft, free = eagle3_head(SHAPE), dict.fromkeys(times, 0.0)
        cost, bare = (RoundCost(SHAPE, GPU, 1, draft, launch=replace(FULL_GRAPH, **given)) for given in (times, free))
        for rows, steps, topk, nodes, passes in ((1, 0, 1, 1, 1), (1, 3, 1, 4, 2), (8, 5, 3, 6, 2)):
            paid = cost.decode_ns(rows, steps, topk, nodes, 600) - bare.decode_ns(rows, steps, topk, nodes, 600)
            expected = passes * 3e5 + rows * 1e4 + steps * 1.5e5 + (7e5 if topk > 1 else 0)
            assert paid == pytest.approx(expected, abs=2)
        ranks = replace(FULL_GRAPH, ranks_gap_ns=4e5)
        for tp, more in ((1, 0), (2, 400_000)):
            plain, paying = (RoundCost(SHAPE, GPU, tp, launch=launch) for launch in (FULL_GRAPH, ranks))
            assert paying.decode_ns(4, 0, 1, 1, 600) - plain.decode_ns(4, 0, 1, 1, 600) == pytest.approx(more, abs=2)

    def test_a_profile_schedules_as_its_server_does_unless_the_scenario_says_otherwise(self):
        def config(*settings: str):
            return assemble(load_scenario(None, list(settings))[0]).spec.config

        assert (config().mixed, config("hardware.server=sglang-0.5").mixed) == (True, False)
        assert config("hardware.server=sglang-0.5", "engine.mixed=true", "engine.chunk_size=2048").mixed
        assert config("hardware.server=sglang-0.5", "engine.chunk_size=2048").chunk_size == 2048

    def test_fp8_checkpoints_for_tensorrt_llm_keep_their_kv_in_fp8(self):
        def kv_dtype(*settings: str) -> str:
            return assemble(load_scenario(None, ["model.weight_dtype=fp8", *settings])[0]).target.kv_dtype

        assert kv_dtype("hardware.server=trtllm-1.x") == "fp8"
        assert kv_dtype("hardware.server=trtllm-1.x", "model.kv_dtype=bf16") == "bf16"
        assert kv_dtype("hardware.server=vllm-0.18") == "bf16"

    def test_an_unknown_server(self):
        with pytest.raises(
            ConfigError, match=r"hardware.server: unknown server 'sglang-0\.6'; known: foretoken, sglang-0\.5"
        ):
            assemble(load_scenario(None, ["hardware.server=sglang-0.6"])[0])

    def test_the_times_of_rounds_are_those_of_a_fresh_fit(self, tmp_path, monkeypatch):
        """What is fitted to simulations takes minutes: `benchmarks/fit_servers.py` alone does it."""
        pytest.importorskip("aiconfigurator_core", reason="needs the extra measured")
        monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        fit_servers = importlib.import_module("fit_servers")
        for name, fitted in fit_servers.ROUNDS.items():
            rows = fit_servers.published_rows(name)
            values = fit_servers.fit_rounds(rows, fitted)
            assert abs(fit_servers.rounds_without(rows, fitted)[1]).mean() < 0.035
            stored = [getattr(server_profile(name).launch, parameter) for parameter in fitted]
            assert values == pytest.approx(stored, rel=0.01, abs=1000)

    def test_published_points_are_met_as_well_as_before(self, tmp_path, monkeypatch):
        """A handful of those of docs/accuracy.md; the bounds are what they were when the page was written, and a little more."""
        pytest.importorskip("aiconfigurator_core", reason="needs the extra measured")
        monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        points = importlib.import_module("points")
        rounds = [
            point for point in points.round_points() if point.server == "sglang-0.5" and point.text == "humaneval"
        ]
        chosen = {point.shape: point for point in rounds if point.concurrency == 1}
        plain = [point for point in points.plain_points() if "Qwen3-32B" in point.model and point.tensor_parallel == 8]
        chosen |= {str(point.concurrency): point for point in plain if (point.prompt, point.output) == (2048, 128)}
        errors = {}
        for name, point in chosen.items():
            published, simulated = point.measured(simulate(point.scenario("measured")).summary)
            errors[name] = simulated / published - 1
        assert len(errors) == 9
        assert statistics.fmean(map(abs, errors.values())) < 0.06, errors
        assert max(map(abs, errors.values())) < 0.12, errors
