"""NumPy arrays by the type of their elements, for signatures. Shapes are said where an array is declared."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

BoolArray = NDArray[np.bool_]
Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
UInt64Array = NDArray[np.uint64]
IntArray = NDArray[np.integer[Any]]
"""Integers of any width."""
Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]
FloatArray = NDArray[np.floating[Any]]
"""Floats of any width."""
