"""The relay's suite: a relay that is not ours holds, and a report says what is wrong."""

import pytest
from foredraft.properties.conformance import check, check_relay
from foredraft.properties.harness.report import PropertiesBroken
from foredraft.properties.harness.trial import Violation
from foredraft.properties.relay.contract import HIDDEN, RelayConfig
from foredraft.properties.relay.trial import RelayTrial
from foredraft.properties.suites import suite_of

RELAY = suite_of("relay")


class DictRelay:
    """A relay that is not ours: a plain dictionary, rows from 0, no padding lanes, generations ignored."""

    def __init__(self, config):
        self.config = config
        self.cells = {}

    def _refuse_unless(self, rows, is_good):
        if len(set(rows)) < len(rows) or not all(0 <= row < self.config.num_rows and is_good(row) for row in rows):
            raise ValueError(f"rows {rows}")

    def write(self, rows, generations, values):
        present = {name: given for name, given in values.items() if given is not None}
        if present.keys() != self.config.fields.keys():
            return False
        self._refuse_unless(rows, lambda row: row not in self.cells)
        self.cells.update({row: {name: given[at] for name, given in present.items()} for at, row in enumerate(rows)})
        return True

    def read(self, rows, generations):
        self._refuse_unless(rows, lambda row: row in self.cells)
        found = [self.cells.pop(row) for row in rows]
        return {name: [cell[name] for cell in found] for name in self.config.fields}

    def drop(self, rows):
        self._refuse_unless(rows, lambda row: True)
        for row in rows:
            self.cells.pop(row, None)


@pytest.mark.parametrize("capabilities", [(), ("misuse",)])
def test_another_relay_holds(capabilities):
    report = check_relay(DictRelay, budget=10_000, capabilities=capabilities)
    assert report.ok and report.skipped == {"RELAY-03": "needs generations"}


class KeepsHidden(DictRelay):
    def read(self, rows, generations):
        return {HIDDEN: [[0.0]] * len(rows), **super().read(rows, generations)}


def test_a_hidden_field_that_is_not_declared_is_named():
    with pytest.raises(PropertiesBroken, match="RELAY-02") as caught:
        check_relay(KeepsHidden, budget=10_000)
    (failure,) = caught.value.report.failures
    assert "a field 'hidden_states'" in failure.finding.was and len(failure.case.operations) <= 3
    assert failure.case.config.hidden_width == 0


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "a mapping of the fields"),
        ({}, "1 rows, one per lane"),
        ({"lengths": [1, 2], "field0": [[1, 2]]}, "1 rows, one per lane"),
        ({"lengths": 65536, "field0": [[1, 2]]}, "1 rows, one per lane"),
    ],
)
def test_an_answer_of_another_shape_is_reported_as_that(answer, words):
    class Odd(DictRelay):
        def read(self, rows, generations):
            super().read(rows, generations)
            return answer

    history = [RelayTrial.open(1), RelayTrial.write((1,)), RelayTrial.read((1,))]
    with pytest.raises(Violation, match=words) as caught:
        RELAY.component(Odd, ()).execute(RelayConfig(1, (2,)), history)
    assert caught.value.id == "TYPE"


@pytest.mark.parametrize("row", [[1], 7, ["a", "b"], [], [65544, 65545.5]])
def test_a_row_of_another_shape_is_not_what_was_written(row):
    class Odd(DictRelay):
        def read(self, rows, generations):
            return super().read(rows, generations) | {"field0": [row]}

    history = [RelayTrial.open(1), RelayTrial.write((1,)), RelayTrial.read((1,))]
    with pytest.raises(Violation, match="field0 of row 0 is") as caught:
        RELAY.component(Odd, ()).execute(RelayConfig(1, (2,)), history)
    assert caught.value.id == "RELAY-02"


def test_a_relay_that_breaks_by_accident_is_reported_as_that():
    class Careless(DictRelay):
        def _refuse_unless(self, rows, is_good):
            pass

    report = check(RELAY, Careless, capabilities=("misuse",), budget=5_000)
    assert report.failures[0].id in ("RAISES", "RELAY-02")
