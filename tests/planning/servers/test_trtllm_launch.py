"""The launch command of TensorRT-LLM with its file of options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foredraft.core.scheduler.rules import OurRules
from foredraft.planning.servers.launch import read_launch
from foredraft.sim.assembly import assemble
from launch_commands import problems_of, scenario_of

TRTLLM_OPTIONS = """\
kv_cache_config:
  free_gpu_memory_fraction: 0.8
  dtype: fp8
  host_cache_size: 100
cuda_graph_config: {batch_sizes: [1, 2, 64], enable_padding: true}
enable_attention_dp: true
disable_overlap_scheduler: true
max_batch_size: 64
moe_config: {backend: CUTLASS}
print_iter_log: true
scheduler_config: {capacity_scheduler_policy: MAX_UTILIZATION, context_chunking_policy: FIRST_COME_FIRST_SERVED}
speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 3, max_concurrency: 32}
"""


def test_trtllm_with_its_options_in_yaml(tmp_path: Path):
    options = tmp_path / "options.yaml"
    options.write_text(TRTLLM_OPTIONS)
    launch = read_launch("trtllm", f"trtllm-serve llama-3.1-8b --tp_size 2 --config {options}", "--from", "H100")
    expected: dict[str, Any] = {
        "hardware.server": "trtllm-1.x",
        "hardware.free_fraction": 0.8,
        "hardware.graph_sizes": [1, 2, 64],
        "hardware.attention_data_parallel": 2,
        "engine.mode": "synchronous",
        "engine.guarantee_output": False,
        "engine.max_running": 64,
        "model.kv_dtype": "fp8",
    }
    assert {key: launch.settings.get(key) for key in expected} == expected
    assert launch.settings["speculation"]["algorithm"] == "EAGLE"
    assert "--print-iter-log" in launch.without_effect
    left = {"kv_cache_config.host_cache_size", "--moe-config", "scheduler_config.context_chunking_policy"}
    assert left == set(launch.not_modelled)
    options.write_text("scheduler_config: {capacity_scheduler_policy: STATIC_BATCH}\n")
    launch = read_launch("trtllm", f"trtllm-serve llama-3.1-8b --config {options}", "--from", "H100")
    assert list(launch.not_modelled) == ["scheduler_config.capacity_scheduler_policy"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("tensor_parallel_size: true", "tensor_parallel_size: is True; expected a number or a word"),
        ("max_batch_size: {most: 3}", "max_batch_size: is {'most': 3}; expected a number or a word"),
        ("kv_cache_config: true", "kv_cache_config: is True; expected keys with values"),
        ("kv_cache_config: {enable_block_reuse: 'no'}", "kv_cache_config.enable_block_reuse: is 'no'"),
        ("cuda_graph_config: {max_batch_size: 999999999}", "expected a number from 1 to 1048576"),
        ("scheduler_config: {capacity_scheduler_policy: FAIR}", "is 'FAIR'; expected GUARANTEED_NO_EVICT"),
    ],
)
def test_impossible_values_of_a_yaml_file_are_refused(tmp_path: Path, options: str, message: str):
    path = tmp_path / "options.yaml"
    path.write_text(options)
    assert message in problems_of("trtllm", f"trtllm-serve llama-3.1-8b --config {path}")


def test_trtllm_waits_for_a_batch_if_both_numbers_say_so(tmp_path: Path):
    options = tmp_path / "options.yaml"
    command = f"trtllm-serve llama-3.1-8b --config {options}"

    def config_of(text: str):
        options.write_text(text)
        return assemble(scenario_of("trtllm", command)).spec.config

    both = "batch_wait_timeout_iters: 20\nbatch_wait_max_tokens_ratio: 0.9\n"
    config = config_of(both + "stream_interval: 10\n")
    assert config.rules == OurRules(guarantee_output=1.0, batch_wait_rounds=20, batch_wait_tokens=0.9)
    for text in ("batch_wait_timeout_iters: 20\n", "batch_wait_max_tokens_ratio: 0.9\n", "stream_interval: 2\n"):
        config = config_of(text)
        assert config.rules == OurRules(guarantee_output=1.0)
    options.write_text(both + "enable_attention_dp: true\n")
    launch = read_launch("trtllm", f"{command} --tp_size 2", "--from", "H100")
    assert "--batch-wait-timeout-iters" in launch.not_modelled and "engine.batch_wait_rounds" not in launch.settings
    for text in ("batch_wait_timeout_iters: -1\n", "batch_wait_max_tokens_ratio: 1.5\n", "stream_interval: [1]\n"):
        options.write_text(text)
        assert "expected" in problems_of("trtllm", command)
