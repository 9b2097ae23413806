"""Files that tell how many drafts were accepted: each kind with a small file, and each way in which one
contradicts itself."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest
from acceptance_texts import SERVER, written
from foredraft.core.acceptance.fit import simulate_rounds
from foredraft.core.acceptance.presets import PRESETS
from foredraft.core.acceptance.process import GaussianAcceptance
from foredraft.core.errors import ConfigError
from foredraft.sim.workload.acceptance.means import read_acceptance

CHAT = PRESETS["eagle-llama-chat"].process()


def metrics(accepted, drafted=None, steps=3, detailed=True):
    """What vLLM reports of one request."""
    drafted = [steps] * len(accepted) if drafted is None else drafted
    found = {
        "mean_acceptance_length": 1 + sum(accepted) / max(len(accepted), 1),
        "draft_acceptance_rate": sum(accepted) / max(sum(drafted), 1),
        "acceptance_histogram": [accepted.count(j) for j in range(steps + 1)],
        "num_spec_steps": len(accepted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": steps,
    }
    return found | ({"per_step_accepted": accepted, "per_step_drafted": drafted} if detailed else {})


def response(found):
    return {"id": "cmpl-1", "choices": [], "usage": {}, "metrics": {"speculative_decoding": found}}


def lines_of(values):
    return "".join(json.dumps(value) + "\n" for value in values)


ROUNDS = [[3, 0, 2], [1, 1], [0, 3, 3, 1]]

PAGE = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 600.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 400.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 3000.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 1.66e+03
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 710.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 530.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 420.0
vllm:num_requests_running{engine="0",model_name="m"} NaN
"""


CONTRADICTIONS = {
    "steps": ({"num_spec_steps": 5}, "line 1, num_spec_steps: 5: expected 3"),
    "accepted": ({"num_accepted_draft_tokens": 4}, "num_accepted_draft_tokens: 4: expected 5"),
    "more accepted than drafted": ({"num_draft_tokens": 4}, "num_draft_tokens: 4: expected at least the 5"),
    "mean": ({"mean_acceptance_length": 1.5}, "mean_acceptance_length: 1.5: expected 2.667"),
    "a round too many": ({"per_step_accepted": [3, 0, 2, 0]}, "4 accepted and 3 drafted: expected 3 each"),
    "a round": ({"per_step_drafted": [2, 3, 3]}, r"per_step_accepted\[0\]: 3 accepted of 2 drafted"),
    "another order of magnitude": ({"per_step_accepted": [3, 1, 1]}, "not what acceptance_histogram counts"),
    "deeper than drafted": ({"num_spec_tokens": 2}, "a round accepts 3 drafts of 2"),
    "deeper than simulated": ({"num_spec_tokens": 40}, "num_spec_tokens: 40: expected at most 16"),
    "negative": ({"acceptance_histogram": [1, -1, 1, 1]}, "'-1': expected a whole number"),
    "missing": ({"acceptance_histogram": None}, "'None': expected a list or an object of counts"),
    "words": ({"acceptance_histogram": {"a": 1}}, "expected numbers of accepted drafts as keys"),
}

BROKEN_RESPONSES = {
    "a truncated line": (lines_of(map(response, map(metrics, ROUNDS)))[:-40], "line 3: is not JSON .a truncated line"),
    "a truncated document": (
        json.dumps([response(metrics(ROUNDS[0]))], indent=1)[:-9],
        "is not JSON .a truncated file",
    ),
    "one truncated line": ('{"metrics": {', "line 1: is not JSON"),
    "no metrics": ('{"metrics": {}}\n{"metrics": null}\n', "--per-request-spec-decode-metrics detailed"),
    "no rounds": (lines_of([response(metrics([]))]), "no request with speculative rounds"),
    "no object": ('{"metrics": {}}\n3\n', "line 2: '3': expected an object"),
    "NaN": ('{"metrics": {"speculative_decoding": {"mean_acceptance_length": NaN}}}\n', "NaN is no JSON number"),
}

BROKEN_PAGES = {
    "more accepted than drafted": ("1.66e+03", "3.5e+03", "3500 accepted of 3000 drafted"),
    "positions that rise": ("530.0", "730.0", "730 accepted at position 1, after 710"),
    "a sum that is another": ("1.66e+03", "1.2e+03", "1660 in all positions: expected 1200"),
    "a page that breaks off": ('"1"} 530.0', '"1"', "line 8: .*truncated line"),
    "a missing position": ('position="1"', 'position="3"', r"positions \[0, 2, 3\]"),
    "a position beyond all": ('position="1"', 'position="99"', "expected position 0 ... 15"),
    "a missing counter": ("num_draft_tokens", "num_x", "num_draft_tokens: missing"),
    "NaN": ("3000.0", "NaN", "line 5: .* is 'NaN': expected a finite number"),
    "negative": ("3000.0", "-3000", "line 5: .* is -3000: expected 0 or more"),
    "several models": ('engine="1",model_name="m"', 'engine="1",model_name="n"', "several models, m, n"),
    "fewer drafts than rounds": ("3000.0", "9000.0", "9000 in 1000 drafts of 3 positions"),
}


class TestResponses:
    def test_detailed(self, tmp_path):
        """One response a line, behind `data:` as a stream has it, or of aiperf; those without metrics are counted."""
        streamed = "".join(f"data: {json.dumps(response(metrics(rounds)))}\n\n" for rounds in ROUNDS) + "data: [DONE]\n"
        aiperf = [{"metadata": {}, "metrics": {}, "spec_decode_acceptance": metrics(rounds)} for rounds in ROUNDS]
        for text in (
            lines_of(map(response, map(metrics, ROUNDS))),
            streamed,
            lines_of(aiperf),
            lines_of(map(metrics, ROUNDS)),
        ):
            log = read_acceptance([written(tmp_path, text + '{"metadata": {}, "metrics": {}}\n')])
            assert log.form == "per-request metrics (vLLM, aiperf), every round"
            assert log.left_out == {"records without metrics": 1}
            assert log.rounds.tolist() == [
                [0, 0, 0, 1, 1, 2, 2, 2, 2],
                [0, 4, 5, 0, 2, 0, 1, 5, 9],
                [3] * 9,
                [3, 0, 2, 1, 1, 0, 3, 3, 1],
            ]

    def test_the_commonest_number_of_drafts_is_kept(self, tmp_path):
        text = lines_of([response(metrics([3, 0, 1, 0], [3, 3, 1, 0]))])
        log = read_acceptance([written(tmp_path, text)])
        assert log.rounds[2:].tolist() == [[3, 3], [3, 0]]
        assert log.left_out == {"rounds of 0 steps": 1, "rounds of 1 steps": 1}

    def test_summary(self, tmp_path):
        """A dense list of vLLM or a sparse object of aiperf; a list of responses in one file is the same."""
        dense = [metrics(rounds, detailed=False) for rounds in ROUNDS]
        sparse = copy.deepcopy(dense)
        for found in sparse:
            found["acceptance_histogram"] = {str(j): n for j, n in enumerate(found["acceptance_histogram"]) if n}
        documents = [json.dumps(list(map(response, dense)), indent=1), lines_of(map(response, dense))]
        for text in (*documents, lines_of({"spec_decode_acceptance": found} for found in sparse)):
            log = read_acceptance([written(tmp_path, text)])
            assert log.form == "per-request metrics (vLLM, aiperf), histograms"
            assert log.histograms.tolist() == [[1, 0, 1, 1], [0, 2, 0, 0], [1, 1, 0, 2]]

    def test_requests_to_warm_up_are_left_out(self, tmp_path):
        records = [
            {"metadata": {"benchmark_phase": phase}, "metrics": {}, "spec_decode_acceptance": metrics(rounds)}
            for phase, rounds in zip(("warmup", "profiling", "profiling"), ROUNDS, strict=True)
        ]
        log = read_acceptance([written(tmp_path, lines_of(records))])
        assert log.num_requests == 2 and log.left_out == {"requests to warm up": 1}

    def test_requests_of_two_settings(self, tmp_path):
        text = lines_of([response(metrics([3, 0])), response(metrics([3, 0], steps=5))])
        with pytest.raises(ConfigError, match="line 2, num_spec_tokens: 5 drafts in a round, 3 before"):
            read_acceptance([written(tmp_path, text)])

    def test_rounds_that_drafted_less_are_reported(self, tmp_path):
        text = lines_of([response(metrics([2, 1], [3, 1], detailed=False))])
        assert read_acceptance([written(tmp_path, text)]).left_out == {
            "requests with rounds of fewer drafts, counted as rejected": 1
        }

    @pytest.mark.parametrize("name", CONTRADICTIONS)
    def test_contradictions(self, name, tmp_path):
        changes, expected = CONTRADICTIONS[name]
        with pytest.raises(ConfigError, match=expected):
            read_acceptance([written(tmp_path, lines_of([response(metrics(ROUNDS[0]) | changes)]))])

    @pytest.mark.parametrize("name", BROKEN_RESPONSES)
    def test_broken_files(self, name, tmp_path):
        text, expected = BROKEN_RESPONSES[name]
        with pytest.raises(ConfigError, match=expected):
            read_acceptance([written(tmp_path, text)])


class TestPages:
    def test_counters_by_position(self, tmp_path):
        log = read_acceptance([written(tmp_path, PAGE)])
        assert log.counts.tolist() == [290, 180, 110, 420] and log.num_requests is None
        fitted = log.fit(CHAT)
        assert fitted.recorded.conditional == pytest.approx((0.71, 530 / 710, 420 / 530))
        assert fitted.simulated.conditional == pytest.approx(fitted.recorded.conditional, abs=0.01)
        assert fitted.recorded.mean_accept_length == pytest.approx(2.66)
        assert fitted.process.field_share == CHAT.field_share and np.isnan(fitted.recorded.request_mean)

    def test_counters_without_positions(self, tmp_path):
        page = "".join(line for line in PAGE.splitlines(keepends=True) if "per_pos" not in line)
        assert read_acceptance([written(tmp_path, page)]).means == ((3, pytest.approx(2.66)),)

    def test_llama_cpp_has_the_same_counters(self, tmp_path):
        mine = read_acceptance([written(tmp_path, PAGE)])
        theirs = read_acceptance([written(tmp_path, PAGE.replace("vllm:", "llamacpp:"))])
        assert (
            np.array_equal(theirs.counts, mine.counts)
            and theirs.form == "llama.cpp's counters by position (Prometheus)"
        )
        page = PAGE.replace("vllm:", "llamacpp:").replace("3000.0", "-3000")
        with pytest.raises(ConfigError, match=r"llamacpp:spec_decode_num_draft_tokens_total.* is -3000"):
            read_acceptance([written(tmp_path, page)])

    def test_a_result_of_vllms_benchmark_has_the_counts_of_its_run(self, tmp_path):
        run = {
            "model_id": "m", "spec_decode_num_drafts": 1000, "spec_decode_draft_tokens": 3000,
            "spec_decode_accepted_tokens": 2000, "spec_decode_per_position_acceptance_rates": [0.85, 0.65, 0.5],
        }  # fmt: skip
        log = read_acceptance([written(tmp_path, json.dumps(run))])
        assert log.counts.tolist() == pytest.approx([150, 200, 150, 500])
        del run["spec_decode_per_position_acceptance_rates"]
        assert read_acceptance([written(tmp_path, json.dumps(run))]).means == ((3, 3.0),)
        with pytest.raises(ConfigError, match="900 in all positions: expected 2000"):
            read_acceptance([written(tmp_path, json.dumps(run | {"spec_decode_per_position_acceptance_rates": [0.9]}))])
        with pytest.raises(ConfigError, match="spec_decode_draft_tokens is 'None'"):
            read_acceptance([written(tmp_path, json.dumps(run | {"spec_decode_draft_tokens": None}))])

    def test_results_of_sglangs_benchmark_are_means_of_their_rounds(self, tmp_path):
        run = {"max_concurrency": 4, "request_rate": math.inf, "accept_length": 2.5, "total_output_tokens": 5000}
        told = run | {"server_info": {"speculative_num_steps": 3}, "accept_length": 2.0, "total_output_tokens": 2000}
        text = f"{json.dumps(told)}\n{json.dumps(run)}\n"
        assert read_acceptance([written(tmp_path, text)]).means == ((3, 7000 / 3000),)
        assert read_acceptance([written(tmp_path, json.dumps(run))], steps=2).means == ((2, 2.5),)
        with pytest.raises(ConfigError, match="does not say how many steps were drafted: give --steps"):
            read_acceptance([written(tmp_path, json.dumps(run))])
        with pytest.raises(ConfigError, match=r"server_info.speculative_num_steps is 3: expected the 5"):
            read_acceptance([written(tmp_path, text)], steps=5)
        with pytest.raises(ConfigError, match=r"accept_length.* expected 1 .bonus token only. \.\.\. 2"):
            read_acceptance([written(tmp_path, json.dumps(run))], steps=1)

    def test_gauges_of_sglang(self, tmp_path):
        page = 'sglang:spec_accept_length{tp_rank="0"} 2.9\nsglang:spec_accept_rate{tp_rank="0"} 0.27\n'
        with pytest.raises(ConfigError, match=r"chain of 7 steps or a tree of 8 nodes with fewer. Give --steps"):
            read_acceptance([written(tmp_path, page)])
        assert read_acceptance([written(tmp_path, page + "sglang:spec_num_steps 5.0\n")]).means == ((5, 2.9),)
        page = page.splitlines()[0]
        with pytest.raises(ConfigError, match="give --steps"):
            read_acceptance([written(tmp_path, page)])
        assert read_acceptance([written(tmp_path, page)], steps=5).means == ((5, 2.9),)
        with pytest.raises(ConfigError, match=r"expected 1 .bonus token only. \.\.\. 2"):
            read_acceptance([written(tmp_path, page)], steps=1)

    @pytest.mark.parametrize("name", BROKEN_PAGES)
    def test_broken_pages(self, name, tmp_path):
        before, after, expected = BROKEN_PAGES[name]
        assert before in PAGE
        with pytest.raises(ConfigError, match=expected):
            read_acceptance([written(tmp_path, PAGE.replace(before, after))])

    @pytest.mark.parametrize("page", ["vllm:num_requests_running 3\n", "sglang:spec_accept_length 0.0\n"])
    def test_pages_without_rounds(self, page, tmp_path):
        with pytest.raises(ConfigError, match="no rounds"):
            read_acceptance([written(tmp_path, page)])

    def test_a_server_that_has_not_speculated_yet(self, tmp_path):
        page = "".join(
            f"vllm:spec_decode_num_{name}_total 0\n" for name in ("drafts", "draft_tokens", "accepted_tokens")
        )
        with pytest.raises(ConfigError, match="has not speculated yet"):
            read_acceptance([written(tmp_path, page)])


def test_files_of_two_kinds(tmp_path):
    with pytest.raises(ConfigError, match="expected files of one kind"):
        read_acceptance([written(tmp_path, PAGE, "page"), written(tmp_path, SERVER, "log")])


def test_a_file_that_is_given_twice(tmp_path):
    page = written(tmp_path, PAGE)
    with pytest.raises(ConfigError, match="would count twice"):
        read_acceptance([page, page])


def test_pages_of_two_servers_are_added(tmp_path):
    one, other = (read_acceptance([written(tmp_path, PAGE, name)]).counts for name in "ab")
    assert read_acceptance([str(tmp_path / "a"), str(tmp_path / "b")]).counts.tolist() == (one + other).tolist()


def test_histograms_tell_the_spread_but_not_the_correlation(tmp_path):
    """The rounds of a known process, as vLLM's summary: its probabilities and its spread are found again."""
    truth = GaussianAcceptance((0.75, 0.7, 0.65), 77, 0.15, 0.28, 8)
    lens = simulate_rounds(truth, 3, 400, 120)
    requests = [metrics((row[row > 0] - 1).tolist(), detailed=False) for row in lens.T]
    log = read_acceptance([written(tmp_path, lines_of(map(response, requests)))])
    fitted = log.fit(CHAT)
    assert fitted.process.conditional == pytest.approx(truth.conditional, abs=0.03)
    assert fitted.process.request_share == pytest.approx(0.15, abs=0.04)
    assert (fitted.process.field_share, fitted.process.correlation_len) == (0.28, 8)
    assert np.isnan(fitted.recorded.lag_correlation[0])


@pytest.mark.parametrize("detailed", [True, False])
def test_positions_that_no_round_reached_are_left_out(tmp_path, detailed):
    """Rounds of 5 drafts that accept 2 at most tell nothing of the fourth and the fifth."""
    rounds = [[0, 1, 2, 0, 1, 1, 2, 0, 1, 0]] * 30
    text = lines_of(response(metrics(accepted, steps=5, detailed=detailed)) for accepted in rounds)
    log = read_acceptance([written(tmp_path, text)])
    fitted = log.fit(CHAT)
    assert (log.steps, fitted.recorded.steps, len(fitted.process.conditional)) == (5, 3, 3)
    assert fitted.recorded.conditional == pytest.approx((6 / 10, 2 / 6, 0))
    assert fitted.simulated.conditional[:2] == pytest.approx((6 / 10, 2 / 6), abs=0.02)


def test_a_log_of_few_rounds_tells_positions_only(tmp_path):
    log = read_acceptance([written(tmp_path, lines_of(map(response, map(metrics, ROUNDS))))])
    fitted = log.fit(CHAT)
    assert fitted.recorded.histogram == pytest.approx((2 / 9, 3 / 9, 1 / 9, 3 / 9))
    assert (fitted.process.request_share, fitted.process.field_share) == (CHAT.request_share, CHAT.field_share)
