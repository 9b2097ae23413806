import io

import pytest
from foredraft.observe.measuring.metrics import RunMetrics
from foredraft.observe.measuring.summary import SLO
from foredraft.observe.rates import rate_of, rates_of
from foredraft.observe.tables import format_number, report_tables, sparkline
from observed_run import recorded_events
from rich.console import Console


def printed(tables, width=80):
    console = Console(file=io.StringIO(), width=width, force_terminal=False, color_system=None)
    for table in tables:
        console.print(table)
    return console.file.getvalue()


def measured():
    metrics = RunMetrics()
    sink = metrics.sink(0)
    for event in recorded_events(1, 60):
        sink(event)
    summary = metrics.summary(None, SLO(ttft_ms=100))
    return summary, {f"timeline_{key}": value for key, value in metrics.timeline().items()}


def test_everything_is_shown_in_eighty_columns():
    summary, timeline = measured()
    text = printed(report_tables({"name": "chat", "seed": 7, **summary, **timeline}))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert text.startswith("chat, seed 7")
    for key in ("mean_ttft_ms", "p99_itl_ms", "median_tpot_ms", "p95_e2el_ms", "accept_length", "output_throughput"):
        assert format_number(summary[key]) in text, key
    for words in ("good requests", "rounds at 3 steps", "aborted", "KV in use", "Timeline", "tokens/s"):
        assert words in text
    assert "incomplete" not in text


def test_an_empty_run_is_shown_with_dashes():
    metrics = RunMetrics()
    text = printed(report_tables(metrics.summary(incomplete=True)))
    assert "–" in text and "None" not in text and "nan" not in text and "Timeline" not in text
    assert "incomplete" in text.splitlines()[0]


def test_a_sparkline_follows_its_values():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 1, None, 1], top=2) == "▁▅ ▅"
    assert sparkline([1, 3, 5, 7], width=2, top=7) == "▃▇"
    assert sparkline([0, 0]) == "▁▁"
    assert sparkline([]) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (12345, "12,345"),
        (12345.6, "12,346"),
        (12.345, "12.3"),
        (1.234, "1.23"),
        (0.01234, "0.0123"),
        (0.0, "0.00"),
    ],
)
def test_numbers_have_three_digits(value, text):
    assert format_number(value) == text


def test_rates_of_two_runs_are_of_one_kind():
    """Those while the load was on, if both have them: the rates of a short run are of the whole run."""
    steady, short = {"mean_running": 5.0, "steady_mean_running": 8.0}, {"mean_running": 4.0}
    assert rate_of(steady, "mean_running") == 8.0 and rate_of(short, "mean_running") == 4.0
    assert rates_of("mean_running", steady, steady) == [8.0, 8.0]
    assert rates_of("mean_running", steady, short) == [5.0, 4.0] and rates_of("p99", steady, short) == [None, None]
