"""What follows of the servers' own rules from a launch command: formats, speculation, memory and nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from foredraft.core.model_shape import built_in_config
from foredraft.planning.servers.files import server_files
from foredraft.planning.servers.launch import read_launch
from foredraft.planning.tuning.tables import settings_of
from foredraft.sim.assembly import assemble
from foredraft.sim.scenario_file import scenario_with
from launch_commands import launch_of, refusal_of, scenario_of

MODEL = "Qwen/Qwen3-8B"


class TestFormatsOfWeights:
    @pytest.mark.parametrize("model, argument, format_, note", [
        ("Qwen/Qwen3-8B-AWQ", "--dtype half", None, ""),
        ("Qwen/Qwen3-8B-AWQ", "--quantization awq_marlin --dtype half", None, ""),
        ("Qwen/Qwen3-8B-FP8", "--quantization awq", None, "the checkpoint's own format is taken, fp8, not int4"),
        ("Qwen/Qwen3-8B-FP8", "--quantization fp8", "fp8", ""),
        ("Qwen/Qwen3-8B", "--quantization fp8", "fp8", ""),
        ("Qwen/Qwen3-8B", "--dtype half", "fp16", ""),
    ])  # fmt: skip
    @pytest.mark.parametrize("server", ["vllm", "sglang"])
    def test_files_that_say_theirs_win(self, server: str, model: str, argument: str, format_: str | None, note: str):
        first = "vllm serve" if server == "vllm" else "python -m sglang.launch_server --model-path"
        found = launch_of(f"{first} {model} {argument}", server)
        assert found.settings.get("model.weight_dtype") == format_
        assert found.not_modelled.get("--quantization", "") == note

    def test_exceptions_of_a_checkpoint_stay_with_the_name_of_its_method(self, tmp_path: Path):
        rules = {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:.*self_attn.*": {}}}
        config = dict(built_in_config("qwen3-8b")[1]) | {"quantization_config": rules}
        (tmp_path / "config.json").write_text(json.dumps(config))
        plain, named = (
            assemble(scenario_of("vllm", f"vllm serve {tmp_path}{more}")) for more in ("", " -q gptq_marlin")
        )
        assert named.target.attention_dtype == "bf16" and named.target == plain.target


@pytest.mark.parametrize(
    ("server", "argument", "known"),
    [
        ("vllm", "--dtype int3", "bfloat16"),
        ("vllm", "--quantization fp6", "fp8"),
        ("vllm", "--kv-cache-dtype fp7", "fp8_e4m3"),
        ("sglang", "--dtype int3", "bfloat16"),
        ("sglang", "--quantization fp6", "w8a8_fp8"),
        ("sglang", "--kv-cache-dtype fp7", "fp8_e5m2"),
    ],
)
def test_an_unknown_format_is_refused_with_the_known_ones(server: str, argument: str, known: str):
    start = {"vllm": "vllm serve a/b", "sglang": "sglang serve --model-path a/b"}[server]
    message = refusal_of(f"{start} {argument}", server)
    assert argument.split()[0] in message and "knows" in message and known in message


class TestSpeculation:
    def test_vllm_drops_its_schedule_under_data_parallelism(self):
        table = (
            '\'{"method":"eagle3","model":"d/e","num_speculative_tokens":4,'
            '"num_speculative_tokens_per_batch_size":[[1,8,4],[9,64,1]]}\''
        )
        alone = launch_of(f"vllm serve {MODEL} --speculative-config {table}")
        parallel = launch_of(f"vllm serve {MODEL} --speculative-config {table} -dp 2")
        assert "adaptive" in alone.settings["speculation"] and not any("WARNING" in line for line in alone.notes())
        assert parallel.settings["speculation"] == {"algorithm": "EAGLE3", "policy": "fixed", "steps": 4}
        assert any("WARNING: with data parallelism vLLM drops" in line for line in parallel.notes())

    @pytest.mark.parametrize(
        "more", ["--speculative-eagle-topk 4 --speculative-num-draft-tokens 8", "--tp 2 --dp 2 --enable-dp-attention"]
    )
    def test_sglang_ignores_adaptive_steps_where_it_cannot(self, more: str):
        command = (
            f"sglang serve --model-path {MODEL} --speculative-algorithm EAGLE3 --speculative-num-steps 3 {more} "
            "--speculative-adaptive"
        )
        launch = launch_of(command, "sglang")
        assert launch.settings["speculation"]["policy"] == "fixed"
        assert any("SGLang ignores --speculative-adaptive" in line for line in launch.notes())

    def test_look_ups_of_sglang_are_trees(self):
        command = (
            f"sglang serve --model-path {MODEL} --speculative-algorithm NGRAM --speculative-num-draft-tokens 16 "
            "--sampling-backend pytorch"
        )
        spec = assemble(scenario_of("sglang", command)).spec
        assert (spec.num_draft_tokens, spec.topk) == (16, 10)

    def test_own_layers_are_one_deployment_on_every_server(self, tmp_path: Path):
        pytest.importorskip("aiconfigurator_core")
        (tmp_path / "o.yaml").write_text(
            "speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 2}\ntensor_parallel_size: 8\n"
        )
        model = "deepseek-ai/DeepSeek-V3"
        commands = {
            "sglang": f"sglang serve --model-path {model} --tp 8 --speculative-algorithm NEXTN "
            "--speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3",
            "vllm": f'vllm serve {model} -tp 8 --speculative-config \'{{"method":"mtp","num_speculative_tokens":2}}\'',
            "trtllm": f"trtllm-serve {model} --config {tmp_path / 'o.yaml'}",
        }
        found = {}
        for server, command in commands.items():
            scenario = scenario_of(server, command, **{"engine.kv_slots": 100_000})
            assembled = assemble(scenario)
            found[server] = (scenario.speculation.algorithm, scenario.speculation.steps, assembled.acceptance)
        assert found["sglang"] == found["vllm"] == found["trtllm"]

    @pytest.mark.parametrize(("steps", "algorithm"), [(3, "MULTI_LAYER_EAGLE"), (4, "EAGLE")])
    def test_several_own_layers_draft_one_token_each(self, steps: int, algorithm: str, tmp_path: Path):
        config = dict(built_in_config("qwen3-8b")[1]) | {"num_nextn_predict_layers": 3}
        (tmp_path / "config.json").write_text(json.dumps(config))
        table = json.dumps({"method": "mtp", "num_speculative_tokens": steps})
        settings = launch_of(f"vllm serve {tmp_path} --speculative-config '{table}'").settings
        assert settings["speculation"]["algorithm"] == algorithm

    def test_eagle_of_tensorrt_is_eagle3_unless_its_backend_says_otherwise(self, tmp_path: Path):
        options = tmp_path / "o.yaml"
        options.write_text(
            "speculative_config: {decoding_type: Eagle, max_draft_len: 3, speculative_model_dir: some/head}\n"
        )
        command = f"trtllm-serve {MODEL} --config {options}"
        assert launch_of(command, "trtllm").settings["speculation"]["algorithm"] == "EAGLE3"
        assert launch_of(f"{command} --backend tensorrt", "trtllm").settings["speculation"]["algorithm"] == "EAGLE"
        options.write_text(options.read_text() + "max_batch_size: 4\nmax_batch_size: 8\n")
        assert "'max_batch_size' is written twice" in refusal_of(command, "trtllm")

    def test_eagle_is_not_written_for_tensorrt(self):
        table = {"1": {"candidate_steps": [3]}}
        keys = {"speculation.algorithm": "EAGLE", "hardware.server": "trtllm-1.x"}
        scenario = scenario_with({}, settings_of(table) | keys)
        files, left_out = server_files(scenario, table, table, 64)
        assert "trtllm.yaml" not in files and "EAGLE" in left_out["TensorRT-LLM"]


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_weights_in_host_memory_are_named(server: str):
    start = {"vllm": "vllm serve a/b", "sglang": "sglang serve --model-path a/b"}[server]
    reason = launch_of(f"{start} --cpu-offload-gb 20", server).not_modelled["--cpu-offload-gb"]
    assert "weights" in reason


def test_all_to_all_kernels_divide_the_experts_among_all_devices():
    command = "sglang serve --model-path deepseek-ai/DeepSeek-V3 --tp 8 --dp 8 --enable-dp-attention --moe-a2a-backend"
    assert launch_of(f"{command} deepep", "sglang").settings["hardware.expert_parallel"] == 8
    assert "hardware.expert_parallel" not in launch_of(f"{command} none", "sglang").settings


@pytest.mark.parametrize(
    ("server", "command"),
    [
        ("vllm", "vllm serve a/b -tp 8 --nnodes 2 --node-rank 0"),
        ("sglang", "sglang serve --model-path a/b --tp 8 --nnodes 2 --node-rank 1"),
        ("trtllm", "trtllm-serve a/b --tp_size 8 --gpus_per_node 4"),
    ],
)
def test_nodes_end_the_fast_link_but_in_a_rack(server: str, command: str):
    assert launch_of(command, server).settings["hardware.gpus_per_node"] == 4
    assert "hardware.gpus_per_node" not in read_launch(server, command, "--from", "GB200").settings
    if server != "trtllm":
        assert "--nnodes: is 3, which does not divide the 8 devices" in refusal_of(
            command.replace("s 2", "s 3"), server
        )
        assert "hardware.gpus_per_node" not in launch_of(command.replace("8", "16"), server).settings


class TestMemory:
    @pytest.mark.parametrize("size", ["10G", "10GiB", "10737418240", "10.73741824g"])
    @pytest.mark.parametrize("name", ["--kv-cache-memory-bytes {}", "--kv-cache-memory={}"])
    def test_the_memory_of_kv_is_as_large_as_the_command_says(self, name: str, size: str):
        scenario = scenario_of("vllm", f"vllm serve {MODEL} {name.format(size)}", **{"hardware.gpu": "H200"})
        assert assemble(scenario).memory.slots == 72_800  # 147,456 bytes each, in blocks of 16 beside one for padding

    def test_tensorrt_llm_bounds_it_in_bytes(self):
        config = json.dumps({"max_gpu_total_bytes": 10 << 30})
        command = f"trtllm-serve {MODEL} --kv_cache_config '{config}'"
        memory = assemble(scenario_of("trtllm", command, **{"hardware.gpu": "H200"})).memory
        assert memory.kv_pool_bytes == pytest.approx(10 << 30, rel=1e-3)

    def test_sizes_that_are_none_are_refused(self):
        for size in ("10X", "ten", "1.5"):
            assert "expected an integer" in refusal_of(f"vllm serve {MODEL} --kv-cache-memory-bytes {size}")

    @pytest.mark.parametrize("server, argument, key, value", [
        ("vllm", "--kv-cache-dtype nvfp4", "model.kv_dtype", "nvfp4"),
        ("vllm", "--kv-cache-dtype turboquant_3bit_nc", "model.kv_dtype", "turboquant_3bit_nc"),
        ("vllm", "--kv-cache-dtype fp8_ds_mla", "model.kv_dtype", "fp8_ds_mla"),
        ("vllm", "--mamba-ssm-cache-dtype float32", "model.state_dtype", "fp32"),
        ("vllm", "--mamba-cache-dtype float16", "model.state_dtype", "fp16"),
        ("vllm", "--mamba-cache-dtype float32 --mamba-ssm-cache-dtype bfloat16", "model.state_dtype", "bf16"),
        ("vllm", "--mamba-cache-dtype float32 --mamba-ssm-cache-dtype bfloat16", "model.conv_dtype", "fp32"),
        ("sglang", "--mamba-ssm-dtype bfloat16", "model.state_dtype", "bf16"),
        ("sglang", "--kv-cache-dtype fp4_e2m1", "model.kv_dtype", "nvfp4"),
        ("sglang", "--max-mamba-cache-size 500", "hardware.state_slots", 500),
        ("sglang", "--swa-full-tokens-ratio 0.5", "hardware.window_ratio", 0.5),
    ])  # fmt: skip
    def test_formats_of_kv_and_states_become_keys(self, server: str, argument: str, key: str, value: object):
        first = "vllm serve" if server == "vllm" else "python -m sglang.launch_server --model-path"
        found = launch_of(f"{first} {MODEL} {argument}", server)
        assert found.settings[key] == value
        assert not [name for name in found.not_modelled if name in argument]
