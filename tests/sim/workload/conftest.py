"""A file of a test."""

import pytest


@pytest.fixture
def write(tmp_path):
    """`write(text, name)` writes a file into the directory of the test. Returns its path."""

    def write(text, name="trace"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write
