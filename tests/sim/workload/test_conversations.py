"""Outputs of a trace with block ids are found again in the next turn of their conversation."""

import json

import numpy as np
import pytest
from foredraft.core.prompt import Prompt, following
from foredraft.sim.running.run import Simulation
from foredraft.sim.scenario_file import scenario_from_dict
from foredraft.sim.workload.conversations import block_names

BLOCK = 100


def names(*requests):
    return block_names(requests, BLOCK)


def test_the_next_turn_has_the_blocks_that_the_output_fills():
    """250 tokens and 240 of output end in the fifth block; the sixth is the client's next message."""
    found = names((250, 240, [1, 2, 3]), (560, 10, [1, 2, 4, 5, 6, 7]))
    assert found == {4: 3, 5: following(3), 6: following(following(3))}
    before = Prompt.of_blocks([1, 2, 3], BLOCK, 250).continued(490).materialize()
    after = Prompt.of_blocks([found.get(block, block) for block in (1, 2, 4, 5, 6, 7)], BLOCK, 560).materialize()
    np.testing.assert_array_equal(before, after[:490])


def test_a_prompt_that_ends_with_its_block_is_continued_in_a_new_one():
    assert names((200, 50, [1, 2]), (330, 10, [1, 2, 3, 4])) == {3: following(2)}


def test_turns_shorter_than_a_block_have_one_name():
    found = names((110, 20, [1, 2]), (140, 20, [1, 3]), (390, 5, [1, 4, 5, 6]))
    assert found == {3: 2, 4: 2}


@pytest.mark.parametrize(
    "requests",
    [
        pytest.param([(250, 240, [1, 2, 3]), (400, 10, [1, 2, 4, 5])], id="shorter than prompt and output"),
        pytest.param([(150, 20, [1, 2]), (120, 20, [1, 3]), (490, 5, [1, 4, 5, 6, 7])], id="two users of one prefix"),
        pytest.param([(350, 9, [1, 5, 6, 7]), (150, 20, [1, 2]), (250, 5, [1, 3, 4])], id="shared before it ended"),
        pytest.param([(150, 20, [1, 2]), (250, 5, [1, 3, 4]), (390, 5, [1, 8, 9, 10])], id="two next turns"),
        pytest.param([(150, 20, [1, 2]), (150, 20, [1, 2])], id="the same again"),
        pytest.param([(50, 20, [1]), (180, 20, [2, 3])], id="less than a block"),
    ],
)
def test_in_doubt_no_block_is_renamed(requests):
    assert names(*requests) == {}


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_simulated_output_is_found_in_the_cache(tmp_path, page_size):
    turns = [(0, 700, 500, [1, 2]), (60_000, 1300, 5, [1, 3, 4])]
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(dict(zip(keys, turn, strict=True))) + "\n" for turn in turns))
    tables = {"workload": {"trace": str(trace)}, "engine": {"page_size": page_size}}
    simulation = Simulation(scenario_from_dict({**tables, "speculation": {"algorithm": "NONE"}}, "test"))
    simulation.run()
    # The last token of the output has no KV.
    assert simulation.replicas[0].engine.store.cache.hits == (700 + 500 - 1) // page_size * page_size
