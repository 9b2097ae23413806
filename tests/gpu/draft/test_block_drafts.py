"""What block drafters propose in real decode is what their published tensors say when they are read by hand: with
chunks, pages, cached prefixes, retraction, overlap and every accepted length between."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cells import MatrixCell
from foredraft.gpu.models.checkpoint import new_head
from foredraft.gpu.models.heads.block import MarkovHead
from heads_by_hand import BlockByHand
from matrix_cells import block_config, sharpened, small_model
from test_drafts_dense import serve_watched

WINDOWS = {"windowed_layers": (0,), "window": 3}
FORMS = {
    "DFLASH": ("DFLASH", {}, {}),
    "DFLASH from its anchor, scaled": (
        "DFLASH",
        {"samples_anchor": True, "input_scale": 1.5, "logit_softcap": 2.0},
        {},
    ),
    "DFLASH, a causal window": ("DFLASH", {}, WINDOWS),
    "DFLASH, a window over the whole block": ("DFLASH", {"windows_are_causal": False}, WINDOWS),
    "DFLASH, causal": ("DFLASH", {"is_causal": True}, WINDOWS),
    "DFLASH2": ("DFLASH2", {}, {}),
    "DSPARK": ("DSPARK", {}, {}),
    "DSPARK from the first mask": ("DSPARK", {"samples_anchor": False, "has_confidence": False}, {}),
    "DSPARK gated": ("DSPARK", {"markov_head": "gated"}, {}),
    "DSPARK rnn": ("DSPARK", {"markov_head": "rnn"}, {}),
    "DSPARK without a Markov head": ("DSPARK", {"markov_rank": 0, "confidence_with_markov": False}, {}),
}


def block_of(form: str, seed: int):
    algorithm, parts, layers = FORMS[form]
    return sharpened(new_head(block_config(algorithm, parts, **layers), small_model(seed)), seed)


def by_hand(head, target) -> BlockByHand:
    tensors = {weight.name: weight.published() for weight in head.checkpoint_weights()}
    return BlockByHand(tensors, head.config.to_dict(), target.embed_weight, target.output_embedding)


@pytest.mark.fast("DFLASH", ci=["DFLASH2", "DSPARK", "DFLASH, a window over the whole block"])
@pytest.mark.parametrize("form", FORMS)
def test_proposals_are_those_of_the_published_tensors(form):
    common = {"algorithm": FORMS[form][0], "chunk_size": 3, "prefixes": "shared", "page_size": 4}
    cells = [
        MatrixCell(**common, mode="overlap", steps=4, multi_step_rounds=3, pool="tight", disturbance="retract", seed=5),
        MatrixCell(**common, mode="overlap", steps=3, multi_step_rounds=2, drafts="simulated", seed=2),
    ]
    watched = []
    for cell in cells:
        head, target = block_of(form, cell.seed % 3), small_model(cell.seed % 3)
        watched.append(serve_watched(cell, head, by_hand(head, target).drafts))
    counts = {
        name: sum(getattr(watcher, name) for watcher, _ in watched)
        for name in ("proposals", "cached", "partly", "fully")
    }
    assert counts["proposals"] > 50 and min(counts.values()) > 3 and watched[0][1] > 3, (counts, watched[0][1])


def test_confidences_are_those_of_the_confidence_head():
    head = block_of("DSPARK", 0)
    assert isinstance(head, MarkovHead)
    hidden = torch.randn(2, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    roots, drafts = torch.tensor([4, 5]), torch.tensor([[1, 2, 3], [6, 7, 8]])
    tensors = {weight.name: weight.published() for weight in head.checkpoint_weights()}
    before = tensors["markov_head.markov_w1.weight"][torch.tensor([[4, 1, 2], [5, 6, 7]])]
    logits = torch.cat((hidden, before), -1) @ tensors["confidence_head.proj.weight"][0]
    wanted = (logits + tensors["confidence_head.proj.bias"]).sigmoid()
    np.testing.assert_allclose(head.confidences(hidden, roots, drafts), wanted, rtol=1e-12)
    assert head.confidences(hidden, roots, drafts).std() > 0
