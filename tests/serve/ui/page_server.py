"""`foredraft ui` as a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

STARTS_S = 60.0
ENVIRONMENT = {**os.environ, "FOREDRAFT_KERNELS": "roofline"}
"""Answers do not depend on which kernels are measured here."""


@dataclass
class PageServer:
    process: subprocess.Popen[str]
    address: str
    http: httpx.Client = field(repr=False)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(f"/api/{path}", json={"given": {}, "batch": 8, "context": None, **body})

    def group(self) -> list[int]:
        """Return the processes of the server, itself among them, and those that they have started."""
        children = {}
        for place in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = place.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                children.setdefault(int(fields[1]), []).append(int(place.parent.name))
        found = [self.process.pid]
        for one in found:
            found += children.get(one, [])
        return found


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds: float = 30.0, what: str = "") -> None:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, f"waited in vain {what}"
        time.sleep(0.02)


@contextmanager
def page_server(folder: Path, *arguments: str) -> Iterator[PageServer]:
    log = folder / "messages.txt"
    command = [sys.executable, "-m", "foredraft.cli", "ui", "--port", "0", *arguments]
    with log.open("w") as messages:
        process = subprocess.Popen(command, stderr=messages, env=ENVIRONMENT, text=True, cwd=folder)
    try:
        wait_until(lambda: "page is at" in log.read_text() or process.poll() is not None, STARTS_S, log.read_text())
        assert process.poll() is None, log.read_text()
        address = log.read_text().partition("page is at ")[2].split()[0]
        with httpx.Client(base_url=address, timeout=120) as client:
            yield PageServer(process, address, client)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
