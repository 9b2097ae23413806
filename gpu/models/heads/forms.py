"""The class of each form of a head's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from ..eagle import DraftHead, Eagle3Head, EagleHead, MultiLayerEagleHeads, ParallelEagleHead
from .block import BlockHead, MarkovHead, WalkedHead
from .block_config import BLOCKS
from .config import EAGLE, EAGLE3, MULTI_LAYER_EAGLE, P_EAGLE

HEADS: Mapping[str, type[DraftHead]] = {
    EAGLE: EagleHead,
    EAGLE3: Eagle3Head,
    MULTI_LAYER_EAGLE: MultiLayerEagleHeads,
    P_EAGLE: ParallelEagleHead,
    **dict(zip(BLOCKS, (BlockHead, WalkedHead, MarkovHead), strict=True)),
}
