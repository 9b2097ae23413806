"""Quantized checkpoints in the simulator: memory and time follow the bytes of their weights."""

from __future__ import annotations

import json

import pytest
from foredraft.core.contract.step import PLAIN_ROUND
from foredraft.core.model_shape import BUILT_IN
from foredraft.sim.assembly import assemble
from foredraft.sim.scenario_file import load_scenario

LLAMA = BUILT_IN["llama-3.1-8b"]


@pytest.fixture
def assembled(tmp_path):
    """`assembled(config, beside)`: the run of a checkpoint's configuration, and of the file beside it."""

    def run(config, beside=None, *settings):
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "hf_quant_config.json").unlink(missing_ok=True)
        if beside is not None:
            (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": beside}))
        return assemble(load_scenario(None, [f"model.target={tmp_path}", *settings])[0])

    return run


def test_fewer_bytes_leave_more_slots_and_take_less_time(assembled):
    runs = [
        assembled(LLAMA),
        assembled({**LLAMA, "quantization_config": {"quant_method": "fp8"}}),
        assembled({**LLAMA, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}),
    ]
    times = [run.cost.decode_ns(1, PLAIN_ROUND, 0) for run in runs]
    slots = [run.memory.slots for run in runs]
    assert times == sorted(times, reverse=True) and times[2] < 0.5 * times[0]
    assert slots == sorted(slots)
    freed = runs[0].target.weight_bytes - runs[2].target.weight_bytes
    assert (slots[2] - slots[0]) * runs[0].memory.slot_bytes == pytest.approx(freed, rel=0.01)


def test_the_file_beside_the_configuration_counts_unless_the_configuration_says_more(assembled):
    nvfp4 = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}
    target = assembled(LLAMA, nvfp4, "hardware.gpu=B200").target
    assert (target.weight_dtype, target.kv_dtype) == ("nvfp4", "fp8")
    assert assembled(LLAMA, {"quant_algo": None}).target.weight_dtype == "bf16"
    own = {**LLAMA, "quantization_config": {"quant_method": "fp8"}}
    assert assembled(own, nvfp4).target.weight_dtype == "fp8"
    assert assembled(LLAMA, nvfp4, "model.weight_dtype=bf16").target.weight_dtype == "bf16"


def test_wide_attention_takes_longer_than_narrow(assembled):
    method = {"quant_method": "mxfp4"}
    narrow = assembled({**LLAMA, "quantization_config": method})
    wide = assembled({**LLAMA, "quantization_config": {**method, "modules_to_not_convert": ["self_attn"]}})
    assert narrow.cost.decode_ns(1, PLAIN_ROUND, 0) < wide.cost.decode_ns(1, PLAIN_ROUND, 0)
