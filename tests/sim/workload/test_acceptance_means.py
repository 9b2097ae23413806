"""Means of acceptance: lines of servers, what follows from them, and each way in which they contradict themselves."""

from __future__ import annotations

import numpy as np
import pytest
from acceptance_texts import ARGUMENTS, SERVER, VLLM_SERVER, sglang_lines, written
from foredraft.core.errors import ConfigError
from foredraft.sim.workload.acceptance.means import read_acceptance

BROKEN_MEANS = {
    "a line that breaks off": (SERVER[: SERVER.index("3.00")], "line 3: accept len is ''"),
    "NaN": (SERVER.replace("3.00", "nan"), "line 3: accept len is 'nan'"),
    "only idle": (SERVER.replace("2.00", "0.00").replace("3.00", "0.00"), "every accept len is 0"),
    "no bonus token": (SERVER.replace("3.00", "0.50"), "line 3: accept len 0.5: expected 1"),
    "no rate": (SERVER.replace("accept rate", "x"), "give --steps"),
    "a rate of no steps": (
        SERVER.replace("0.67", "0.40"),
        "no whole number of draft steps, 1 ... 16, in all of 2 lines",
    ),
    "a rate of steps that change": (sglang_lines((2.17, 0.54), (2.17, 0.36)), "did the steps change.*give --steps"),
    "a rate with two meanings": (
        sglang_lines((2.00, 0.33)),
        r"5 draft steps if accept rate = tokens / .*0.5.10; 3 draft steps if accept rate = correct.*Give --steps",
    ),
    "arguments of a tree": (ARGUMENTS.format(3, 4) + SERVER, "line 1: a draft tree of top-4"),
    "arguments of two servers": (
        ARGUMENTS.format(3, 1) + ARGUMENTS.format(5, 1) + SERVER,
        "draft steps of several settings, 3 .*line 1.; 5 .*line 2",
    ),
    "two servers in one log": (SERVER + VLLM_SERVER, "'SpecDecoding metrics' and with 'accept len'"),
    "positions of vLLM that rise": (
        VLLM_SERVER.replace("0.491", "0.791"),
        "line 2: rates .* expected numbers that do not rise",
    ),
    "a mean of vLLM that is another": (
        VLLM_SERVER.replace("2.89", "2.79"),
        "line 2: mean acceptance length 2.79: expected 2.89",
    ),
    "more accepted by vLLM than drafted": (VLLM_SERVER.replace("330", "100"), "line 2: 104 accepted of 100 drafted"),
    "a line of vLLM that breaks off": (
        VLLM_SERVER[:-70],
        "line 2: mean acceptance length 2.89: expected 1.69, by the rates .a truncated",
    ),
    "NaN of vLLM": (VLLM_SERVER.replace("0.691", "nan"), "line 2: acceptance rate is 'nan'"),
    "two settings of vLLM": (
        VLLM_SERVER + VLLM_SERVER.replace(", 0.073", "").replace("2.89", "2.82"),
        "lines of 5 and of 6 positions: expected those of one setting",
    ),
    "nothing that is known": ("hello\n", "unknown format: expected events.jsonl of Foredraft"),
    "empty": ("", "is empty: expected events.jsonl"),
    "header only": ("steps,accept_length\n", "no rows behind the header"),
    "half a row": ("steps,accept_length\n3\n", "line 2: 1 fields"),
    "half a step": ("steps,accept_length\n2.5,2\n", "line 2: steps 2.5: expected a whole number"),
    "more than all": ("steps,accept_length\n3,4.1\n", "line 2: accept_length 4.1: expected 1 .* 4, all 3 drafts"),
    "no number": ("steps,accept_length\n3,inf\n", "line 2: accept_length is 'inf'"),
}


class TestMeans:
    def test_lines_of_a_server_weigh_by_their_requests(self, tmp_path):
        log = read_acceptance([written(tmp_path, SERVER)])
        assert log.means == ((3, 2.75),) and log.left_out == {"lines without rounds": 1}

        assert log.inferred == (
            "3 draft steps: all of 2 lines fit accept rate = correct drafts / (rounds × steps), SGLang 0.5.11 and later",
        )

    @pytest.mark.parametrize("steps", [1, 3, 5])
    @pytest.mark.parametrize("bonus", [0, 1])
    def test_the_meaning_of_the_rate_follows_from_the_lines(self, tmp_path, steps, bonus):
        """SGLang divided tokens by steps + 1 before it divided correct drafts by steps; both round to two decimals."""
        lengths = [1 + steps * share for share in (0.31, 0.47, 0.593, 0.71)]
        pairs = [(length, (length - 1 + bonus) / (steps + bonus)) for length in lengths]
        log = read_acceptance([written(tmp_path, sglang_lines(*pairs))])
        assert log.means == ((steps, pytest.approx(np.mean(lengths), abs=0.01)),)
        assert (f"{steps} draft step" in log.inferred[0]) and ("tokens /" in log.inferred[0]) == bool(bonus)

    def test_arguments_as_a_dictionary_are_read_like_those_of_a_call(self, tmp_path):
        arguments = "[2026-09-04] server_args={'speculative_num_steps': 5, 'speculative_eagle_topk': 1, 'tp_size': 1}\n"
        log = read_acceptance([written(tmp_path, arguments + sglang_lines((2.00, 0.33)))])
        assert log.means[0][0] == 5 and log.inferred == ()

    def test_the_arguments_in_a_log_win_over_rates(self, tmp_path):
        """A rate with two meanings, a log of a release without rates, and the depth of a tree that the user takes as
        a chain's."""
        for text in (sglang_lines((2.00, 0.33)), SERVER.replace(", accept rate", ", rate")):
            log = read_acceptance([written(tmp_path, ARGUMENTS.format(5, 1) + text)])
            assert log.means[0][0] == 5 and log.inferred == ()
        assert read_acceptance([written(tmp_path, ARGUMENTS.format(5, 4) + SERVER)], steps=5).means[0][0] == 5
        with pytest.raises(ConfigError, match=r"3 .--steps.; 5 .*line 1"):
            read_acceptance([written(tmp_path, ARGUMENTS.format(5, 1) + SERVER)], steps=3)

    def test_the_orders_of_vllms_releases(self, tmp_path):
        """The first releases put the draft acceptance rate first, one of them counts no bonus token, some idle lines
        are not numbers; later ones name a depth."""
        sums = "Accepted: 200 tokens, Drafted: 300 tokens"
        rates = "Per-position acceptance rate: 0.850, 0.650, 0.500"
        idle = "SpecDecoding metrics: Draft acceptance rate: nan%, Mean acceptance length: nan, Accepted: 0 tokens, Drafted: 0 tokens\n"
        for line in (
            f"Draft acceptance rate: 66.7%, Mean acceptance length: 3.00, {sums}, {rates}\n",
            f"Draft acceptance rate: 66.7%, Mean acceptance length: 2.00, {sums}, {rates}\n{idle}",
            f"Mean acceptance length: 3.00, Current speculative depth: 3, {sums}, {rates}, Avg Draft acceptance rate: 66.7%\n",
        ):
            log = read_acceptance(
                [written(tmp_path, f"INFO 06-01 10:00:00 [metrics.py:82] SpecDecoding metrics: {line}")]
            )
            assert log.counts == pytest.approx([15, 20, 15, 50])
            assert log.left_out == ({"lines without rounds": 1} if "nan" in line else {})
            with pytest.raises(ConfigError, match="its lines have 3 positions, but --steps is 5"):
                read_acceptance([str(tmp_path / "input")], steps=5)
        text = f"SpecDecoding metrics: Draft acceptance rate: 66.7%, {sums}\n"
        with pytest.raises(ConfigError, match=r"line 1: does not say how many steps .*--steps"):
            read_acceptance([written(tmp_path, text)])
        assert read_acceptance([written(tmp_path, text)], steps=3).means == ((3, pytest.approx(3.0)),)

    def test_counts_of_vllms_first_engine(self, tmp_path):
        """They count from the start on, and begin anew with the server."""
        form = (
            "INFO metrics.py:367] Speculative metrics: Draft acceptance rate: 0.5, System efficiency: 0.6, Number of "
            "speculative tokens: 3, Number of accepted tokens: 9, Number of draft tokens: {}, Number of emitted tokens: {}.\n"
        )
        text = "".join(form.format(*counts) for counts in ((150, 100), (300, 240), (30, 16)))
        assert read_acceptance([written(tmp_path, text)]).means == ((3, pytest.approx(256 / 110)),)
        with pytest.raises(ConfigError, match="3 and 5 speculative tokens"):
            read_acceptance([written(tmp_path, text)], steps=5)

    def test_lines_of_vllm(self, tmp_path):
        log = read_acceptance([written(tmp_path, VLLM_SERVER)])
        assert log.counts == pytest.approx([17, 11, 11, 6, 1, 5, 4], abs=0.1)
        assert read_acceptance([written(tmp_path, VLLM_SERVER * 2)]).counts == pytest.approx(2 * log.counts)

    def test_csv(self, tmp_path):
        log = read_acceptance([written(tmp_path, "steps, accept_length\n3,2.24\n1,1.65\n")])
        assert log.means == ((1, 1.65), (3, 2.24))

    @pytest.mark.parametrize("name", BROKEN_MEANS)
    def test_broken_means(self, name, tmp_path):
        text, expected = BROKEN_MEANS[name]
        with pytest.raises(ConfigError, match=expected):
            read_acceptance([written(tmp_path, text)])
