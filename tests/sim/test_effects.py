"""Keys without effect: refused where the command line gives them, told where a file does, silent where they say
what happens anyway."""

from __future__ import annotations

import inspect
import json

import pytest
from foredraft.core.errors import ConfigError
from foredraft.core.model_shape import BUILT_IN
from foredraft.sim.assembly import assemble
from foredraft.sim.effects.given_keys import conditions_of, given_keys, refuse_without_effect
from foredraft.sim.effects.notices import notices_of
from foredraft.sim.scenario import Scenario, conditions
from foredraft.sim.scenario_file import flat_items, load_scenario

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
MOONCAKE = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
SGLANG = ["hardware.server=sglang-0.5"]
FIXED = ("speculation.policy=fixed", "speculation.steps=3")
POOLS = ("disaggregation.prefill=1", "disaggregation.decode=1", "engine.page_size=16")
GROUPS = ("model.target=qwen3-30b-a3b", "hardware.tensor_parallel=2")  # has experts
OWN = "hardware.prefill.{0} and hardware.decode.{0} replace it"


def of_both(setting: str) -> list[str]:
    return [f"hardware.{pool}.{setting}" for pool in ("prefill", "decode")]


# settings, then the key that does nothing with a part of the reason
CASES = [
    (["hardware.server=sglang-0.5", "hardware.window_ratio=0.5"], "hardware.window_ratio", "no pool of their own"),
    (["hardware.server=sglang-0.5", "hardware.state_ratio=0.5"], "hardware.state_ratio", "in proportion"),
    (["model.state_dtype=bf16"], "model.state_dtype", "llama-3.1-8b has no recurrent layers"),
    (["hardware.server=sglang-0.5", "model.target=qwen3-next-80b-a3b", "model.weight_dtype=int4", "hardware.gpu=H200",
      "speculation.algorithm=NONE", "hardware.state_slots=500", "hardware.state_ratio=0.5"],
     "hardware.state_ratio", "state_slots is their"),
    (["hardware.server=vllm-0.18", "hardware.release=\"0.18\"", "hardware.flashinfer_sampler=true"],
     "hardware.flashinfer_sampler", "until 0.11.0"),
    (["hardware.server=sglang-0.5", "hardware.release=0.5.23"], "hardware.release", "all releases of sglang-0.5"),
    (["speculation.algorithm=NONE", "speculation.steps=3"], "speculation.steps", "NONE drafts nothing"),
    (["speculation.algorithm=NONE", "speculation.num_draft_tokens=4"], "speculation.num_draft_tokens", "NONE drafts nothing"),
    (["speculation.algorithm=NONE", "speculation.policy=goodput"], "speculation.policy", "NONE drafts nothing"),
    (["speculation.algorithm=NONE", "speculation.adaptive=default"], "speculation.adaptive", "NONE drafts nothing"),
    (["speculation.algorithm=NONE", "acceptance.preset=code"], "acceptance.preset", "nothing is drafted"),
    (["speculation.policy=fixed", "speculation.steps=0", "speculation.topk=4"], "speculation.topk", "0 steps"),
    ([*FIXED, "speculation.adaptive=default"], "speculation.adaptive", "fixed policy"),
    (['speculation.adaptive={1 = {candidate_steps = [3]}}', "speculation.policy=ema"], "speculation.policy", "one candidate"),
    (["speculation.heads=3"], "speculation.heads", "EAGLE3 has not one head per step"),
    (["speculation.algorithm=NGRAM", "model.draft=llama-3.2-1b"], "model.draft", "NGRAM has no draft of its own"),
    (["model.expert_independence=0.3"], "model.expert_independence", "llama-3.1-8b has no experts"),
    (["speculation.algorithm=EAGLE", "model.draft_vocab=32000"], "model.draft_vocab", "EAGLE has no vocabulary"),
    ([*FIXED, "acceptance.mean_length=10.0"], "acceptance.mean_length", "is not reached: a round of 3 draft steps gives at most 4 tokens"),
    (["acceptance.recorded=runs.csv", "acceptance.request_share=0.1"], "acceptance.request_share", "the recording"),
    (["acceptance.rank_ratio=0.5"], "acceptance.rank_ratio", "topk is 1"),
    (["acceptance.rejected_ratio=0.1"], "acceptance.rejected_ratio", "that of the rule target itself"),
    (["acceptance.look_up_share=0.5"], "acceptance.look_up_share", "EAGLE3 has no look-ups beside a head"),
    (["speculation.algorithm=SUFFIX", "acceptance.look_up_share=0.5"], "acceptance.look_up_share", "as HYBRID has"),
    (["acceptance.look_up_conditional=[0.9]"], "acceptance.look_up_conditional", "EAGLE3 has no look-ups beside a head"),
    (["speculation.algorithm=HYBRID", "acceptance.look_up_conditional=[0.9]"], "acceptance.look_up_conditional", "look_up_share is 0"),
    (["speculation.algorithm=HYBRID", "acceptance.look_up_share=0.5", "acceptance.recorded=runs.csv",
      "acceptance.look_up_conditional=[0.9]"], "acceptance.look_up_conditional", "the recording"),
    (["speculation.algorithm=SUFFIX", "speculation.accept_rule=block"], "speculation.accept_rule", "look-ups, which are not drawn"),
    (["speculation.topk=4", "speculation.verify=remaining"], "speculation.verify", "rows of trees"),
    (["engine.kv_slots=100000", "hardware.kv_gb=10.0"], "hardware.kv_gb", "kv_slots"),
    (["engine.kv_slots=100000", "hardware.reserved_fraction=0.5"], "hardware.reserved_fraction", "kv_slots"),
    (["hardware.kernels_of=vllm"], "hardware.kernels_of", "the roofline prices the passes"),
    (["hardware.kernels=roofline", "hardware.kernels_of=vllm"], "hardware.kernels_of", "kernels is roofline"),
    (["hardware.tensor_parallel=2", "hardware.expert_parallel=2"], "hardware.expert_parallel", "llama-3.1-8b has no experts"),
    (["hardware.gpu=L40S", "hardware.custom={memory_gb=24.0,bandwidth_gb_per_s=936.0,bf16_tflops=71.0,link_gb_per_s=32.0}"],
     "hardware.custom.memory_gb", "hardware.gpu is L40S"),
    (["hardware.gpus_per_node=4"], "hardware.gpus_per_node", "on one node"),
    (["hardware.cuda_graphs=false", "hardware.graph_sizes=[1, 2]"], "hardware.graph_sizes", "cuda_graphs is false"),
    (["hardware.cuda_graphs=false", "hardware.graph_unit=tokens"], "hardware.graph_unit", "cuda_graphs is false"),
    (["speculation.algorithm=HYBRID", "hardware.graph_sizes=[1, 2]"], "hardware.graph_sizes", "HYBRID captures none"),
    (["engine.prefix_cache=true"], "engine.prefix_cache", "unknown"),
    (["workload.prefixes.groups=2", "engine.prefix_cache=false", "engine.eviction_policy=fifo"], "engine.eviction_policy", "prefix_cache"),
    (["hardware.server=sglang-0.5", "engine.watermark=0.1"], "engine.watermark", "guarantee_output is 0.7"),
    (["engine.preempt=true"], "engine.preempt", "same priority"),
    *(([f"engine.{key}"], f"engine.{key.partition('=')[0]}", "the rules of hardware.server = foredraft have no such setting")
      for key in ("guarantee_floor=0.5", "guarantee_rounds=9", "guarantee_limit=9", "retraction_policy=length", "reserve_full_isl=false")),
    *((["hardware.server=vllm-0.18", f"engine.{key}"], f"engine.{key.partition('=')[0]}", "have no such setting")
      for key in ("guarantee_output=0.5", "batch_wait_rounds=9", "batch_wait_tokens=0.5")),
    ([*SGLANG, "engine.guarantee_output=0.0", "engine.guarantee_limit=9"], "engine.guarantee_limit", "guarantee_output is 0"),
    ([*SGLANG, "engine.guarantee_floor=1.0", "engine.guarantee_rounds=9"], "engine.guarantee_rounds", "guarantee_floor is 1"),
    (["engine.batch_wait_rounds=9"], "engine.batch_wait_rounds", "batch_wait_tokens is 0"),
    (["engine.batch_wait_tokens=0.5"], "engine.batch_wait_tokens", "batch_wait_rounds is 0"),
    (["front_end.first_chunk=interval"], "front_end.first_chunk", "stream_interval is 1"),
    ([*FIXED, "speculation.probe_backoff=false"], "speculation.probe_backoff", "the policy fixed"),
    ([*FIXED, "speculation.confidence_temperatures={temperatures=[1.0, 1.0, 1.0]}"], "speculation.confidence_temperatures",
     "makes no use of confidences"),
    (["workload.urgent_share=1.0", "engine.ageing_bound=4"], "engine.ageing_bound", "same priority"),
    (["workload.trace=azure.csv", "workload.rate=8.0"], "workload.rate", "trace"),
    (["workload.trace=azure.csv", "workload.output.value=9"], "workload.output.value", "trace"),
    (["workload.trace=azure.csv", "workload.prefixes.groups=2"], "workload.prefixes.groups", "trace"),
    (["workload.trace=azure.csv", "workload.concurrency=2", "workload.rate_scale=2.0"], "workload.rate_scale", "closed loop"),
    (["workload.format=azure"], "workload.format", "only a trace"),
    (["workload.concurrency=2", "workload.rate=3.0"], "workload.rate", "closed loop"),
    (["workload.concurrency=2", "workload.stop_s=3.0"], "workload.stop_s", "closed loop"),
    (["workload.arrivals=curve", "workload.curve=[1.0, 2.0]", "workload.amplitude=0.1"], "workload.amplitude", "belongs to day"),
    (["workload.curve=[1.0, 2.0]"], "workload.curve", "belongs to curve"),
    (["workload.period_s=60.0"], "workload.period_s", "belongs to day, curve"),
    (["workload.arrivals=constant", "workload.burstiness=2.0"], "workload.burstiness", "belongs to gamma, day, curve"),
    (["workload.output.value=9", "workload.output.high=20"], "workload.output.high", "fixed length has no bounds"),
    (["workload.prompt.values=[9]", "workload.prompt.low=2"], "workload.prompt.low", "empirical length has no bounds"),
    (["workload.prefixes.zipf=2.0"], "workload.prefixes.zipf", "one group"),
    (["workload.max_tokens=1000000"], "workload.max_tokens", "131072 tokens"),
    (["clients.cancel_mean_s=3.0"], "clients.cancel_mean_s", "no client leaves"),
    (["router.policy=round_robin"], "router.policy", "one engine"),
    (["hardware.replicas=2", "router.policy=prefix_aware"], "router.policy", "without block hashes"),
    (["hardware.replicas=2", "workload.trace=azure.csv", "router.policy=prefix_aware"], "router.policy", "without block hashes"),
    ([*POOLS, "router.policy=random"], "router.policy", "prefill_policy"),
    (["disaggregation.layerwise=false"], "disaggregation.layerwise", "every engine does all"),
    (["hardware.prefill.gpu=H200"], "hardware.prefill.gpu", "every engine does all"),
    ([*POOLS, "hardware.gpu=H200", *of_both("gpu=B200")], "hardware.gpu", OWN.format("gpu")),
    ([*POOLS, "hardware.tensor_parallel=4", *of_both("tensor_parallel=2")], "hardware.tensor_parallel", OWN.format("tensor_parallel")),
    ([*POOLS, "hardware.attention_data_parallel=4", *of_both("attention_data_parallel=2")],
     "hardware.attention_data_parallel", OWN.format("attention_data_parallel")),
    ([*POOLS, *GROUPS, "hardware.expert_parallel=1", *of_both("expert_parallel=2")],
     "hardware.expert_parallel", OWN.format("expert_parallel")),
    ([*POOLS, "hardware.tensor_parallel=4", "hardware.gpus_per_node=4", *of_both("gpus_per_node=2")],
     "hardware.gpus_per_node", OWN.format("gpus_per_node")),
    ([*POOLS, "disaggregation.bandwidth_gbps=100.0", *of_both("bandwidth_gbps=200.0")],
     "disaggregation.bandwidth_gbps", OWN.format("bandwidth_gbps")),
    ([*POOLS, "hardware.decode.expert_parallel=1", "hardware.prefill.gpus_per_node=4"], "hardware.prefill.gpus_per_node", "on one node"),
    ([*POOLS, "hardware.decode.tensor_parallel=2", "hardware.decode.expert_parallel=2"], "hardware.decode.expert_parallel", "no experts"),
    ([*POOLS, "disaggregation.decode_policy=random"], "disaggregation.decode_policy", "one decode engine"),
    ([*POOLS, "disaggregation.prefill_policy=random"], "disaggregation.prefill_policy", "one prefill engine"),
]  # fmt: skip


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "azure.csv").write_text(AZURE)
    (tmp_path / "mooncake.jsonl").write_text(MOONCAKE)
    (tmp_path / "runs.csv").write_text("request,position,longest_run\n" + "".join(f"a,{i},2\n" for i in range(9)))


def told(settings: list[str], path=None) -> tuple[str, ...]:
    scenario, origins = load_scenario(path, settings)
    return notices_of(assemble(scenario), origins)


@pytest.mark.parametrize(("settings", "key", "reason"), CASES, ids=[" ".join(case[0]) for case in CASES])
def test_the_command_line_is_refused_and_a_file_gets_a_note(files, tmp_path, settings, key, reason):
    """Also a resolved scenario, which has every key: only those are told that are not the default."""
    from foredraft.sim.scenario.scenario_text import scenario_text

    scenario, origins = load_scenario(None, settings)
    with pytest.raises(ConfigError) as refused:
        refuse_without_effect(assemble(scenario), origins)
    assert [problem.key for problem in refused.value.problems] == [key], "and no other key"
    assert reason in str(refused.value)
    path = tmp_path / "scenario.toml"
    path.write_text(scenario_text(scenario, origins))
    again, origins = load_scenario(path)
    assembly = assemble(again)
    refuse_without_effect(assembly, origins)
    default, given = ({name: value for name, value, _ in flat_items(each)} for each in (Scenario(), scenario))
    notices = notices_of(assembly, origins)
    matching = [notice for notice in notices if notice.startswith(f"{key} = ") and str(path) in notice]
    if given[key] != default.get(key) and key != "workload.prefixes.groups":
        assert len(matching) == 1 and reason in matching[0]


def test_every_condition_is_that_of_a_key_and_has_a_case():
    declared = conditions_of(Scenario)
    functions = {one for one in vars(conditions).values() if inspect.isfunction(one)}
    known = {one for one in functions if [*inspect.signature(one).parameters][:2] == ["run", "key"]}
    assert {one.condition for those in declared.values() for one in those} == known
    covered = {one.condition for _, key, _ in CASES for one in declared[key]}
    covered.add(conditions.mode_fell_back)  # which needs a plugin, see tests/cli/test_plugins_cli.py
    assert covered == known


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["speculation.algorithm=NONE", "speculation.policy=fixed", "speculation.steps=0", "speculation.topk=1"],
        ["disaggregation.ratio=none", "disaggregation.prefill=0"],
        ["workload.arrivals=day", "workload.burstiness=2.0", "workload.amplitude=0.2", "workload.period_s=60.0"],
        ["workload.arrivals=curve", "workload.curve=[1.0, 3.0]", "workload.period_s=60.0", "workload.burstiness=2.0"],
        ["workload.trace=mooncake.jsonl", "hardware.replicas=2", "router.policy=prefix_aware", "workload.rate_scale=2.0"],
        ["workload.urgent_share=0.5", "engine.preempt=true", "engine.ageing_bound=4"],
        [*POOLS, "disaggregation.layerwise=false", "disaggregation.rebalance_s=9.0", "disaggregation.decode_policy=random"],
        ["acceptance.mean_length=8.0"],
        ["speculation.topk=4", "acceptance.rank_ratio=0.5"],
        ["workload.prefixes.groups=2", "workload.prefixes.zipf=2.0", "engine.eviction_policy=fifo"],
    ],
    ids=str,
)  # fmt: skip
def test_keys_with_an_effect_pass_in_silence(files, settings):
    scenario, origins = load_scenario(None, settings)
    assembly = assemble(scenario)
    refuse_without_effect(assembly, origins)
    assert notices_of(assembly, origins) == ()


def test_what_the_run_decides_itself_is_noted(tmp_path, monkeypatch):
    assert told(["speculation.algorithm=STANDALONE"]) == ("model.draft is not given: llama-3.2-1b drafts",)
    assert told(["speculation.algorithm=STANDALONE", "model.draft=llama-3.2-3b"]) == ()
    assert (
        told(["speculation.algorithm=STANDALONE", "model.target=qwen3-8b"])[0]
        == "model.draft is not given: qwen3-0.6b drafts"
    )
    recording = tmp_path / "runs.jsonl"
    recording.write_text('{"request": "a", "runs": [1, 2]}\n')
    assert "every simulated request repeats its runs" in told([f"acceptance.recorded={recording}"])[0]
    recording.write_text(recording.read_text() + '{"request": "b", "runs": [0]}\n')
    assert told([f"acceptance.recorded={recording}"]) == ()
    flat = told(["speculation.adaptive={candidate_steps = [1, 3]}"])
    assert len(flat) == 1 and "flat form" in flat[0], "notices of the adaptive table"


def test_scenarios_from_python_are_told():
    scenario = Scenario.model_validate({"speculation": {"algorithm": "NONE", "steps": 3}})
    notices = notices_of(assemble(scenario), given_keys(scenario, "scenario"))
    assert notices == ("speculation.steps = 3 (scenario) has no effect: NONE drafts nothing",)


def test_a_vocabulary_without_a_built_in_draft_is_named_as_that(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**BUILT_IN["qwen3-8b"], "vocab_size": 1000}))
    with pytest.raises(
        ConfigError, match=r"model.draft: is not given, and no built-in model .* vocabulary of 1000 tokens"
    ):
        assemble(load_scenario(None, ["speculation.algorithm=STANDALONE", f"model.target={config}"])[0])


@pytest.mark.parametrize("target", ["llama-160m", "llama-3.2-1b"])
def test_no_model_drafts_for_itself(target):
    with pytest.raises(ConfigError, match=f"model.draft: is not given, and no built-in model smaller than {target}"):
        assemble(load_scenario(None, ["speculation.algorithm=STANDALONE", f"model.target={target}"])[0])


def test_graphs_that_take_much_of_the_memory_are_told():
    target = ["model.target=qwen3-30b-a3b"]
    (notice,) = told([*target, "speculation.policy=goodput"])
    assert notice.startswith("CUDA graphs of 8 step counts take 7,000 MiB") and "fewer candidates" in notice
    assert (
        "CUDA graphs of 1 step count take" in told([*target, "speculation.policy=fixed", "engine.max_running=800"])[0]
    )
    for quiet in (["engine.kv_slots=50000"], ["hardware.cuda_graphs=false"], ["hardware.graph_sizes=[1, 8, 64, 256]"]):
        assert told([*target, "speculation.policy=goodput", *quiet]) == (), quiet


def test_a_candidate_beyond_a_tree_is_blamed_on_the_table():
    settings = ["speculation.topk=2", "speculation.adaptive={1 = {candidate_steps = [1, 80]}}"]
    with pytest.raises(ConfigError) as refused:
        assemble(load_scenario(None, settings)[0])
    assert [problem.key for problem in refused.value.problems] == ["speculation.adaptive"]
    assert "80 steps" in str(refused.value)
