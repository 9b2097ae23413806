"""What `doctor` and `plan` print of a server's KV pool, in the words of the server."""

from __future__ import annotations

import re

import pytest

VLLM = "vllm serve llama-3.1-8b --max-model-len 16000 --gpu-memory-utilization 0.9"
SGLANG = "python -m sglang.launch_server --model-path llama-3.1-70b --tp 8"


def test_doctor_says_that_a_model_does_not_fit_before_it_asks_for_drafts(command):
    """DeepSeek-V3 on eight H100, as a card has it."""
    asked = ("doctor", "--from-vllm", "vllm serve deepseek-ai/DeepSeek-V3 -tp 8", "--set", "hardware.gpu=H100")
    for outcome in (command(*asked), command(*asked, "--json")):
        assert (
            outcome.code == 2 and "does not fit on 8 × H100" in outcome.err and "name the algorithm" not in outcome.err
        )


def test_a_command_without_speculation_has_the_lines_of_vllm(command):
    text = command("doctor", "--from-vllm", VLLM, "--set", "hardware.gpu=H100").out
    gib = float(re.search(r"Available KV cache memory: ([\d.]+) GiB \(give or take [\d.]+\)", text)[1])
    tokens = int(re.search(r"GPU KV cache size: ([\d,]+) tokens", text)[1].replace(",", ""))
    times = float(re.search(r"Maximum concurrency for 16,000 tokens per request: ([\d.]+)x", text)[1])
    assert gib == pytest.approx(51.38, rel=0.08) and tokens == pytest.approx(gib * 2**30 / 131_072, rel=0.001)
    assert times == pytest.approx(tokens / 16_000, abs=0.01)
    assert "does not speculate" in text


def test_those_of_sglang(command):
    text = command("doctor", "--from-sglang", SGLANG, "--set", "hardware.gpu=H200").out
    tokens = int(re.search(r"KV Cache is allocated. #tokens: (\d+)", text)[1])
    assert tokens == pytest.approx(2_795_207, rel=0.04) and f"max_total_num_tokens={tokens}," in text


def test_a_server_that_does_not_start_is_said(command):
    text = command(
        "doctor", "--from-vllm", "vllm serve qwen3-32b --max-model-len 32000 --gpu-memory-utilization 0.9",
        "--set", "hardware.gpu=H100",
    ).out  # fmt: skip
    assert "vllm-0.18 may not start" in " ".join(text.split())
