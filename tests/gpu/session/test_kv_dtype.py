"""KV in 8-bit floats: the tokens are those of a dense pass over keys and values that were rounded one by one, with any
draft, chunk and page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from family_shapes import SHAPES
from foredraft.core.contract.request import Request
from foredraft.core.errors import ConfigError
from foredraft.core.prompt import Prompt
from foredraft.gpu.disaggregation.session import DisaggregatedSession, plan_disaggregated
from foredraft.gpu.disaggregation.topology import WorkerCounts
from foredraft.gpu.disaggregation.workers import Workers
from foredraft.gpu.kernels.layers.e4m3 import to_e4m3
from foredraft.gpu.models.checkpoint import load_target
from foredraft.gpu.models.stored.tensor_files import SINGLE, CheckpointError
from foredraft.gpu.ops.torch_ops import TorchOps
from foredraft.gpu.session.memory import FP8
from foredraft.gpu.session.plan import SessionOptions, plan_session
from foredraft.gpu.session.session import DecodeSession
from foredraft.gpu.tiny.dense import DenseAttention
from foredraft.gpu.types.attention import E4M3, UNSCALED, KVScales, Softmax
from kinds_of_drafts import DRAFTS
from safetensors.torch import load_file, save_file
from small_checkpoint import VOCAB_SIZE, write_head, write_standalone, write_target
from torch import Tensor

SCALES = [KVScales(0.25 + layer / 8, 1.5 - layer / 4) for layer in range(4)]
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor"}


class RoundedAttention(DenseAttention):
    """Attention of a whole text over rotated keys, and values, that were rounded by the format's definition."""

    def __init__(self, length: int, scales: list[KVScales] | None) -> None:
        super().__init__([length])
        self._scales = scales
        self._layer = 0
        self.saturated = 0

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, softmax: Softmax) -> Tensor:
        self._layer = layer
        return super().attend(layer, q, k, v, cos_sin, replace(softmax))  # no default, so it is written out

    def _written_out(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        scales = UNSCALED if self._scales is None else self._scales[self._layer]
        return super()._written_out(q, self._rounded(k, scales.key), self._rounded(v, scales.value), softmax)

    def _rounded(self, x: Tensor, scale: float) -> Tensor:
        self.saturated += int((x.abs() > 448 * scale).sum())
        x = (x / scale).clamp(-448, 448)
        unit = 2.0 ** (x.abs().log2().floor().clamp(min=-6) - 3)
        return (x / unit).round() * unit * scale


def write_scales(directory: Path, named: dict[str, Tensor], scheme: dict = SCHEME) -> Path:
    """Add tensors to a checkpoint, and to its configuration that KV was calibrated."""
    save_file(load_file(directory / SINGLE) | named, directory / SINGLE)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": scheme,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def scales_of(names: tuple[str, str], scales: list[KVScales] = SCALES) -> dict[str, Tensor]:
    return {
        f"model.layers.{layer}.self_attn.{name}": torch.tensor(value)
        for layer, both in enumerate(scales)
        for name, value in zip(names, both, strict=True)
    }


def options_for(model: Path, **options) -> SessionOptions:
    usual = {"dtype": "float64", "device": "cpu", "debug": True, "kv_dtype": FP8, "max_running": 3, "threads": 1}
    return SessionOptions(model, **{**usual, **options})


def requests() -> list[Request]:
    tokens = (np.arange(60) * 37 + 5) % VOCAB_SIZE
    return [Request(f"r{i}", Prompt.of_tokens(tokens[i : i + n]), 20) for i, n in enumerate((1, 45, 7, 30))]


def served(options: SessionOptions) -> tuple[dict[str, list[int]], DecodeSession]:
    session = DecodeSession.open(options)
    return {key: list(map(int, output.tokens)) for key, output in session.run(requests()).items()}, session


def expected_of(model: Path, found: dict[str, list[int]], scales: list[KVScales] | None) -> tuple[dict, int]:
    """What a dense pass over each text chooses after its prompt and every token, and how many values were too great."""
    decoder, expected, saturated = load_target(model, TorchOps(), dtype=torch.float64), {}, 0
    for request in requests():
        text = torch.tensor([*request.prompt.tokens, *found[request.request_id]])
        attention = RoundedAttention(len(text), scales)
        with torch.no_grad():
            logits = decoder.logits(decoder.forward(text, attention).hidden)
        expected[request.request_id] = logits[request.prompt.length - 1 : -1].argmax(-1).tolist()
        saturated += attention.saturated
    return expected, saturated


FAST = ("llama", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_5")


@pytest.mark.ci
@pytest.mark.parametrize(
    "label", [label if label in FAST else pytest.param(label, marks=pytest.mark.slow) for label in SHAPES]
)
def test_every_family_and_every_draft_attends_to_rounded_values(label: str, tmp_path: Path):
    target = write_target(tmp_path / "target", SHAPES[label])
    plain, session = served(options_for(target, algorithm="NONE", chunk_size=4))
    pools = session.own_executor.pool
    assert pools.keys.dtype is pools.values.dtype is E4M3 and pools.on_host is None
    expected, _ = expected_of(target, plain, None)
    assert plain == expected
    full, _ = served(options_for(target, algorithm="NONE", kv_dtype="auto"))
    # The small Gemma 4 says one token again and again.
    assert full != plain or label == "gemma4", "rounding changes no token: the comparison would not notice it"
    for number, (name, options) in enumerate(DRAFTS.items()):
        draft = {"draft": target} if name.startswith("itself") else {}
        if name.startswith("EAGLE"):
            draft = {"draft": write_head(tmp_path / name, name)}
        sizes = {"chunk_size": (64, 7)[number % 2], "page_size": (1, 4)[number % 2], "overlap": number % 3 == 0 or None}
        same, session = served(options_for(target, **{**options, **draft, **sizes}))
        assert same == plain, name
        if name != "look-up":
            assert session.own_executor.draft_pool.keys.dtype is E4M3


NAMES = [
    ("k_scale", "v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("attn.k_scale", "attn.v_scale"),
]


@pytest.mark.fast("*k_proj.k_scale*", ci="*")
@pytest.mark.parametrize("names", NAMES, ids=str)
def test_scales_of_a_checkpoint(names: tuple[str, str], tmp_path: Path):
    target = write_scales(write_target(tmp_path / "target"), scales_of(names))
    plain, session = served(options_for(target, algorithm="NONE", chunk_size=4))
    assert session.own_executor.pool.scales == tuple(SCALES)
    assert plain == expected_of(target, plain, SCALES)[0]
    draft = write_scales(write_standalone(tmp_path / "draft"), scales_of(names, [KVScales(3.0, 4.0)]))
    chain, session = served(options_for(target, draft=draft, steps=3))
    assert chain == plain and session.own_executor.draft_pool.scales == ((3.0, 4.0),)


def test_values_that_are_too_great_become_the_greatest(tmp_path: Path):
    """Scales of a thousandth, at which most values are."""
    small = [KVScales(2.0**-10, 2.0**-9)] * 4
    target = write_scales(write_target(tmp_path / "target"), scales_of(("k_scale", "v_scale"), small))
    plain, _ = served(options_for(target, algorithm="NONE"))
    expected, saturated = expected_of(target, plain, small)
    assert plain == expected and saturated > 1000


def test_one_scale_for_keys_and_values(tmp_path: Path):
    both = {f"model.layers.{i}.self_attn.kv_scale": torch.tensor([2.0 + i]) for i in range(4)}
    loaded = load_target(write_scales(write_target(tmp_path), both), TorchOps(), kv_dtype=E4M3)
    assert loaded.kv_scales == [(2.0 + i, 2.0 + i) for i in range(4)]


def test_a_latent_vector_has_the_scale_of_its_keys(tmp_path: Path):
    target = write_target(tmp_path, SHAPES["deepseek_v3"])
    target = write_scales(target, scales_of(("attn.k_scale", "attn.v_scale")))
    plain, session = served(options_for(target, algorithm="NONE"))
    scales = [KVScales(key, key) for key, _ in SCALES]
    assert session.own_executor.pool.scales == tuple(scales)
    assert plain == expected_of(target, plain, scales)[0]


K = "model.layers.2.self_attn.k_scale"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({K: torch.tensor(torch.nan)}, r"layers\.2\.self_attn\.k_scale: expected a scale above 0, found nan"),
        ({K: torch.tensor(torch.inf)}, "expected a scale above 0, found inf"),
        ({K: torch.tensor(0.0)}, "expected a scale above 0, found 0"),
        ({K: torch.tensor(-0.5)}, "expected a scale above 0, found -0.5"),
        ({K: torch.ones(2)}, r"expected one number for all heads, found \[2\] of torch.float32"),
        ({K: torch.tensor([3])}, r"expected one number for all heads, found \[1\] of torch.int64"),
        ({K: torch.ones(1), K.replace("attn.k", "attn.k_proj.k"): torch.ones(1)}, "is the scale of its k, too"),
        ({K: torch.ones(1), K.replace("k_scale", "kv_scale"): torch.ones(1)}, "is the scale of its k, too"),
    ],
    ids=["nan", "inf", "zero", "negative", "shape", "integer", "twice", "twice in one"],
)
def test_a_wrong_scale_is_one_error(tensors: dict[str, Tensor], message: str, tmp_path: Path):
    target = write_scales(write_target(tmp_path), tensors)
    with pytest.raises(CheckpointError, match=message) as error:
        DecodeSession.open(options_for(target, algorithm="NONE"))
    assert len(error.value.problems) == 1
    DecodeSession.open(options_for(target, algorithm="NONE", kv_dtype="auto"))  # which reads no scale


def test_scales_of_another_format_are_refused(tmp_path: Path):
    target = write_scales(write_target(tmp_path), {K: torch.ones(1)}, {"num_bits": 4, "type": "float"})
    with pytest.raises(CheckpointError, match=r"k_scale: is a scale of another format of KV, \{'num_bits': 4"):
        DecodeSession.open(options_for(target, algorithm="NONE"))


def test_an_unknown_dtype_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"kv_dtype: 'fp6' is none of auto, fp8 \(did you mean 'fp8'"):
        plan_session(options_for(write_target(tmp_path), kv_dtype="fp6"))


@pytest.mark.parametrize("name", ["none", "small model", "EAGLE3"])
def test_the_same_memory_has_room_for_twice_the_tokens(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = write_target(tmp_path / "target")
    drafts = {"none": {"algorithm": "NONE"}, "small model": {"draft": write_standalone(tmp_path / "small")}}
    drafts["EAGLE3"] = {"draft": write_head(tmp_path / "EAGLE3", "EAGLE3")} if name == "EAGLE3" else {}
    monkeypatch.setattr("foredraft.gpu.session.memory.free_bytes", lambda device: 4 << 20)
    pages = {}
    for kv_dtype in ("auto", FP8):
        options = options_for(target, dtype="bfloat16", kv_dtype=kv_dtype, max_running=512, **drafts[name])
        session = DecodeSession.open(options)
        executor, pages[kv_dtype] = session.own_executor, session.plan.spec.config.num_pages
        pools = [pool for pool in (executor.pool, executor.draft_pool) if pool is not None]
        assert session.plan.kv_bytes == sum(pool.num_bytes for pool in pools), "what was planned is what is allocated"
    assert pages[FP8] == pytest.approx(2 * pages["auto"], abs=2) and pages["auto"] > 1000


def test_the_error_of_rounded_values(record_property):
    """Numbers of 8 bits are 2.7 % from normal ones, and what attends to 2,000 of them has 4.1 % of error (root mean
    squares)."""
    generator, rounded = torch.Generator().manual_seed(0), RoundedAttention(1, None)._rounded
    q, k, v = (torch.randn(2000, 64, dtype=torch.float64, generator=generator) for _ in range(3))

    def attend(k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.T / 8, -1) @ v

    exact, found = attend(k, v), attend(to_e4m3(k, 1.0).double(), to_e4m3(v, 1.0).double())
    assert torch.equal(to_e4m3(k, 1.0).double(), rounded(k, 1.0))
    of_keys, of_results = (float((a - b).norm() / a.norm()) for a, b in ((k, rounded(k, 1.0)), (exact, found)))
    record_property("note", f"E4M3: keys differ by {of_keys:.1%}, results of attention by {of_results:.1%}")
    assert round(of_keys, 3) == 0.027 and round(of_results, 3) == 0.041


def test_rings_keep_rounded_values(tmp_path: Path):
    target = write_target(tmp_path, SHAPES["gemma3"])
    pages, _ = served(options_for(target, chunk_size=8, prefix_cache=False))
    rings, session = served(options_for(target, chunk_size=8, window_kv="ring"))
    assert rings == pages and session.own_executor.pool.all_ringed.keys.dtype is E4M3


@pytest.mark.ci
@pytest.mark.xdist_group("ranks")
def test_ranks_keep_rounded_values(tmp_path: Path):
    """The parts of a divided model have the scales of the whole."""
    target = write_scales(write_target(tmp_path / "target"), scales_of(("k_scale", "v_scale")))
    head = write_head(tmp_path / "EAGLE3", "EAGLE3")
    plain, _ = served(options_for(target, algorithm="NONE"))
    divided, session = served(options_for(target, draft=head, steps=2, tensor_parallel=2))
    assert divided == plain
    session.close()


@pytest.mark.ci
@pytest.mark.xdist_group("nano pair")
def test_pages_travel_as_they_are_kept(tmp_path: Path):
    target = write_scales(write_target(tmp_path / "target"), scales_of(("k_scale", "v_scale")))
    plain, _ = served(options_for(target, algorithm="NONE"))
    one_each = WorkerCounts(1, 1)
    workers = Workers(one_each.workers(), one_each.devices("cpu"))
    try:
        plan = plan_disaggregated(options_for(target, draft=target, steps=2, page_size=4), one_each)
        session = DisaggregatedSession.open(plan, workers)
        assert {key: list(map(int, output.tokens)) for key, output in session.run(requests()).items()} == plain
    finally:
        workers.close()
