"""A process that runs the catalogue's steps: `python -m foretoken.gpu.selftest.worker DEVICE DIR FIRST`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from .catalogue import catalogue
from .context import Context
from .steps import serve_steps


def _is_spoilt(device: str) -> bool:
    """Return whether the device no longer answers: then everything in this process fails."""
    import torch

    if device == "cpu":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


if __name__ == "__main__":
    device, directory, first = sys.argv[1:]
    serve_steps(catalogue(Context(device, Path(directory))), int(first), lambda: _is_spoilt(device))
    sys.stderr.flush()
    os._exit(
        0
    )  # giving a spoilt device back may hang, or abort the process, which would be taken for the next step's death
