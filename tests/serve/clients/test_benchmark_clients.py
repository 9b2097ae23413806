"""Benchmark clients as they are published, unmodified, against a simulated server. Each runs if its command stands
beside the Python that runs this, as in the environments of `make clients`, or on PATH (docs/serve.md)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from foredraft.serve.metrics import ServerMetrics
from http_server import serving, simulated_body

REQUESTS, TOKENS = 16, 12
COMMANDS = {
    "aiperf": "profile --model served --tokenizer {tokenizer} --url {url} --endpoint-type chat --streaming --concurrency 4"
    " --request-count {requests} --synthetic-input-tokens-mean 40 --output-tokens-mean {tokens} --extra-inputs ignore_eos:true"
    " --use-server-token-count --ui none",
    "guidellm": "run --backend kind=openai_http,target={url} --profile kind=concurrent,streams=4"
    " --constraint kind=max_requests,count={requests} --tokenizer kind=hf_auto,model={tokenizer}"
    " --data kind=synthetic_text,prompt_tokens=40,output_tokens={tokens} --disable-progress",
}


@pytest.mark.slow
@pytest.mark.parametrize("client", COMMANDS)
def test_a_benchmark_client_gets_all_that_it_asks_for(client: str, models: dict[str, Path], tmp_path: Path):
    command = shutil.which(client, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if command is None:
        pytest.skip(f"{client} is not installed")
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    shutil.copy(models["target"] / "tokenizer.json", tokenizer)
    (tokenizer / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    metrics = ServerMetrics()
    with serving(simulated_body(metrics=metrics, speed=20.0), metrics=metrics, model="served") as served:
        words = COMMANDS[client].format(url=served.url, tokenizer=tokenizer, requests=REQUESTS, tokens=TOKENS).split()
        environment = {**os.environ, "PYTHONPATH": ""}
        done = subprocess.run(
            [command, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        served.wait_until_idle()
    assert metrics.ended["length"] >= REQUESTS and metrics.ended["error"] == 0, metrics.ended
    assert metrics.counts[0].totals["output_tokens", ""] >= REQUESTS * TOKENS
