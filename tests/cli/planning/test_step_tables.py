"""Tables of adaptive steps: `foredraft tune --table` and `export`."""

from __future__ import annotations

import json

import pytest


def test_tables_of_steps_go_to_other_servers_and_come_back(command, refused, tmp_path):
    ours = command("tune", "--table", "default").out
    code, out, errors = command("export", "default", "--for", "sglang-0.5.23", "--out", tmp_path / "theirs.json")
    assert (code, out) == (0, "") and "--speculative-algorithm" in errors
    (tmp_path / "plain.json").write_text('{"1": {"candidate_steps": [2]}}')
    for server, words in (("vllm", '"method" (such as "eagle3") and "model"'), ("trtllm", "decoding_type")):
        exported = command("export", tmp_path / "plain.json", "--for", server, "--max-batch-size", 64)
        assert exported.code == 0 and words in exported.err and words not in exported.out and "64" in exported.out
        (tmp_path / server).write_text(exported.out)
        assert '"1": {"candidate_steps": [2]' in command("tune", "--table", tmp_path / server).out
    back = ("tune", "--table", tmp_path / "theirs.json")
    assert command(*back, "--out", tmp_path / "back.json").code == 0
    assert command("tune", "--table", tmp_path / "back.json").out == ours == command(*back).out


def test_a_table_in_the_command_line_may_be_longer_than_a_path(command):
    table = json.dumps({str(bound): {"candidate_steps": [bound % 3]} for bound in range(1, 20)})
    assert len(table) > 255
    exported = command("export", table, "--for", "vllm")
    assert exported.code == 0 and "num_speculative_tokens_per_batch_size" in exported.out


def test_a_printed_table_is_a_table(command, tmp_path):
    """With every key that is given, nodes of trees by steps among them."""
    table = {"num_draft_tokens": {"2": 6, "3": 8}, "probe_backoff": True, "1": {"candidate_steps": [2, 3]}}
    printed = command("tune", "--table", json.dumps(table)).out
    (tmp_path / "printed.json").write_text(printed)
    assert json.loads(printed)["1"]["num_draft_tokens"] == {"2": 6, "3": 8}
    assert command("tune", "--table", tmp_path / "printed.json").out == printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("export", "default", "--for", "sgland"), "sglang-"),
        (("export", "default"), "--for: is missing: a table is written for sglang-VERSION"),
        (("export", "default", "--for", "vllm", "--json"), "--json: has no effect: a table of steps"),
        (("export", "defualt", "--for", "vllm"), "did you mean 'default'?"),
        (("export", ".", "--max-batch-size", "8"), "--max-batch-size: has no effect"),
        (("tune", "--table", "none.json"), "none.json"),
        (("tune", "--table", "defualt"), "did you mean 'default'?"),
        (
            ("tune", "--table", "default", "--seeds", "3", "--json"),
            "--seeds: has no effect: --table makes no use of it",
        ),
        (("adaptive", "show", "default"), "adaptive is gone: use `foredraft tune --table`"),
    ],
)
def test_what_is_no_question_about_a_table_is_one_message(refused, arguments, words):
    assert words in refused(*arguments)
