"""Kernels under Triton's interpreter. It is chosen when Triton is imported, for the whole process:
`test_interpreted.py` runs these files in processes of their own, with TRITON_INTERPRET=1. Elsewhere they are not
collected, and one that is named is refused."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]

    def pytest_collect_file(file_path):
        if file_path.match("test_*.py"):
            raise pytest.Collector.CollectError(f"{file_path.name} runs interpreted kernels: set TRITON_INTERPRET=1")
