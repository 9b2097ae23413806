"""Kernels under Triton's interpreter. It is chosen when Triton is imported, for the whole process: `tests/gpu/test_interpreted.py` runs
these files in processes of their own, with TRITON_INTERPRET=1. Elsewhere they are not collected."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
