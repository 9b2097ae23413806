"""`foredraft serve` as a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOREDRAFT = [sys.executable, "-m", "foredraft.cli"]
WITHOUT_EXTRAS = (
    "import sys; sys.modules |= dict.fromkeys(('torch', 'pyarrow')); from foredraft.cli.__main__ import main; main()"
)
"""A simulated server needs neither torch nor what comes with it, and no tables."""
SMALL = ["--set", "engine.max_running=8", "--set", "hardware.graph_sizes=[1,2,4,8]", "--set", "engine.kv_slots=20000"]


@contextmanager
def serve(tmp_path: Path, *arguments: str, model: Path | None = None) -> Iterator[tuple[subprocess.Popen, str, Path]]:
    """Start a server of `model`, or of a small simulated service;
    yields its process, its address and the file of its messages."""
    log = tmp_path / "messages.txt"
    scenario = tmp_path / "scenario.toml"
    scenario.write_text("")
    with log.open("w") as messages:
        command = [sys.executable, "-c", WITHOUT_EXTRAS, "serve", "--simulate", str(scenario), *SMALL]
        if model is not None:
            command = [*FOREDRAFT, "serve", "--model", str(model)]
        command += ["--port", "0", *arguments]
        process = subprocess.Popen(command, stderr=messages)
        try:
            address = wait_for(log, "served on ", process).split()[0].rstrip('"}')
            yield process, address, log
        finally:
            process.kill()
            process.wait()


def wait_for(log: Path, words: str, process: subprocess.Popen) -> str:
    """Return what follows `words` in a message, once it is there."""
    begin = time.monotonic()
    while words not in (text := log.read_text()):
        assert process.poll() is None and time.monotonic() - begin < 300, text
        time.sleep(0.02)
    return text.rpartition(words)[2]


def recorded(directory: Path) -> list[Path]:
    """Return the folders of a record, one for each start, in their order."""
    return sorted(directory.iterdir())
