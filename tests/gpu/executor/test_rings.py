"""The KV of windowed layers in rings: as many tokens as a window sees, and the same outputs as in pages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from family_shapes import SHAPES
from foredraft.core.contract.request import Request, SamplingParams
from foredraft.core.errors import ConfigError, InvariantViolation
from foredraft.core.prompt import Prompt
from foredraft.gpu.batch.pools import Rings
from foredraft.gpu.disaggregation.session import plan_disaggregated
from foredraft.gpu.disaggregation.topology import WorkerCounts
from foredraft.gpu.executor.build import build_executor
from foredraft.gpu.executor.parts import ExecutorOptions
from foredraft.gpu.session.devices import ops_for
from foredraft.gpu.session.plan import NO_PREFIX_IN_RINGS, SessionOptions, plan_session
from foredraft.gpu.session.session import DecodeSession, load_models
from kinds_of_drafts import DRAFTS, ITSELF, unequal_rows
from small_checkpoint import VOCAB_SIZE, write_head, write_target

WINDOWED = ["gemma3", *(pytest.param(label, marks=pytest.mark.slow) for label in ("gemma2", "gpt_oss", "olmo3"))]
CHUNK, MAX_TOKENS = 8, 60


def options_for(model: Path, window_kv: str, **options) -> SessionOptions:
    usual = {"dtype": "float64", "device": "cpu", "debug": True, "chunk_size": CHUNK, "max_running": 3, "threads": 1}
    return SessionOptions(model, window_kv=window_kv, context_len=160, **{**usual, **options})


def requests() -> list[Request]:
    """More than run together, prompts of many chunks, texts that go around a ring several times."""
    tokens = (np.arange(60) * 37 + 5) % VOCAB_SIZE
    sampled = SamplingParams(temperature=0.9, top_p=0.9, seed=5)
    return [
        Request(f"r{i}", Prompt.of_tokens(tokens[i : i + length]), MAX_TOKENS, sampling=sampling)
        for i, (length, sampling) in enumerate([(1, None), (45, None), (7, sampled), (30, None), (59, sampled)])
        for sampling in [sampling or SamplingParams()]
    ]


def served(options: SessionOptions, row_lengths=None) -> tuple[dict[str, list[int]], DecodeSession]:
    session = DecodeSession.open(options)
    if row_lengths is not None:
        session.engine.rounds.row_lengths = row_lengths
    return {key: list(map(int, output.tokens)) for key, output in session.run(requests()).items()}, session


@pytest.fixture(scope="module", params=WINDOWED)
def windowed(request, tmp_path_factory) -> Path:
    return write_target(tmp_path_factory.mktemp(request.param), SHAPES[request.param])


FAST = ("none", ITSELF)


@pytest.mark.fast("gemma3-overlap-none", ci="*")
@pytest.mark.parametrize(
    "name", [x if x in FAST else pytest.param(x, marks=pytest.mark.slow) for x in ("none", *DRAFTS)]
)
@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True], ids=["synchronous", "overlap"])
def test_rings_give_the_outputs_of_pages(windowed, name, overlap, tmp_path):
    drafts = {"algorithm": "NONE"} if name == "none" else dict(DRAFTS[name])
    if name.startswith("itself"):
        drafts["draft"] = windowed
    elif name.startswith("EAGLE"):
        drafts["draft"] = write_head(tmp_path, name)
    pages, _ = served(options_for(windowed, "paged", overlap=overlap, **drafts))
    rings, session = served(options_for(windowed, "ring", overlap=overlap, **drafts))
    assert rings == pages and all(len(tokens) == MAX_TOKENS for tokens in pages.values())
    shorter, _ = served(options_for(windowed, "ring", overlap=overlap, **drafts), unequal_rows)
    # What a sampled row emits depends on its drafts, whatever it is drawn from.
    differing = {key for key, tokens in pages.items() if shorter[key] != tokens}
    assert differing <= {"r2", "r4"}, "rows of unequal lengths"
    pool = session.own_executor.pool
    assert pool.rings.length < 60, "texts go around it"
    assert pool.all_ringed.keys.any() and pool.all_layers.keys.any(), "both hold KV"
    assert NO_PREFIX_IN_RINGS in session.plan.notices


@pytest.mark.ci
def test_a_ring_that_is_too_short_changes_the_outputs(tmp_path, monkeypatch):
    """The comparison notices it: a chunk overwrites what its first tokens see."""
    model = write_target(tmp_path, SHAPES["gemma3"])
    pages, _ = served(options_for(model, "paged", algorithm="NONE", debug=False))
    real = Rings.of

    def short(*given):
        rings = real(*given)
        return replace(rings, length=rings.length - 3)

    monkeypatch.setattr(Rings, "of", short)
    rings, _ = served(options_for(model, "ring", algorithm="NONE", debug=False))
    assert rings != pages


def test_the_memory_is_that_of_a_window(tmp_path):
    model = write_target(tmp_path, SHAPES["gemma3"])
    pools = {}
    for kind in ("paged", "ring"):
        session = DecodeSession.open(options_for(model, kind, algorithm="NONE", kv_tokens=2000))
        pools[kind] = session.own_executor.pool
        assert session.plan.kv_bytes == sum(tensor.nbytes for tensor in pools[kind].all_layers)
    config, pool = SHAPES["gemma3"], pools["ring"]
    windows = len(config.windowed_layers)
    assert (
        pools["paged"].num_bytes * (config.num_layers - windows)
        == sum(t.nbytes for t in pool.all_layers) * config.num_layers
    )
    assert pool.all_ringed.keys.shape[:2] == (windows, 1 + 3 * (config.window - 1 + CHUNK))
    table = pool.rings.table(torch.device("cpu")).numpy()
    assert not table[0].any() and len(np.unique(table)) == pool.rings.num_slots
    assert (table[1:, pool.rings.length :] == table[1:, : -pool.rings.length]).all()


def test_what_has_no_rings_is_refused(tmp_path):
    plain = write_target(tmp_path / "plain")
    windowed = write_target(tmp_path / "windowed", SHAPES["gemma3"])
    with pytest.raises(ConfigError, match="the model has no windowed layers beside others"):
        plan_session(options_for(plain, "ring"))
    with pytest.raises(ConfigError, match=r"'rings' is none of paged, ring \(did you mean 'ring'"):
        plan_session(options_for(windowed, "rings"))
    with pytest.raises(ConfigError, match="workers hand whole KV on"):
        plan_disaggregated(options_for(windowed, "ring"), WorkerCounts(1, 1))
    plan = plan_session(options_for(windowed, "paged", algorithm="NONE"))
    target, _ = load_models(plan, ops_for("cpu"))
    engine = plan.spec.with_config(num_pages=20).make_engine(lambda event: None)
    with pytest.raises(ConfigError, match="a ring keeps no prefix for other requests"):
        build_executor(engine, target, None, ops_for("cpu"), ExecutorOptions(in_rings=True))


def test_a_write_outside_a_ring_is_found(tmp_path):
    session = DecodeSession.open(options_for(write_target(tmp_path, SHAPES["gemma3"]), "ring", algorithm="NONE"))
    session.own_executor.pool.ring_table[1, 2] = session.own_executor.pool.rings.num_slots
    with pytest.raises(InvariantViolation, match="ALLOC-11"):
        session.run(requests())
