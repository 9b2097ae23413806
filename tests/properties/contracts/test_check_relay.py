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
    """A relay that is not ours: plain dictionaries, rows from 0, no padding lanes, generations ignored."""

    def __init__(self, config):
        self.config = config
        self.lengths, self.fields = {}, {}

    def _refuse_unless(self, rows, is_good):
        if len(set(rows)) < len(rows) or not all(0 <= row < self.config.num_rows and is_good(row) for row in rows):
            raise ValueError(f"rows {rows}")

    def publish(self, rows, generations, lengths):
        self._refuse_unless(rows, lambda row: row not in self.lengths)
        self.lengths.update(zip(rows, lengths, strict=True))

    def stash(self, rows, generations, values):
        present = {name: given for name, given in values.items() if given is not None}
        if set(present) != set(self.config.fields):
            return False
        if present:
            self._refuse_unless(rows, lambda row: row not in self.fields)
            self.fields.update({row: {n: v[at] for n, v in present.items()} for at, row in enumerate(rows)})
        else:
            self._refuse_unless(rows, lambda row: True)
        return True

    def resolve(self, rows, generations):
        self._refuse_unless(rows, lambda row: row in self.lengths and (row in self.fields or not self.config.fields))
        found = [self.fields.pop(row, {}) for row in rows]
        return [self.lengths.pop(row) for row in rows], {n: [row[n] for row in found] for n in self.config.fields}

    def drop(self, rows):
        self._refuse_unless(rows, lambda row: True)
        for row in rows:
            self.lengths.pop(row, None)
            self.fields.pop(row, None)


def test_another_relay_holds():
    report = check_relay(DictRelay, budget=10_000)
    assert report.ok and report.skipped == {"RELAY-03": "needs generations"}


class KeepsHidden(DictRelay):
    def resolve(self, rows, generations):
        lengths, fields = super().resolve(rows, generations)
        return lengths, {HIDDEN: [[0.0]] * len(rows), **fields}


def test_a_hidden_field_that_is_not_declared_is_named():
    with pytest.raises(PropertiesBroken, match="RELAY-02") as caught:
        check_relay(KeepsHidden, budget=10_000)
    (failure,) = caught.value.report.failures
    assert "a field 'hidden_states'" in failure.finding.was and len(failure.case.operations) <= 3
    assert failure.case.config.hidden_width == 0


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "the lengths, and a mapping"),
        (([1.5], {}), "a flat sequence of integers"),
        (([1], {}), "1 rows, one per lane"),
        (([1, 2], {"field0": [[1, 2]]}), "one per lane"),
        (([1], {"field0": [[1]]}), "2 of them per row"),
        (([1], {"field0": [7]}), "2 of them per row"),
        (([1], {"field0": [["a", "b"]]}), "2 of them per row"),
    ],
)
def test_an_answer_of_another_shape_is_reported_as_that(answer, words):
    class Odd(DictRelay):
        def resolve(self, rows, generations):
            super().resolve(rows, generations)
            return answer

    history = [RelayTrial.open(1), RelayTrial.write((1,)), RelayTrial.read((1,))]
    with pytest.raises(Violation, match=words) as caught:
        RELAY.component(Odd, ()).execute(RelayConfig(1, (2,)), history)
    assert caught.value.id == "TYPE"


def test_a_relay_that_breaks_by_accident_is_reported_as_that():
    class Careless(DictRelay):
        def _refuse_unless(self, rows, is_good):
            pass

    report = check(RELAY, Careless, capabilities=("misuse",), budget=5_000)
    assert report.failures[0].id in ("RAISES", "RELAY-02")
