"""The values that a decode worker gets with handed-over requests, and the input of their first drafts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ..errors import ForedraftError
from .arrays import Float32Array, Int32Array, Int64Array
from .hidden import CaptureHiddenMode


@dataclass(frozen=True, slots=True)
class HandoffBatch:
    """Requests that arrive at a decode worker with their prompt's KV, one row each; may be empty."""

    rows: Int32Array  # int32 [bs]
    epochs: Int64Array  # int64 [bs]
    request_ids: tuple[str, ...]
    seq_lens: Int64Array  # int64 [bs], KV-ready length
    probabilities: Float32Array | None  # float32 [bs, n]: of the first draft step's top-k
    token_ids: Int64Array | None  # int64 [bs, n]: of the first draft step's top-k
    hidden_states: tuple[np.ndarray | None, ...]  # per row float [H], or None
    hidden_size: int = 0
    relayed: Mapping[str, np.ndarray] = field(default_factory=dict)  # other relay fields by name, [bs, *shape_suffix]


@dataclass(frozen=True, slots=True)
class DraftInput:
    """The draft input of the first decode round of handed-over requests, for the rows that could be served."""

    rows: Int32Array  # int32 [n]
    bonus_tokens: Int64Array  # int64 [n]
    probabilities: Float32Array | None  # float32 [n, k]
    token_ids: Int64Array | None  # int64 [n, k]
    hidden_states: Float32Array | None  # float32 [n, H], None unless the algorithm needs them
    capture: CaptureHiddenMode
    failures: tuple[tuple[int, ForedraftError], ...] = ()  # (row, error): these requests fail, the others go on
    relayed: Mapping[str, np.ndarray] = field(default_factory=dict)  # the algorithm's own fields, [n, *shape_suffix]
