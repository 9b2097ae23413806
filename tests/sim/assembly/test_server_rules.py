"""The rules of servers: what docs/servers.md says, what a run has, and what `--explain` prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from foredraft.core.scheduler.rules import ServerRules, settings_of
from foredraft.core.scheduler.rules.admission_state import PauseEnd
from foredraft.sim.assembly import assemble
from foredraft.sim.assembly.explaining import derived_rows, timing_line
from foredraft.sim.cost.server import NEWEST, PROFILES, server_profile
from foredraft.sim.scenario_file import load_scenario

PAGE = Path(__file__).parents[3] / "docs" / "servers.md"
COLUMNS = {"foredraft": 1, "vllm-0.18": 2, "trtllm-1.x": 3, "sglang-0.5": 4}


def rules_of(server: str, pattern: str) -> dict[str, str]:
    """The column of a server in the first two tables of the page, by the names in the heads of rows."""
    lines = PAGE.read_text().partition("## SGLang")[0].splitlines()
    rows = [line.split("|")[1:-1] for line in lines if line.startswith("| `")]
    return {
        key: row[COLUMNS[server]].split(";")[0].strip().replace(",", "")
        for row in rows
        if " with " not in row[0]
        for key in re.findall(pattern, row[0])
    }


@pytest.mark.parametrize("server", COLUMNS)
def test_the_page_has_the_rules_that_a_run_follows_and_explain_prints(server: str):
    run = assemble(load_scenario(None, [f"hardware.server={server}", "hardware.kernels=roofline"])[0])
    told = {name.removeprefix("engine: "): (value, source) for name, value, _, source in derived_rows(run)}
    keys, rules = rules_of(server, r"`engine\.(\w+)`"), run.spec.config.rules
    assert set(settings_of(rules)) <= set(keys)
    for key, said in keys.items():
        if said == "–":  # without effect under this server
            assert key not in settings_of(rules) or key == "watermark"
            continue
        value = getattr(rules if key in settings_of(rules) else run.spec.config, key)
        assert said == (
            "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value).lower()
        ), key
        if key != "mode" and value is not None:
            assert told[key] == (str(value).lower() if isinstance(value, bool) else value, f"default of {server}")


@pytest.mark.parametrize("server", COLUMNS)
def test_the_page_has_the_constants_of_the_rules(server: str):
    rules, said = server_profile(server).rules, rules_of(server, r"`(\w+)`")
    constants = {name for name, value in vars(ServerRules).items() if isinstance(value, bool | PauseEnd)} | {"name"}
    assert set(said) == constants
    for name, shown in said.items():
        value = getattr(rules, name)
        assert shown == (
            value.value if isinstance(value, PauseEnd) else str(value).lower() if name != "name" else value
        )


def test_explain_says_whose_rule_it_is_and_why_a_batch_is_small():
    def told(*settings: str) -> dict[str, tuple[object, str]]:
        run = assemble(load_scenario(None, ["hardware.kernels=roofline", *settings])[0])
        return {name: (value, source) for name, value, _, source in derived_rows(run)}

    drafts = told("hardware.server=sglang-0.5", "engine.retraction_policy=priority")
    assert drafts["engine: max_running"] == (48, "default of sglang-0.5 on H100")
    assert drafts["engine: rules"] == ("sglang", "those of sglang-0.5")
    assert drafts["engine: retraction_policy"] == ("priority", "scenario")
    assert drafts["engine: guarantee_rounds"] == (600, "default of sglang-0.5")
    small = told("hardware.server=vllm-0.18")["engine: max_running"]
    assert small == (1023, "default of vllm-0.18 on H100 (1,024), within engine.max_step_tokens")


@pytest.mark.parametrize(("server", "profile"), [*NEWEST.items(), ("vLLM", "vllm-0.18"), ("vllm-0.9", "vllm-0.9")])
def test_the_name_of_a_server_is_its_newest_profile(server: str, profile: str):
    run = assemble(load_scenario(None, [f"hardware.server={server}", "hardware.kernels=roofline"])[0])
    assert run.scenario.hardware.server == run.deployment.server.name == profile


def test_the_page_has_the_releases_of_every_profile():
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines()]
    told = {row[0]: (row[1], row[2]) for row in rows if len(row) == 4 and row[0] in PROFILES}
    assert told == {name: (one.rules_release, one.times_release) for name, one in PROFILES.items()}


def test_a_run_says_the_release_of_the_rules_and_that_of_the_times():
    settings = ["hardware.server=vllm-0.18", "hardware.kernels=roofline"]
    line = timing_line(assemble(load_scenario(None, settings)[0]))
    assert line.startswith("Timing of vllm-0.18 (hardware.server; rules of 0.33, times of 0.18), batches of up to ")
    assert timing_line(assemble(load_scenario(None, [])[0])).startswith("Timing of foredraft (hardware.server), ")
