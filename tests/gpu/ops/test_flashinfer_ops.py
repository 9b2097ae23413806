"""Operations by FlashInfer, with a stand-in for the library: every form of attention beside sums over one query at a
time, the sampler's filter beside its specification, and what FlashInfer lacks."""

from __future__ import annotations

import ast
import inspect
import os
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import flashinfer_stand_in as stand_in
import numpy as np
import pytest
import torch
from family_shapes import SHAPES
from flashinfer_stand_in import CALLS, module
from foredraft.core.errors import ConfigError
from foredraft.core.tree.verify import target_distribution
from foredraft.gpu.ops import flashinfer_ops
from foredraft.gpu.ops.flashinfer_ops import ATTENTION, FILTERS, FlashInferOps, lacking
from foredraft.gpu.ops.torch_ops import TorchOps
from foredraft.gpu.selftest import forward
from foredraft.gpu.selftest.batches import PagedBatch, decode_view, make_batch, random_tree_bits, softmaxes
from foredraft.gpu.selftest.forward import CPU_LAYOUTS, flashinfer_steps, forward_steps
from foredraft.gpu.selftest.steps import Context, State, run_step
from foredraft.gpu.session import devices
from foredraft.gpu.session.plan import plan_session
from foredraft.gpu.session.prompts import RequestDefaults, make_requests, read_prompts
from foredraft.gpu.session.session import DecodeSession, SessionOptions
from foredraft.gpu.session.text import Tokenizer
from foredraft.gpu.types.attention import E4M3, PLAIN, KVScales, Softmax
from foredraft.gpu.types.ops import KVTensors, Ops, Packing
from forward_cases import dense_decode, dense_extend, dense_verify
from small_checkpoint import write_target

D = 16
TOLERANCE = {torch.float64: 1e-12, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> FlashInferOps:
    """Operations beside which the stand-in computes small heads, in float64 too, which shows more."""
    monkeypatch.setattr(flashinfer_ops, "HEAD_DIMS", (D,))
    monkeypatch.setattr(flashinfer_ops, "DTYPES", tuple(TOLERANCE))
    CALLS.clear()
    return FlashInferOps(TorchOps(), module())


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    limit = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=limit, atol=limit)


def verify(ops: FlashInferOps | TorchOps, batch: PagedBatch, bits: torch.Tensor, softmax: Softmax, **bounds):
    return ops.verify_attention(batch.q, batch.k, batch.v, batch.kv, batch.tree(bits, **bounds), softmax)


def extend(ops: FlashInferOps | TorchOps, batch: PagedBatch, softmax: Softmax, **bounds):
    return ops.extend_attention(batch.q, batch.k, batch.v, batch.kv, batch.chunks(**bounds), softmax)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("number", range(6))
def test_every_softmax_of_every_attention_is_the_dense_one(ops: FlashInferOps, number: int, dtype: torch.dtype):
    softmax = [PLAIN, *softmaxes(4, dtype)][number]
    batch, bits = make_batch(3, [9, 0, 2], [5] * 3, d=D, dtype=dtype), random_tree_bits(4, 3, 5, padding=True)
    close(verify(ops, batch, bits, softmax), dense_verify(batch, bits, softmax))
    batch = make_batch(5, [7, 0, 3], [4, 6, 1], d=D, dtype=dtype)
    close(extend(ops, batch, softmax), dense_extend(batch, softmax))
    batch = make_batch(6, [9, 1, 4], [1] * 3, d=D, dtype=dtype)
    view = decode_view(batch, [8, 0, 3], [4, 0, 3], [5, 0, 0])
    close(ops.decode_attention(batch.q, batch.kv, view, softmax), dense_decode(batch, view, softmax))
    assert CALLS["run"] == CALLS["plan"] == (3 if softmax.window == 1 else 5)  # a window of 1 reaches no prefix


def test_bounds_that_are_not_exact_and_padding_change_nothing(ops: FlashInferOps):
    batch, bits = make_batch(7, [6, 3], [3] * 2, d=D), random_tree_bits(1, 2, 3)
    close(verify(ops, batch, bits, Softmax(window=4), max_prefix_len=20), dense_verify(batch, bits, Softmax(window=4)))
    more = replace(batch, q=torch.cat((batch.q, batch.q)), k=torch.cat((batch.k, batch.k)), v=torch.cat((batch.v,) * 2))
    found = extend(ops, more, PLAIN, max_prefix_len=20, max_new_len=9)
    close(found[:6], dense_extend(batch))
    assert found.shape == more.q.shape and found.isfinite().all()


def test_no_rows_and_no_prefixes_are_attended_to(ops: FlashInferOps):
    empty = make_batch(1, [], [], d=D)
    assert verify(ops, empty, torch.zeros(0, 3, dtype=torch.int64), PLAIN).shape == (0, 4, D)
    assert extend(ops, empty, PLAIN).shape == (0, 4, D)
    first = make_batch(1, [0], [3], d=D)
    close(extend(ops, first, PLAIN), dense_extend(first))
    view = decode_view(first, [0, 0, 0])
    view = replace(view, rows=first.rows.repeat(3))
    assert not ops.decode_attention(first.q, first.kv, view).any()


def test_a_packed_batch_has_the_results_of_its_nodes(ops: FlashInferOps):
    batch, bits = make_batch(8, [6, 3], [4] * 2, d=D), random_tree_bits(2, 2, 4)
    nodes = torch.tensor([0, 1, 2, 4])
    places = torch.full((8,), -1).scatter(0, nodes, torch.arange(4))
    packing, expected = Packing(nodes, places), dense_verify(batch, bits)[nodes]
    tree = replace(batch.tree(bits & 0b0111), packing=packing)
    kept = random_tree_bits(2, 2, 4) & 0b0111
    expected = dense_verify(batch, kept)[nodes]
    close(ops.verify_attention(batch.q[nodes], batch.k[nodes], batch.v[nodes], batch.kv, tree), expected)


def test_layers_of_a_pass_share_a_plan_until_a_tensor_changes(ops: FlashInferOps):
    batch, bits = make_batch(9, [6, 3], [3] * 2, d=D), random_tree_bits(3, 2, 3)
    tree = batch.tree(bits, 9)
    for _ in range(3):
        close(ops.verify_attention(batch.q, batch.k, batch.v, batch.kv, tree), dense_verify(batch, bits))
    assert (CALLS["plan"], CALLS["run"]) == (2, 6)
    batch.prefix_lens.sub_(1)
    close(ops.verify_attention(batch.q, batch.k, batch.v, batch.kv, tree), dense_verify(batch, bits))
    assert CALLS["plan"] == 4


def test_models_of_two_pools_do_not_take_each_others_plans(ops: FlashInferOps):
    """The new tokens of both are in 16 bits, and the pool of one in 8."""
    batches = [
        make_batch(seed, lens, [3] * len(lens), d=D, dtype=torch.float16) for seed, lens in ((1, [6]), (2, [3, 8]))
    ]
    batches[1] = replace(batches[1], k_pool=batches[1].k_pool.to(E4M3), v_pool=batches[1].v_pool.to(E4M3))
    trees = [batch.tree(random_tree_bits(3, len(batch.rows), 3)) for batch in batches]
    for _ in range(2):
        for batch, tree in zip(batches, trees, strict=True):
            there = replace(batch, k_pool=batch.k_pool.half(), v_pool=batch.v_pool.half())
            found = ops.verify_attention(batch.q, batch.k, batch.v, batch.kv, tree)
            close(found, dense_verify(there, tree.ancestor_bits))


def test_kv_in_8_bits_is_scaled_layer_by_layer_with_one_plan(ops: FlashInferOps):
    batch, bits = make_batch(9, [7, 2, 0], [4] * 3, d=D, dtype=torch.float16), random_tree_bits(1, 3, 4)
    batch = replace(batch, **{name: getattr(batch, name).to(E4M3) for name in ("k", "v", "k_pool", "v_pool")})
    exact = replace(batch, **{name: getattr(batch, name).double() for name in ("q", "k", "v", "k_pool", "v_pool")})
    for key, value in ((0.6, 1.7), (1.4, 0.5)):
        softmax = PLAIN.over(KVScales(key, value), batch.q)
        close(verify(ops, batch, bits, softmax), verify(TorchOps(), exact, bits, softmax))
        close(extend(ops, batch, softmax), extend(TorchOps(), exact, softmax))
    assert (CALLS["plan"], CALLS["run"]) == (4, 8)


# -- what FlashInfer lacks ---------------------------------------------------------------------------------------------


def test_other_forms_are_the_operations_beside_it(monkeypatch: pytest.MonkeyPatch):
    ops = FlashInferOps(TorchOps(), module())
    CALLS.clear()
    bits = random_tree_bits(1, 1, 3)
    for d, dtype, value_dim in ((80, torch.bfloat16, 80), (64, torch.float32, 64), (64, torch.bfloat16, 0)):
        batch = make_batch(2, [5], [3], d=d, dtype=dtype)
        batch = replace(batch, v=batch.v[..., :value_dim], v_pool=batch.v_pool[..., :value_dim])
        assert torch.equal(verify(ops, batch, bits, PLAIN), verify(TorchOps(), batch, bits, PLAIN))
        assert torch.equal(extend(ops, batch, PLAIN), extend(TorchOps(), batch, PLAIN))
        view = decode_view(batch, [5])
        kv = KVTensors(batch.k_pool, batch.v_pool)
        found = ops.decode_attention(batch.q[:1], kv, view)
        assert torch.equal(found, TorchOps().decode_attention(batch.q[:1], kv, view))
    assert not CALLS


def older_plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads): ...


@pytest.mark.parametrize(
    ("instead", "said"),
    [
        ({}, []),
        ({"top_p_renorm_probs": None}, ["top-k and top-p are not FlashInfer's: flashinfer 0.7.4 lacks top_p_renorm_probs"]),
        ({"__version__": "0.1", "BatchPrefillWithPagedKVCacheWrapper": None}, ["flashinfer 0.1 lacks BatchPrefill"]),
        (
            {"BatchPrefillWithPagedKVCacheWrapper": type("Wrapper", (stand_in.BatchPrefillWithPagedKVCacheWrapper,), {"plan": older_plan})},
            ["lacks BatchPrefillWithPagedKVCacheWrapper.plan(num_kv_heads=…), BatchPrefillWithPagedKVCacheWrapper.plan(head_dim_qk=…)"],
        ),
    ],
    ids=["all there", "no filter", "no attention", "an older plan"],
)  # fmt: skip
def test_a_version_that_lacks_a_call_is_named_and_not_called(instead: dict, said: list[str]):
    model = replace(SHAPES["llama"], head_dim=64)
    sentences = lacking(module(**instead), [model], torch.bfloat16)
    assert len(sentences) == len(said) and all(part in one for part, one in zip(said, sentences, strict=True))
    CALLS.clear()
    ops = FlashInferOps(TorchOps(), module(**instead))
    batch = make_batch(2, [5], [3], d=64, dtype=torch.bfloat16)
    close(extend(ops, batch, PLAIN), dense_extend(batch))
    logits, one = torch.randn(1, 9), torch.ones(1, dtype=torch.float64)
    ops.target_probs(logits, one, one / 2, torch.full((1,), 3))
    assert set(CALLS) == {"plan", "run", "top_k", "top_p"} - (
        {"plan", "run"} if "attention" in "".join(sentences) else {"top_k", "top_p"} if sentences else set()
    )


@pytest.mark.parametrize(
    ("model", "dtype", "said"),
    [
        (SHAPES["llama"], torch.bfloat16, f"attention over heads of {SHAPES['llama'].head_dim} channels is not FlashInfer's"),
        (SHAPES["deepseek_v3"], torch.float16, "attention over latent vectors is not FlashInfer's"),
        (SHAPES["llama"], torch.float32, "it has none in float32, only in float16 and bfloat16"),
    ],
    ids=["narrow heads", "latent", "float32"],
)  # fmt: skip
def test_what_a_model_does_without_is_said(model, dtype: torch.dtype, said: str):
    (sentence,) = lacking(module(), [model], dtype)
    assert said in sentence


# -- the sampler's filter ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ties", "many tokens", "equal probabilities of unequal logits"])
def test_the_filter_keeps_what_the_specification_keeps(ops: FlashInferOps, kind: str):
    rng, n = np.random.default_rng(5), 60
    vocab = 300 if kind == "many tokens" else 12
    logits = rng.choice(np.linspace(-4, 4, 17), (n, vocab)) if kind == "ties" else rng.normal(size=(n, vocab)) * 3
    if kind == "equal probabilities of unequal logits":
        logits = np.float64(np.float32(rng.choice([1.0, 1.0 + 2.0**-23, 1.0 + 2.0**-22, 0.0], (n, vocab))))
    logits[rng.random((n, vocab)) < 0.2] = -np.inf
    logits[0, 3], logits[1, 2], logits[2] = np.nan, np.inf, -np.inf
    temperature, top_p = rng.choice([0.0, 0.5, 1.0, 2.0], n), rng.choice([0.0, 0.1, 0.53, 0.91, 1.0], n)
    top_k = rng.choice([0, -1, 1, 2, 5, vocab, 500], n)
    expected = target_distribution(logits, temperature, top_p, top_k)
    given = [torch.from_numpy(x) for x in (temperature, top_p, top_k)]
    found = ops.target_probs(torch.from_numpy(logits).float(), *given)
    assert found.dtype == torch.float32 and CALLS["top_k"] == CALLS["top_p"] == 1
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=0)


def test_without_filters_and_in_float64_nothing_is_asked_of_flashinfer(ops: FlashInferOps):
    logits, one = torch.randn(3, 9), torch.ones(3, dtype=torch.float64)
    for values, top_p, filtered in ((logits, one, False), (logits, one, True), (logits.double(), one / 2, True)):
        given = (values, one, top_p, torch.zeros(3, dtype=torch.int64), filtered)
        assert torch.equal(ops.target_probs(*given), TorchOps().target_probs(*given))
    assert not CALLS


# -- whole sessions ----------------------------------------------------------------------------------------------------

LINES = [
    '{"tokens": [7, 5, 6, 7, 9], "max_tokens": 6}',
    '{"tokens": [5, 6, 7], "max_tokens": 9, "temperature": 1.0, "top_p": 0.9, "top_k": 40, "seed": 1}',
]


@pytest.mark.fast("gpt_oss-fp8", ci=("gemma2-auto", "gemma4-auto", "deepseek_v3-auto"))
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("label", ["llama", "gemma2", "gemma4", "gpt_oss", "ministral3", "deepseek_v3", "qwen3_next"])
def test_a_session_decodes_the_text_of_torch(
    label: str, kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The draft is the target itself, as a tree: prompts in chunks, decode and verify over pages of 4 with branches."""
    target = write_target(tmp_path, SHAPES[label])
    monkeypatch.setattr(flashinfer_ops, "HEAD_DIMS", {shape.key_dim for shape in SHAPES[label].kv_shapes})
    monkeypatch.setattr(flashinfer_ops, "DTYPES", (torch.float32,))
    requests = make_requests(read_prompts(LINES, "f"), Tokenizer.load(target), RequestDefaults(), "f")
    options = SessionOptions(
        target, draft=target, steps=2, topk=2, num_draft_tokens=4, page_size=4, chunk_size=4, dtype="float32",
        kv_dtype=kv_dtype,
    )  # fmt: skip

    def run(ops: TorchOps | FlashInferOps) -> tuple[dict, float]:
        monkeypatch.setattr(devices, "ops_for", lambda device, name: ops)
        session = DecodeSession.open(options)
        return session.run(requests), session.stats().accept_length

    expected = run(TorchOps())
    CALLS.clear()
    assert run(FlashInferOps(TorchOps(), module())) == expected
    assert {*CALLS} == ({"top_k", "top_p"} if label == "deepseek_v3" else {"plan", "run", "top_k", "top_p"})


# -- how it is chosen -------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", module())


@pytest.mark.usefixtures("installed")
def test_operations_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    kinds = {name: type(devices.ops_for(device, name)).__name__ for device, name in (
        ("cpu", "auto"), ("cpu", "torch"), ("cpu", "triton"), ("cuda", "flashinfer"),
    )}  # fmt: skip
    assert kinds == {"auto": "HostOps", "torch": "TorchOps", "triton": "TritonOps", "flashinfer": "FlashInferOps"}
    assert isinstance(devices.ops_for("cuda", "torch"), TorchOps)
    found = [devices.can_capture(name, "cuda") for name in ("auto", "triton", "torch", "flashinfer")]
    assert found == [True, True, False, False] and not devices.can_capture("triton", "cpu")


@pytest.mark.parametrize(
    ("device", "name", "said"),
    [
        ("cpu", "flashinfer", "ops: flashinfer needs an NVIDIA GPU; a CPU has auto, torch, and triton"),
        ("cpu", "triton", "ops: triton on a CPU is interpreted: set TRITON_INTERPRET=1, or name --device cuda"),
        ("cuda", "flashinfer", r"ops: flashinfer cannot be imported \(.*\): pip install .*flashinfer"),
        (
            "cuda",
            "flashinfr",
            r"ops: 'flashinfr' is none of auto, torch, triton, flashinfer \(did you mean 'flashinfer'",
        ),
    ],
)
def test_operations_that_are_not_there_are_refused(device: str, name: str, said: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # importing it fails
    with pytest.raises(ConfigError, match=said):
        devices.check_ops(name, device)


def test_interpreted_kernels_need_triton(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("foredraft.gpu.kernels.jit.triton", None)
    with pytest.raises(ConfigError, match="ops: triton needs Triton, which is not installed"):
        devices.check_ops("triton", "cpu")


@pytest.mark.usefixtures("installed")
def test_a_plan_says_what_runs_without_graphs_and_without_flashinfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = write_target(tmp_path, SHAPES["llama"])
    plan = plan_session(SessionOptions(target, device="cpu", dtype="float16", kv_tokens=200))
    assert plan.notices == ()
    plan = replace(plan, device="cuda", options=replace(plan.options, ops="flashinfer"))
    graphs, heads = plan.notices
    assert graphs == "rounds run without CUDA graphs: the operations flashinfer wait for the device"
    assert heads.startswith(f"attention over heads of {SHAPES['llama'].head_dim} channels is not FlashInfer's")
    assert replace(plan, options=replace(plan.options, ops="torch")).notices == (graphs.replace("flashinfer", "torch"),)


def test_graphs_of_operations_that_wait_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    options = SessionOptions(write_target(tmp_path, SHAPES["llama"]), device="cuda", ops="torch", graphs=True)
    with pytest.raises(ConfigError, match="graphs: the operations torch wait for the device; leave it out"):
        plan_session(options)


# -- the self-test -----------------------------------------------------------------------------------------------------


def run_steps(tmp_path: Path, ops: Ops | None = None) -> dict[str, tuple[State, str]]:
    """Run what the self-test does with FlashInfer, and the same steps with `ops`, at the sizes of a CPU."""
    context = Context("cpu", tmp_path)
    if ops is not None:
        context.made["ops"] = ops
    steps = [*flashinfer_steps(context), *(step for step in forward_steps(context) if "attention" in step.name)]
    outcomes = [run_step(step) for step in steps]
    return {f"{one.part}: {one.name}": (one.state, one.text) for one in outcomes}


@pytest.mark.usefixtures("installed")
def test_the_self_test_says_which_of_the_two_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(forward, "GPU_LAYOUTS", CPU_LAYOUTS)
    monkeypatch.setattr(flashinfer_ops, "HEAD_DIMS", (16,))
    CALLS.clear()
    assert {state for state, _ in run_steps(tmp_path).values()} == {State.PASSED}
    assert CALLS["run"] > 20 and CALLS["top_k"] and CALLS["top_p"]

    class Wrong(TorchOps):
        def verify_attention(self, q, *given):
            return super().verify_attention(q * 1.5, *given)

    found = run_steps(tmp_path, Wrong())
    assert {name for name, (state, _) in found.items() if state is State.FAILED} == {
        "kernels: verify attention, 4/2 heads of 16"
    }
    run = stand_in.BatchPrefillWithPagedKVCacheWrapper.run

    def wrong(self, q, *given, **named):
        return run(self, q * 1.5, *given, **named)

    monkeypatch.setattr(stand_in.BatchPrefillWithPagedKVCacheWrapper, "run", wrong)
    monkeypatch.setattr(flashinfer_ops, "missing_calls", lambda *given: [])
    found = run_steps(tmp_path)
    failed = {name.partition(":")[0] for name, (state, _) in found.items() if state is State.FAILED}
    assert failed == {"FlashInfer"} and found["FlashInfer: top-k and top-p"][0] is State.PASSED


@pytest.mark.parametrize(
    ("there", "said"), [(None, "flashinfer cannot be imported"), (module(top_k_renorm_probs=None), "lacks top_k")]
)
def test_the_self_test_runs_none_of_a_library_that_is_not_there(there, said, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", there)
    context = Context("cpu", tmp_path)
    outcomes = [run_step(step) for step in flashinfer_steps(context)]
    assert outcomes and all(one.state is State.NOT_RUN and said in one.text for one in outcomes)


# -- the library itself ------------------------------------------------------------------------------------------------


def parameters_of(source: str, name: str) -> dict[str, str | None]:
    """Return the parameters of the last function of this name in a module, with the texts of their defaults."""
    owner, _, method = name.rpartition(".")
    nodes = ast.parse(source).body
    if owner:
        nodes = next(node.body for node in nodes if isinstance(node, ast.ClassDef) and node.name == owner)
    given = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == method][-1].args
    defaults = [None] * (len(given.args) - len(given.defaults)) + [ast.unparse(one) for one in given.defaults]
    found = {one.arg: default for one, default in zip(given.args, defaults, strict=True)}
    named = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    return found | {one.arg: None if default is None else ast.unparse(default) for one, default in named}


@pytest.mark.slow
def test_the_stand_in_has_the_parameters_of_the_wheel():
    """The wheel is in the folder that FOREDRAFT_WHEELS names."""
    wheels = [*Path(os.environ.get("FOREDRAFT_WHEELS", ".")).glob("flashinfer_python-0.7.4-*.whl")]
    if not wheels:
        pytest.skip("no wheel of flashinfer-python 0.7.4 in FOREDRAFT_WHEELS")
    with zipfile.ZipFile(wheels[0]) as wheel:
        prefill, sampling, front = (
            wheel.read(f"flashinfer/{name}.py").decode() for name in ("prefill", "sampling", "__init__")
        )
    own = inspect.getsource(stand_in)
    for name in (*ATTENTION, *FILTERS):
        source, full = (sampling, name) if name in FILTERS else (prefill, name if "." in name else f"{name}.__init__")
        assert parameters_of(own, full) == parameters_of(source, full), name
        assert {*(ATTENTION | FILTERS)[name]} <= parameters_of(source, full).keys()
        assert f"{name.partition('.')[0]} as" in front
