"""STANDALONE keeps no hidden states on the draft's side: not in a buffer, not in a relay cell, not between rounds.

The target's hidden size is one that no other size of the run is equal to. Whatever tensor of that width is alive between two steps, other
than the target's own weights, is found: by walking the executor's objects, and by watching every tensor that torch creates.
"""

from __future__ import annotations

import gc
import types
import weakref
from collections import deque
from dataclasses import fields, is_dataclass

import pytest
import torch
from foretoken.checks.driver import Disturbance
from foretoken.core.adaptive import build_controller
from foretoken.core.contract.hidden import CaptureHiddenMode, ForwardPhase
from foretoken.core.contract.request import Request
from foretoken.core.prompt import Prompt
from foretoken.gpu.executor.build import relayed_hidden_size
from foretoken.gpu.executor.executor import TorchExecutor
from foretoken.gpu.executor.round import DecodeRound
from matrix_cells import small_config, small_head, small_model
from serving import Way, serve
from torch.utils._python_dispatch import TorchDispatchMode

HIDDEN = 44  # of the target; its projections are 16 + 2 · 8 and 2 · 24 wide
DRAFT_HIDDEN = 52
TARGET = {"hidden_size": HIDDEN}
DRAFT = {"hidden_size": DRAFT_HIDDEN, "num_layers": 1}
ADAPTIVE = {"1": {"candidate_steps": [0, 1, 3], "ema_alpha": 0.5, "update_interval": 2, "warmup_batches": 1}}


def requests() -> list[Request]:
    stem = list(range(1, 13))
    return [
        Request(f"r{i}", Prompt.of_tokens(stem + [(i + j) % 24 for j in range(1 + 2 * i)]), 14 + i) for i in range(6)
    ]


def is_hidden(tensor: torch.Tensor) -> bool:
    return bool(tensor.ndim) and tensor.shape[-1] in (HIDDEN, DRAFT_HIDDEN)


class Created(TorchDispatchMode):
    """Remembers, weakly, every floating tensor with a last axis of a hidden size, and the sizes of all that were created."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: list[weakref.ref] = []
        self.num_tensors = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.num_tensors += 1
                if is_hidden(tensor):
                    self.hidden.append(weakref.ref(tensor))
        return out

    def alive(self) -> list[torch.Size]:
        if any(ref() is not None for ref in self.hidden):
            gc.collect()
        return [tensor.shape for ref in self.hidden if (tensor := ref()) is not None]


OPAQUE = (str, bytes, int, float, bool, type, types.ModuleType, torch.nn.Module, torch.dtype, torch.device)


def tensors_under(root: object) -> dict[str, torch.Tensor]:
    """All tensors that an object graph reaches, models aside, by path."""
    found, seen, stack = {}, {}, [("executor", root)]
    while stack:
        path, value = stack.pop()
        if value is None or isinstance(value, OPAQUE) or id(value) in seen:
            continue
        seen[id(value)] = value  # kept, so that no other object gets its id
        if isinstance(value, torch.Tensor):
            found[path] = value
        elif isinstance(value, dict):
            stack += [(f"{path}[{key!r}]", item) for key, item in value.items()]
        elif isinstance(value, types.FunctionType | types.MethodType):
            cells = getattr(value, "__closure__", None) or ()
            stack += [(f"{path}.<cell>", cell.cell_contents) for cell in cells]
            stack.append((f"{path}.__self__", getattr(value, "__self__", None)))
        elif isinstance(value, list | tuple | set | frozenset | deque):
            stack += [(f"{path}[{i}]", item) for i, item in enumerate(value)]
        elif is_dataclass(value):
            stack += [(f"{path}.{field.name}", getattr(value, field.name, None)) for field in fields(value)]
        else:
            stack += [(f"{path}.{name}", item) for name, item in getattr(value, "__dict__", {}).items()]
    return found


class Walked:
    """Looks at an executor at every launch: between rounds."""

    def __init__(self, created: Created | None = None) -> None:
        self.paths: dict[str, torch.Size] = {}
        self.num_tensors = self.num_looks = 0
        self.kept: list[torch.Size] = []
        self._created = created

    def __call__(self, executor: TorchExecutor) -> None:
        self.executor = executor
        real = executor.launch

        def launch(step):
            self.look()
            real(step)

        executor.launch = launch

    def look(self) -> None:
        found = tensors_under({k: v for k, v in vars(self.executor).items() if k != "launch"})
        self.num_looks += 1
        self.num_tensors = max(self.num_tensors, len(found))
        self.paths |= {path: tensor.shape for path, tensor in found.items() if is_hidden(tensor)}
        if self._created is not None:
            self.kept += self._created.alive()


def run(way: Way, watch: Walked, adaptive: bool = False, num_requests: int = 6):
    controller = build_controller("ema", ADAPTIVE) if adaptive else None
    return serve(
        way,
        requests()[:num_requests],
        target=small_model(0, **TARGET),
        disturbance=Disturbance(submit=50, retract=6),
        controller=controller,
        before=watch,
    )


@pytest.mark.slow  # with every test the executor contract looks for them (ACCEPT-17), in the same walk
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("shape", ["chain", "tree", "adaptive"])
def test_nothing_of_a_hidden_size_is_kept(shape, overlap):
    shapes = {"chain": {"steps": 3}, "tree": {"steps": 3, "topk": 3, "num_draft_tokens": 9}, "adaptive": None}
    config = {"overlap": overlap, "prefix_cache": True, "chunk_size": 5, "page_size": 4, "num_pages": 60}
    way = Way("STANDALONE", small_model(9, **DRAFT), shapes[shape], config)
    run(way, Walked(), adaptive=shape == "adaptive")  # the models are made, and packed, before the count begins
    created = Created()
    watch = Walked(created)
    with created:
        served = run(way, watch, adaptive=shape == "adaptive")
    assert watch.paths == {} and watch.kept == []
    # Not for want of looking: the models did make hidden states, the walk did find the pools and the relay.
    assert len(created.hidden) > 100 and watch.num_tensors > 10 and watch.num_looks > 10
    assert served.retractions > 0 and served.executor.counters.drafted > 0
    assert [field.name for field in served.executor.future_map.fields] == [
        "bonus_tokens",
        "topk_probabilities",
        "topk_ids",
    ]


@pytest.mark.slow
def test_one_that_is_kept_is_found(monkeypatch):
    """The tests above see what they are there to see: here the round hides the last hidden state in a closure."""
    real = DecodeRound._verify_forward

    def keeping(self, *arguments):
        out = real(self, *arguments)
        self._ops.kept = lambda: out
        return out

    monkeypatch.setattr(DecodeRound, "_verify_forward", keeping)
    created = Created()
    watch = Walked(created)
    with created:
        run(Way("STANDALONE", small_model(9, **DRAFT), {"steps": 3}), watch, num_requests=1)
    assert any("kept" in path and path.endswith("hidden") for path in watch.paths)
    assert any(shape[-1] == HIDDEN for shape in watch.kept)


def test_the_same_walk_finds_the_hidden_states_of_heads():
    """A positive control: EAGLE keeps what STANDALONE must not."""
    target, head = small_model(0), small_head(0, "EAGLE")
    assert target.hidden_size == head.hidden_size == 16
    found = {}

    def look(executor):
        found.update(tensors_under(vars(executor)))

    serve(Way("EAGLE", head, {"steps": 2}), requests(), before=look)
    relayed = [path for path, tensor in found.items() if tensor.shape == (5, 16) and "buffers" in path]
    assert len(relayed) == 1


def test_capture_is_off_at_every_producer():
    served = serve(
        Way("STANDALONE", small_model(9, **DRAFT), {"steps": 2}), requests(), target=small_model(0, **TARGET)
    )
    algorithm, draft = served.engine.algorithm, served.executor.draft
    assert not algorithm.needs_hidden_states and not draft.wants_hidden and draft.aux_layers == ()
    assert {algorithm.capture_hidden_mode(phase) for phase in ForwardPhase} == {CaptureHiddenMode.NULL}


def test_the_saving(record_property):
    """Relay cells of one row: bonus token, length, top-k; and, for heads, the hidden state in float32."""
    bytes_of = {}
    for name, draft in (("STANDALONE", small_model(0)), ("EAGLE", small_head(0, "EAGLE"))):
        served = serve(Way(name, draft, {"steps": 2}), requests()[:1])
        bytes_of[name] = served.executor.relay_storage.num_bytes
        size = relayed_hidden_size(served.engine.algorithm.drafter, draft)
        assert size == (0 if name == "STANDALONE" else small_config().hidden_size)
    rows = served.engine.config.max_running + 1
    saved = bytes_of["EAGLE"] - bytes_of["STANDALONE"]
    record_property(
        "note", f"relay: {bytes_of['EAGLE'] // rows} bytes per row with EAGLE, {saved // rows} fewer with STANDALONE"
    )
    assert saved == rows * small_config().hidden_size * 4
    assert bytes_of["STANDALONE"] == rows * (8 + 8 + 4 + 8)
