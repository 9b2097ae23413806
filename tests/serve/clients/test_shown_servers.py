"""docs/serve.md: every simulated server that it starts, and what its clients send to it, as they stand there."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import commands as documents
import pytest
from server_process import FOREDRAFT, wait_for

ROOT = Path(__file__).resolve().parents[3]
DOCUMENT = "docs/serve.md"
SERVER = "foredraft serve --simulate "
NEEDS_MODEL = "models/"
"""A part of the options that name a checkpoint, which a reader has and the tree has not."""


class Shown(NamedTuple):
    """A server of the document, and the commands of its clients: those below it, up to the next server."""

    line: int
    command: str
    clients: list[documents.Command]


def lines_of(code: str) -> list[str]:
    """Return the commands of a block without comments, each on one line."""
    joined = re.sub(r"\\\n\s*", "", code)
    return [line for line in joined.splitlines() if line and not line.startswith("#")]


def shown_in(text: str) -> list[Shown]:
    """Return all servers that a document shows. Of several in one block the last one has the clients."""
    found: list[Shown] = []
    for command in documents.commands_of(DOCUMENT, text):
        lines = lines_of(command.code) if command.program == documents.BASH else []
        servers = [line for line in lines if line.startswith(SERVER) and NEEDS_MODEL not in line]
        found += [Shown(command.line, line, []) for line in servers]
        is_of_client = command.program == documents.PYTHON or (lines and all(x.startswith("curl") for x in lines))
        if found and is_of_client:
            found[-1].clients.append(command)
    return found


SHOWN = shown_in((ROOT / DOCUMENT).read_text(encoding="utf-8"))


def test_servers_and_their_clients_are_found():
    page = f"```sh\n# one\n{SERVER}a.toml\n{SERVER}b.toml \\\n    --speed 2\n{SERVER}c --tokenizer models/x\n```\n"
    page += "\n```sh\ncurl http://127.0.0.1:8000/load\n```\n\n```sh\npip install x\n```\n"
    one, other = shown_in(page)
    assert (one.command, one.clients) == (f"{SERVER}a.toml", [])
    assert other.command == f"{SERVER}b.toml --speed 2" and [c.code[:4] for c in other.clients] == ["curl"]
    lines = (ROOT / DOCUMENT).read_text(encoding="utf-8").splitlines()
    without_model = [line for line in lines if line.startswith(SERVER) and NEEDS_MODEL not in line]
    assert len(SHOWN) == len(without_model) > 0 and any(shown.clients for shown in SHOWN)


def free_ports(numbers: list[str]) -> dict[str, str]:
    """Return a free port for each that the document names."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in numbers]
        return {number: str(each.getsockname()[1]) for number, each in zip(numbers, sockets, strict=True)}


@pytest.mark.readme
@pytest.mark.parametrize("shown", SHOWN, ids=lambda shown: f"{DOCUMENT}:{shown.line}")
def test_a_server_answers_as_the_document_shows(shown: Shown, tmp_path: Path):
    texts = " ".join([shown.command, *(client.code for client in shown.clients)])
    ports = free_ports(sorted({"8000", *re.findall(r"(?<=127\.0\.0\.1:)\d{4}|(?<=port )\d{4}|(?<=\*:)\d{4}", texts)}))

    def moved(text: str) -> str:
        return re.sub(r"\b(?:" + "|".join(ports) + r")\b", lambda found: ports[found[0]], text)

    log = tmp_path / "messages.txt"
    words = [word.strip("'") for word in moved(shown.command).split()][1:]
    if "--replica-ports" in words:
        pytest.importorskip("zmq", reason="needs the extra kv-events")
    with log.open("w") as messages:
        server = [*FOREDRAFT, *words, "--port", ports["8000"]]
        process = subprocess.Popen(server, stderr=messages, cwd=ROOT)
        try:
            wait_for(log, "served on ", process)
            for client in shown.clients:
                for code in [client.code] if client.program == documents.PYTHON else lines_of(client.code):
                    done = documents.run_here(replace(client, code=moved(code)), tmp_path)
                    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}\n{log.read_text()}"
                    assert done.stdout.strip(), f"{code}: no answer"
                    assert ('"error"' in done.stdout) == ("X-Fault: 503" in code), f"{code}\n{done.stdout}"
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()
