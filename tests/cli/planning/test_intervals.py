"""Every command that prints simulated times says how far they may be off. What plan and tune print is in
the tests beside this one."""

import json

import pytest

SMALL = ("--set", "workload.num_requests=20")
ESTIMATE = ("bench", "--estimate", "H100", "--random-weights", "llama-3.1-8b", "--acceptance", "3.0", "--steps", "3")
COMMANDS = {
    "simulate": ("simulate", *SMALL),
    "simulate, a server": ("simulate", *SMALL, "--set", "hardware.server=vllm"),
    "doctor": ("doctor", *SMALL),
    "sweep": ("sweep", *SMALL, "--grid", "speculation.steps=3", "--seeds", "1", "--quiet"),
    "bench --estimate": (*ESTIMATE, "--batch-sizes", "1", "--context-lengths", "128"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_prints_times_prints_their_intervals(command, name, tmp_path):
    needs = {"bench --estimate": "torch"}
    if name in needs:
        pytest.importorskip(needs[name])
    out = ("--out", tmp_path / "sweep") if name == "sweep" else ()
    text = " ".join(command(*COMMANDS[name], *out).out.split())
    assert "80 % intervals" in text and "they rest on " in text, text
    if name != "sweep":
        assert '"intervals_rest_on": "n' in json.dumps(json.loads(command(*COMMANDS[name], "--json").out))
