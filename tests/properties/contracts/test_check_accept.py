"""The suite of acceptance on a foreign component and on nonsense answers."""

import numpy as np
import pytest
from foredraft.checks.adapters import tree_accept
from foredraft.properties.accept import plain
from foredraft.properties.accept.contract import AcceptCapabilities, AcceptConfig
from foredraft.properties.accept.expected import RecordedCoins
from foredraft.properties.conformance import check_accept
from foredraft.properties.harness.invariants import of_contract
from foredraft.properties.harness.report import PropertiesBroken
from foredraft.properties.harness.trial import Violation
from foredraft.properties.suites import suite_of

ACCEPT = suite_of("accept")


def test_the_contract_checks_what_it_says():
    enabled = {item.id for make in (plain.make, tree_accept.make) for item in ACCEPT.component(make).invariants}
    assert enabled == {item.id for item in of_contract("accept")}, "the two have every capability between them"


# -- what must be -----------------------------------------------------------------------------------------------------


def test_coins_that_are_none():
    good = np.random.default_rng(1).random((2, 40, 30))
    coins = RecordedCoins()
    coins.note(0, np.arange(40), np.zeros(40, int), good)
    assert not coins.uneven()
    for parts, words in (
        ((good[0] / 2, good[1]), "accept coins fall"),
        ((good[0], 1 - good[0]), "the bonus coin have a correlation of -1.00"),
        ((np.sort(good[0], axis=1), good[1]), "next position"),
    ):
        coins = RecordedCoins()
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


# -- what runs are made of ---------------------------------------------------------------------------------------------


def test_a_row_that_never_ends_is_found():
    class Endless(Chains):
        """A round that emits nothing at all."""

        def verify_greedy(self, round, logits):
            index, lens, predict, bonus = super().verify_greedy(round, logits)
            return [-1] * len(index), [0] * len(lens), predict, bonus

    invariants = [item for item in of_contract("accept") if item.id in ("ACCEPT-01", "ACCEPT-02")]
    with pytest.raises(Violation) as caught:
        ACCEPT.component(Endless, AcceptCapabilities()).execute(AcceptConfig(), [], invariants)
    assert {broken.id for broken in caught.value.broken} == {"ACCEPT-01", "ACCEPT-02"}


def test_a_placeholder_in_place_of_a_bonus_token_is_found():
    class Placeholder(tree_accept.TreeAccept):
        def verdict(self, round, verified):
            *rest, bonus = super().verdict(round, verified)
            return *rest, np.where(verified.target_failed, -1, bonus)

    with pytest.raises(PropertiesBroken, match="whose target has failed, is -1"):
        check_accept(Placeholder, budget=2_000)
