"""Fault plans: reading them, drawing them, and that no kind of fault moves another."""

import pytest
from foredraft.core.errors import ConfigError
from foredraft.sim.faults.kinds import UNITS
from foredraft.sim.faults.plan import KINDS, FaultDraws, FaultPlan, FaultTable, fault_plan, load_fault_plan, swarm_plan
from service_under_faults import everything


def test_an_empty_plan_injects_nothing():
    plan = fault_plan({})
    assert plan == FaultPlan() and plan.enabled == ()
    draws = FaultDraws(plan, 3)
    assert all(draws.at(unit, 0, i) == () for unit in UNITS for i in range(2000))


def test_every_kind_has_a_place_in_the_plan_and_a_number_of_its_own():
    plan = fault_plan(everything(0.5))
    assert plan.enabled == tuple(KINDS)
    named = [f"{family}.{key}" for family in FaultPlan.model_fields for key in _keys(getattr(FaultPlan(), family))]
    assert sorted(named) == sorted(KINDS)
    numbers = [kind.number for kind in KINDS.values()]
    assert len(set(numbers)) == len(numbers) and max(numbers) < 64


def _keys(table) -> list[str]:
    return list(type(table).model_fields) if isinstance(table, FaultTable) else []


def test_all_problems_of_a_plan_at_once(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(
        "[device]\nhang = {probability = 0.1}\n[device.raises]\nprobability = 1.5\n[link.late]\ndelay = 2\nprobability = nan\n[klient]\n"
        "[link.lost]\nretries = 1000001\n[pool.denied]\ncount = 1000000\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_fault_plan(path, 0)
    text = str(caught.value)
    assert text.count(str(path)) == 6 == len(caught.value.problems)
    for words in (
        "device.hang: unknown key (did you mean 'hangs'?)",
        "device.raises.probability",
        "got 1.5",
        "link.late.delay: unknown key (did you mean 'delay_s'?)",
        "link.late.probability",
        "link.lost.retries: input should be less than or equal to 1000000",
        "klient: unknown key (did you mean 'client'?)",
    ):
        assert words in text


@pytest.mark.parametrize(("text", "words"), [("[device", "is no TOML"), (None, "cannot be read")])
def test_a_plan_that_cannot_be_read(tmp_path, text, words):
    path = tmp_path / "plan.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_fault_plan(path, 0)


def test_a_plan_survives_its_own_file(tmp_path):
    path = tmp_path / "plan.toml"
    for seed in range(5):
        plan = load_fault_plan("swarm", seed)
        path.write_text(plan.to_toml())
        assert load_fault_plan(path, 99) == plan


def test_the_swarm_drops_half_of_the_kinds_and_none_for_ever():
    plans = [swarm_plan(seed, transfers=True) for seed in range(200)]
    times = {kind: sum(kind in plan.enabled for plan in plans) for kind in KINDS}
    assert all(60 < count < 140 for count in times.values()), times
    assert swarm_plan(7, transfers=True) == plans[7] != plans[8]


def test_where_there_are_no_transfers_the_swarm_has_no_faults_of_them_and_the_others_stay():
    for seed in range(30):
        with_them, without = swarm_plan(seed, transfers=True), swarm_plan(seed)
        others = tuple(kind for kind in with_them.enabled if not KINDS[kind].needs_transfers)
        assert without.enabled == others and all(without.of(kind) == with_them.of(kind) for kind in others)


def test_one_kind_more_moves_no_other():
    every = FaultDraws(fault_plan(everything(0.05)), 11)
    for left_out in ("device.raises", "clock.freeze", "client.cancels", "link.lost"):
        family, _, key = left_out.partition(".")
        table = everything(0.05)
        del table[family][key]
        fewer = FaultDraws(fault_plan(table), 11)
        unit = KINDS[left_out].occasion
        hits = 0
        for occasion in range(1500):
            there = every.at(unit, 2, occasion)
            hits += left_out in there
            assert fewer.at(unit, 2, occasion) == tuple(kind for kind in there if kind != left_out)
        assert 30 < hits < 130


def test_subjects_seeds_and_stretches_are_independent():
    plan = fault_plan({"device": {"raises": {"probability": 0.1}}})
    draws, other = FaultDraws(plan, 1), FaultDraws(plan, 2)
    hits = [
        [bool(d.at("step", subject, i)) for i in range(3000)] for d, subject in ((draws, 0), (draws, 1), (other, 0))
    ]
    assert hits[0] != hits[1] and hits[0] != hits[2]
    assert all(200 < sum(row) < 400 for row in hits)
    backwards = FaultDraws(plan, 1)
    assert [bool(backwards.at("step", 0, i)) for i in reversed(range(3000))][::-1] == hits[0]


def test_every_nth_occasion():
    draws = FaultDraws(fault_plan({"pool": {"denied": {"every": 7}}}), 0)
    assert [i for i in range(30) if draws.at("step", 0, i)] == [6, 13, 20, 27]
