"""The load generators of SGLang and vLLM as their wheels have them, unmodified, against a simulated server: they get
all that they ask for, and count the tokens that the server counts. `make clients` downloads the wheels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from foredraft.serve.bodies.filler import WORDS
from foredraft.serve.metrics import ServerMetrics
from http_server import serving, simulated_body
from prometheus_client.parser import text_string_to_metric_families

REQUESTS = 24
COMMON = (
    "--base-url {url} --model served --tokenizer {tokenizer} --random-input-len 40 --random-output-len 24"
    f" --random-range-ratio 0.5 --num-prompts {REQUESTS} --max-concurrency 4 --seed 7 --disable-tqdm "
)
USAGE = '{"stream_options":{"include_usage":true}}'
COMMANDS = {
    "sglang": "--dataset-name random-ids --warmup-requests 0 --output-details --output-file result.json ",
    "vllm": "--dataset-name random --temperature 0 --save-result --save-detailed --result-filename result.json ",
}
ENDPOINTS = {
    ("sglang", "completions"): "--backend sglang-oai",
    ("sglang", "chat"): f"--backend sglang-oai-chat --extra-request-body {USAGE}",
    ("vllm", "completions"): "--backend openai",
    ("vllm", "chat"): "--backend openai-chat --endpoint /v1/chat/completions",
}


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are the words of simulated texts, so that it counts as the server does."""
    tokenizers = pytest.importorskip("tokenizers", reason="the load generators need a tokenizer")
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f" {word}": i for i, word in enumerate(WORDS)}, unk_token=f" {WORDS[0]}")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(" [a-z]+"), "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "config.json").write_text('{"model_type": "llama"}')


def _run(wheel: Path, words: list[str], folder: Path) -> dict[str, Any]:
    """Return the result that a load generator writes."""
    command = [sys.executable, "-P", str(Path(__file__).with_name("benchmark_of_wheel.py")), str(wheel), *words]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((folder / "result.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(("package", "endpoint"), ENDPOINTS)
def test_the_load_generator_of_a_server_counts_what_the_server_counts(package: str, endpoint: str, tmp_path: Path):
    wheels = list(Path(sys.prefix).glob(f"wheels/{package}-*.whl"))
    if not wheels:
        pytest.skip(f"`make clients` downloads the wheel of {package} and runs this")
    _write_tokenizer(tmp_path / "tokenizer")
    metrics = ServerMetrics()
    with serving(simulated_body(metrics=metrics, speed=1.0), metrics=metrics, model="served") as served:
        words = (COMMON + COMMANDS[package]).format(url=served.url, tokenizer=tmp_path / "tokenizer").split()
        told = _run(wheels[0], words + ENDPOINTS[package, endpoint].split(), tmp_path)
        served.wait_until_idle()
        families = text_string_to_metric_families(served.http.get("/metrics").text)
        counted: dict[str, float] = {}
        for sample in (sample for family in families for sample in family.samples):
            name = sample.name.removeprefix("foredraft:")
            name += f" {sample.labels['finished_reason']}" if "finished_reason" in sample.labels else ""
            counted[name] = counted.get(name, 0.0) + sample.value
    assert told["completed"] == REQUESTS and not told.get("failed") and told["errors"] == [""] * REQUESTS
    assert counted["request_success_total length"] == counted["request_prompt_tokens_count"] == REQUESTS
    _check_tokens(told, counted, endpoint)
    _check_times(told, counted)


def _check_tokens(told: dict[str, Any], counted: dict[str, float], endpoint: str) -> None:
    """Check the tokens by the tool's tokenizer, by the usage of the answers and by the words of the texts. A chat has
    tokens of its template, which SGLang's own count of the input is without."""
    assert sum(told["input_lens"]) == counted["prompt_tokens_total"]
    if endpoint == "completions":
        assert told["total_input_tokens"] == counted["prompt_tokens_total"]
    assert len(set(told["input_lens"])) > 1 and len(set(told["output_lens"])) > 1
    outputs = counted["generation_tokens_total"]
    assert told["total_output_tokens"] == sum(told["output_lens"]) == outputs
    assert told.get("total_output_tokens_retokenized", outputs) == outputs
    assert [len(text.split()) for text in told["generated_texts"]] == told["output_lens"]


def _check_times(told: dict[str, Any], counted: dict[str, float]) -> None:
    """Check that the times are positive and in order, and no first token comes before the server gives it."""
    for name in ("ttft", "tpot"):
        assert 0 < told[f"median_{name}_ms"] <= told[f"p99_{name}_ms"] and told[f"mean_{name}_ms"] > 0
    assert len(told["ttfts"]) == len(told["itls"]) == REQUESTS and min(told["ttfts"]) > 0
    assert any(told["itls"]) and all(wait > 0 for waits in told["itls"] for wait in waits)
    series = "time_to_first_token_seconds"
    assert told["mean_ttft_ms"] / 1e3 >= counted[f"{series}_sum"] / counted[f"{series}_count"]
