"""A real Prometheus scrapes a server: its database has the series by their names, and what the shipped rules and
dashboard ask for has values."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from foredraft.serve.base.connections import bind
from foredraft.serve.metrics import ServerMetrics
from foredraft.serve.metrics.series import STYLES
from http_server import Served, serving, simulated_body, wait_until
from prometheus_client.parser import text_string_to_metric_families

EXAMPLES = Path(__file__).resolve().parents[3] / "examples/serving"
CONFIG = """
global: {{scrape_interval: 250ms, evaluation_interval: 250ms}}
rule_files: [{rules}]
scrape_configs: [{{job_name: foredraft, static_configs: [{{targets: ["{target}"]}}]}}]
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prometheus of this machine, else that of its Debian package, which is not installed."""
    if (found := shutil.which("prometheus")) is not None:
        return Path(found)
    folder = tmp_path_factory.mktemp("package")
    for command in (["apt-get", "download", "prometheus"], ["sh", "-c", "dpkg-deb -x prometheus_*.deb ."]):
        if shutil.which(command[0]) is None or subprocess.run(command, cwd=folder, capture_output=True).returncode:
            pytest.skip("there is no prometheus on PATH, and its Debian package cannot be had")
    return folder / "usr/bin/prometheus"


class Database:
    """What a Prometheus has found."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, **given: str) -> Any:
        """Return the data of an answer; an empty list while it does not answer."""
        try:
            return httpx.get(f"{self.url}/api/v1/{path}", params=given).json().get("data") or []
        except (httpx.HTTPError, ValueError):
            return []

    def values(self, query: str) -> list[str]:
        """Return the values that a query has now."""
        found = self.ask("query", query=query)
        return [one["value"][1] for one in found["result"]] if found else []


@contextmanager
def scraped(program: Path, tmp_path: Path, style: str) -> Iterator[tuple[Served, Database]]:
    """Serve under load with a style of names; a Prometheus scrapes it."""
    metrics = ServerMetrics()
    body = simulated_body("engine.prefix_cache=true", metrics=metrics, speed=20.0)
    with serving(body, metrics=metrics, metrics_as=style) as served, bind("127.0.0.1", 0) as free:
        stopped = threading.Event()

        def load() -> None:
            asked = {"prompt": list(range(60)), "max_tokens": 40}
            while not stopped.is_set():
                served.post("/v1/completions", **asked)
                served.post("/v1/completions", **asked, stream=True)

        address = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        config = tmp_path / "prometheus.yml"
        rules = EXAMPLES / "prometheus/rules.yml"
        config.write_text(CONFIG.format(rules=json.dumps(str(rules)), target=served.url.removeprefix("http://")))
        options = [f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}"]
        with (tmp_path / "log.txt").open("w") as log:
            command = [program, *options, f"--web.listen-address={address}"]
            process = subprocess.Popen(command, stderr=log, stdout=log)
        client = threading.Thread(target=load)
        client.start()
        try:
            yield served, Database(f"http://{address}")
        finally:
            stopped.set()
            client.join()
            process.kill()
            process.wait()


@pytest.mark.parametrize("style", STYLES)
def test_the_database_has_the_names_of_the_server(program: Path, tmp_path: Path, style: str):
    """As Prometheus has negotiated them, which accepts OpenMetrics: those of the text format, and no other ones."""
    with scraped(program, tmp_path, style) as (served, database):
        wait_until(lambda: len(database.values("count_over_time(up[1m]) > 4")) == 1)
        text = served.http.get("/metrics").text
        names = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
        found = set(database.ask("label/__name__/values", **{"match[]": '{job="foredraft"}'}))
        own = re.compile("up|scrape_.*")
        rules = {"foredraft:requests", "foredraft:time_to_first_token_seconds:p95"} if style == "foredraft" else set()
        assert {name for name in found if not own.fullmatch(name)} - rules == names
        assert database.values("up") == ["1"]


def test_the_shipped_rules_and_dashboard_have_values(program: Path, tmp_path: Path):
    panels = json.loads((EXAMPLES / "grafana/dashboard.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    with scraped(program, tmp_path, "foredraft") as (_, database):
        wait_until(lambda: len(database.values("count_over_time(up[1m]) > 8")) == 1)
        (group,) = database.ask("rules")["groups"]
        assert len(group["rules"]) == 4 and {(rule["health"], rule.get("lastError")) for rule in group["rules"]} == {
            ("ok", None)
        }
        recorded = [rule["name"] for rule in group["rules"] if rule["type"] == "recording"]
        alerts = [rule["query"].rpartition(" > ")[0] for rule in group["rules"] if rule["type"] == "alerting"]
        for query in (*queries, *recorded, *alerts):
            values = database.values(query)
            assert values and "NaN" not in values, query
