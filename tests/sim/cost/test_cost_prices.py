"""No impossible prices, by the judge of `checks/prices.py`: with the roofline, and with the measured kernels of every
model, GPU and server that has some. The judge itself finds planted defects."""

from __future__ import annotations

import pytest
from foredraft.checks.prices import impossible_prices
from foredraft.core.errors import ForedraftError
from foredraft.core.model_shape import lookup_model
from foredraft.sim.assembly import assemble
from foredraft.sim.cost.draft import eagle3_head
from foredraft.sim.cost.hardware import Parallelism, lookup_gpu
from foredraft.sim.cost.measured import NotMeasured, measured_tables, packaged_models, tables
from foredraft.sim.cost.measured.database import SERVERS, SYSTEMS
from foredraft.sim.cost.passes.curve import Line
from foredraft.sim.cost.passes.forward import ForwardCost
from foredraft.sim.cost.round import RoundCost
from foredraft.sim.cost.server import PROFILES
from foredraft.sim.scenario_file import load_scenario

KERNELS_OF = {"sglang": "sglang-0.5", "vllm": "vllm-0.18", "trtllm": "trtllm-1.x"}
SAMPLE = (
    ("meta-llama/Meta-Llama-3.1-8B", "L40S", "sglang", 1, 1),  # weights that stay in a cache
    ("deepseek-ai/DeepSeek-V4-Pro", "B200", "vllm", 8, 1),  # experts that were slower for one token than for eight
    ("Qwen/Qwen3-235B-A22B-FP8", "H200", "vllm", 4, 1),
    ("deepseek-ai/DeepSeek-R1", "H200", "trtllm", 1, 8),  # latent attention, data parallel
)


def round_cost(model: str, gpu: str, server: str, tp: int, data: int = 1, **changes: object) -> RoundCost:
    """Return the cost of a deployment, with a head of EAGLE-3, or without a draft where it has no measured kernels."""
    settings = [
        f"model.target={model}", "hardware.kernels=roofline", "engine.kv_slots=100000", "speculation.algorithm=NONE",
        f"hardware.gpu={gpu}", f"hardware.tensor_parallel={tp}", f"hardware.attention_data_parallel={data}",
    ]  # fmt: skip
    if model == "deepseek-ai/DeepSeek-V4-Pro":
        settings.append("model.kv_dtype=fp8")
    target = assemble(load_scenario(None, settings)[0]).target
    parallel = Parallelism(tp, data, tp * data if target.experts is not None else 1)
    profile = PROFILES[KERNELS_OF[server]]
    of_target = measured_tables(target, gpu, server, parallel)
    draft, of_draft = eagle3_head(target), None
    try:
        of_draft = measured_tables(draft.body, gpu, server, parallel.without_experts)
    except NotMeasured:
        draft = None
    given = {"launch": profile.launch, "graph_unit": profile.graph_unit, "tables": of_target, "draft_tables": of_draft}
    return RoundCost(target, lookup_gpu(gpu), parallel, draft, **given | changes)


@pytest.fixture(scope="module", autouse=True)
def _own_tables(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOREDRAFT_CACHE", str(tmp_path_factory.getbasetemp() / "kernels"))
        yield


@pytest.mark.fast("llama-3.1-8b-*", ci="*")
@pytest.mark.parametrize("server", PROFILES)
@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b"])
def test_the_roofline_has_no_impossible_prices(model, server):
    profile, target = PROFILES[server], lookup_model(model)
    launch = {"launch": profile.launch, "graph_unit": profile.graph_unit}
    cost = RoundCost(target, lookup_gpu("L40S"), 4, eagle3_head(target), **launch)
    assert not list(impossible_prices(cost))


@pytest.mark.xdist_group("kernel tables")  # one worker reads them from the database
@pytest.mark.fast("deployment1")
@pytest.mark.parametrize("deployment", SAMPLE)
def test_measured_kernels_have_no_impossible_prices(deployment):
    pytest.importorskip("aiconfigurator_core", reason="needs the extra measured")
    assert not list(impossible_prices(round_cost(*deployment)))


@pytest.mark.slow
@pytest.mark.xdist_group("kernel tables")
@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("gpu", SYSTEMS)
def test_no_measured_kernels_have_impossible_prices(gpu, server, record_property, monkeypatch):
    """Each model of the database on as few devices as hold its weights. Other servers are not asked: it takes long to
    read their databases for each model."""
    pytest.importorskip("aiconfigurator_core", reason="needs the extra measured")
    monkeypatch.setattr(tables, "_other_handles", lambda *_: [])
    judged, wrong = 0, {}
    for model in packaged_models():
        settings = [f"model.target={model}", "hardware.kernels=roofline", "engine.kv_slots=100000"]
        shape = assemble(load_scenario(None, [*settings, "speculation.algorithm=NONE"])[0]).target
        memory = 0.8 * lookup_gpu(gpu).memory_bytes
        tp = next((tp for tp in (1, 2, 4, 8) if shape.weight_bytes / tp < memory), 8)
        try:
            cost = round_cost(model, gpu, server, tp)
        except ForedraftError:  # no such kernels, or the model does not divide
            continue
        judged += 1
        found = list(impossible_prices(cost))
        if found:
            wrong[model] = [str(finding) for finding in (found[0], found[-1])]
    record_property("note", f"{gpu} under {server}: {judged} models judged")
    assert not wrong
    assert judged


class FreeOfSeveral(ForwardCost):
    """Reads a prefix faster for several tokens of a row."""

    def decode_attention(self, rows, queries_per_row, own_tokens, reads=1):
        line = super().decode_attention(rows, queries_per_row, own_tokens, reads)
        return Line(line.base_ns, line.slope_ns / queries_per_row, line.window_slope_ns)


class TooFast(ForwardCost):
    """Reads weights four times as fast as the memory."""

    def layers_ns(self, tokens, routing=None):
        return super().layers_ns(tokens, routing) / 4


class CheapLongPrompts(ForwardCost):
    """Computes the attention of a long prompt as that of a short one."""

    def prefill_attention_ns(self, chunks):
        return super().prefill_attention_ns([(new, past if new < 8192 else 0) for new, past in chunks])


class FallingRows(RoundCost):
    """A batch of 64 is as fast as one row."""

    def _curve(self, batch_size, shape, num_verified=None):
        return super()._curve(1 if batch_size == 64 else batch_size, shape, num_verified)


@pytest.mark.parametrize(
    ("planted", "rules"),
    [
        (FreeOfSeveral, {"verifying is no cheaper", "more steps take no less"}),
        (TooFast, {"bytes over bandwidth", "operations over peak"}),
        (CheapLongPrompts, {"more new tokens take no less"}),
        (FallingRows, {"more rows take no less"}),
    ],
)
def test_the_judge_finds_planted_prices(planted, rules):
    target = lookup_model("llama-3.1-8b")
    cost = RoundCost(target, lookup_gpu("H100"), 1, eagle3_head(target))
    if issubclass(planted, RoundCost):
        cost.__class__ = planted
    else:
        cost._target.__class__ = planted
    assert rules <= {finding.rule for finding in impossible_prices(cost)}
