"""`foredraft plan` with prefill and decode engines on unlike GPUs, from the question to the bill."""

from __future__ import annotations

import json

import pytest

PLAIN = "speculation.algorithm=NONE"


@pytest.mark.ci
def test_a_plan_prices_each_pool(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = ["plan", "--slo", "ttft_p99<2s", "--rate", "2", "--requests", "100", "--seeds", "2"]
    asked += ["--workers", "1", "--quiet", "--out", "plan"]
    for one in (
        PLAIN,
        "disaggregation.ratio=none,1:1",
        "hardware.decode.gpu=L40S",
        "hardware.decode.tensor_parallel=2",
    ):
        asked += ["--try", one]
    for one in ("engine.page_size=16", "workload.output.mean=20.0", "workload.prompt.mean=200.0"):
        asked += ["--set", one]
    asked += ["--price", "H100=3", "--price", "L40S=1"]
    told = command(*asked, "--json")
    assert told.code == 0, told.err
    found = {one["name"].removeprefix("plain decoding, "): one for one in json.loads(told.out)["candidates"]}
    apart, together = found["ratio 1:1, decode gpu L40S, decode tensor_parallel 2"], found["ratio none"]
    assert [(pool["role"], pool["gpu"], pool["gpus"]) for pool in apart["pools"]] == [
        ("prefill", "H100", 1),
        ("decode", "L40S", 2),
    ]
    assert together["pools"] == [{"role": "both", "engines": 1, "gpu": "H100", "gpus": 1}]
    assert (apart["gpus"], apart["engines"]) == (3, 2) and together["gpus"] == 1
    assert apart["bill"]["month"] == pytest.approx(730 * (3 + 2 * 1)) and together["bill"]["month"] == 730 * 3
    assert apart["bill"]["planned"] == pytest.approx(5 / 3600 / apart["tokens_per_s"] * 1e6)
    again = command(*asked)
    assert again.code == 0 and max(map(len, again.out.splitlines())) <= 80
