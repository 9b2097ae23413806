"""The clients that `make clients` installs: the document names each with its version, and none brings a torch."""

from __future__ import annotations

import json
import re
from pathlib import Path

import environments
import pytest
from environments import CLIENTS, HEAVY, ROOT, Client, NotInstalled, make


def test_the_document_names_each_client_with_its_version():
    text = (ROOT / "docs/serve.md").read_text(encoding="utf-8")
    table = text.partition("<!-- clients -->")[2].partition("<!-- end -->")[0]
    shown = dict(re.findall(r"^\| `([\w-]+)(?:\[\w+\])?` ([\d.]+) \|", table, re.MULTILINE))
    assert shown == dict(re.sub(r"\[\w+\]", "", client.requirement).split("==") for client in CLIENTS.values())
    assert all((ROOT / client.tests[0]).exists() for client in CLIENTS.values())


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_of_a_server_only_the_wheel_is_downloaded(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    commands: list[list[str]] = []

    def output(command: list[str]) -> str:
        commands.append(command)
        return json.dumps({"install": [{"metadata": {"name": "aiohttp", "version": "3"}}]})

    monkeypatch.setattr(environments, "ROOT", tmp_path)
    monkeypatch.setattr(environments, "_output", output)
    python, client = make(name, CLIENTS[name]), CLIENTS[name]
    assert make(name, client) == python and len(commands) == 3, "a second time nothing is made"
    asked, installed, downloaded = commands
    assert client.requirement not in asked and asked[-len(client.needs) :] == list(client.needs)
    assert installed[-2:] == ["--no-deps", "aiohttp==3"]
    assert "download" in downloaded and "--no-deps" in downloaded and downloaded[-1] == client.requirement


def test_a_client_that_would_bring_a_torch_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    commands: list[list[str]] = []

    def output(command: list[str]) -> str:
        commands.append(command)
        return json.dumps({"install": [{"metadata": {"name": name, "version": "1"}} for name in ("aiohttp", "torch")]})

    monkeypatch.setattr(environments, "ROOT", tmp_path)
    monkeypatch.setattr(environments, "_output", output)
    with pytest.raises(NotInstalled, match="torch 1"):
        make("x", Client("x==1", ()))
    assert len(commands) == 1 and "--dry-run" in commands[0]
    heavy = ("torch", "torchvision", "triton", "nvidia-cublas-cu12")
    assert all(map(HEAVY.fullmatch, heavy)) and not any(
        map(HEAVY.fullmatch, ("nvidia-ml-py", "tritonclient", "pytorch-x"))
    )
