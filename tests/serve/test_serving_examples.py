"""examples/serving: the autoscaler's loop, and configurations that fit the command, its metrics and their schemas."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
import yaml
from foredraft.cli.app import app
from foredraft.serve.metrics.series import STYLES
from foredraft.sim.scenario_file import load_scenario

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "serving"


def _yaml(name: str) -> list[Any]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def autoscaler() -> ModuleType:
    spec = importlib.util.spec_from_file_location("autoscaler", EXAMPLES / "autoscaler.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["autoscaler"] = module  # dataclasses and forward references look there
    spec.loader.exec_module(module)
    return module


# -- the autoscaler ---------------------------------------------------------------------------------------------------


class _Servers:
    """A fleet whose load is given turn by turn; each server reports its share, and is ready in the turn after its
    start."""

    speed = 1e9
    num_open = 0

    def __init__(self, loads: list[float]) -> None:
        self.loads, self.servers, self.ready = loads, [object()], [self]
        self.seen: list[tuple[float, int]] = []

    def now_s(self) -> float:
        return float(len(self.seen))

    def refresh(self) -> None:
        self.ready = [self] * len(self.servers)

    def metric(self, name: str) -> float:
        share = {"foredraft:num_requests_running": 0.75, "foredraft:num_requests_waiting": 0.25}[name]
        return share * self.loads[len(self.seen)] / len(self.ready)

    def start(self) -> None:
        self.servers.append(object())

    def stop(self) -> None:
        self.servers.pop()

    def note(self, requests: float) -> None:
        self.seen.append((requests, len(self.servers)))


def test_the_loop_grows_at_once_and_shrinks_with_patience(autoscaler):
    loads = [3.0, 17.0, 50.0, 50.0, *[2.0] * 20, 1000.0]
    fleet = _Servers(loads)
    autoscaler.autoscale(fleet, until_s=len(loads))
    assert [round(requests, 6) for requests, _ in fleet.seen] == loads
    numbers = [number for _, number in fleet.seen]
    assert numbers[:4] == [1, 2, 4, 4]
    patience = round(autoscaler.PATIENCE_S / autoscaler.EVERY_S)
    assert numbers[4 : 3 + patience] == [4] * (patience - 1) and numbers[3 + patience] == 1
    assert numbers[-1] == autoscaler.MOST_SERVERS


@pytest.mark.slow
def test_the_autoscaler_holds_its_servers(tmp_path):
    """Every request is answered, also by servers that drain; the number of servers rises and falls."""
    command = [sys.executable, EXAMPLES / "autoscaler.py", "--minutes", "3", "--out", tmp_path]
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=550)
    turns = json.loads((tmp_path / "turns.json").read_text())
    running = [turn["running"] for turn in turns]
    assert running[0] == 1 < max(running) and running[-1] < max(running)
    assert all(now["ended"] <= later["ended"] for now, later in pairwise(turns))
    ended = re.search(r"% of (\d+) requests in the SLO", run.stdout.splitlines()[-1])[1]
    assert int(ended) >= turns[-1]["ended"] > 300


# -- configurations ---------------------------------------------------------------------------------------------------


def _check_arguments(arguments: list[str], scenario: str) -> dict[str, str]:
    """Check a command line without running it; return its options."""
    assert arguments[:2] == ["serve", "--simulate"]
    command = typer.main.get_command(app).commands["serve"]
    context = command.make_context("serve", [arg if arg != arguments[2] else scenario for arg in arguments[1:]])
    given = {**context.params}
    load_scenario(given["simulate"], ())
    return given


def test_the_compose_file_starts_a_server_that_prometheus_and_grafana_find(tmp_path):
    (compose,) = _yaml("compose.yaml")
    server, prometheus, grafana = (compose["services"][name] for name in ("server", "prometheus", "grafana"))
    mounted = {target: source for source, target, *_ in (one.split(":") for one in server["volumes"])}
    given = _check_arguments(server["command"], str(EXAMPLES / mounted[server["command"][2]]))
    (job,) = _yaml("prometheus/prometheus.yml")[0]["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"server:{given['port']}"]}]
    assert server["ports"] == [f"127.0.0.1:{given['port']}:{given['port']}"]
    assert int(server["stop_grace_period"].removesuffix("s")) > given["drain_s"]
    assert (EXAMPLES / server["build"] / "Dockerfile").is_file()
    for one in (*server["volumes"], *prometheus["volumes"], *grafana["volumes"]):
        assert (EXAMPLES / one.split(":")[0]).exists()
    inside = {one.split(":")[1] for one in grafana["volumes"]}
    (provider,) = _yaml("grafana/provider.yaml")[0]["providers"]
    assert any(path.startswith(provider["options"]["path"] + "/") for path in inside)
    (source,) = _yaml("grafana/datasource.yaml")[0]["datasources"]
    assert source["url"] == "http://prometheus:9090" and prometheus["ports"][0].endswith(":9090")


def test_the_rules_of_prometheus_ask_for_series_that_there_are():
    kinds = {f"{prefix}:{series.name}": series.kind for prefix, series in STYLES["foredraft"]}
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    names = {name + suffix for name, kind in kinds.items() for suffix in suffixes[kind]}
    (rules,) = _yaml("prometheus/rules.yml")
    asked = [re.findall(r"foredraft:\w+", rule["expr"]) for group in rules["groups"] for rule in group["rules"]]
    assert len(asked) == 4 and all(one and set(one) <= names for one in asked)


def test_the_manifests_of_kubernetes_fit_the_server(tmp_path):
    config, deployment, service = _yaml("kubernetes.yaml")
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    scenario = tmp_path / "scenario.toml"
    scenario.write_text(config["data"]["scenario.toml"])
    given = _check_arguments(container["args"], str(scenario))
    assert container["args"][2] == f"{container['volumeMounts'][0]['mountPath']}/{next(iter(config['data']))}"
    assert pod["spec"]["terminationGracePeriodSeconds"] > given["drain_s"]
    assert container["ports"] == [{"name": "http", "containerPort": given["port"]}]
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(given["port"])
    started = container["startupProbe"]
    assert started["periodSeconds"] * started["failureThreshold"] > given["start_s"]
    assert {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("readiness", "liveness")} == {
        "readiness": "/ready",
        "liveness": "/health",
    }
    labels = pod["metadata"]["labels"]
    assert service["spec"]["selector"] == labels == deployment["spec"]["selector"]["matchLabels"]
    assert pod["spec"]["volumes"][0]["configMap"]["name"] == config["metadata"]["name"]


def test_the_manifests_of_kubernetes_have_its_schema():
    checker = pytest.importorskip("kubernetes_validate", reason="a package of the extra dev")
    for part in _yaml("kubernetes.yaml"):
        checker.validate(part, checker.latest_version(), strict=True)
        wrong = {**part, "metadata": {**part["metadata"], "labels": 3}}
        with pytest.raises(checker.ValidationError):
            checker.validate(wrong, checker.latest_version(), strict=True)


def test_the_compose_file_has_its_schema(tmp_path):
    pytest.importorskip("check_jsonschema", reason="a package of the extra dev")
    wrong = tmp_path / "compose.yaml"
    wrong.write_text((EXAMPLES / "compose.yaml").read_text().replace("healthcheck:", "healthchecks:"))
    for file, code in ((EXAMPLES / "compose.yaml", 0), (wrong, 1)):
        command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", file]
        assert subprocess.run(command, capture_output=True, timeout=60).returncode == code
