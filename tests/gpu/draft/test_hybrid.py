"""HYBRID: rows of one round draft in several ways, and the head drafts as if it had run over every token at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from foredraft.checks.adapters.dense_drafting import DenseHead, Shape, dense_tree
from foredraft.core.acceptance.process import GaussianAcceptance
from foredraft.core.algorithm.hybrid import HybridChoice, HybridCosts, RoundChoice
from foredraft.core.algorithm.registry import get_algorithm
from foredraft.core.algorithm.suffix import Lookup
from foredraft.core.contract.request import Request
from foredraft.core.errors import ConfigError
from foredraft.core.prompt import Prompt
from foredraft.core.scheduler.config import EngineConfig
from foredraft.core.scheduler.engine import Engine
from foredraft.core.tree.chains import AcceptRule
from foredraft.gpu.draft import hybrid
from foredraft.gpu.draft.hybrid import HybridDraft
from foredraft.gpu.executor.build import build_executor
from foredraft.gpu.executor.parts import ExecutorOptions
from matrix_cells import OPS, oracle, small_head, small_model
from serving import chain, serve

STEPS = 3


def requests_for(number: int = 5, tokens: int = 30) -> list[Request]:
    prompts = [[(7 * i + 3 * j) % 24 for j in range(3 + 4 * i)] * 2 for i in range(number)]
    return [Request(f"r{i}", Prompt.of_tokens(prompt), tokens + i) for i, prompt in enumerate(prompts)]


def plain(request: Request) -> list[int]:
    return oracle(0).continuation(request.prompt.materialize().tolist(), request.max_tokens)


@pytest.fixture
def proposals(monkeypatch):
    """Rounds draft by look-up, by the head for some rows, by it for all, and not at all, in turn. Returns what the head
    has drafted: the text of each row, and its drafts."""
    found: list[tuple[list[int], list[int]]] = []
    by_the_head, turn = HybridDraft._by_the_head, [0]

    def choose(choice, rows, look_ups, most, late, is_sampled):
        turn[0] += 1
        way, places = turn[0] // 2 % 4, np.arange(len(rows))
        by_model = (places % 2 == 0) & (way == 1) | (way == 2)
        longest = np.array([len(each.tokens) for each in look_ups])
        counts = np.where(by_model | (way == 3), 0, np.minimum(longest, most))
        return RoundChoice(min(most, 1 + turn[0] % STEPS) if by_model.any() else 0, by_model, counts)

    def recorded(draft, batch, relayed, steps):
        tree = by_the_head(draft, batch, relayed, steps)
        texts = [draft._look_ups._texts[row].tokens.tolist() for row in batch.row_numbers.tolist()]
        found.extend(zip(texts, tree.tokens[:, 1:].tolist(), strict=True))
        return tree

    monkeypatch.setattr(HybridChoice, "choose", choose)
    monkeypatch.setattr(HybridDraft, "_by_the_head", recorded)
    return found


CONFIGS = {
    "overlap": {"overlap": True, "multi_step_rounds": 1},
    "multi-step": {"overlap": False},
    "pages": {"page_size": 4, "num_pages": 90, "multi_step_rounds": 1},
    "no cache": {"prefix_cache": False, "num_pages": 100, "multi_step_rounds": 1},
}


@pytest.mark.fast("pages-64", ci="*")
@pytest.mark.parametrize("most_waiting", [64, 3])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_head_drafts_as_if_it_had_run_over_every_token(proposals, config, most_waiting, monkeypatch):
    monkeypatch.setattr(hybrid, "MOST_WAITING", most_waiting)
    run = serve(chain("HYBRID", STEPS, **config), requests_for(), disturbance=None)
    assert run.tokens == {request.request_id: plain(request) for request in requests_for()}
    assert run.retractions or config.get("num_pages") != 100
    dense = DenseHead(small_head(0, "EAGLE3"), small_model(0), 0)
    assert len(proposals) > 20
    for text, drafts in proposals:
        if len(text) + len(drafts) + 1 < run.engine.config.context_len:
            shape = Shape(len(drafts), 1, len(drafts) + 1, run.engine.config.context_len - 1)
            with torch.no_grad():
                assert dense_tree(dense, text, shape, 1).tree.tokens.tolist()[1:] == drafts


def test_what_is_behind_an_early_end_is_complete_for_the_next_request(proposals):
    """The second request finds the first one's whole text in the prefix cache, with the head's KV of it."""
    first = requests_for(1, 24)[0]
    text = [*first.prompt.materialize().tolist(), *plain(first)]
    again = Request("again", Prompt.of_tokens([*text, 3, 5]), 12)
    way = chain("HYBRID", STEPS, max_running=1, multi_step_rounds=1, overlap=False)
    run = serve(way, [first, again], disturbance=None)
    assert run.tokens["again"] == plain(again)
    dense, checked = DenseHead(small_head(0, "EAGLE3"), small_model(0), 0), 0
    for whole, drafts in proposals:
        if whole[: len(text)] == text and len(whole) > len(text):
            shape = Shape(len(drafts), 1, len(drafts) + 1, run.engine.config.context_len - 1)
            with torch.no_grad():
                assert dense_tree(dense, whole, shape, 1).tree.tokens.tolist()[1:] == drafts
            checked += 1
    assert checked > 1


def test_simulated_acceptance_is_refused():
    with pytest.raises(ConfigError, match=r"acceptance: cannot be simulated with HYBRID"):
        serve(chain("HYBRID", 2), requests_for(1), acceptance=GaussianAcceptance((0.8,), seed=1))


def test_rules_of_drawn_drafts_are_refused():
    with pytest.raises(
        ConfigError, match=r"accept_rule: rejection: HYBRID has drafts of look-ups, which are not drawn"
    ):
        way = chain("HYBRID", 2)
        engine = Engine(
            EngineConfig(num_pages=99, context_len=96, track_tokens=True), get_algorithm("HYBRID"), way.controller()
        )
        build_executor(engine, small_model(0), way.draft, OPS, ExecutorOptions(accept_rule=AcceptRule.REJECTION))


# -- the choice -------------------------------------------------------------------------------------------------------

NOTHING, SURE = Lookup([], [], 0), Lookup([1, 2, 3, 4, 5, 6], [1.0] * 6, 12)


def choose(choice: HybridChoice, found: list[Lookup], rounds: int = 60, model=lambda row: 0, look_up=lambda row: 6):
    """Let rounds run whose drafts are right so often; return the last choice."""
    for row in range(len(found)):
        choice.open_row(row)
    for _ in range(rounds):
        made = choice.choose(range(len(found)), found, 6)
        for row, each in enumerate(found):
            if made.by_model[row]:
                choice.learn_model(made.model_steps, min(made.model_steps, model(row)))
            else:
                choice.learn_look_up(row, each, int(made.look_ups[row]), min(int(made.look_ups[row]), look_up(row)))
    return made


def test_each_row_takes_what_promises_more():
    made = choose(HybridChoice(6, HybridCosts(draft_base=0.05)), [SURE, NOTHING] * 2, model=lambda row: 4)
    assert made.by_model.tolist() == [False, True, False, True]
    assert made.model_steps >= 3 and made.look_ups.tolist() == [6, 0, 6, 0]


def test_nothing_is_drafted_where_neither_pays():
    costs = HybridCosts(verify_base=1.0, verify_token=0.2, draft_base=0.4)
    made = choose(HybridChoice(6, costs), [SURE] * 3, look_up=lambda row: 0)
    assert not made.by_model.any() and made.look_ups.max() <= 1
    dear = choose(HybridChoice(6, HybridCosts(draft_base=2.0)), [NOTHING] * 3)
    assert dear.model_steps == 0


def test_a_head_for_one_row_must_pay_for_the_round():
    """Where one row of eight has no look-up, the pass of the head delays the other seven."""
    costs = HybridCosts(verify_base=1.0, verify_token=0.0, draft_base=0.5, draft_token=0.0)
    made = choose(HybridChoice(6, costs), [SURE] * 7 + [NOTHING], model=lambda row: 1)
    assert not made.by_model.any() and made.look_ups.tolist() == [6] * 7 + [0]


def test_what_is_not_tried_is_tried_again():
    choice = HybridChoice(6, HybridCosts(draft_base=0.3))
    assert not choose(choice, [NOTHING], rounds=30).by_model.any()
    made = [choose(choice, [NOTHING], rounds=1).by_model.any() for _ in range(1500)]
    assert any(made) and sum(made) < 200


def test_a_text_that_is_known_does_not_take_the_model_from_one_that_is_new():
    """Most tokens per second come without the model: 9 of the first row, and 1 of the other."""
    made = choose(HybridChoice(6, HybridCosts(draft_base=0.15)), [SURE, NOTHING], model=lambda row: 2)
    assert made.by_model.tolist() == [False, True] and made.look_ups.tolist() == [6, 0]


def test_rounds_that_sample_have_times_of_their_own():
    costs = HybridCosts(draft_base=0.6, sampled_base=9.0)
    choice = HybridChoice(6, costs)
    choice.open_row(0)
    greedy, sampled = (choice.choose([0], [NOTHING], 6, is_sampled=flag).model_steps for flag in (False, True))
    assert greedy < sampled
