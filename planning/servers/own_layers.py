"""Drafting with layers of the target's own checkpoint: multi-token prediction (MTP), which SGLang calls EAGLE or NEXTN.

A checkpoint with one such layer drafts with it step after step, as EAGLE's head does, on every server. One with several
layers drafts with one for each step.
"""

from __future__ import annotations

from ...core.errors import ForedraftError
from ...core.model_shape import prediction_layers
from ...sim.assembly.models import model_shape
from .command import Given

WITH_DRAFT = ("STANDALONE", "EAGLE", "EAGLE3", "MULTI_LAYER_EAGLE")
"""The algorithms whose draft may be a checkpoint of its own."""


def own_layers(model: str) -> int:
    """Return how many layers of its own a model has to draft with; 0 if its configuration says none or is not known."""
    try:
        return prediction_layers(model_shape(model, "model.target"))
    except ForedraftError:
        return 0


def draft_with_own_layers(given: Given, steps: int) -> None:
    """Set the algorithm of a target that drafts up to `steps` tokens with layers of its own."""
    layers = own_layers(str(given.settings.get("model.target", "")))
    if layers > 1 and steps <= layers:
        given.settings |= {"speculation.algorithm": "MULTI_LAYER_EAGLE", "speculation.heads": layers}
    else:
        given.settings["speculation.algorithm"] = "EAGLE"
