"""The relay's suite: ours hold, a relay that is not ours too, and a report says what is wrong."""

import pytest
from foretoken.checks.adapters import future_map
from foretoken.checks.registry import SUBJECTS
from foretoken.properties.conformance import RelayConformance, check, check_relay
from foretoken.properties.harness.importing import load_make
from foretoken.properties.harness.report import PropertiesBroken
from foretoken.properties.harness.swarm import Swarm
from foretoken.properties.harness.trial import Violation
from foretoken.properties.relay.contract import HIDDEN, RelayConfig
from foretoken.properties.relay.model import RelayModel, length_of, stamp_of
from foretoken.properties.relay.trial import RelayTrial
from foretoken.properties.suites import suite_of

RELAY = suite_of("relay")
OPERATIONS = 8_000


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


@pytest.mark.parametrize("name", SUBJECTS["relay"])
def test_ours_hold(name):
    report = check(RELAY, load_make(name), budget=OPERATIONS)
    assert report.ok, report.text()
    assert min(report.evaluations.values()) > 80 and all(report.executed.values())


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
        (([1], {}), "a sequence of 1 rows"),
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

    config = RelayConfig(1, (2,))
    capabilities = RELAY.capabilities()
    history = [RelayTrial.open(1), RelayTrial.write((1,)), RelayTrial.read((1,))]
    with pytest.raises(Violation, match=words) as caught:
        RELAY.execute(Odd, config, capabilities, RELAY.invariants(capabilities), history)
    assert caught.value.id == "TYPE"


def test_a_relay_that_breaks_by_accident_is_reported_as_that():
    class Careless(DictRelay):
        def _refuse_unless(self, rows, is_good):
            pass

    report = check(RELAY, Careless, capabilities=("misuse",), budget=5_000)
    assert report.failures[0].id in ("RAISES", "RELAY-02")


def run(history):
    config = RelayConfig(2, (0,), 2)
    capabilities = future_map.make.capabilities
    return RELAY.execute(future_map.make, config, capabilities, RELAY.invariants(capabilities), history, drain=False)


def test_what_makes_no_sense_is_left_out():
    t = RelayTrial
    senseless = [t.write((1,)), t.read((1,)), t.release(1), t.inherit(1, 2), t.read_as(1, 1, ()), t.half_as(1, 1)]
    assert run([*senseless, t.stash_oddly("missing", 1), t.read_anyway((3,))]).num_operations == 0
    trial = run([t.open(1), t.open(2), t.open(3), t.write((1, 1, 2, 0))])
    assert trial.executed == {t.open: 2, t.write: 1} and len(trial.model.cells) == 2


def test_the_model_follows_what_is_refused():
    t = RelayTrial
    trial = run([t.open(1), t.open(2), t.write((1, 2)), t.read_as(1, 1, (2,)), t.read((2, 0, 1))])
    assert trial.moment.answer == (length_of(2), 0, length_of(1)) and not trial.model.cells
    trial = run([t.open(1), t.write((1,)), t.inherit(1, 2), t.read_anyway((2,)), t.write_anyway("lengths", (2,))])
    assert trial.moment.refusal and len(trial.model.cells) == 1


def test_every_value_is_written_once_and_tells_its_write():
    model = RelayModel(RelayConfig(3, (0, 3), 4), 1)
    seen = set()
    for stamp in (model.new_stamp(5), model.new_stamp(6), 2_000):
        values = model.values(stamp).values()
        entries = [length_of(stamp), *(entry for v in values for entry in (v if isinstance(v, list) else [v]))]
        assert len(entries) == 9 and not seen & set(entries)
        assert all(stamp_of(entry) == stamp for entry in entries)
        seen |= set(entries)
    assert model.written == {1: 5, 2: 6}


def test_configurations_differ_and_hidden_states_are_rare_enough():
    swarm = Swarm(RELAY, future_map.make, future_map.make.capabilities, seed=2)
    configs = [swarm.drawn(run)[0] for run in range(200)]
    assert {config.num_rows for config in configs} == {1, 2, 3, 4}
    hidden = [config.hidden_width for config in configs]
    assert 60 < hidden.count(0) < 140 and {0, 1, 4} == set(hidden)


class TestOurs(RelayConformance):
    capabilities = future_map.make.capabilities
    budget = 5_000

    def make(self, config):
        return future_map.make(config)
