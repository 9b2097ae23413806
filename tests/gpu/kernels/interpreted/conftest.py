"""Kernels under Triton's interpreter. It is chosen when Triton is imported, for the whole process:
`test_interpreted.py` runs these files in processes of their own, with TRITON_INTERPRET=1. Elsewhere they are not
collected."""

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
