"""A draft that is the target itself is never wrong: every chain is accepted to its end, however it is served."""

import pytest
from foretoken.core.contract.request import Request
from foretoken.core.prompt import Prompt
from matrix_cells import oracle
from serving import Way, chain, serve, tree

STEPS = 4
# One token of the prefill, then whole runs of S + 1.
REQUESTS = [
    Request(f"r{i}", Prompt.of_tokens([(7 * i + 3 * j) % 24 for j in range(2 + 5 * i)]), 1 + (STEPS + 1) * (2 + i))
    for i in range(4)
]


def served(way: Way, acceptance=None):
    run = serve(way, REQUESTS, acceptance=acceptance)
    counters = run.executor.counters
    return run, counters.correct_drafts / counters.verified_rows


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("block_rounds", [1, 8])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_draft_equal_to_the_target_is_always_right(overlap, block_rounds, page_size):
    config = {"overlap": overlap, "block_rounds": block_rounds, "page_size": page_size, "num_pages": 800 // page_size}
    run, correct = served(chain("STANDALONE", STEPS, noise=0.0, **config))
    assert correct == STEPS
    for request in REQUESTS:
        wanted = oracle(0).continuation(request.prompt.materialize().tolist(), request.max_tokens)
        assert run.tokens[request.request_id] == wanted
    # In overlap mode a row takes part in one more round, for its end is not known when that is planned.
    rounds = sum(-(-(request.max_tokens - 1) // (STEPS + 1)) for request in REQUESTS)
    assert rounds <= run.executor.counters.verified_rows <= rounds + overlap * 2 * len(REQUESTS)


def test_its_trees_are_right_as_deep_as_they_are():
    """All children of all first nodes: the best of each is among them. (Deeper, a beam may drop it for likelier others.)"""
    _, correct = served(tree("STANDALONE", 2, 3, 1 + 3 + 9, noise=0.0))
    assert correct == 2


def test_a_draft_that_is_another_model_is_not():
    """The contrast: what is asserted above can be false."""
    _, correct = served(chain("STANDALONE", STEPS, noise=0.3))
    assert 0 < correct < STEPS
