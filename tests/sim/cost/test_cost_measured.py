"""Measured kernels: tables are looked up as they are, kept, and refused with a reason;
the database itself where it is installed."""

from __future__ import annotations

import importlib
import re
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from foredraft import simulate
from foredraft.core.errors import ConfigError
from foredraft.core.model_shape import lookup_model, read_model_shape
from foredraft.observe.distribution.install_hint import install_command
from foredraft.sim.assembly import assemble
from foredraft.sim.cost.draft import eagle3_head
from foredraft.sim.cost.efficiency import default_efficiency
from foredraft.sim.cost.forward import ExpertRouting, ForwardCost
from foredraft.sim.cost.hardware import Parallelism, lookup_gpu
from foredraft.sim.cost.host import FULL_GRAPH
from foredraft.sim.cost.measured import (
    KernelTables,
    MeasuredForward,
    NotMeasured,
    database,
    measured_tables,
    packaged_models,
    tables,
)
from foredraft.sim.cost.measured.tables import CHUNKS, CONTEXTS, KNEE, PASTS, QUERIES, ROWS, TOKENS, Operations
from foredraft.sim.cost.round import RoundCost
from foredraft.sim.cost.server import server_profile
from foredraft.sim.scenario_file import load_scenario

SHAPE, GPU = lookup_model("llama-3.1-8b"), lookup_gpu("H200")
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
    "vocab_size": 129280, "max_position_embeddings": 163840, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3, "n_routed_experts": 256,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
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


class Handle:
    """Answers as the database's handle of a model does, with the given microseconds of each operation
    whatever the pass."""

    def __init__(self, times_us: dict[str, float]) -> None:
        self.times_us, self._engine = times_us, self

    def decode_step_per_op(self, rows: int, context: int, _output: int) -> list[tuple[str, float, float, str]]:
        return [(f"generation_{name}", us * rows / 1e3, 0.0, "silicon") for name, us in self.times_us.items()]

    def run_static_per_op(self, *_given: object) -> tuple[list[tuple[str, float, float, str]], list]:
        return [(f"context_{name}", us / 1e3, 0.0, "silicon") for name, us in self.times_us.items()], []


def test_what_takes_thrice_as_long_as_under_other_servers_is_taken_from_them():
    own = {"qkv_gemm": 60.0, "ffn2_gemm": 28.0, "moe_pre_dispatch": 90.0, "tp_allreduce": 9.0, "moe": 50.0}
    others = {"sglang": {"qkv_gemm": 6.0, "ffn2_gemm": 10.0, "moe_pre_dispatch": 10.0}, "trtllm": {"qkv_gemm": 5.0}}
    priced = Operations(Handle(own), {name: Handle(times) for name, times in others.items()})
    assert priced.corrected == {"qkv_gemm": "silicon, at most that of sglang and trtllm"}
    expected = {"qkv_gemm": 5e3, "ffn2_gemm": 28e3, "moe_pre_dispatch": 90e3, "moe": 50e3}
    for found in (priced.decode(1, 64), priced.prompt(1, 64, 0)):
        assert {name: operation.ns for name, operation in found.items()} == pytest.approx(expected)
    assert Operations(Handle(own), {}).corrected == {}


def made_up_tables() -> KernelTables:
    """Tables whose entries are known functions of their places; attention has a knee, as caches have."""
    rows, contexts = np.array(ROWS, float), np.array(CONTEXTS, float)
    per_row = 100.0 + 2.0 * np.minimum(contexts, KNEE) + 3.0 * np.maximum(contexts - KNEE, 0)
    decode = rows[:, None] * per_row
    return KernelTables(
        source="made up",
        layers=1e7 + 10.0 * np.array(TOKENS),
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
    assert forward.layers_ns(8) == 1e7 + 80
    assert forward.layers_ns(70) == pytest.approx(1e7 + 700)  # between 64 and 72
    assert forward.layers_ns(20_000) == pytest.approx(1e7 + 200_000)  # beyond the last, its segment goes on
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
    assert parts["verify"] == 10_000_160 and parts["lm_head"] == 7 * 16
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
    assert forward.layers_ns(8, ExpertRouting(8, 8.0)) == pytest.approx(whole)
    assert forward.layers_ns(8, ExpertRouting(8, 3.0)) / whole == pytest.approx(
        roofline.layers_ns(8, ExpertRouting(8, 3.0)) / roofline.layers_ns(8)
    )
    assert forward.layers_ns(8, ExpertRouting(8, 3.0)) < 0.8 * whole
    assert (
        MeasuredForward(ForwardCost(SHAPE, GPU, default_efficiency(GPU), 1), made_up_tables()).layers_ns(
            8, ExpertRouting(8, 3.0)
        )
        == 1e7 + 80
    )


def test_tables_are_kept_and_a_damaged_file_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    monkeypatch.setattr(tables, "package_version", lambda: "9.9")
    asked = []
    monkeypatch.setattr(database, "compiled", lambda *given: asked.append(given) or Handle({}))
    monkeypatch.setattr(tables, "_query", lambda *given: made_up_tables())
    first = measured_tables(SHAPE, "H200", "sglang", 1)
    again = measured_tables(SHAPE, "H200", "sglang", 1)
    assert len(asked) == 1 and again.provenance == first.provenance
    assert all(np.array_equal(getattr(first, name), getattr(again, name)) for name in tables._ARRAYS)
    measured_tables(SHAPE, "H200", "sglang", 2)
    assert len(asked) == 2  # another parallelism has tables of its own
    for file in (tmp_path / "kernels").iterdir():
        file.write_bytes(file.read_bytes()[:100])
    measured_tables(SHAPE, "H200", "sglang", 1)
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("weights", "gpu", "server", "words"),
    [
        ("bf16", "MI300X", "sglang", "MI300X: no measured.* some of A100.*nearest is H200; hardware.kernels=auto"),
        ("bf16", "RTX 4090", "sglang", "nearest is L40S"),
        ("bf16", "H100", "llama.cpp", "no measured kernels of this server"),
        ("int3-g64", "H100", "vllm", "no measured kernels of int3-g64 weights; there are some of bf16, fp16, fp8"),
    ],
)
def test_what_is_not_measured_is_refused_with_the_reason(monkeypatch, weights, gpu, server, words):
    monkeypatch.setattr(tables, "package_version", lambda: "9.9")
    with pytest.raises(NotMeasured, match=words):
        measured_tables(replace(SHAPE, weight_dtype=weights), gpu, server, 1)


def test_without_the_package_auto_takes_the_roofline(monkeypatch):
    monkeypatch.setattr(database, "PACKAGE", "no_such_package")
    monkeypatch.delenv("FOREDRAFT_KERNELS", raising=False)
    with pytest.raises(NotMeasured, match=re.escape(install_command("measured"))):
        assemble(load_scenario(None, ["hardware.kernels=measured"])[0])
    for kernels in ("auto", "roofline"):
        run = assemble(load_scenario(None, [f"hardware.kernels={kernels}"])[0])
        assert ("kernels of the target", "roofline") in [row[:2] for row in run.explain()]
    assert packaged_models() == []
    assert install_command("measured") in assemble(load_scenario(None, [])[0]).timing, "one line says why"


def test_a_misspelt_choice_of_kernels_is_refused(monkeypatch):
    monkeypatch.setenv("FOREDRAFT_KERNELS", "rooflines")
    with pytest.raises(
        ConfigError,
        match=r"FOREDRAFT_KERNELS: expected auto or roofline, found 'rooflines' \(did you mean 'roofline'\?\)",
    ):
        assemble(load_scenario(None, [])[0])
    assert assemble(load_scenario(None, ["hardware.kernels=roofline"])[0]).cost.kernels == "roofline"


def test_a_refusal_is_kept_and_auto_says_it(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    monkeypatch.delenv("FOREDRAFT_KERNELS", raising=False)
    monkeypatch.setattr(tables, "package_version", lambda: "9.9")
    asked = []

    def refuse(*given):
        asked.append(given)
        raise NotMeasured("no such rows")

    monkeypatch.setattr(database, "compiled", refuse)
    for _ in range(2):
        run = assemble(load_scenario(None, ["hardware.gpu=H200", "speculation.algorithm=NONE"])[0])
        assert "passes priced by the roofline (llama-3.1-8b on H200 under sglang" in run.timing
        assert "no such rows" in run.timing
    assert len(asked) == 1


def test_a_family_without_a_verify_pass_takes_the_rooflines_ratio():
    shape = read_model_shape(DEEPSEEK_V3, "config.json", "deepseek-v3")
    roofline = ForwardCost(shape, GPU, default_efficiency(GPU), 8)
    priced = MeasuredForward(roofline, replace(made_up_tables(), verify=np.empty(0)))
    one, four = (priced.decode_attention(8, queries, 0) for queries in (1, 4))
    ratio = roofline.decode_attention(1, 4, 0).slope_ns / roofline.decode_attention(1, 1, 0).slope_ns
    assert 1.0 <= ratio < 1.5, "a latent is read once for all queries"
    assert four.slope_ns == pytest.approx(one.slope_ns * ratio)
    assert four.base_ns > one.base_ns, "what each token takes is paid for each"
    assert any("verify pass" in row[0] for row in priced.explain())


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
        assert any(row[0] == "kernel qkv_gemm" and row[1] == "silicon" for row in run.explain())
        assert "measured kernels of H100 under sglang" in run.timing and "% of a decode pass measured" in run.timing

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
            assert assemble(scenario).cost.decode_ns(8, 0, 1, 1, 8 * 1024) > 0, name
        with pytest.raises(
            ConfigError, match=r"unknown model 'Qwen/Qwen3-99B'.*the extra `measured` knows \d+ more by name"
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
        docs/cost-model.md says where they differ by more, and why."""
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
                work = (rows, 0, 1, 1, rows * context)
                differences.append(measured.decode_ns(*work) / roofline.decode_ns(*work) - 1)
        words = f"{min(differences):+.0%} … {max(differences):+.0%}"
        record_property("note", f"measured against the roofline, {model} on {gpu}, {parallel}: {words}")
        assert min(differences) > -0.3 and max(differences) < 1.4, words
        times = [measured.decode_ns(64, 0, 1, 1, 64 * context) for context in (64, 512, 1024, 2048, 8192)]
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
        waiting = replace(FULL_GRAPH, collective_gap_ns=1e3)
        for tp, doublings in ((1, 0), (2, 1), (8, 3)):
            plain, paying = (RoundCost(SHAPE, GPU, tp, draft, launch=launch) for launch in (FULL_GRAPH, waiting))
            for steps, passes in (
                (0, 0),
                (3, 3),
            ):  # of the draft's one layer: two after the first drafts, and the catch-up
                more = paying.decode_ns(4, steps, 1, steps + 1, 600) - plain.decode_ns(4, steps, 1, steps + 1, 600)
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
            ("vllm-0.18", [2048, 2048, 8192, 16_384], [256, 256, 1024, 1024], [512, 512, 512, 512]),
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
        assert all(f"up to {n:,}" in run.timing for run, n in zip(runs, rows, strict=True))

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
        words = f"unknown server '{server}': no published times to fit it to; the nearest is {nearest}, and `foredraft calibrate --from`"
        with pytest.raises(ConfigError, match=re.escape(f"hardware.server: {words}")):
            assemble(load_scenario(None, [f"hardware.server={server}"])[0])
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
            assert abs(fit_servers.rounds_without(rows, fitted)[1]).mean() < 0.035
            stored = [getattr(server_profile(name).launch, parameter) for parameter in fitted]
            assert values == pytest.approx(stored, rel=0.01, abs=1000)

    def test_published_points_are_met_as_well_as_before(self, tmp_path, monkeypatch):
        """A handful of those of docs/accuracy.md;
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
