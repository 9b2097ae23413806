"""The suite of acceptance on our components, on a foreign one and on nonsense answers; and its own inputs."""

import time
from functools import cache

import numpy as np
import pytest
from foretoken.checks.adapters import tree_accept
from foretoken.checks.registry import SUBJECTS
from foretoken.core.errors import ConfigError
from foretoken.properties.accept import inputs, plain
from foretoken.properties.accept.contract import AcceptCapabilities, AcceptConfig, capacity
from foretoken.properties.accept.expected import Coins, Drafter, distribution
from foretoken.properties.accept.model import LAYERS, AcceptModel, code_of
from foretoken.properties.conformance import AcceptConformance, check, check_accept
from foretoken.properties.harness.importing import NotInstalled, load_make
from foretoken.properties.harness.report import PropertiesBroken
from foretoken.properties.harness.swarm import Swarm
from foretoken.properties.harness.trial import Violation
from foretoken.properties.invariants import of_contract
from foretoken.properties.suites import suite_of

ACCEPT = suite_of("accept")
EVERYTHING = plain.make.capabilities


@cache
def checked(make):
    """The report, and operations per second of processor time."""
    begin = time.process_time()
    report = check(ACCEPT, make, budget=1_000)
    return report, report.num_operations / (time.process_time() - begin)


@pytest.mark.parametrize("name", SUBJECTS["accept"])
def test_ours_hold(name, record_property):
    try:
        make = load_make(name)
    except NotInstalled as error:
        pytest.skip(str(error))
    report, rate = checked(make)
    assert report.ok, report.text()
    record_property(
        "note", f"{name}: {rate:,.0f} operations per second of processor time, everything recounted after each"
    )


def test_the_contract_checks_what_it_says():
    reports = [checked(make)[0] for make in (plain.make, tree_accept.make)]
    evaluated = {id for report in reports for id in report.evaluations}
    assert evaluated == {item.id for item in of_contract("accept")}, "the two have every capability between them"


# -- what must be -----------------------------------------------------------------------------------------------------


def test_a_beam_search_over_the_draft():
    drafter = Drafter.of(3, 8, 2, 1)
    best = drafter.best(0, 2, 4)
    assert len(best) == 3 and {path[:-1] for path in best} <= best | {()}, "closed under parents"
    ids, shares = drafter.answer(0, np.array([[5]]), np.array([[0]]))
    assert ids.shape == (1, 1, 2) and shares[0, 0, 0] > shares[0, 0, 1]
    drafter.answer(1, ids[:, 0], np.array([[0, 0]]))
    assert not drafter.strange and drafter.levels[1] == [[(int(token),) for token in ids[0, 0]]]
    drafter.answer(2, np.array([[99, 99]]), np.array([[0, 1]]))
    assert "step 2 of row 0 goes on from token 99" in drafter.strange


def test_parameters_by_hand():
    logits = np.log([0.5, 0.25, 0.125, 0.125]).tolist()
    assert distribution(logits, 1.0, 0, 0.6) == pytest.approx([2 / 3, 1 / 3, 0, 0]), "the second one reaches 0.6"
    assert distribution(logits, 1.0, 3, 1.0) == pytest.approx([4 / 7, 2 / 7, 1 / 7, 0]), "the lower id of equals stays"
    assert distribution(logits, 0.0, 0, 0.1) == [1, 0, 0, 0]
    assert distribution(logits, 1.0, 0, 0.5) is None, "rounding would decide"
    assert np.isnan(distribution([0.0, float("nan")], 1.0, 0, 1.0)).all()


def test_coins_that_are_none():
    good = np.random.default_rng(1).random((2, 40, 30))
    coins = Coins()
    coins.note(0, np.arange(40), np.zeros(40, int), good)
    assert not coins.uneven()
    for parts, words in (
        ((good[0] / 2, good[1]), "accept coins fall"),
        ((good[0], 1 - good[0]), "the bonus coin have a correlation of -1.00"),
        ((np.sort(good[0], axis=1), good[1]), "next position"),
    ):
        coins = Coins()
        coins.note(0, np.arange(40), np.zeros(40, int), parts)
        assert words in coins.uneven()


class Chains:
    """A foreign component: greedy verification of chains, with lists, without trees."""

    def __init__(self, config):
        self.last = config.context_len - 1

    def configure(self, num_steps, topk, num_nodes):
        assert (topk, num_nodes) == (1, num_steps + 1)

    def launch(self, batch):
        rows = [[root, *drafts] for root, drafts in zip(batch.roots.tolist(), batch.tokens.tolist(), strict=True)]
        return {"rows": rows, "nodes": batch.tokens.shape[1] + 1, "starts": batch.seq_lens.tolist()}

    def tree(self, round):
        nodes = round["nodes"]
        tokens = [token for row in round["rows"] for token in row]
        positions = [min(start + node, self.last) for start in round["starts"] for node in range(nodes)]
        return tokens, list(range(-1, nodes - 1)) * len(round["rows"]), positions

    def verify_greedy(self, round, logits):
        nodes = round["nodes"]
        choices = logits.argmax(axis=1).tolist()
        index, lens, bonus = [], [], []
        for number, row in enumerate(round["rows"]):
            length = 1
            while length < nodes and row[length] == choices[number * nodes + length - 1]:
                length += 1
            index += [number * nodes + node if node < length else -1 for node in range(nodes)]
            lens.append(length)
            bonus.append(choices[number * nodes + length - 1])
        return index, lens, choices, bonus


def test_a_foreign_component_holds():
    report = check_accept(Chains, budget=2_000)
    assert report.ok and report.capabilities == ()
    assert report.skipped["ACCEPT-16"] == "needs kv" and report.skipped["ACCEPT-14"] == "needs constraints"
    assert set(report.executed) == {"configure", "replace", "launch", "greedy", "abandon", "launch-garbage"}


def changed(method, change):
    """Chains with one answer changed."""

    def answer(self, *arguments):
        return change(getattr(Chains, method)(self, *arguments))

    return type("Changed", (Chains,), {method: answer})


@pytest.mark.parametrize(
    ("make", "broken", "words"),
    [
        (changed("verify_greedy", lambda v: v[:3]), "TYPE", "4 sequences"),
        (changed("verify_greedy", lambda v: None), "TYPE", "NoneType"),
        (changed("verify_greedy", lambda v: (*v[:3], [[b] for b in v[3]])), "TYPE", "part 3 of the verdict"),
        (changed("verify_greedy", lambda v: (*v[:3], [float(b) for b in v[3]])), "TYPE", "a flat sequence of integers"),
        (changed("verify_greedy", lambda v: (v[0], v[1][1:], *v[2:])), "ACCEPT-18", "accept_lens"),
        (changed("verify_greedy", lambda v: ([n + 1 if n >= 0 else n for n in v[0]], *v[1:])), "ACCEPT-01", "the root"),
        (changed("verify_greedy", lambda v: (v[0], [1000] * len(v[1]), *v[2:])), "ACCEPT-01", "1000 of them"),
        (changed("verify_greedy", lambda v: (v[0], [-7] * len(v[1]), *v[2:])), "ACCEPT-01", "-7 of them"),
        (changed("tree", lambda t: (t[0], [2] * len(t[1]), t[2])), "TYPE", "an earlier node"),
        (changed("tree", lambda t: (t[0][1:], *t[1:])), "TYPE", "part 0 of tree() has"),
        (changed("tree", lambda t: (*t[:2], [p + 1 for p in t[2]])), "ACCEPT-07", "position"),
        (changed("launch", lambda r: {}["rows"]), "RAISES", "KeyError"),
    ],
)
def test_nonsense_is_reported_as_what_it_is(make, broken, words):
    with pytest.raises(PropertiesBroken) as caught:
        check_accept(make, budget=1_000)
    (failure,) = caught.value.report.failures
    assert broken in (failure.id, *failure.also) and words in str(caught.value)
    assert len(failure.case.operations) <= 3


def test_a_promise_that_is_not_kept():
    with pytest.raises(PropertiesBroken, match="has no move"):
        check_accept(Chains, capabilities=("kv",), budget=100)
    with pytest.raises(ConfigError, match="needs the capability kv as well"):
        check_accept(Chains, capabilities=("plan",), budget=100)


class TestOurs(AcceptConformance):
    capabilities = tree_accept.make.capabilities
    budget = 1_200

    def make(self, config):
        return tree_accept.make(config)


# -- what runs are made of ----------------------------------------------------------------------------------------------


def test_runs_have_every_shape_and_several_rounds_in_flight():
    swarm = Swarm(ACCEPT, plain.make, EVERYTHING, seed=2)
    shapes, in_flight, vocabularies = set(), 0, set()
    for run in range(60):
        config, operations = swarm.drawn(run)
        vocabularies.add(config.vocab_size)
        trial = ACCEPT.start(plain.make, config, EVERYTHING, ())
        for operation in operations[:40]:
            if not operation.tag.startswith("distribution") and trial.apply(operation):
                shapes.add(trial.shape)
                others = [round for round in trial.rounds.values() if round.shape != trial.shape]
                in_flight += len(others) >= 2
    assert any(nodes != steps + 1 for steps, _, nodes in shapes) and any(
        nodes < steps + 1 for steps, _, nodes in shapes
    )
    assert max(topk for _, topk, _ in shapes) == 16 and max(steps for steps, _, _ in shapes) == 8
    assert max(nodes for _, _, nodes in shapes) == 64 and min(steps for steps, _, _ in shapes) == 0
    assert in_flight > 10 and vocabularies == {2, 3, 4, 5, 8, 17}


@pytest.mark.parametrize("garbage", ["", *inputs.GARBAGE_SCORES, *inputs.GARBAGE_IDS])
@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 2, 6), (2, 16, 40), (0, 3, 1)])
def test_candidates_are_a_beam(shape, garbage):
    steps, topk, _ = shape
    tokens, scores, parents = inputs.candidates(shape, 3, 17, 5, garbage)
    assert tokens.shape == scores.shape == parents.shape == (3, capacity(steps, topk))
    assert (parents < np.arange(parents.shape[1])).all() and (parents[:, :topk] == -1).all()
    for row in range(3):
        assert np.unique(parents[row], return_counts=True)[1].tolist() == [topk] * len(set(parents[row].tolist()))
        pairs = set(zip(parents[row].tolist(), tokens[row].tolist(), strict=True))
        assert len(pairs) == tokens.shape[1] or garbage in inputs.GARBAGE_IDS
    is_number = np.isfinite(scores).all() and (scores > 0).all()
    assert is_number == (garbage not in inputs.GARBAGE_SCORES or not scores.size)
    assert (garbage == "out-of-range") == bool(((tokens < 0) | (tokens >= 17)).any()) or not tokens.size
    if garbage == "" and steps > 1:
        later = scores[:, topk:]
        assert (later <= np.take_along_axis(scores, parents[:, topk:], axis=1)).all(), "no child above its parent"


def test_targets_have_ties_zeros_and_agreement():
    tokens, parents = np.array([[1, 2, 0, 3]]), np.array([[-1, 0, 0, 1]])
    agreed = 0
    for seed in range(40):
        probs = inputs.probabilities(tokens, parents, 5, seed, 2)
        assert np.allclose(probs.sum(axis=1), 1) and (probs == 0).any()
        agreed += probs[0, 2] > 0.3
        scores = inputs.logits(tokens, parents, 5, seed, 4)
        assert scores[0].argmax() in (0, 2) and scores[1].argmax() == 3
    assert 5 < agreed < 35
    table, states = inputs.grammar(5, 4, 3)
    assert (table >= 0).any(axis=1).all() and (table < 0).any() and ((states >= 0) & (states < 3)).all()
    drafts = inputs.draft_probabilities(tokens, parents, 5, 1, "")
    assert drafts[0, 2] > 0 and drafts[0, 0] > 0 and np.allclose(drafts.sum(axis=1), 1)
    for kind in ("nan", "inf", "masked"):
        broken = [inputs.draft_probabilities(tokens, parents, 5, seed, kind).sum(axis=1) for seed in range(10)]
        spoilt = ~np.isclose(np.array(broken), 1)
        assert 5 < spoilt.sum() < 35, kind


def test_the_grid_misses_no_box_by_more_than_the_tolerance():
    accept, bonus = inputs.grid(3)
    rng = np.random.default_rng(1)
    worst = [0.0, 0.0]
    for _ in range(2_000):
        (a, b), (c, d) = np.sort(rng.random((2, 2)), axis=1)
        share = ((accept[:, 0] >= a) & (accept[:, 0] < b) & (bonus[:, 0] >= c) & (bonus[:, 0] < d)).mean()
        worst[0] = max(worst[0], abs(share - (b - a) * (d - c)))
        share = ((accept[:, 0] >= a) & (accept[:, 0] < b) & (accept[:, 1] >= c) & (accept[:, 1] < d)).mean()
        worst[1] = max(worst[1], abs(share - (b - a) * (d - c)))
    assert 0.02 < worst[0] <= inputs.FIRST_TOLERANCE and worst[1] <= inputs.SECOND_TOLERANCE


def test_the_model_tells_rows_positions_and_prefixes_apart():
    model = AcceptModel(AcceptConfig(vocab_size=2, page_size=3, num_rows=3))
    assert (
        np.unique(model.table).size == model.table.size
        and model.table.min() >= 3
        and model.table.max() < model.num_slots
    )
    assert (model.table[:, 1] - model.table[:, 0] == 1).all(), "pages of neighbours"
    for row, length in ((0, 9), (1, 9), (2, 9)):
        model.replace(row, length)
    codes = [code for request in model.requests for code in request.codes]
    assert len(set(codes)) == 27 and all(code % LAYERS == 0 and code >= 0 for code in codes)
    assert model.first_wrong() is None and code_of(5, 1) != code_of(5, 2)
    model.pools[1, model.table[1, 4]] = model.pools[1, model.table[1, 5]]
    assert model.first_wrong() == (1, 4, 1)


def test_what_makes_no_sense_is_left_out():
    trial = ACCEPT.start(plain.make, AcceptConfig(), EVERYTHING, ())
    assert not trial.greedy("a", 1, 1) and not trial.abandon("a") and not trial.constrain("a", 1)
    assert not any(map(trial.configure, [(1, 2), (1, 1, 9), (1, 8, 2)]))
    assert not trial.launch("a", (7,), 0, 0) and not trial.replace(3, 1)
    assert not trial.launch_garbage("a", (0,), 0, "noise")
    assert trial.launch("a", (0,), 0, 0)
    assert not trial.launch("a", (), 0, 0) and not trial.replace(0, 1), "in flight"
    assert not trial.launch("b", (0,), 0, 0) and trial.launch("b", (), 0, 0)
    assert trial.constrain("a", 1) and not trial.constrain("a", 1)
    chains = ACCEPT.start(Chains, AcceptConfig(), AcceptCapabilities(), ())
    assert not chains.configure((2, 2, 4))


def test_a_row_that_never_ends_is_found():
    class Endless(Chains):
        """A round that emits nothing at all."""

        def verify_greedy(self, round, logits):
            index, lens, predict, bonus = super().verify_greedy(round, logits)
            return [-1] * len(index), [0] * len(lens), predict, bonus

    invariants = [item for item in of_contract("accept") if item.id in ("ACCEPT-01", "ACCEPT-02")]
    with pytest.raises(Violation) as caught:
        ACCEPT.execute(Endless, AcceptConfig(), AcceptCapabilities(), invariants, [])
    assert {broken.id for broken in caught.value.broken} == {"ACCEPT-01", "ACCEPT-02"}
