"""The draft of a command: layers of the target's own checkpoint, and block drafters, whose files say what they are.

Drafting with own layers is multi-token prediction (MTP), which SGLang calls EAGLE or NEXTN.
A checkpoint with one such layer drafts with it step after step, as EAGLE's head does, on every server. One with several
layers drafts with one for each step.
"""

from __future__ import annotations

from ...core.errors import ForedraftError
from ...core.model_shape import block_kind, most_block_drafts, prediction_layers
from ...core.parsing import read_json_object
from ...observe.input_files import read_text
from ...sim.assembly.models import model_shape
from ...sim.cost.draft import BLOCK_DRAFTERS, P_EAGLE, PARD
from ...sim.cost.measured.model_files import find_model_files
from .command import Given

WITH_OWN_LAYERS = ("EAGLE", "MULTI_LAYER_EAGLE")
"""The algorithms whose draft may be layers of the target's checkpoint."""
WITH_DRAFT = ("STANDALONE", "EAGLE3", PARD, P_EAGLE, *BLOCK_DRAFTERS, *WITH_OWN_LAYERS)
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


def block_drafter(draft: str, usual: str) -> tuple[str, int]:
    """Return the algorithm of a block drafter and the drafts of its trained block (0: not known), by its file.

    Without a file the name decides between DFlash and DFlash2, which servers call alike. `usual`: the algorithm that
    the command names.
    """
    files = find_model_files(draft) if draft else None
    if files is None or not files.config.is_file():
        return ("DFLASH2" if usual == "DFLASH" and "dflash2" in draft.lower() else usual), 0
    config = read_json_object(str(files.config), read_text, of_checkpoint=True)
    kind = block_kind(config)
    return (kind if usual == "DFLASH" and kind == "DFLASH2" else usual), most_block_drafts(config)
