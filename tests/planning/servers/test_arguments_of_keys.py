"""Every key of a scenario names the arguments of servers that it is read from, and nothing else does."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest
from foredraft.planning.servers import command
from foredraft.planning.servers.command import Given, flags_of


@pytest.mark.parametrize("server", ["sglang", "vllm", "trtllm"])
def test_every_key_names_arguments_that_its_server_reads(server):
    module, written = importlib.import_module(f"foredraft.planning.servers.{server}"), set()
    for key, flags in flags_of(server):
        if flags.by:
            assert callable(getattr(module, f"_{flags.by}")), (key, flags.by)
            continue
        (name,) = flags.names  # has the value of the key, as it is
        assert callable(getattr(Given(""), flags.read)), key
        written.add(name.partition(" ")[0])
    source = inspect.getsource(module) + inspect.getsource(command)
    readers = {f"_{flags.by}" for _, flags in flags_of(server) if flags.by}
    assert all(re.search(rf"\b{reader}[,()]", source[source.index("def read(") :]) for reader in readers)
    named = {usage.partition(" ")[0] for _, flags in flags_of(server) for usage in flags.names}
    assert {name for name, known in module.SERVER.known.items() if known.reason == ""} == named
    own = {name: name.removeprefix("speculative-") for name in named - written}
    unread = [name for name, rest in own.items() if not re.search(rf'"(speculative-)?{rest}"', source)]
    assert not unread, "each argument is read somewhere"
