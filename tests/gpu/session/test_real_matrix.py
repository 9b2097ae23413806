"""The matrix on the real executor: every way to serve a real model gives the tokens of its plain greedy loop, in
float64 on a CPU.

More random cells: FOREDRAFT_MATRIX_CELLS=2000 pytest -m slow tests/gpu/session/test_real_matrix.py
"""

import os
from functools import cache

import pytest
from cells import DIMENSIONS, is_legal, pairs_of, pairwise_cells, random_cells
from matrix_cells import applicable, in_words, run_real_cell, total

COVERS = 3  # of all pairs, each with other cells
RANDOM_CELLS = int(os.environ.get("FOREDRAFT_MATRIX_CELLS", "200"))
NOT_HERE = ("drafts", "outputs", "faults")  # dimensions with one choice left, or not all of them


@cache
def cover(seed=0):
    """A cover of all pairs in the dimensions that apply; what gets the same is served once."""
    return list(dict.fromkeys(applicable(cell) for cell in pairwise_cells(seed)))


def choices(cell):
    return {(name, getattr(cell, name)) for name in DIMENSIONS}


def few(cells):
    """Some that show every choice: the next is the first with the most choices that none has shown."""
    left, shown = set().union(*map(choices, cells)), []
    while left:
        shown.append(max(cells, key=lambda cell: len(choices(cell) & left)))
        left -= choices(shown[-1])
    return shown


def serve(cells):
    """All of `cells`; a failing one names itself by the line that runs it in the reference, the others go on."""
    reports, failures = [], []
    for cell in cells:
        try:
            reports.append(run_real_cell(cell))
        except Exception as error:
            failures.append(f"{cell}\n    {type(error).__name__}: {error}")
    assert not failures, "\n".join(failures)
    return reports


@pytest.mark.ci
def test_what_is_left_of_the_cover_has_every_pair():
    cells = cover()
    assert all(is_legal(cell) for cell in cells)
    wanted = {pair for cell in pairwise_cells() for pair in pairs_of(cell)}
    wanted = {(a, x, b, y) for a, x, b, y in wanted if a not in NOT_HERE and b not in NOT_HERE}
    assert wanted <= {pair for cell in cells for pair in pairs_of(cell)}
    assert len(wanted) > 1500
    for name in set(DIMENSIONS) - set(NOT_HERE):
        assert {getattr(cell, name) for cell in cells} == set(DIMENSIONS[name]), name


@pytest.mark.fast("few")
@pytest.mark.parametrize("seed", ["few", *range(COVERS)])
def test_pairwise_cells_serve_the_tokens_of_plain_decoding(seed, record_property):
    cells = few(cover()) if seed == "few" else cover(seed)
    counts = total(serve(cells))
    record_property("note", f"real matrix, cover {seed}: {len(cells)} cells, {in_words(counts)}")
    # The cover is no empty exercise.
    for name in ("tokens", "blocks", "drafted", "correct_drafts", "retractions", "disturbances"):
        assert counts[name] >= (3 if seed == "few" else 5), (name, counts)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_random_cells(seed, record_property):
    cells = [applicable(cell) for cell in random_cells(RANDOM_CELLS, seed)]
    counts = total(serve(cells))
    record_property("note", f"real matrix, seed {seed}: {len(cells)} cells, {in_words(counts)}")
    for name in ("tokens", "blocks", "drafted", "correct_drafts", "retractions", "disturbances"):
        assert counts[name] > RANDOM_CELLS // 10, (name, counts)
