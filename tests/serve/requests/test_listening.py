"""How a server is reached: TLS, a Unix socket, pages of other sites, ports of replicas and their loads."""

from __future__ import annotations

import json
import re
import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
from foredraft.cli.app import app
from foredraft.core.errors import ConfigError, ForedraftError
from foredraft.serve.base.connections import bind, bind_path, check_certificate
from foredraft.serve.metrics import ServerMetrics
from http_server import serving, simulated_body
from prometheus_client.parser import text_string_to_metric_families
from server_process import SMALL, serve
from typer.testing import CliRunner

ASKED = {"prompt": "x", "max_tokens": 20, "ignore_eos": True}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    files = (folder / "cert.pem", folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", files[0], "-keyout", files[1]]
    subprocess.run(command, check=True, capture_output=True)
    return files


def test_streams_go_over_tls(certificate):
    with serving(simulated_body(), certificate=certificate) as served:
        assert served.url.startswith("https://")
        verified = ssl.create_default_context(cafile=certificate[0])
        with httpx.Client(verify=verified, base_url=served.url) as client:
            answer = client.post("/v1/completions", json=ASKED | {"stream": True})
            assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.TransportError):
            httpx.get(served.url.replace("https", "http") + "/health")


def test_a_certificate_that_cannot_be_used_is_one_error(certificate, tmp_path):
    check_certificate(*certificate)
    for wrong in ((tmp_path / "none.pem", None), (certificate[0], None), (certificate[1], certificate[0])):
        with pytest.raises(ConfigError, match=r"--ssl-certfile, --ssl-keyfile: .*cannot be used"):
            check_certificate(*wrong)


def test_a_unix_socket_replaces_one_that_was_left_behind(tmp_path):
    path = tmp_path / "server.sock"
    bind_path(path).close()  # the file stays
    with serving(simulated_body(), listeners=[bind_path(path)]) as served:
        assert served.url == f"unix:{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://server") as client:
            answer = client.post("/v1/completions", json=ASKED | {"stream": True})
            assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
        with pytest.raises(ConfigError, match=r"--uds: cannot listen on .*in use"):
            bind_path(path)


def test_pages_of_allowed_sites_may_ask():
    head = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    with serving(simulated_body(), api_key="k", origins=["https://app.example"]) as served:
        assert served.http.options("/v1/completions", headers=head).headers["Access-Control-Allow-Origin"]
        other = served.http.options("/v1/completions", headers=head | {"Origin": "https://other.example"})
        assert "Access-Control-Allow-Origin" not in other.headers
        answer = served.http.post(
            "/v1/completions", json=ASKED, headers={"Origin": head["Origin"], "Authorization": "Bearer k"}
        )
        assert answer.headers["Access-Control-Allow-Origin"] == head["Origin"]
    with serving(simulated_body()) as served:
        assert "Access-Control-Allow-Origin" not in served.http.options("/v1/completions", headers=head).headers


@pytest.mark.parametrize(
    ("origin", "host", "allowed", "status"),
    [
        (None, "127.0.0.1:1", [], 200),
        ("https://other.example", "127.0.0.1:1", [], 403),
        ("null", "127.0.0.1:1", [], 403),
        ("http://127.0.0.1:2", "127.0.0.1:1", [], 403),
        ("http://127.0.0.1:1", "127.0.0.1:1", [], 200),
        ("http://localhost:1", "localhost:1", [], 200),
        ("http://[::1]:1", "[::1]:1", [], 200),
        ("http://name.example:1", "name.example:1", [], 403),  # a name that its owner lets lead to this machine
        ("http://name.example:1", "name.example:1", ["http://name.example:1"], 200),
        ("https://other.example", "127.0.0.1:1", ["*"], 200),
        ("http://[", "[", [], 403),
    ],
)
def test_a_page_of_another_site_changes_nothing(origin, host, allowed, status):
    """A key says that a page may; without one, pages of other sites are refused."""
    head = {"Host": host, "Content-Type": "application/json"} | ({} if origin is None else {"Origin": origin})
    with serving(simulated_body(), origins=allowed) as served:
        answer = served.http.post("/v1/completions", content=json.dumps(ASKED), headers=head)
        assert answer.status_code == status, answer.text
        assert status == 200 or "--allowed-origins" in answer.json()["error"]["message"]
        assert served.http.get("/health", headers=head).status_code == 200
    with serving(simulated_body(), origins=allowed, api_key="k") as served:
        keyed = served.http.post(
            "/v1/completions", content=json.dumps(ASKED), headers=head | {"Authorization": "Bearer k"}
        )
        assert keyed.status_code == 200, "the key says that the page may"


def test_a_replica_has_a_port_of_its_own_with_its_own_metrics_and_load():
    metrics = ServerMetrics()
    listeners = [bind("127.0.0.1", 0) for _ in range(3)]
    ports = [one.getsockname()[1] for one in listeners]
    body = simulated_body("hardware.replicas=2", metrics=metrics)
    alone = {ports[1]: 0, ports[2]: 1}
    with serving(body, metrics=metrics, listeners=listeners, engine_of_port=alone) as served:

        def get(number: int, path: str) -> httpx.Response:
            return httpx.get(f"http://127.0.0.1:{ports[number]}{path}")

        for number, times in ((1, 1), (2, 3)):
            for _ in range(times):
                asked = ASKED | {"stream": True}
                answer = httpx.post(f"http://127.0.0.1:{ports[number]}/v1/completions", json=asked)
                assert answer.text.endswith("data: [DONE]\n\n")
        served.wait_until_idle()  # the last answer may end before its request is counted
        for number, expected in ((0, {"0": 1, "1": 3}), (1, {"0": 1}), (2, {"1": 3})):
            families = {one.name: one for one in text_string_to_metric_families(get(number, "/metrics").text)}
            counts = {
                sample.labels["engine"]: sample.value
                for sample in families["foredraft:e2e_request_latency_seconds"].samples
                if sample.name.endswith("_count")
            }
            assert counts == expected
            running = {one.labels["engine"] for one in families["foredraft:num_requests_running"].samples}
            assert running == set(expected)


def test_the_load_follows_the_requests():
    metrics = ServerMetrics()
    body = simulated_body("engine.max_running=2", speed=0.02, metrics=metrics)
    with serving(body, metrics=metrics) as served:
        with served.http.stream("POST", "/v1/completions", json=ASKED | {"n": 5, "stream": True}) as stream:
            lines = stream.iter_lines()  # kept: httpx closes the connection when the iterator is deleted
            next(lines)
            assert served.http.get("/load").json() == {"server_load": 5}
        served.wait_until_idle()
        assert served.http.get("/load").json() == {"server_load": 0}


@pytest.mark.ci
def test_the_command_takes_the_options(tmp_path):
    path = tmp_path / "s.sock"
    options = ["--set", "hardware.replicas=2", "--uds", str(path), "--replica-ports", "0", "--metrics-as", "vllm"]
    with serve(tmp_path, *options, "--kv-events", "tcp://127.0.0.1:0", "--allowed-origins", "*") as (_, address, log):
        assert address == f"unix:{path}"
        ports = re.findall(r"replica (\d) is reached alone on port (\d+)", log.read_text())
        assert [number for number, _ in ports] == ["0", "1"] and log.read_text().count("tcp://127.0.0.1:") == 2
        metrics = httpx.get(f"http://127.0.0.1:{ports[1][1]}/metrics", headers={"Origin": "https://a.example"})
        assert 'vllm:num_requests_running{engine="1"' in metrics.text and 'engine="0"' not in metrics.text
        assert metrics.headers["Access-Control-Allow-Origin"] == "*"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--ssl-keyfile", "k.pem"], "--ssl-keyfile: has no effect: without --ssl-certfile"),
        (["--kv-events-topic", "t"], "--kv-events-topic: has no effect: without --kv-events"),
        (["--ssl-certfile", "None.pem"], "None.pem cannot be used: no such file or directory"),
        (["--uds", "s.sock", "--api-key", " "], "is empty, and the server would be open"),
        (["--otlp-traces-endpoint", "collector"], "'collector' is no http:// or https:// address"),
        (
            ["--replica-ports", "0", "--set", "disaggregation.prefill=1", "--set", "disaggregation.decode=1"],
            "serves no request alone",
        ),
        (
            ["--kv-events", "tcp://*:1", "--set", "hardware.replicas=2", "--set", "router.policy='prefix_aware'"],
            "prefix_aware replaces tokens by hashes",
        ),
    ],
)
def test_options_that_cannot_have_effect_are_one_error(options, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("scenario.toml").write_text("")
    asked = CliRunner().invoke(app, ["serve", "--simulate", "scenario.toml", *SMALL, "--port", "0", *options])
    assert isinstance(asked.exception, ForedraftError) and told in str(asked.exception)


def test_answers_name_their_pod(monkeypatch):
    monkeypatch.setenv("POD_NAME", "server-0")
    monkeypatch.setenv("POD_NAMESPACE", "models")
    with serving(simulated_body()) as served:
        head = served.http.get("/health").headers
        assert (head["x-inference-pod"], head["x-inference-namespace"]) == ("server-0", "models")
