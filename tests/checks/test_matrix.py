"""The matrix: every configuration serves the tokens of the plain greedy loop."""

import itertools

import pytest
import serving_matrix
from cells import CHAINS_ALONE, DIMENSIONS, MatrixCell, is_legal, legal_pairs, pairs_of, pairwise_cells, random_cells
from serving_matrix import run_cell_in_multi_steps, run_cells, summary

PARTS = 4
"""The cells of a cover are run in so many parts, of which `make test` runs the first."""


def test_the_pairwise_cover_has_every_legal_pair():
    cells = pairwise_cells()
    covered = {pair for cell in cells for pair in pairs_of(cell)}
    assert all(is_legal(cell) for cell in cells)
    legal = legal_pairs()
    assert not legal.keys() - covered
    # A pair that is called impossible must be so for a reason that `is_legal` gives, not for want of trying.
    impossible = [
        (a, x, b, y)
        for a, b in itertools.combinations(DIMENSIONS, 2)
        for x, y in itertools.product(DIMENSIONS[a], DIMENSIONS[b])
        if (a, x, b, y) not in legal
    ]
    chains_alone = {("algorithm", name) for name in ("SUFFIX", *CHAINS_ALONE)}
    reasons = {("algorithm", "NONE"), ("steps", 0), ("mixed", False), *chains_alone}
    assert all((a, x) in reasons or (b, y) in reasons for a, x, b, y in impossible)


def test_cells_are_the_same_every_time():
    assert pairwise_cells(attempts=2) == pairwise_cells(attempts=2)
    assert list(random_cells(5, 3)) == list(random_cells(5, 3))
    assert list(random_cells(5, 3)) != list(random_cells(5, 4))


@pytest.mark.fast("0", ci="*")
@pytest.mark.parametrize("part", range(PARTS))
def test_pairwise_cells_serve_the_oracles_tokens(part, record_property):
    cells = pairwise_cells()[part::PARTS]
    failures, reports = run_cells(cells)
    record_property(
        "note", f"matrix: {len(cells)} cells of a cover of {len(legal_pairs())} pairs; {summary(failures, reports)}"
    )
    assert not failures, "\n".join(f"{f.error}\n    {f.cell.reproducer()}" for f in failures)
    # No part is an empty exercise: each of these happened.
    for count in ("blocks", "correct_drafts", "retractions", "disturbances"):
        assert sum(getattr(report, count) for report in reports) >= 10 // PARTS, count


@pytest.mark.ci
def test_pairwise_cells_are_equal_in_blocks_and_singly(record_property):
    cells = pairwise_cells(seed=1, attempts=4)[::18]
    failures, blocks = run_cells(cells, run=run_cell_in_multi_steps)
    record_property("note", f"blocks: {len(cells)} cells, {sum(blocks)} blocks")
    assert not failures, "\n".join(f"{f.error}\n    {f.cell.reproducer()}" for f in failures)
    assert sum(blocks) > 10


def test_a_failing_cell_prints_one_line_that_runs_it_again(monkeypatch, capsys):
    monkeypatch.setattr(serving_matrix, "check_greedy_output", lambda *arguments: 1 / 0)
    lines = []
    failures, _ = run_cells([MatrixCell()], report=lines.append)
    assert len(failures) == 1 and "ZeroDivisionError" in lines[0]
    command = lines[0].splitlines()[1].strip()
    cell = command.split("--cell ")[1].strip("'")
    assert serving_matrix.main(["--cell", cell]) == 1
    monkeypatch.undo()
    assert serving_matrix.main(["--cell", cell]) == 0
    assert "1 cells passed, 0 failed" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_a_thousand_random_cells(seed, record_property):
    failures, reports = run_cells(random_cells(1000, seed))
    record_property("note", f"matrix, seed {seed}: {summary(failures, reports)}")
    assert not failures


@pytest.mark.slow
def test_random_cells_in_blocks(record_property):
    failures, blocks = run_cells(random_cells(1000, 11), run=run_cell_in_multi_steps)
    record_property("note", f"blocks: {len(blocks)} cells, {sum(blocks)} blocks")
    assert not failures
