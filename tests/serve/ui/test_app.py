"""The server of the page: its answers, what it refuses, and that nothing of it is left behind."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import httpx
import pytest
from foredraft.serve.base.limits import Limits
from foredraft.ui import app as app_file
from foredraft.ui.app import AnswerPools, make_app
from page_server import PageServer, is_running, page_server, wait_until
from starlette.testclient import TestClient

SHORT = {"workload.num_requests": 60}
LONG = {"workload.num_requests": 500_000}
PROCESSES = 2 + 1 + 2  # for answers, by the roofline, for simulations; those of plans start with the first


def lines(reply: httpx.Response) -> list[dict]:
    assert reply.status_code == 200, reply.text
    return [json.loads(line) for line in reply.text.splitlines()]


def answer(served: PageServer, **body) -> dict:
    return lines(served.post("answer", **body))[-1]


def test_cost_and_doctor_are_those_of_the_commands(served: PageServer):
    found = answer(served, given={"hardware.gpu": "H200"}, batch=16)["result"]
    assert found["cost"]["format"] == "foredraft-cost" and found["doctor"]["format"] == "foredraft-doctor"
    (batch,) = found["cost"]["batches"]
    assert batch["batch"] == 16 and [one["steps"] for one in batch["rounds"]] == [*range(8)]
    assert found["doctor"]["context"] == found["cost"]["context"] == 768 + 128
    assert found["doctor"]["load"] == {}
    assert found["speeds"][-1]["batch"] == found["most_rows"]
    speeds = {point["batch"]: point for point in found["speeds"]}
    # A round is decode alone; the throughput bears the prompts of new requests, as the gains of the verdict do.
    assert speeds[16]["plain"] < 0.9 * batch["rounds"][0]["tokens_per_s"]
    gains = {(one["batch"], one["steps"]): one["gain"] for one in found["doctor"]["gains_by_batch"]}
    assert gains[8, speeds[8]["steps"]] == pytest.approx(speeds[8]["drafted"] / speeds[8]["plain"])


def test_plain_decoding_has_no_doctor(served: PageServer):
    found = answer(served, given={"speculation.algorithm": "NONE"}, batch=100_000)["result"]
    assert found["doctor"] is None and len(found["cost"]["batches"][0]["rounds"]) == 1
    assert found["cost"]["batches"][0]["batch"] == found["most_rows"], "no more than fit"


@pytest.mark.parametrize(
    ("given", "key", "words"),
    [
        ({"hardware.gpu": "H200x"}, "hardware.gpu", "did you mean 'H200'"),
        ({"workload.rate": "fast"}, "workload.rate", "valid number"),
        ({"speculation.algorithm": "NONE", "speculation.steps": 3}, "speculation.steps", "has no effect"),
        ({"hardware.gpus": 2}, "hardware.gpus", "unknown key"),
        ({"workload.trace": "dropped:0/a.csv"}, "workload.trace", "drop the file"),
        ({"a.b.c": 1}, "a", "unknown key"),
    ],
)
def test_a_wrong_key_is_named(served: PageServer, given, key, words):
    for path in ("answer", "simulate"):
        error = lines(served.post(path, given=given))[-1]["error"]
        assert words in error["message"]
        assert path == "simulate" or [problem["key"] for problem in error["problems"]] == [key]


def test_a_model_that_does_not_fit_says_so(served: PageServer):
    assert "does not fit" in answer(served, given={"model.target": "llama-3.1-70b"})["error"]["message"]


def test_a_simulation_tells_its_progress_and_both_results(served: PageServer):
    told = lines(served.post("simulate", given={"workload.num_requests": 400}))
    assert {line["run"] for line in told if "run" in line} == {"as it is", "without speculation"}
    found = told[-1]["result"]
    assert found["as_it_is"]["completed"] == found["without"]["completed"] == 400
    assert found["as_it_is"]["mean_tpot_ms"] < found["without"]["mean_tpot_ms"]
    assert len(found["as_it_is"]["timeline"]["running"]) > 5
    assert any("as_it_is" in line for line in told), "the first result does not wait for the second"


@pytest.mark.ci
def test_a_plan_tells_its_progress_and_its_answer(served: PageServer):
    asked = {"slo": "ttft_p99<1s", "rate": 1, "gpus": 1, "requests": 100, "seeds": 2}
    asked["tried"] = ["speculation.steps=3"]
    told = lines(served.post("plan", plan=asked, given={"hardware.server": "sglang-0.5"}))
    progress = [line["plan"] for line in told[:-1]]
    assert progress[-1]["runs"] == len(progress) > 1 and progress[0]["candidates"] == 1
    assert all(one["left_s"] >= 0 and " left" in one["words"] for one in progress)
    found = told[-1]["result"]
    assert found["format"] == "foredraft-plan" and found["candidates"][0]["gpus"] == 1
    (best,) = found["candidates"]
    exported = served.post("export", place=found["place"], candidate=best["name"], server="sglang").json()["result"]
    assert exported["name"] == best["name"] and "--speculative-num-steps 3" in exported["commands"]["launch.sh"]
    assert exported["load"]["requests_per_s"] == best["requests_per_s"] and "scaling.json" in exported["files"]
    other = served.post("export", place=found["place"], candidate=best["name"], server="vllm").json()["result"]
    assert other["load"] is None, "it was computed for SGLang"
    words = served.post("export", place=found["place"], candidate="x", server="vllm").json()["error"]["message"]
    assert "is none of this plan" in words


def test_the_files_of_a_page_are_those_of_its_scenario(served: PageServer):
    given = {"hardware.server": "trtllm-1.x", "hardware.tensor_parallel": 2, "speculation.policy": "fixed"}
    found = served.post("export", given=given).json()["result"]
    assert found["server"] == "TensorRT-LLM" and "--tp_size 2" in found["files"]["launch.sh"]
    assert "speculative_config" in found["files"]["trtllm.yaml"] and found["load"] is None


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"server": "vlm"}, "did you mean 'vllm'"),
        ({"server": ["vllm"]}, "expected vllm"),
        ({"place": "../secrets", "server": "vllm"}, "make it again"),
        ({"place": "plan-gone", "server": "vllm"}, "make it again"),
        ({}, "whose launch command is not written"),
        ({"server": "vllm"}, "vLLM has no arguments"),
    ],
)
def test_what_cannot_be_exported_is_one_message(served: PageServer, asked, words):
    assert words in served.post("export", **asked).json()["error"]["message"]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"slo": "ttft<1"}, "ttft"),
        ({"slo": ","}, "no limit"),
        ({"slo": 3}, "slo"),
        ({"slo": "ttft_p99<1s", "tried": "speculation.steps=3"}, "tried"),
        ({"slo": "ttft_p99<1s", "gpus": 0}, "gpus"),
        ({"slo": "ttft_p99<1s", "gpus": True}, "gpus"),
        ({"slo": "ttft_p99<1s", "tried": ["steps"]}, "expected key=values"),
    ],
)
def test_a_wrong_plan_is_one_message(served: PageServer, asked, words):
    assert words in lines(served.post("plan", plan=asked))[-1]["error"]["message"]
    assert "result" in answer(served, plan=asked), "the rest of the page answers"


def test_what_is_read_comes_back_as_keys(served: PageServer):
    found = served.post("read", name="a.toml", text='[hardware]\ngpu = "L4"\n').json()["result"]
    assert found == {"kind": "scenario", "given": {"hardware.gpu": "L4"}, "notes": []}
    assert "is none of" in served.post("read", name="a", text="no").json()["error"]["message"]


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_other_sites_are_refused(served: PageServer):
    body = {"given": {}, "batch": 8}
    for headers in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        assert served.http.post("/api/answer", json=body, headers=headers).status_code == 403
    own = {"Origin": served.address.rstrip("/"), "Sec-Fetch-Site": "same-origin"}
    assert served.http.post("/api/answer", json=body, headers=own).status_code == 200
    for host, status in (("evil.example", 403), ("evil.example:80", 403), ("localhost:9", 200), ("[::1]:9", 200)):
        assert served.http.get("/", headers={"Host": host}).status_code == status, host


def test_forms_are_refused(served: PageServer):
    """A form of another site may send any text, but not under the type of JSON."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a"):
        reply = served.http.post("/api/answer", content="{}", headers={"Content-Type": kind})
        assert reply.status_code == 415


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (b"\xff", 400),
        (b"[]", 400),
        (b'{"given": []}', 400),
        (b'{"given": {}, "batch": 0}', 400),
        (b'{"given": {}, "batch": true}', 400),
        (b'{"given": {}, "context": 0.5}', 400),
        (b'{"given": {}, "plan": 3}', 400),
        (b"[" * 100_000, 400),
        (json.dumps({"given": {f"k{i}": 1 for i in range(600)}}).encode(), 400),
        (b" " * (9 << 20), 413),
    ],
)
def test_a_body_that_is_none_is_refused(served: PageServer, content: bytes, status: int):
    reply = served.http.post("/api/answer", content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == status and reply.json()["error"]["message"]


def test_the_page_loads_nothing_from_elsewhere(served: PageServer):
    policy = served.http.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "http" not in policy.replace("'self'", "")
    for path in app_file.FOLDER.iterdir():
        reply = served.http.get(f"/page/{path.name}")
        assert reply.status_code == 200 and reply.content == path.read_bytes()
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text and "https://" not in text and "<script>" not in text, path.name
    for path in ("/page/../app.py", "/page/..%2fapp.py", "/app.py"):
        assert served.http.get(path).status_code == 404


# -- processes ---------------------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_leaving_cancels_and_two_pages_do_not_disturb_each_other(served: PageServer):
    assert "result" in answer(served)
    wait_until(lambda: len(served.group()) > PROCESSES, what="for all processes")
    settled = len(served.group())
    for _ in range(4):  # more than there are processes
        with served.http.stream("POST", "/api/simulate", json={"given": LONG}) as reply:
            next(reply.iter_lines())
    with served.http.stream("POST", "/api/simulate", json={"given": LONG}) as other:
        progress = other.iter_lines()
        next(progress)
        assert lines(served.post("simulate", given=SHORT))[-1]["result"]["as_it_is"]["completed"] == 60
        assert "result" in answer(served)
        assert json.loads(next(progress))["run"] == "as it is"
    wait_until(lambda: len(served.group()) == settled, what="for those that were left to end")


@pytest.mark.ci
def test_ctrl_c_leaves_nothing_running(tmp_path: Path):
    with page_server(tmp_path) as server:
        asked = {"slo": "ttft_p99<1s", "requests": 100_000}
        with (
            server.http.stream("POST", "/api/simulate", json={"given": LONG}) as simulation,
            server.http.stream("POST", "/api/plan", json={"given": {}, "plan": asked}),
        ):
            next(simulation.iter_lines())
            wait_until(lambda: len(server.group()) >= 8, what="for the processes of the plan")
            group = server.group()
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(15) == 0
        wait_until(lambda: not any(map(is_running, group)), 5)


def test_processes_end_with_a_server_that_is_killed(tmp_path: Path):
    with page_server(tmp_path) as server, server.http.stream("POST", "/api/simulate", json={"given": LONG}) as reply:
        next(reply.iter_lines())
        group = server.group()
        assert len(group) > 3
        server.process.kill()
        wait_until(lambda: not any(map(is_running, group)), 10)


class _Fake:
    """A pool whose answers are written down."""

    count = 1

    def __init__(self, waits_s: float, result: str) -> None:
        self.waits_s, self.result, self.asked = waits_s, result, []

    async def start(self, count: int | None = None) -> None: ...

    def close(self) -> None: ...

    async def ask(self, question):
        self.asked.append(question)
        await asyncio.sleep(self.waits_s)
        return {"result": self.result}


@pytest.mark.parametrize("waits_s", [0.0, 0.2])
def test_an_answer_that_takes_long_is_given_by_the_roofline_first(monkeypatch, tmp_path: Path, waits_s: float):
    monkeypatch.setattr(app_file, "SOON_S", 0.05)
    exact, rough = _Fake(waits_s, "exact"), _Fake(0.0, "rough")
    app = make_app({}, tmp_path, Limits(), AnswerPools(exact, rough, rough, rough))
    with TestClient(app, base_url="http://localhost") as client:
        told = lines(client.post("/api/answer", json={"given": {}}))
    assert told[-1] == {"result": "exact"}
    if waits_s:
        assert told[0] == {"result": "rough", "is_rough": True} and rough.asked[0]["roofline"] is True
    else:
        assert len(told) == 1 and not rough.asked


def test_an_exact_answer_does_not_wait_for_that_of_the_roofline(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(app_file, "SOON_S", 0.05)
    exact, rough = _Fake(0.2, "exact"), _Fake(30.0, "rough")
    app = make_app({}, tmp_path, Limits(), AnswerPools(exact, rough, rough, rough))
    with TestClient(app, base_url="http://localhost") as client:
        told = lines(client.post("/api/answer", json={"given": {}}))
    assert told == [{"result": "exact"}] and rough.asked
