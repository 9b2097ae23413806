"""STANDALONE keeps no hidden states on the draft's side: no tensor of that width that torch creates outlives its round.

The executor contract (ACCEPT-17) searches the executor's objects; here every tensor is watched, wherever it is kept.
The target's and the draft's hidden sizes are such that no other size of the run is equal to them.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from foredraft.core.adaptive import build_controller
from foredraft.core.contract.request import Request
from foredraft.core.prompt import Prompt
from foredraft.gpu.executor.build import relayed_hidden_size
from hostile_driver import Disturbance
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
    """Remembers, weakly, every floating tensor whose last axis has a hidden size;
    `kept` are those alive at a launch."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: list[weakref.ref] = []
        self.kept: list[torch.Size] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and is_hidden(tensor):
                self.hidden.append(weakref.ref(tensor))
        return out

    def watch(self, executor) -> None:
        real = executor.launch

        def launch(step):
            if any(ref() is not None for ref in self.hidden):
                gc.collect()
            self.kept += [tensor.shape for ref in self.hidden if (tensor := ref()) is not None]
            real(step)

        executor.launch = launch


def run(way: Way, adaptive: bool = False):
    def served(before):
        controller = build_controller("ema", ADAPTIVE) if adaptive else None
        options = {"target": small_model(0, **TARGET), "controller": controller, "before": before}
        return serve(way, requests(), disturbance=Disturbance(submit=50, retract=6), **options)

    served(lambda executor: None)  # the models are made, and packed, before the count begins
    created = Created()
    with created:
        return served(created.watch), created


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("shape", [{"steps": 3}, {"steps": 3, "topk": 3, "num_draft_tokens": 9}, None])
def test_nothing_of_a_hidden_size_is_kept(shape, overlap):
    config = {"overlap": overlap, "prefix_cache": True, "chunk_size": 5, "page_size": 4, "num_pages": 60}
    served, created = run(Way("STANDALONE", small_model(9, **DRAFT), shape, config), adaptive=shape is None)
    assert created.kept == [] and len(created.hidden) > 100, "the models did make hidden states"
    assert served.retractions > 0 and served.engine.controller.metrics().proposed_drafts


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
