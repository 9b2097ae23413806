"""The database of measured kernels, where it is installed: what it prices, refuses and says of itself."""

from __future__ import annotations

import importlib
import re
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from foredraft import simulate
from foredraft.core.contract.step import PLAIN_ROUND, RoundShape
from foredraft.core.errors import ConfigError
from foredraft.core.model_shape import lookup_model
from foredraft.sim.assembly import assemble
from foredraft.sim.assembly.explaining import derived_rows, timing_line
from foredraft.sim.cost.draft import eagle3_head
from foredraft.sim.cost.hardware import Parallelism, lookup_gpu
from foredraft.sim.cost.host import FULL_GRAPH
from foredraft.sim.cost.measured import NotMeasured, packaged_models
from foredraft.sim.cost.passes.decode_work import DecodeWork
from foredraft.sim.cost.round import RoundCost
from foredraft.sim.cost.server import server_profile
from foredraft.sim.scenario_file import load_scenario

SHAPE, GPU = lookup_model("llama-3.1-8b"), lookup_gpu("H200")
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
GRID = (
    ("llama-3.1-8b", "H100", {}),
    ("llama-3.1-8b", "B200", {}),
    ("llama-3.1-8b", "L40S", {}),
    ("llama-3.1-70b", "H200", {"tensor": 8}),
    ("Qwen/Qwen3-32B-FP8", "H100", {"tensor": 2}),
    ("qwen3-30b-a3b", "H200", {}),
    ("Qwen/Qwen3-235B-A22B", "H200", {"tensor": 8}),
    ("Qwen/Qwen3-235B-A22B-FP8", "H200", {"tensor": 8, "expert": 8}),
    ("openai/gpt-oss-120b", "H100", {"tensor": 4}),
    ("deepseek-ai/DeepSeek-V3", "H200", {"tensor": 8, "expert": 8}),
    ("deepseek-ai/DeepSeek-V3", "H200", {"tensor": 1, "attention_data": 8, "expert": 8}),
    ("deepseek-ai/DeepSeek-V3", "H200", {"tensor": 16, "expert": 16}),
    ("zai-org/GLM-5-FP8", "H200", {"tensor": 8, "expert": 8}),
    ("Qwen/Qwen3.5-35B-A3B", "H200", {"tensor": 2}),
    ("nvidia/Nemotron-H-56B-Base-8K", "H200", {"tensor": 4}),
    ("google/gemma-4-26B-A4B", "H100", {"tensor": 2}),
)


@pytest.mark.xdist_group("kernel tables")  # one worker reads them from the database
class TestDatabase:
    """Against the installed database."""

    @pytest.fixture(autouse=True)
    def _installed(self, tmp_path_factory, monkeypatch):
        pytest.importorskip("aiconfigurator_core", reason="needs the extra measured")
        monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path_factory.getbasetemp() / "kernels"))
        monkeypatch.delenv("FOREDRAFT_KERNELS", raising=False)

    def test_a_scenario_is_priced_and_says_by_what(self):
        run = assemble(load_scenario(None, [])[0])
        assert any(row[0] == "kernel qkv_gemm" and row[1] == "silicon" for row in derived_rows(run))
        assert "measured kernels of H100 under sglang" in timing_line(
            run
        ) and "% of a decode pass measured" in timing_line(run)

    def test_kept_tables_need_no_import_of_the_package(self):
        """Start-up with kept tables is as fast as without them."""
        load = "from foredraft.sim.assembly import assemble; from foredraft.sim.scenario_file import load_scenario; import sys"
        check = "print('aiconfigurator_core' in sys.modules, assemble(load_scenario(None, [])[0]).cost.kernels)"
        assemble(load_scenario(None, [])[0])
        code = f"{load}; {check}; {check}"
        words = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        assert words == ["False", "measured"] * 2

    def test_every_model_that_the_database_has_loads_by_its_name(self):
        """The counts are those of version 0.12; a later one has more."""
        names = packaged_models()
        assert len(names) >= 89
        for name in names:
            scenario = load_scenario(
                None, [f"model.target={name}", "hardware.kernels=roofline", "engine.kv_slots=100000"]
            )[0]
            assert assemble(scenario).cost.decode_ns(8, PLAIN_ROUND, 8 * 1024) > 0, name
        with pytest.raises(
            ConfigError,
            match=r"unknown model 'Qwen/Qwen3-99B'; the nearest known: .*simulate --list models` prints all 1\d\d\)",
        ):
            assemble(load_scenario(None, ["model.target=Qwen/Qwen3-99B"])[0])

    @pytest.mark.slow
    def test_what_is_refused_names_the_nearest(self):
        settings = ["hardware.kernels=measured", "hardware.gpu=H200", "hardware.tensor_parallel=8"]
        settings.append("engine.kv_slots=100000")
        scenario = load_scenario(None, [*settings, "model.target=MiniMaxAI/MiniMax-M2.5"])[0]
        with pytest.raises(
            NotMeasured, match=r"nearest that it has: hardware.expert_parallel=8; hardware.kernels=auto"
        ):
            assemble(scenario)

    @pytest.mark.fast("llama-3.1-8b-H100-*", "deepseek-ai/DeepSeek-V3-H200-parallel9")
    @pytest.mark.parametrize(("model", "gpu", "parallel"), GRID)
    def test_roofline_and_measured_agree_over_a_grid(self, model, gpu, parallel, record_property):
        """A unit or a group of operations that went astray would show.
        docs/servers.md says where they differ by more, and why."""
        settings = ["engine.kv_slots=100000", "speculation.algorithm=NONE"]
        settings += [f"model.target={model}", f"hardware.gpu={gpu}"]
        settings += [f"hardware.{key}_parallel={devices}" for key, devices in parallel.items()]
        measured, roofline = (
            assemble(load_scenario(None, [*settings, f"hardware.kernels={kernels}"])[0]).cost
            for kernels in ("measured", "roofline")
        )
        differences = []
        for rows in (1, 8, 32, 128):
            for context in (512, 4096):
                work = DecodeWork(rows, PLAIN_ROUND, rows * context)
                differences.append(measured.decode_ns(*work) / roofline.decode_ns(*work) - 1)
        words = f"{min(differences):+.0%} … {max(differences):+.0%}"
        record_property("note", f"measured against the roofline, {model} on {gpu}, {parallel}: {words}")
        assert min(differences) > -0.3 and max(differences) < 1.4, words
        times = [measured.decode_ns(64, PLAIN_ROUND, 64 * context) for context in (64, 512, 1024, 2048, 8192)]
        assert times == sorted(times)


class TestServers:
    def test_a_profile_brings_host_launch_and_kernels(self):
        run = assemble(load_scenario(None, ["hardware.server=sglang-0.5"])[0])
        assert (run.host.name, run.cost.launch.name) == ("sglang-overlap", "sglang-0.5")
        assert "sglang-0.5" in timing_line(run) and "the roofline" in timing_line(run)
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
        for rows, shape, passes in ((1, PLAIN_ROUND, 1), (1, RoundShape.chain(3), 2), (8, RoundShape(5, 3, 6), 2)):
            paid = cost.decode_ns(rows, shape, 600) - bare.decode_ns(rows, shape, 600)
            expected = passes * 3e5 + rows * 1e4 + shape.steps * 1.5e5 + (7e5 if shape.topk > 1 else 0)
            assert paid == pytest.approx(expected, abs=2)
        waiting = replace(FULL_GRAPH, collective_gap_ns=1e3)
        for tp, doublings in ((1, 0), (2, 1), (8, 3)):
            plain, paying = (RoundCost(SHAPE, GPU, tp, draft, launch=launch) for launch in (FULL_GRAPH, waiting))
            for steps, passes in (
                (0, 0),
                (3, 3),
            ):  # of the draft's one layer: two after the first drafts, and the catch-up
                more = paying.decode_ns(4, RoundShape.chain(steps), 600) - plain.decode_ns(
                    4, RoundShape.chain(steps), 600
                )
                assert more == pytest.approx(1e3 * doublings * 2 * (SHAPE.layers + passes), abs=2)

    def test_a_profile_schedules_as_its_server_does_unless_the_scenario_says_otherwise(self):
        def config(*settings: str):
            return assemble(load_scenario(None, list(settings))[0]).spec.config

        assert (config().mixed, config("hardware.server=sglang-0.5").mixed) == (True, False)
        assert config("hardware.server=sglang-0.5", "engine.mixed=true", "engine.chunk_size=2048").mixed
        assert config("hardware.server=sglang-0.5", "engine.chunk_size=2048").chunk_size == 2048

    @pytest.mark.parametrize(
        ("server", "chunks", "rows", "graphs"),
        [
            ("foredraft", [8192, 8192, 8192, 8192], [256, 256, 256, 256], [256, 256, 256, 256]),
            ("sglang-0.5", [4096, 8192, 8192, 16_384], [2048, 2048, 2048, 2048], [32, 256, 256, 512]),
            ("vllm-0.18", [2048, 2048, 8192, 16_384], [256, 256, 1024, 1024], [512, 512, 512, 1024]),
            ("trtllm-1.x", [8192, 8192, 8192, 8192], [2048, 2048, 2048, 2048], [512, 512, 512, 512]),
        ],
    )
    def test_an_engine_has_the_limits_of_its_server_on_the_device(self, server, chunks, rows, graphs):
        settings = [f"hardware.server={server}", "model.target=qwen3-8b", "speculation.algorithm=NONE"]
        runs = [
            assemble(load_scenario(None, [*settings, f"hardware.gpu={gpu}"])[0])
            for gpu in ("L40S", "A100", "H100", "B200")
        ]
        assert [run.spec.config.chunk_size for run in runs] == chunks
        assert [run.spec.config.max_running for run in runs] == rows
        assert [run.cost.graph_sizes[-1] for run in runs] == graphs
        assert all(f"up to {n:,}" in timing_line(run) for run, n in zip(runs, rows, strict=True))

    def test_sglang_gives_weights_and_kv_the_share_that_its_sizes_leave(self):
        def share(gpu: str, tp: int, data: int = 1, draft: str | None = None) -> float:
            return round(server_profile("sglang-0.5").static_fraction(lookup_gpu(gpu), Parallelism(tp, data), draft), 3)

        # As aiconfigurator-core 0.12 has it (sdk/backends/sglang_backend.py), and SGLang's 2 and 6 GiB for drafts.
        assert [share("H100", 1), share("H100", 8), share("H200", 4), share("B200", 8)] == [0.835, 0.818, 0.9, 0.852]
        assert (share("H100", 1, draft="EAGLE3"), share("H100", 1, draft="STANDALONE")) == (0.81, 0.76)
        assert share("L40S", 1) == 0.851 and share("H100", 1, 8) < share("H100", 8)
        plan = assemble(load_scenario(None, ["hardware.server=sglang-0.5"])[0]).memory
        used = plan.target_weights_bytes + plan.draft_weights_bytes + plan.kv_pool_bytes
        assert used / (plan.total_bytes - plan.context_bytes) == pytest.approx(0.81, abs=0.002)

    def test_fp8_checkpoints_keep_their_kv_as_their_server_does(self):
        def kv_dtype(*settings: str) -> str:
            return assemble(load_scenario(None, ["model.weight_dtype=fp8", *settings])[0]).target.kv_dtype

        assert kv_dtype("hardware.server=trtllm-1.x") == "fp8"
        assert kv_dtype("hardware.server=trtllm-1.x", "model.kv_dtype=bf16") == "bf16"
        assert kv_dtype("hardware.server=vllm-0.18") == "fp8"
        assert kv_dtype("hardware.server=sglang-0.5") == "bf16"

    @pytest.mark.parametrize(
        ("server", "nearest"),
        [
            ("sglang-0.4", "sglang-0.5"),
            ("vllm-0.10", "vllm-0.9"),
            ("vllm-0.2x", "vllm-0.18"),
            ("vllm-0.19.1", "vllm-0.18"),
            ("trtllm-0.20", "trtllm-1.x"),
        ],
    )
    def test_an_unknown_server_names_the_nearest(self, server, nearest):
        words = f"unknown server '{server}': no profile stands for this release; the nearest is {nearest}"
        with pytest.raises(ConfigError, match=re.escape(f"hardware.server: {words}")) as caught:
            assemble(load_scenario(None, [f"hardware.server={server}"])[0])
        told = f"{nearest} (its published points are of releases " in str(caught.value)
        assert told == (nearest != "vllm-0.9"), "vllm-0.9 has no published points of serving"
        assert "`foredraft calibrate --from` fits your own" in str(caught.value)
        with pytest.raises(ConfigError, match=r"unknown server 'tgi-3\.0'; known: foredraft, sglang-0\.5"):
            assemble(load_scenario(None, ["hardware.server=tgi-3.0"])[0])

    @pytest.mark.slow
    def test_the_times_of_rounds_are_those_of_a_fresh_fit(self, tmp_path, monkeypatch):
        """What is fitted to simulations takes minutes: `benchmarks/fit_servers.py` alone does it."""
        pytest.importorskip("aiconfigurator_core", reason="needs the extra measured")
        monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        fit_servers = importlib.import_module("fit_servers")
        for name, fitted in fit_servers.ROUNDS.items():
            rows = fit_servers.published_rows(name)
            values = fit_servers.fit_rounds(rows, fitted)
            assert abs(fit_servers.rounds_without(rows, fitted)[1]).mean() < 0.055
            stored = [getattr(server_profile(name).launch, parameter) for parameter in fitted]
            assert values == pytest.approx(stored, rel=0.01, abs=1000)
        _, inverse = fit_servers.speedups_by_time("sglang-0.5")
        values = fit_servers.fit_verify_times(inverse) * list(fit_servers.VERIFY_TIMES.values())
        stored = [getattr(server_profile("sglang-0.5").host, name) for name in fit_servers.VERIFY_TIMES]
        assert values == pytest.approx(stored, rel=0.01, abs=1000)

    def test_published_points_are_met_as_well_as_before(self, tmp_path, monkeypatch):
        """A handful of those of docs/evidence/accuracy.md;
        the bounds are what they were when the page was written, and a little more."""
        pytest.importorskip("aiconfigurator_core", reason="needs the extra measured")
        monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
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
            simulated = point.measured(simulate(point.scenario("measured"))).token_ms
            errors[name] = simulated / point.published_ms - 1
        assert len(errors) == 9
        assert statistics.fmean(map(abs, errors.values())) < 0.06, errors
        assert max(map(abs, errors.values())) < 0.12, errors
