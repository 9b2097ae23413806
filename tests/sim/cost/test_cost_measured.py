"""Measured kernels: tables are looked up as they are, kept, and refused with a reason."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
from foredraft.core.contract.step import RoundShape
from foredraft.core.errors import ConfigError
from foredraft.core.model_shape import lookup_model, read_model_shape
from foredraft.observe.distribution.install_hint import install_command
from foredraft.sim.assembly import assemble
from foredraft.sim.assembly.explaining import derived_rows, timing_line
from foredraft.sim.cost.draft import eagle3_head
from foredraft.sim.cost.efficiency import default_efficiency
from foredraft.sim.cost.hardware import Parallelism, lookup_gpu
from foredraft.sim.cost.measured import (
    KernelTables,
    MeasuredForward,
    NotMeasured,
    database,
    measured_tables,
    packaged_models,
    tables,
)
from foredraft.sim.cost.measured.forward import _risen
from foredraft.sim.cost.measured.limits import PhysicalLimits
from foredraft.sim.cost.measured.tables import CHUNKS, CONTEXTS, KNEE, PASTS, QUERIES, ROWS, TOKENS
from foredraft.sim.cost.passes.forward import ForwardCost
from foredraft.sim.cost.passes.tokens import ExpertRouting
from foredraft.sim.cost.round import RoundCost
from foredraft.sim.scenario_file import load_scenario

SHAPE, GPU = lookup_model("llama-3.1-8b"), lookup_gpu("H200")
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
    "vocab_size": 129280, "max_position_embeddings": 163840, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3, "n_routed_experts": 256,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip


GPT_OSS = {
    "model_type": "gpt_oss", "num_hidden_layers": 36, "hidden_size": 2880, "num_attention_heads": 64, "head_dim": 64,
    "num_key_value_heads": 8, "vocab_size": 201088, "max_position_embeddings": 131072, "intermediate_size": 2880,
    "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip


class Handle:
    """Answers as the database's handle of a model does, with the given microseconds of each operation
    whatever the pass."""

    def __init__(self, times_us: dict[str, float]) -> None:
        self.times_us, self._engine = times_us, self

    def decode_step_per_op(self, rows: int, context: int, _output: int) -> list[tuple[str, float, float, str]]:
        return [(f"generation_{name}", us * rows / 1e3, 0.0, "silicon") for name, us in self.times_us.items()]

    def run_static_per_op(self, *_given: object) -> tuple[list[tuple[str, float, float, str]], list]:
        return [(f"context_{name}", us / 1e3, 0.0, "silicon") for name, us in self.times_us.items()], []


def test_kernels_of_servers_that_disagree_are_a_fact_of_the_tables_and_stay(tmp_path, monkeypatch):
    times = {
        "sglang": {"qkv_gemm": 60.0, "moe": 50.0, "tp_allreduce": 9.0},
        "vllm": {"qkv_gemm": 6.0, "moe": 25.0},
        "trtllm": {"qkv_gemm": 15.0, "moe": 100.0},
    }
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    monkeypatch.setattr(tables, "package_version", lambda: "9.9")
    monkeypatch.setattr(database, "compiled", lambda _config, _options, _system, server: Handle(times[server]))
    found = measured_tables(SHAPE, "H200", "sglang", 1)
    assert found.layers[:2] == pytest.approx([60e3, 120e3]) and found.experts[:2] == pytest.approx([50e3, 100e3])
    assert found.provenance == {"qkv_gemm": "silicon", "moe": "silicon"}


class LaunchedHandle(Handle):
    """Its products take as long as the host's launch of them, but for thousands of tokens."""

    LAUNCH_US = 200.0

    def decode_step_per_op(self, rows: int, context: int, _output: int) -> list[tuple[str, float, float, str]]:
        found = super().decode_step_per_op(rows, context, _output)
        return [(n, max(ms, self.LAUNCH_US / 1e3) if "gemm" in n else ms, *rest) for n, ms, *rest in found]


def test_products_that_were_timed_with_the_hosts_launches_take_what_they_take_under_the_others(tmp_path, monkeypatch):
    handles = {
        "sglang": Handle({"qkv_gemm": 4.0, "proj_gemm": 70.0, "moe": 50.0}),
        "vllm": LaunchedHandle({"qkv_gemm": 1.0, "proj_gemm": 70.0, "moe": 200.0}),
        "trtllm": Handle({"qkv_gemm": 9.0, "proj_gemm": 70.0, "moe": 50.0}),
    }
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    monkeypatch.setattr(tables, "package_version", lambda: "9.9")
    monkeypatch.setattr(database, "compiled", lambda _config, _options, _system, server: handles[server])
    found = measured_tables(SHAPE, "H200", "vllm", 1)
    by_tokens = dict(zip(TOKENS, found.layers / 1e3, strict=True))
    mean = statistics.geometric_mean([4.0, 9.0])
    assert by_tokens[1] == pytest.approx(mean + 200), (
        "flat and 33 times the others; proj_gemm is flat for two tokens only"
    )
    assert by_tokens[16] == pytest.approx(16 * mean + 16 * 70)
    assert by_tokens[512] == pytest.approx(512 + 512 * 70), "longer than two launches: the kernel itself"
    assert found.experts[0] == 200e3, "four times the others, and no product"
    assert found.provenance["qkv_gemm"].startswith("launches of the host")
    assert found.provenance["proj_gemm"] == "silicon"
    monkeypatch.setitem(handles, "sglang", None)

    def compiled(_config, _options, _system, server):
        if server != "vllm":
            raise NotMeasured("no such rows")
        return handles[server]

    monkeypatch.setattr(database, "compiled", compiled)
    alone = measured_tables(SHAPE, "H200", "vllm", 2)
    assert alone.layers[0] == 400e3, "without another server nothing shows which part is a launch"


def test_experts_that_are_spread_over_a_rack_have_copies_and_exchange_tokens(tmp_path, monkeypatch):
    asked = []

    def compiled(_config, options, system, server, graph=None):
        asked.append((system, server, bool(graph)))
        if graph and options["moe_quant_mode"] == "nvfp4" and graph["enable_eplb"]:
            return Handle({"qkv_gemm": 1.0, "moe_overlap": 50.0, "moe_reduce_add": 2.0})
        return Handle({"qkv_gemm": 4.0, "moe_overlap": 500.0})

    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    monkeypatch.setattr(tables, "package_version", lambda: "9.9")
    monkeypatch.setattr(database, "compiled", compiled)
    wide, narrow, one_node = (
        measured_tables(SHAPE, gpu, "sglang", Parallelism(1, ranks, ranks, 72))
        for gpu, ranks in (("GB300", 32), ("GB300", 4), ("B200", 8))
    )
    assert (
        wide.experts[0] == 52e3 and wide.layers[0] == 4e3 and wide.source.endswith("experts with copies under trtllm")
    )
    assert wide.experts[-1] == 52e3 * TOKENS[-1] and narrow.experts[-1] == 500e3, "the price of a prompt in this test"
    assert narrow.experts[0] == one_node.experts[0] == 500e3
    assert asked == [
        ("gb300", "sglang", False),
        ("gb200", "trtllm", True),
        ("gb300", "sglang", False),
        ("b200_sxm", "sglang", False),
    ]
    monkeypatch.setattr(tables, "wide_experts", refuse)
    other = measured_tables(SHAPE, "GB200", "sglang", Parallelism(1, 32, 32, 72))
    assert other.experts[0] == 500e3, "sizes that were not timed so keep the usual graph"


def refuse(*_given):
    raise NotMeasured("no such sizes")


def test_tensorrt_llm_computes_mxfp4_experts_on_blackwell_with_activations_of_8_bits():
    shape = read_model_shape(GPT_OSS, "config.json", "gpt-oss-120b")

    def mode(system: str, server: str) -> str | None:
        return database.question(shape, system, server, Parallelism(1))[1].get("moe_quant_mode")

    assert shape.weight_dtype == "mxfp4"
    assert mode("b200_sxm", "trtllm") == mode("gb300", "trtllm") == "w4a8_mxfp4_mxfp8"
    assert mode("h200_sxm", "trtllm") is mode("b200_sxm", "vllm") is None, "as the database has the checkpoint"


def made_up_tables() -> KernelTables:
    """Tables whose entries are known functions of their places; attention has a knee, as caches have. No time is one
    that physics forbids."""
    rows, contexts = np.array(ROWS, float), np.array(CONTEXTS, float)
    per_row = 1e4 + 200.0 * np.minimum(contexts, KNEE) + 300.0 * np.maximum(contexts - KNEE, 0)
    decode = rows[:, None] * per_row
    return KernelTables(
        source="made up",
        layers=1e7 + 2e4 * np.array(TOKENS),
        comm=5.0 * np.array(TOKENS),
        lm_head=1e6 + 700.0 * np.array(TOKENS),
        decode=decode,
        verify=decode[:, None, :] * np.array(QUERIES, float)[None, :, None],
        prefill=np.array(CHUNKS, float)[:, None] * (1e5 + 100.0 * np.array(PASTS, float)),
        provenance={"attention": "silicon", "add_norm_1": "empirical"},
    )


@pytest.fixture
def forward():
    return MeasuredForward(ForwardCost(SHAPE, GPU, default_efficiency(GPU), 1), made_up_tables())


def test_times_between_the_points_of_a_grid(forward):
    assert forward.layers_ns(8) == 1e7 + 160e3
    assert forward.layers_ns(70) == pytest.approx(1e7 + 1400e3)  # between 64 and 72
    assert forward.layers_ns(20_000) == pytest.approx(1e7 + 400e6)  # beyond the last, its segment goes on
    assert forward.lm_head_ns(3) == 1_002_100 and forward.comm_ns(3) == 15
    assert forward.prefill_attention_ns([(48, 128), (16, 0)]) == pytest.approx(48 * 112_800 + 16 * 100_000)


@pytest.mark.parametrize("rows", [1, 3, 64, 700])
@pytest.mark.parametrize("queries", [1, 2, 10])
def test_attention_is_two_lines_that_meet_at_the_knee(forward, rows, queries):
    line = forward.decode_attention(rows, queries, 0)
    for context in (0, 100, KNEE, 5000):
        kv, cap = rows * context, rows * forward.knee
        expected = queries * rows * (1e4 + 200.0 * min(context, KNEE) + 300.0 * max(context - KNEE, 0))
        assert line.base_ns + line.slope_ns * kv + line.window_slope_ns * min(kv, cap) == pytest.approx(expected)


def test_a_round_is_made_of_the_tables():
    draft = eagle3_head(SHAPE)
    cost = RoundCost(SHAPE, GPU, 1, draft, tables=made_up_tables(), draft_tables=made_up_tables())
    parts = cost.decode_parts(4, RoundShape.chain(3), 4 * 100)
    assert parts["verify"] == 10_320_000 and parts["lm_head"] == 1_000_000 + 700 * 16
    assert parts["attention"] == 4 * 4 * (10_000 + 200 * 100)
    assert parts["draft"] >= 2 * 1_000_000  # two passes after the catch-up's drafts
    assert sum(parts.values()) == cost.decode_ns(4, RoundShape.chain(3), 4 * 100)
    sources = [row[3] for row in cost.explain() if row[0].startswith("kernels")]
    assert sources and set(sources) == {"made up"}


def test_tokens_that_share_experts_save_of_the_experts_alone():
    sparse = lookup_model("qwen3-30b-a3b")
    experts = 2e7 + 1e6 * np.minimum(np.array(TOKENS), 200) + 2e4 * np.array(TOKENS)
    made_up = replace(made_up_tables(), experts=experts)
    forward = MeasuredForward(ForwardCost(sparse, GPU, default_efficiency(GPU), 1), made_up)
    assert (
        forward.layers_ns(8) == forward.layers_ns(8, ExpertRouting(8, 8.0)) == pytest.approx(1e7 + 160e3 + experts[7])
    )
    assert forward.layers_ns(8, ExpertRouting(8, 3.0)) == pytest.approx(1e7 + 160e3 + experts[2])
    assert forward.layers_ns(8, ExpertRouting(8, 2.5)) == pytest.approx(1e7 + 160e3 + (experts[1] + experts[2]) / 2)
    few, every = (forward.layers_ns(16384, ExpertRouting(16384, tokens)) for tokens in (1.0, 16384.0))
    assert few == pytest.approx(every), "16,384 tokens are computed, whatever they read"
    dense = MeasuredForward(ForwardCost(SHAPE, GPU, default_efficiency(GPU), 1), made_up_tables())
    assert dense.layers_ns(8, ExpertRouting(8, 3.0)) == 1e7 + 160e3


def test_a_look_up_is_in_the_nearest_rising_table():
    falling = np.array([1.0, 5.0, 3.0, 4.0, 9.0, 8.0, 1.0, 10.0])
    mean = statistics.geometric_mean
    assert _risen(falling) == pytest.approx([1, *[mean([5, 3])] * 2, 4, *[mean([9, 8, 1])] * 3, 10])
    noisy = np.random.default_rng(1).lognormal(0, 1, (6, 7, 8))
    rising = _risen(noisy)
    for axis in range(3):
        assert (np.diff(rising, axis=axis) >= -1e-12).all()
    assert np.log(rising).mean() == pytest.approx(np.log(noisy).mean()), "work is neither cheaper nor dearer over all"
    already = np.multiply.outer([1.0, 2.0, 2.0], [0.0, 3.0])
    assert _risen(already) is already


def test_only_physics_raises_a_measured_time_and_the_sources_say_where(forward):
    assert not [row for row in forward.explain() if row[0].startswith("times raised: layers")]
    made_up, limits = made_up_tables(), PhysicalLimits(SHAPE, GPU, Parallelism(1))
    least = [limits.layers_ns(tokens, tokens, has_mixers=True) for tokens in (1, 512)]
    weights = SHAPE.parameters - 2 * SHAPE.vocab * SHAPE.hidden  # without norms in the limits
    assert least[0] == pytest.approx(2 * weights / GPU.memory_bandwidth_bytes_per_s * 1e9, rel=1e-3)
    assert least[1] == pytest.approx(2 * weights * 512 / GPU.flops("bf16") * 1e9, rel=1e-3)
    cached = replace(made_up, layers=np.linspace(least[0] / 2, 1e9, len(TOKENS)), prefill=made_up.prefill / 1e3)
    low = MeasuredForward(ForwardCost(SHAPE, GPU, default_efficiency(GPU), 1), cached)
    assert low.layers_ns(1) == least[0] and low.layers_ns(16384) == 1e9
    for chunk in ((16, 65536), (100_000, 0)):
        assert low.prefill_attention_ns([chunk]) == limits.prompt_ns(*chunk)
    rows = {row[0]: row for row in low.explain()}
    assert rows["times raised: layers"][1] == f"1 of {len(TOKENS)}"
    assert "bytes over bandwidth" in rows["times raised: attention of a prompt"][3]


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
    for count, damage in enumerate((wrong_version_of_zip, wrong_header_of_array, with_hole, with_missing_row), 4):
        damage(max((tmp_path / "kernels").iterdir(), key=lambda file: file.stat().st_size))
        again = measured_tables(SHAPE, "H200", "sglang", 1)
        assert len(asked) == count
        assert all(np.array_equal(getattr(first, name), getattr(again, name)) for name in tables._ARRAYS)


def wrong_version_of_zip(path: Path):
    content = bytearray(path.read_bytes())
    content[content.rindex(b"PK\x01\x02") + 6] = 255  # the version that is needed to extract, which is 2.0
    path.write_bytes(content)


def wrong_header_of_array(path: Path):
    rewrite(path, lambda name, content: content.replace(b"'shape': ()", b"'shape': (,") if name == "about" else content)


def with_hole(path: Path):
    replace_array(path, "decode", lambda table: np.where(table == table[2, 2], np.nan, table))


def with_missing_row(path: Path):
    replace_array(path, "layers", lambda table: table[1:])


def replace_array(path: Path, name: str, change: Callable[[np.ndarray], np.ndarray]):
    with np.load(path) as file:
        arrays = {key: file[key] for key in file.files}
    np.savez(path, **(arrays | {name: change(arrays[name])}))


def rewrite(path: Path, change: Callable[[str, bytes], bytes]):
    with ZipFile(path) as archive:
        contents = {entry: archive.read(entry) for entry in archive.namelist()}
    with ZipFile(path, "w") as archive:
        for entry, content in contents.items():
            archive.writestr(entry, change(entry.removesuffix(".npy"), content))


def test_a_database_with_holes_is_no_source_of_times(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    monkeypatch.setattr(tables, "package_version", lambda: "9.9")
    monkeypatch.setattr(database, "compiled", lambda *given: Handle({}))
    whole = made_up_tables()
    for devices, name, value in ((1, "prefill", np.nan), (2, "layers", np.inf), (4, "comm", -1.0)):
        holed = getattr(whole, name).copy()
        holed.flat[3] = value
        monkeypatch.setattr(tables, "_query", lambda *given, name=name, holed=holed: replace(whole, **{name: holed}))
        with pytest.raises(NotMeasured, match=f"no usable time at some points of '{name}'"):
            measured_tables(SHAPE, "H200", "sglang", devices)


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
        assert ("kernels of the target", "roofline") in [row[:2] for row in derived_rows(run)]
    assert packaged_models() == []
    assert install_command("measured") in timing_line(assemble(load_scenario(None, [])[0])), "one line says why"


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
        assert "passes priced by the roofline (llama-3.1-8b on H200 under sglang" in timing_line(run)
        assert "no such rows" in timing_line(run)
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
