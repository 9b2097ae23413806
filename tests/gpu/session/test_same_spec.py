"""The same settings make the same engine in a scenario and in a session, or are refused with the same words."""

import json
from dataclasses import replace

import pytest
from foredraft.core.errors import ConfigError, ForedraftError
from foredraft.gpu.session.plan import SessionOptions, plan_session
from foredraft.gpu.session.session import DecodeSession
from foredraft.sim.assembly import assemble
from foredraft.sim.assembly.explaining import derived_rows
from foredraft.sim.disaggregation.cluster import page_format_of
from foredraft.sim.scenario_file import scenario_from_dict
from hypothesis import given
from hypothesis import strategies as st
from small_checkpoint import CONTEXT, write_head, write_standalone, write_target

HEADS = ("EAGLE", "EAGLE3", "MULTI_LAYER_EAGLE")
TABLES = ("default", "with-zero", '{"1": {"candidate_steps": [2]}, "8": {"candidate_steps": [0, 2]}}', "defualt")
FILES = {
    "round_times": {"sample_batch_tokens": [1, 9], "sample_steps_per_sec": [90.0, 80.0], "max_batch_tokens": 9},
    "confidence_temperatures": {"temperatures": [1.5, 1.0]},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    found = {"target": write_target(root / "target"), "STANDALONE": write_standalone(root / "standalone")}
    for directory in found.values():  # the cost model knows no wider weights
        config = directory / "config.json"
        config.write_text(config.read_text().replace("float32", "bfloat16"))
    for name, table in FILES.items():
        (root / name).write_text(json.dumps(table))
    return found | {name: write_head(root / name, name) for name in HEADS} | {name: root / name for name in FILES}


def outcome(resolve):
    """The specification, or the messages of what is wrong."""
    try:
        return resolve()
    except ConfigError as error:
        return {problem.message for problem in error.problems}
    except ForedraftError as error:
        return {str(error)}


SETTINGS = st.fixed_dictionaries(
    {
        "algorithm": st.sampled_from(["NONE", "NGRAM", "STANDALONE", *HEADS]),
        "policy": st.sampled_from([None, "ema", "goodput", "confidence"]),
        "adaptive": st.sampled_from([None, *TABLES]),
        "steps": st.none() | st.integers(0, 4),
        "topk": st.integers(1, 3),
        "nodes": st.none() | st.integers(1, 20),
        "overlap": st.booleans(),
        "page_size": st.sampled_from([1, 4]),
        "max_running": st.integers(1, 40),
        "kv_tokens": st.integers(4, 400),
        "context_len": st.integers(2, CONTEXT),
        "graphs": st.booleans(),
        "files": st.booleans(),
    }
)


@given(chosen=SETTINGS)
def test_scenario_and_session_resolve_alike(models, chosen):
    c = chosen
    if c["algorithm"] == "NONE":
        c = c | {"steps": None}  # a session refuses steps that nothing drafts; a scenario may be one of a sweep
    graphs = c["graphs"] and c["algorithm"] != "NGRAM"  # the real executor captures no round that drafts on the host
    files = {name: str(models[name]) for name in FILES} if c["files"] else {}
    options = SessionOptions(
        models["target"],
        models.get(c["algorithm"]),
        **files,
        algorithm=c["algorithm"],
        policy=c["policy"],
        adaptive=c["adaptive"],
        steps=c["steps"],
        topk=c["topk"],
        num_draft_tokens=c["nodes"],
        overlap=c["overlap"],
        page_size=c["page_size"],
        max_running=c["max_running"],
        kv_tokens=c["kv_tokens"],
        context_len=c["context_len"],
        multi_step_rounds=32,
        chunk_size=8192,
        graphs=graphs,
        dtype="float32",
        device="cpu",
    )
    is_fixed = c["policy"] is None and c["adaptive"] is None
    scenario = {
        "model": {"target": str(models["target"]), "context_len": c["context_len"]}
        | ({"draft": str(models[c["algorithm"]])} if c["algorithm"] in models else {}),
        "hardware": {"cuda_graphs": graphs},
        "speculation": {
            "algorithm": c["algorithm"],
            "policy": "fixed" if is_fixed else c["policy"] or "ema",
            "adaptive": c["adaptive"],
            "topk": c["topk"],
            "heads": 2,
        }
        | files
        | {key: c[of] for key, of in (("steps", "steps"), ("num_draft_tokens", "nodes")) if c[of] is not None},
        "engine": {
            "mode": "overlap" if c["overlap"] else "synchronous",
            "page_size": c["page_size"],
            "max_running": c["max_running"],
            "kv_slots": c["kv_tokens"],
        },
    }
    simulated = outcome(lambda: assemble(scenario_from_dict(scenario, "test")).spec)
    real = outcome(lambda: plan_session(options).spec)
    if isinstance(simulated, set) or isinstance(real, set):
        assert real and real <= simulated  # a session may stop before the size of its pool is known
        return
    # A session has tokens and text, and measures its costs.
    simulated = replace(simulated.with_config(track_tokens=True), decodes_text=True)
    assert (simulated if real.cost_table is not None else replace(simulated, cost_table=None)) == real
    assert c["files"] or not real.temperatures
    assert simulated.resolve_sizes() == real.resolve_sizes()
    if not real.lacks_costs:
        assert simulated.make_controller().snapshot() == real.make_controller().snapshot()


@pytest.mark.parametrize("num_heads", [1, 2, 3])
def test_a_simulated_row_relays_what_a_real_one_does(models, tmp_path, num_heads):
    """Fields and sizes: a hidden state of every head but the last, and the candidates of every head,
    whatever the steps."""
    draft = write_head(tmp_path / "draft", "MULTI_LAYER_EAGLE", num_heads=num_heads)
    options = SessionOptions(models["target"], draft, steps=1, dtype="float32", device="cpu", kv_tokens=400)
    speculation = {"algorithm": "MULTI_LAYER_EAGLE", "policy": "fixed", "steps": 1, "heads": num_heads}
    assembly = assemble(
        scenario_from_dict({"model": {"target": str(models["target"])}, "speculation": speculation}, "test")
    )
    real = DecodeSession.open(options).executor.future_map.fields
    assert assembly.algorithm.relay_fields(assembly.relay_shape) == real
    rows = {name: value for name, value, *_ in derived_rows(assembly)}
    assert rows["relay per request and round: hidden_states"] == next(
        field.bytes_per_row for field in real if field.name == "hidden_states"
    )
    assert page_format_of(assembly).hidden_size == max(num_heads - 1, 1) * assembly.target.hidden
