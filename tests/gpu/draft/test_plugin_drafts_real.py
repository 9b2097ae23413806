"""Plugins on the real executor: told the truth, rejected where they talk nonsense, named where they fail."""

from __future__ import annotations

import pytest
from cells import MatrixCell, random_cells
from foredraft.core.algorithm.builtin import Eagle, Eagle3, MultiLayerEagle, Standalone
from foredraft.core.algorithm.registry import register_algorithm
from matrix_cells import applicable, run_real_cell
from witness import Witness

pytestmark = pytest.mark.usefixtures("forget")


def plugin(base, **changes):
    return register_algorithm("PLUGGED")(type("Plugged", (base,), changes))


@pytest.mark.ci
def test_every_round_starts_from_what_its_last_accepted_node_said(record_property):
    plugin(Witness)
    Witness.rounds_witnessed = 0
    cells = [applicable(cell) for cell in random_cells(12, 11, {"algorithm": "PLUGGED"})]
    reports = [run_real_cell(cell, eager=bool(number % 2)) for number, cell in enumerate(cells)]
    total = {name: sum(getattr(report, name) for report in reports) for name in reports[0].__slots__}
    record_property("note", f"witness on the real executor: {total}, {Witness.rounds_witnessed} witnessed")
    for name in ("blocks", "retractions", "disturbances", "correct_drafts"):
        assert total[name] > 3, total
    assert Witness.rounds_witnessed > 100


@pytest.mark.fast("MultiLayerEagle")
@pytest.mark.parametrize("base", [Standalone, Eagle, Eagle3, MultiLayerEagle])
def test_a_plugin_takes_a_drafter_that_is_there_by_saying_so(base):
    plugin(base)
    report = run_real_cell(MatrixCell(algorithm="PLUGGED", mode="overlap", page_size=4, topk=2, steps=3, seed=4))
    assert report.drafted > 0 and report.tokens > 0
