"""A log of an engine that has tokens and text is replayed from its header alone, without tokenizer and model."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from foredraft.core.adaptive import CostTable, load_adaptive_config
from foredraft.core.adaptive.config import fixed_config
from foredraft.core.algorithm.registry import get_algorithm
from foredraft.core.contract.request import FinishReason, Request
from foredraft.core.contract.text import TextDecoder
from foredraft.core.errors import ConfigError
from foredraft.core.prompt import Prompt
from foredraft.core.scheduler.config import EngineConfig
from foredraft.core.scheduler.driver import Driver
from foredraft.core.scheduler.spec import EngineSpec, SpeculationChoice, default_graph_sizes, resolve_spec
from foredraft.observe.log import EventLog, read_log
from foredraft.observe.replay import replay
from foredraft.properties.executor.reference import HashDraft, HashLanguageModel, ReferenceExecutor

CONFIG = EngineConfig(
    num_pages=400, context_len=96, max_running=4, chunk_size=16, multi_step_rounds=4, track_tokens=True
)
MODEL = HashLanguageModel(seed=1, vocab_size=24)


@pytest.mark.parametrize("max_running", [1, 2, 3, 8, 33, 256, 512, 513, 700])
def test_default_graphs_hold_every_batch(max_running):
    sizes = default_graph_sizes(max_running)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] >= max_running
    assert sizes[-1] < max_running + 8, "nothing is captured that no batch is padded to"


class Letters(TextDecoder):
    """Token n is the n-th letter."""

    def decode(self, tokens: np.ndarray) -> str:
        return "".join(chr(ord("a") + int(token)) for token in tokens)


def described(**fields) -> EngineSpec:
    values = {"config": CONFIG, "algorithm": "STANDALONE", "policy": "fixed", "adaptive": fixed_config(3)}
    return EngineSpec(**{**values, **fields})


def ask(number: int, **fields) -> Request:
    return Request(str(number), Prompt.of_tokens([(number + j) % 24 for j in range(5 + number)]), 20, **fields)


def plain_outputs() -> dict[str, np.ndarray]:
    engine = described().make_engine()
    driver = Driver(engine, ReferenceExecutor(engine, HashDraft(MODEL)))
    for number in range(6):
        driver.submit(ask(number))
    return {name: end.tokens for name, end in driver.run_until_idle().items()}


def record(
    path: Path, description: EngineSpec, requests: list[Request], agreement: float = 0.7
) -> dict[str, FinishReason]:
    """Serve `requests` with a log at `path`; how each of them ended."""
    with EventLog(path, {"engine": description.to_json()}) as log:
        engine = description.make_engine(log.sink(0), Letters())
        driver = Driver(engine, ReferenceExecutor(engine, HashDraft(MODEL, agreement)))
        for request in requests:
            driver.submit(request)
        return {name: end.reason for name, end in driver.run_until_idle().items()}


def from_header(header, replica, events):
    return EngineSpec.from_json(header["engine"], "log").make_engine(events)


@pytest.mark.fast("True", ci="*")
@pytest.mark.parametrize("overlap", [True, False])
def test_a_log_with_stop_strings_is_replayed_without_a_tokenizer(tmp_path, overlap):
    outputs = plain_outputs()
    requests = []
    for number in range(6):
        text = Letters().decode(outputs[str(number)])
        # The first token, one in the middle, two across a round's end, none.
        stop = [text[0], text[4:6], text[7:9], text[2], "A", text[10]][number]
        requests.append(ask(number, stop_strings=(stop,)))
    config = replace(CONFIG, overlap=overlap)
    path = tmp_path / "events.jsonl"
    reasons = record(path, described(config=config, decodes_text=True), requests)
    assert [reasons[str(n)].name for n in range(6)] == ["STOP"] * 4 + ["LENGTH", "STOP"]
    report = replay(path, from_header)
    assert report.identical and report.complete, report.difference
    assert report.num_commits > 5
    # The replay has no letters: where it ended a request, the log had told it.
    commits = [r.data for r in read_log(path) if r.kind == "commit"]
    assert sum("stops" in data for data in commits) >= 2 and any("stopped" in data for data in commits)


def test_an_engine_that_was_described_with_text_differs_from_one_without(tmp_path):
    path = tmp_path / "events.jsonl"
    record(path, described(decodes_text=True), [ask(1, stop_strings=("A",))])
    lines = path.read_text().splitlines()
    header = json.loads(lines[0])
    header["engine"]["decodes_text"] = False
    path.write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")
    report = replay(path, from_header)
    assert "refusal" in report.difference.explanation


COSTS = CostTable((0, 1, 3), (1, 8), ((100, 120), (130, 160), (150, 200)), (1, 1, 1))


@pytest.mark.parametrize(
    "description",
    [
        described(),
        described(algorithm="NONE", adaptive=fixed_config(0)),
        described(policy="ema", adaptive=load_adaptive_config("default"), initial_steps=3, graph_sizes=(1, 2, 4)),
        described(
            policy="goodput",
            adaptive=load_adaptive_config({"1": {"candidate_steps": [0, 1, 3], "ema_alpha": 0.5}}),
            cost_table=COSTS,
        ),
        described(algorithm="EAGLE3", topk=3, num_draft_tokens=8),
        described(
            policy="ema",
            algorithm="EAGLE3",
            adaptive=load_adaptive_config(
                {"num_draft_tokens": {"1": 4}, "1": {"candidate_steps": [0, 3]}, "4": {"candidate_steps": [1]}}
            ),
            topk=3,
            num_draft_tokens=((1, 3), (3, 8)),
        ),
    ],
)
def test_a_description_reads_back(description):
    written = json.loads(json.dumps(description.to_json()))
    again = EngineSpec.from_json(written, "log")
    assert again.to_json() == description.to_json()
    assert again.make_engine().sizes == description.make_engine().sizes
    assert again.make_controller().candidates == description.make_controller().candidates


TREES = {"policy": "ema", "topk": 4}


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({}, ((1, 5), (3, 16), (7, 16))),  # each as many as it fills, up to 16
        ({"num_draft_tokens": 5}, ((1, 5), (3, 5), (7, 5))),
        ({"num_draft_tokens": {"3": 20, "7": 64}}, ((1, 5), (3, 20), (7, 64))),
        ({"adaptive": {"num_draft_tokens": 4, "1": {"candidate_steps": [1, 3]}}}, ((1, 4), (3, 4))),
        (
            {
                "adaptive": {
                    "1": {"candidate_steps": [1, 3], "num_draft_tokens": {"3": 30}},
                    "8": {"candidate_steps": [3]},
                }
            },
            ((1, 5), (3, 16), (3, 30)),
        ),
    ],
)
def test_every_tree_has_nodes_of_its_own(given, sizes):
    spec = resolve_spec(CONFIG, get_algorithm("EAGLE3"), SpeculationChoice(**TREES | given))
    assert tuple((shape.steps, shape.nodes) for shape in spec.draft_shape.round_shapes()) == sizes
    assert spec.max_num_draft_tokens == max(nodes for _, nodes in sizes) == spec.resolve_sizes().max_draft_tokens
    again = EngineSpec.from_json(json.loads(json.dumps(spec.to_json())), "log")
    assert again.draft_shape.round_shapes() == spec.draft_shape.round_shapes()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_draft_tokens": 16}, "16 is beyond .* 1 steps hold at most 5 nodes; give the nodes by steps"),
        ({"num_draft_tokens": {"3": 65}}, "65 is beyond .* at most 37"),
        ({"num_draft_tokens": {"2": 5}}, r"num_draft_tokens\.2: is for no candidate"),
        ({"num_draft_tokens": {"3": 1}}, r"num_draft_tokens\.3: is 1; expected an integer >= 2"),
        ({"topk": 1, "num_draft_tokens": {"3": 5}}, "does not suit a chain"),
        (
            {"num_draft_tokens": 5, "adaptive": {"1": {"candidate_steps": [1], "num_draft_tokens": 3}}},
            "here and in the adaptive table",
        ),
        (
            {"adaptive": {"1": {"candidate_steps": [1], "num_draft_tokens": 6}}},
            r"adaptive\.1\.num_draft_tokens: 6 is beyond",
        ),
        ({"adaptive": {"1": {"candidate_steps": [1], "num_draft_tokens": {"2": 6}}}}, "is for no candidate"),
        ({"adaptive": {"1": {"candidate_steps": [1], "num_draft_tokens": [6]}}}, "is a list; expected an integer >= 2"),
    ],
)
def test_trees_that_cannot_be_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        resolve_spec(CONFIG, get_algorithm("EAGLE3"), SpeculationChoice(**TREES | given))


def test_each_policy_has_a_table_of_its_own():
    for policy, candidates in (("ema", (1, 3, 7)), ("goodput", tuple(range(8)))):
        assert (
            resolve_spec(CONFIG, get_algorithm("EAGLE3"), SpeculationChoice(policy)).adaptive.candidate_steps
            == candidates
        )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda value: value.pop("topk"), ["engine.topk", "missing"]),
        (lambda value: value.update(topk_=1), ["engine.topk_", "did you mean 'topk'"]),
        (lambda value: value["config"].update(page_sise=1), ["engine.config.page_sise", "did you mean 'page_size'"]),
        (lambda value: value["config"].update(page_size=0), ["page_size", "at least 1"]),
        (lambda value: value["config"].update(page_size="x"), ["describes no engine"]),
        (lambda value: value.update(algorithm="EAGEL3"), ["did you mean 'EAGLE3'"]),
        (lambda value: value.update(adaptive={"1": {}}), ["candidate_steps", "missing"]),
        (lambda value: value.update(policy="goodput"), ["cost_table"]),
        (lambda value: value.update(config=3), ["engine.config", "expected an object"]),
    ],
)
def test_a_header_that_describes_no_engine_is_named(change, words):
    value = described().to_json()
    change(value)
    with pytest.raises(ConfigError) as caught:
        EngineSpec.from_json(value, "log: line 1")
    assert all(word in str(caught.value) for word in ["log: line 1", *words]), str(caught.value)
