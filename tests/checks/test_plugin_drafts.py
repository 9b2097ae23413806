"""Plugins on the reference executor: told the truth, rejected where they talk nonsense, named where they fail."""

from __future__ import annotations

import pytest
from cells import random_cells
from foredraft.core.adaptive import fixed_controller
from foredraft.core.algorithm.registry import get_algorithm, register_algorithm
from foredraft.core.contract.request import Request
from foredraft.core.errors import Problem
from foredraft.core.prompt import Prompt
from foredraft.core.scheduler.config import EngineConfig
from foredraft.core.scheduler.engine import Engine
from foredraft.properties.conformance import check
from foredraft.properties.executor.contract import ExecutorConfig, drawn_with
from foredraft.properties.executor.reference import HashDraft, HashLanguageModel, ReferenceExecutor, plain_greedy
from foredraft.properties.executor.reference.adapter import ReferenceAdapter
from foredraft.properties.executor.reference.handoff import HandoffPair
from foredraft.properties.suites import suite_of
from serving_matrix import run_cell_in_multi_steps, run_cells, summary
from witness import Witness, WitnessProposer

pytestmark = pytest.mark.usefixtures("forget")


def plugin(base, **changes):
    """A class of this test's own, registered as PLUGGED."""
    return register_algorithm("PLUGGED")(type("Plugged", (base,), changes))


@pytest.mark.ci
def test_every_round_starts_from_what_its_last_accepted_node_said(record_property):
    plugin(Witness)
    Witness.rounds_witnessed = 0
    # With simulated acceptance the drafts are not the proposer's own, so there is no truth to tell.
    fixed = {"algorithm": "PLUGGED", "drafts": "model"}
    failures, reports = run_cells(list(random_cells(20, 7, fixed)))
    assert not failures, "\n".join(f"{f.error}\n    {f.cell}" for f in failures)
    record_property("note", f"witness on the reference executor: {summary(failures, reports)}")
    for count in ("blocks", "correct_drafts", "retractions", "disturbances"):
        assert sum(getattr(report, count) for report in reports) > 5, count
    assert Witness.rounds_witnessed > 150


def check_plugged():
    """As `foredraft check executor reference-executor --algorithm PLUGGED` does."""
    return check(suite_of("executor").drawing(drawn_with("PLUGGED")), ReferenceAdapter, budget=1_200)


@pytest.mark.ci
def test_the_executor_contract_draws_engines_of_a_plugin(monkeypatch):
    drawn, make_engine = set(), ExecutorConfig.make_engine

    def note(config, *arguments):
        drawn.add((config.algorithm, config.topk > 1, config.overlap, config.adaptive, config.multi_step_rounds > 1))
        return make_engine(config, *arguments)

    monkeypatch.setattr(ExecutorConfig, "make_engine", note)
    plugin(Witness)
    Witness.rounds_witnessed = 0
    report = check_plugged()
    assert report.ok, report.text()
    assert Witness.rounds_witnessed > 100
    assert {algorithm for algorithm, *_ in drawn} == {"PLUGGED"}
    assert all({choices[at] for choices in drawn} == {False, True} for at in range(1, 5))


@pytest.mark.ci
def test_the_executor_contract_draws_what_a_plugin_takes():
    def problems(self, shape):
        return [Problem("steps", "2 at most")] if shape.steps > 2 or shape.topk > 1 else []

    plugin(Witness, supports_trees=False, supports_overlap=False, problems=problems)
    report = check_plugged()
    assert report.ok, report.text()


@pytest.mark.ci
def test_the_executor_contract_finds_a_plugin_that_talks_nonsense():
    class Liar(WitnessProposer):
        def propose(self, request):
            proposal = super().propose(request)
            proposal.next_relay["text_len"][:, 1:] += 1
            return proposal

    plugin(Witness, make_proposer=lambda self, shape: Liar())
    report = check_plugged()
    assert "NotTheTruth" in report.text() and not report.ok
    assert len(report.failures[0].case.operations) <= 15


@pytest.mark.ci
def test_blocks_and_simulated_acceptance():
    plugin(Witness)
    blocks = sum(
        run_cell_in_multi_steps(cell)
        for cell in random_cells(5, 3, {"algorithm": "PLUGGED", "drafts": "model", "multi_step_rounds": 8, "topk": 1})
    )
    assert blocks > 0
    plain = type("Silent", (Witness,), {"make_proposer": lambda self, shape: Silent()})
    register_algorithm("SILENT")(plain)
    failures, reports = run_cells(list(random_cells(8, 5, {"algorithm": "SILENT", "drafts": "simulated"})))
    assert not failures, failures[0].error
    assert sum(report.correct_drafts for report in reports) > 30


class Silent(WitnessProposer):
    """Proposes nothing, and relays that."""

    def propose(self, request):
        raise AssertionError("with simulated acceptance no drafts are asked for")


# -- prefill and decode on different workers --------------------------------------------------------------------------


def serve_disaggregated(model, requests, **config):
    """The ends of requests that one engine prefills and another decodes."""

    def worker(role):
        algorithm = get_algorithm("PLUGGED")
        sizes = {"num_pages": 80, "page_size": 4, "context_len": 96, "max_running": 4, "chunk_size": 8}
        engine = Engine(
            EngineConfig(**sizes, **config, track_tokens=True, role=role),
            algorithm,
            fixed_controller(3, topk=2, num_draft_tokens=6, depth_limited=False),
        )
        return engine, ReferenceExecutor(engine, HashDraft(model, 0.7))

    pair = HandoffPair(worker("prefill"), worker("decode"))
    for request in requests:
        assert not pair.prefill.submit(request, 0)
    return pair.run()


@pytest.mark.parametrize("overlap", [False, True])
def test_own_fields_travel_from_the_prefill_to_the_decode_worker(overlap):
    plugin(Witness)
    Witness.rounds_witnessed = 0
    model = HashLanguageModel(seed=3, vocab_size=24, regularity=0.8)
    requests = [Request(f"r{i}", Prompt.of_tokens([(i + 5 * j) % 24 for j in range(1 + 6 * i)]), 20) for i in range(6)]
    ends = serve_disaggregated(model, requests, overlap=overlap, multi_step_rounds=4)
    for request in requests:
        assert ends[request.request_id].tokens.tolist() == plain_greedy(model, request, 20).tolist()
    assert Witness.rounds_witnessed > 30
