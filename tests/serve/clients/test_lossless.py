"""`foredraft check server` on made-up endpoints that are lossless, tied, noisy, defective or failing, and on a
server of our own."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path

import httpx
import pytest
from click.testing import Result
from foredraft.cli.app import app
from foredraft.core.errors import ForedraftError
from foredraft.serve.lossless import endpoint, prompts
from foredraft.serve.lossless.difference import first_difference
from foredraft.serve.lossless.endpoint import Completion
from http_server import Served
from typer.testing import CliRunner

WORDS = [" red", " green", " blue", " heron", " oak", " sea", " stone", " wind"]
DEFECT_AFTER = "heron"


class FakeServer:
    """A model of eight words whose logits are hashes of the last two. `host` says what is wrong with it."""

    def __init__(self) -> None:
        self.running: dict[str, int] = {}
        self.bodies: list[dict] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "fake"}]})
        body = json.loads(request.content)
        self.bodies.append(body)
        if host == "old" and "logprobs" in body:
            return httpx.Response(400, json={"error": {"message": "logprobs are not supported with speculation"}})
        if host == "broken" and body["prompt"] != "One two three":
            return httpx.Response(500, json={"error": {"message": "CUDA error"}})
        if host == "rubbish":
            return httpx.Response(200, json={"choices": []})
        self.running[host] = self.running.get(host, 0) + 1
        await asyncio.sleep(0)
        batched = self.running[host] > 1
        answer = self._complete(host, body, batched)
        await asyncio.sleep(0)
        self.running[host] -= 1
        return httpx.Response(200, json=answer)

    def _complete(self, host: str, body: dict, batched: bool) -> dict:
        context = body["prompt"].split()
        tokens, rows = [], []
        for i in range(body["max_tokens"]):
            logits = self._logits(context, tie=i == 3)
            order = sorted(logits, key=logits.get, reverse=True)
            chosen = order[0]
            if (host == "tied" and i == 3) or (host in ("noisy", "batched") and batched and i == 5):
                chosen = order[1]
            wrong = host == "defective" or (host == "shy" and "logprobs" not in body)
            if wrong and i == 2 and DEFECT_AFTER in body["prompt"]:
                chosen = order[2]
            if host == "short" and i == 4:
                break
            tokens.append(chosen)
            rows.append({word: logits[word] for word in order[:5]})
            context.append(chosen.strip())
        finish = "length"
        text = "".join(tokens)
        if "logprobs" not in body:
            return {"choices": [{"text": text, "finish_reason": finish, "logprobs": None}]}
        if host == "llama":
            content = [
                {"token": t, "logprob": row[t], "top_logprobs": [{"token": w, "logprob": v} for w, v in row.items()]}
                for t, row in zip(tokens, rows, strict=True)
            ]
            return {"choices": [{"text": text, "finish_reason": finish, "logprobs": {"content": content}}]}
        values = [row[token] for token, row in zip(tokens, rows, strict=True)]
        logprobs = {"tokens": tokens, "token_logprobs": values, "top_logprobs": rows}
        return {"choices": [{"text": text, "finish_reason": finish, "logprobs": logprobs}]}

    @staticmethod
    def _logits(context: list[str], tie: bool) -> dict[str, float]:
        seed = hashlib.sha256(" ".join(context[-2:]).encode()).digest()
        order = sorted(range(len(WORDS)), key=lambda i: seed[i])
        gaps = [0.2, 0.22 if tie else 1.2, *(2.0 + i for i in range(len(WORDS) - 2))]
        return {WORDS[i]: -gap for i, gap in zip(order, gaps, strict=True)}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    server = FakeServer()
    monkeypatch.setattr(
        endpoint, "make_client", lambda *given: httpx.AsyncClient(transport=httpx.MockTransport(server))
    )
    monkeypatch.setattr(endpoint, "FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(prompts, "BUILT_IN", prompts.BUILT_IN[:6])
    return server


def lossless(plain: str, *arguments: object) -> Result:
    """Check the endpoint that follows `plain` against it; without one, `plain` itself."""
    url, *others = map(str, arguments) if arguments and "://" in str(arguments[0]) else ("", *map(str, arguments))
    asked = [url, "--against", plain] if url else [plain]
    return CliRunner().invoke(app, ["check", "server", *asked, "--quiet", *others])


@pytest.mark.parametrize("host", ["good", "llama"])
def test_endpoints_of_one_text_are_lossless(fake: FakeServer, host: str):
    done = lossless("http://plain/v1", f"http://{host}", "--max-tokens", 8)
    assert done.exit_code == 0 and done.stdout.endswith("Lossless.\n"), done.stdout
    assert all(body["temperature"] == 0 and body.get("logprobs", 5) == 5 for body in fake.bodies)


def test_a_tie_is_shown_and_is_no_error(fake: FakeServer):
    done = lossless("http://plain", "http://tied", "--max-tokens", 8)
    assert done.exit_code == 0, done.stdout
    as_json = json.loads(lossless("http://plain", "http://tied", "--max-tokens", 8, "--json").stdout)
    verdicts = {finding["verdict"] for finding in as_json["outcome"]["findings"]}
    assert verdicts == {"tie"}
    assert "apart by 0.02 (plain), 0.02 (speculative)" in done.stdout
    assert lossless("http://plain", "http://tied", "--max-tokens", 8, "--tie-margin", 0.01).exit_code == 1


def test_a_wrong_token_is_found_with_its_smallest_prompt(fake: FakeServer, tmp_path: Path):
    file = tmp_path / "prompts.txt"
    file.write_text("the sea and the wind\n\na stone under the heron by the old oak tree\n", encoding="utf-8")
    asked = ("http://plain", "http://defective", "--max-tokens", 8, "--prompts", file)
    done = lossless(*asked)
    assert done.exit_code == 1 and "Not lossless" in done.stdout, done.stdout
    as_json = lossless(*asked, "--json")
    assert as_json.exit_code == 1 and not json.loads(as_json.stdout)["lossless"]
    found = json.loads(as_json.stdout)["outcome"]
    assert found["num_same"] == 1 and found["num_unlikely"] == 1
    (finding,) = found["findings"]
    assert finding["difference"]["position"] == 2 and finding["alone"] == 2 and finding["verdict"] == "error"
    assert found["smallest"]["prompt"].strip() == DEFECT_AFTER and found["smallest"]["max_tokens"] == 3
    assert "curl http://defective/v1/completions" in done.stdout
    assert "1 of 16 tokens were not the most likely" in done.stdout


def test_what_the_plain_endpoint_gives_itself_in_a_batch_is_noise(fake: FakeServer):
    """Both endpoints change a token in a batch, each when it happens to have one."""
    done = lossless("http://noisy", "http://plain", "--max-tokens", 8)
    assert done.exit_code == 0 and "the plain endpoint gives the other text when asked alone" in done.stdout, (
        done.stdout
    )
    assert lossless("http://plain", "http://batched", "--max-tokens", 8).exit_code == 1


def test_one_endpoint_is_compared_with_itself(fake: FakeServer):
    steady = lossless("http://plain", "--max-tokens", 8, "--repeat", 2)
    assert steady.exit_code == 0 and "The same as itself." in steady.stdout
    unsteady = lossless("http://noisy", "--max-tokens", 8)
    assert unsteady.exit_code == 1 and "Differs from itself" in unsteady.stdout


def test_speculation_that_stops_for_log_probabilities_is_asked_without(fake: FakeServer, tmp_path: Path):
    file = tmp_path / "prompts.txt"
    file.write_text("the heron\n", encoding="utf-8")
    done = lossless("http://plain", "http://shy", "--max-tokens", 6, "--prompts", file)
    assert done.exit_code == 1 and "apart by 1.8 (plain)" in done.stdout, done.stdout


@pytest.mark.parametrize(("host", "code", "words"), [("plain", 0, "Lossless"), ("defective", 1, "apart by")])
def test_without_log_probabilities_the_text_is_compared(
    fake: FakeServer, tmp_path: Path, host: str, code: int, words: str
):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "the heron"}\n"a sea"\n', encoding="utf-8")
    done = lossless(f"http://{host}", "http://old", "--max-tokens", 6, "--prompts", file)
    assert done.exit_code == code and words in done.stdout, done.stdout
    assert "only text is compared" in done.stdout


def test_an_answer_cut_short_is_an_error(fake: FakeServer):
    done = lossless("http://plain", "http://short", "--max-tokens", 8)
    assert done.exit_code == 1 and "cut off by a length" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["http://plain", "http://broken"], "stopped after 3 requests without an answer: .* answered 500: CUDA error"),
        (["http://plain", "http://rubbish"], "not a completion of OpenAI's interface"),
        (["localhost:8000"], "not an address; expected http://HOST:PORT"),
        (["http://127.0.0.1:9"], "cannot be reached"),
        (["http://plain", "--prompts", "missing.txt"], "missing.txt: cannot be read"),
        (["http://127.0.0.1:9", "--api-key", "schlüssel"], "--api-key: has characters that a header cannot contain"),
    ],
)
def test_what_cannot_be_compared_is_one_message(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
):
    if "127.0.0.1" not in arguments[0]:
        request.getfixturevalue("fake")
    monkeypatch.setattr(endpoint, "FIRST_WAIT_S", 0.0)
    with pytest.raises(ForedraftError, match=message):
        raise lossless(*arguments).exception


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["server"], ["URL: is missing"]),
        (["server", "http://plain", "--budget", "10s"], ["--budget: has no effect: server makes no use of it"]),
        (["server", "http://plain", "--device", "cpu", "--list"], ["--device", "--list"]),
        (["allocator", "--against", "http://plain", "--repeat", "2"], ["--against: has no effect: without server", "--repeat"]),
    ],
)  # fmt: skip
def test_options_of_the_other_checks_are_refused(fake: FakeServer, arguments: list[str], words: list[str]):
    with pytest.raises(ForedraftError) as caught:
        raise CliRunner().invoke(app, ["check", *arguments]).exception
    assert all(word in str(caught.value) for word in words)
    assert not fake.bodies


def test_margins_are_bounds_where_a_candidate_is_not_listed():
    plain = Completion("ab", "stop", ("a", "b"), ({"a": -0.1, "c": -3.0}, {"b": -0.5, "z": -0.6}))
    other = Completion("ax", "stop", ("a", "x"), ({"a": -0.1, "c": -3.0}, {"x": -0.2, "b": -4.2}))
    difference = first_difference(plain, other)
    assert difference.position == 1 and [str(margin) for margin in difference.margins] == ["≥ 0.1", "4"]
    assert not difference.is_tie(0.25), "one side tells"
    ended = first_difference(plain, Completion("a", "stop", ("a",), ({"a": -0.1, "c": -3.0},)))
    assert ended.speculative is None and str(ended.margins[0]) == "≥ 0.1" and ended.is_tie(0.25)


def test_a_server_of_our_own_gives_one_text(real: Served, tmp_path: Path):
    """It decodes with a draft, in float64: alone and in batches the same text."""
    file = tmp_path / "prompts.txt"
    file.write_text("one two three\nthe sea\nabc abc abc\n", encoding="utf-8")
    done = lossless(real.url, real.url + "/v1", "--max-tokens", 8, "--prompts", file)
    assert done.exit_code == 0 and "3 answers" in done.stdout, done.stdout + repr(done.exception)
