"""Algorithms by name: the built-in ones, plugins from a file of their own, and what is refused at registration."""

import pytest
from foredraft.core.algorithm import registry
from foredraft.core.algorithm.algorithm import BONUS_TOKENS, AlgorithmShape, Drafter, DraftKV, SpecAlgorithm
from foredraft.core.algorithm.builtin import LookupDrafting, Standalone
from foredraft.core.algorithm.proposer import Proposal
from foredraft.core.algorithm.registry import algorithm_names, get_algorithm, register_algorithm, unregister_algorithm
from foredraft.core.contract.future_map import RelayField
from foredraft.core.errors import ConfigError
from foredraft.properties.executor.reference import plain_greedy
from served_engine import MODEL, ask, finish, make


@pytest.mark.fast("tree-True", "chain-False", ci="*")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("shape", [{}, {"topk": 3, "num_draft_tokens": 7}], ids=["chain", "tree"])
def test_a_plugin_serves_from_its_own_file_alone(forget, overlap, shape):
    @register_algorithm("MyDraft")
    class MyDraft(Standalone):
        """Nothing of the core knows this class."""

    assert get_algorithm("mydraft").name == "MYDRAFT"
    engine, executor = make(algorithm="mYdRaFt", overlap=overlap, shape=shape, multi_step_rounds=4)
    requests = [ask(f"r{i}", start=i, prompt_len=3 + i) for i in range(5)]
    for request in requests:
        engine.submit(request, 0)
    ended = finish(engine, executor)
    for request in requests:
        assert ended[request.request_id].tokens.tolist() == plain_greedy(MODEL, request, 12).tolist()
    assert executor.num_correct_drafts > 0


@pytest.mark.parametrize("name", ["eagle", "None", "NGRAM"])
def test_built_in_names_are_reserved(forget, name):
    with pytest.raises(ConfigError, match="reserved"):
        register_algorithm(name)(type("Thief", (SpecAlgorithm,), {}))


def test_a_name_is_given_once_and_must_be_an_identifier(forget):
    register_algorithm("ONCE")(type("First", (SpecAlgorithm,), {}))
    with pytest.raises(ConfigError, match="registered already, by First"):
        register_algorithm("once")(type("Second", (SpecAlgorithm,), {}))
    with pytest.raises(ConfigError, match="no identifier"):
        register_algorithm("no name")(type("Third", (SpecAlgorithm,), {}))


def test_a_plugin_that_lacks_methods_is_refused_with_all_of_them(forget):
    class Bare:
        drafter = SpecAlgorithm.drafter

        def accept_width(self, steps):
            return steps + 1

        def __init__(self, argument):
            pass

    with pytest.raises(ConfigError) as error:
        register_algorithm("BARE")(Bare)
    message = str(error.value)
    for expected in [
        "build_disagg_draft_input",
        "relay_fields",
        "draft_kv",
        "accept_width",
        "num_draft_tokens",
        "__init__",
    ]:
        assert expected in message, expected
    assert "BARE" not in algorithm_names()


def test_built_in_names_cannot_be_forgotten():
    with pytest.raises(ConfigError):
        unregister_algorithm("EAGLE")


# -- what the built-in algorithms say of themselves --------------------------------------------------------------------


def test_one_head_per_step_relays_candidates_of_every_head_and_is_refused_more_steps_than_heads():
    heads = get_algorithm("MULTI_LAYER_EAGLE")
    fields = {field.name: field.shape_suffix for field in heads.relay_fields(AlgorithmShape(3, 2, hidden_size=8))}
    assert fields["topk_ids"] == fields["topk_probabilities"] == (6,)
    assert fields["hidden_states"] == (8,)
    assert not heads.problems(AlgorithmShape(3, num_heads=3))
    (problem,) = heads.problems(AlgorithmShape(4, num_heads=3))
    assert "4 heads" in str(problem) and "has 3" in str(problem)


def test_a_draft_of_another_vocabulary_is_refused_with_both_sizes():
    standalone = get_algorithm("STANDALONE")
    (problem,) = standalone.problems(AlgorithmShape(3, target_vocab_size=100, draft_vocab_size=90))
    assert "100" in str(problem) and "90" in str(problem)
    assert not standalone.problems(AlgorithmShape(3, target_vocab_size=100, draft_vocab_size=100))


def test_plain_decoding_drafts_no_trees():
    assert get_algorithm("NONE").problems(AlgorithmShape(0, topk=2))
    assert not get_algorithm("EAGLE").problems(AlgorithmShape(3, topk=8))


# -- interface parity --------------------------------------------------------------------------------------------------


class GoodProposer:
    def open_row(self, row):
        pass

    def observe(self, row, tokens):
        pass

    def first_relay(self, rows):
        return {}

    def propose(self, request):
        return Proposal.of_paths([[] for _ in request.rows], request.num_draft_tokens)


class GoodLookup(LookupDrafting):
    def make_proposer(self, shape):
        return GoodProposer()


def refusal(**changes) -> str:
    """What the registry says of `GoodLookup` with these changes, when it is registered or, again and again, when
    it is asked for."""
    with pytest.raises(ConfigError) as error:
        register_algorithm("CHANGED")(type("Changed", (GoodLookup,), changes))
        get_algorithm("CHANGED")
    if "CHANGED" in algorithm_names():
        with pytest.raises(ConfigError, match="plugin Changed"):
            get_algorithm("CHANGED")
        unregister_algorithm("CHANGED")
    return str(error.value)


def raising(self, *arguments):
    raise RuntimeError("not today")


def test_a_class_that_agrees_is_registered(forget):
    register_algorithm("GOOD")(GoodLookup)
    assert get_algorithm("good").make_proposer(AlgorithmShape(1)).first_relay([]) == {}
    with pytest.raises(ConfigError, match="registered already, as GOOD"):
        register_algorithm("BETTER")(GoodLookup)
    with pytest.raises(ConfigError, match="is no class"):
        register_algorithm("LAMBDA")(lambda: None)


def test_a_class_may_name_itself_in_its_methods(forget):
    """They run when the name is asked for: while a decorated class is registered its own name means nothing yet."""
    asked = []

    @register_algorithm("REFLECTIVE")
    class Reflective(GoodLookup):
        share = 0.25

        def __init__(self):
            asked.append("__init__")
            assert type(self) is Reflective

        def accept_width(self, steps, num_draft_tokens):
            asked.append("accept_width")
            return Reflective.__mro__[1].accept_width(self, steps, num_draft_tokens)

        def make_proposer(self, shape):
            assert Reflective.share == 0.25
            return super().make_proposer(shape)

    assert asked == []
    assert isinstance(get_algorithm("reflective"), Reflective) and asked == ["__init__", "accept_width"]
    assert get_algorithm("reflective") is get_algorithm("REFLECTIVE")
    unregister_algorithm("REFLECTIVE")
    register_algorithm("REFLECTIVE")(GoodLookup)
    assert type(get_algorithm("REFLECTIVE")) is GoodLookup


@pytest.mark.parametrize("name", [n for n in vars(SpecAlgorithm) if n[0] != "_" and callable(vars(SpecAlgorithm)[n])])
def test_every_method_is_checked_for_its_parameters(forget, name):
    assert f"{name}: takes (" in refusal(**{name: lambda self, one, two, three, four, five: None})
    assert f"{name}: must be a method" in refusal(**{name: 3})


def test_the_way_a_parameter_is_given_is_part_of_the_signature(forget):
    assert "takes (steps, num_draft_tokens (by keyword))" in refusal(
        accept_width=lambda self, steps, *, num_draft_tokens: 1
    )
    assert "takes (*everything)" in refusal(accept_width=lambda self, *everything: 1)


@pytest.mark.parametrize("name", ["relay_fields", "make_proposer", "accept_width", "problems"])
def test_a_method_that_raises_is_named(forget, name):
    parameters = {"accept_width": "steps, num_draft_tokens"}.get(name, "shape")
    function = eval(f"lambda self, {parameters}: raising(self)", {"raising": raising})
    assert f"{name}: raised RuntimeError: not today" in refusal(**{name: function})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"drafter": "lookup"}, "drafter: is 'lookup', expected Drafter"),
        ({"supports_trees": 1}, "supports_trees: is 1, expected bool"),
        ({"draft_time_share": -1.0}, "draft_time_share"),
        ({"usual_acceptance": "chatt"}, "did you mean 'chat'"),
        ({"draft_form": "EAGLE"}, "a drafter LOOKUP needs ''"),
        ({"draft_kv": DraftKV.SHIFTED}, "draft_kv: is DraftKV.SHIFTED"),
        ({"needs_hidden_states": True}, "needs_hidden_states: is True"),
        ({"drafter": Drafter.HEAD}, "needs 'EAGLE' or 'EAGLE3'"),
        ({"drafter": Drafter.NONE}, "gave a proposer, but its drafter is NONE"),
        ({"accept_width": lambda self, steps, num_draft_tokens: 0}, "accept_width: gave 0"),
        ({"prefix_key_kind": lambda self: "trigram"}, "'trigram'"),
        ({"make_proposer": lambda self, shape: None}, "make_proposer: gave None"),
        ({"draft_network": lambda self: int}, "draft_network: gave <class 'int'>, but its drafter is LOOKUP"),
        ({"make_proposer": lambda self, shape: object()}, "object.observe: is missing"),
        ({"relay_fields": lambda self, shape: []}, "expected a tuple of RelayField"),
        ({"relay_fields": lambda self, shape: ()}, "must begin with bonus_tokens"),
        ({"relay_fields": lambda self, shape: (RelayField("mine", (), "int64"),)}, "must begin with bonus_tokens"),
    ],
)
def test_unusable_answers_are_refused(forget, changes, words):
    assert words in refusal(**changes)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        (RelayField("lengths", (), "int64"), "lengths: every field has a name of its own"),
        (RelayField("bonus_tokens", (), "int64"), "bonus_tokens: every field"),
        (RelayField("mine", (), "bfloat16"), "of dtype 'bfloat16'"),
        (RelayField("mine", (), "U3"), "of dtype 'U3'"),
        (RelayField("mine", (0,), "int64"), "has the shape"),
    ],
)
def test_own_fields_are_such_as_a_relay_can_hold(forget, field, words):
    assert words in refusal(relay_fields=lambda self, shape: (BONUS_TOKENS, field))


def test_a_draft_model_relays_what_executors_build_it_with(forget):
    own = RelayField("mine", (), "int64")

    class Talkative(Standalone):
        def relay_fields(self, shape):
            return (*super().relay_fields(shape), own)

    with pytest.raises(ConfigError, match="must be bonus_tokens, topk_probabilities, topk_ids"):
        register_algorithm("TALKATIVE")(Talkative)
        get_algorithm("TALKATIVE")


def test_all_problems_of_a_proposer_are_listed(forget):
    class Poor:
        def observe(self, row):
            pass

        open_row = 3

    message = refusal(make_proposer=lambda self, shape: Poor())
    for words in ("Poor.observe: takes (row), expected (row, tokens)", "Poor.open_row: must", "Poor.propose: is miss"):
        assert words in message


# -- entry points ------------------------------------------------------------------------------------------------------


def offer(monkeypatch, *entries):
    monkeypatch.setattr(registry, "entry_points", lambda group: list(entries))


class Afar:
    def __init__(self, name, loaded, value="far.away:Plugin"):
        self.name, self.value, self.loaded = name, value, loaded

    def load(self):
        if isinstance(self.loaded, BaseException):
            raise self.loaded
        return self.loaded() if self.loaded in (clash, half) else self.loaded


def clash():
    register_algorithm("OTHER")(GoodLookup)
    return GoodLookup


def half():
    register_algorithm("OTHER")(GoodLookup)
    raise ValueError("half way")


@pytest.mark.parametrize(
    ("loaded", "words"),
    [
        (ImportError("no module"), "ImportError: no module"),
        (ZeroDivisionError("at import"), "ZeroDivisionError: at import"),
        (SystemExit(0), "SystemExit: 0"),
        (42, "42 is no class"),
        (int, "is no subclass of SpecAlgorithm, and has no drafter, "),
        (clash, "registered already, as OTHER"),
        (half, "ValueError: half way"),
    ],
)
def test_an_entry_point_that_fails_is_one_error_and_leaves_nothing(forget, monkeypatch, loaded, words):
    offer(monkeypatch, Afar("broken", loaded))
    before = algorithm_names()
    with pytest.raises(ConfigError) as error:
        get_algorithm("BROKEN")
    assert words in str(error.value) and "far.away:Plugin" in str(error.value)
    assert algorithm_names() == before


def test_only_what_is_asked_for_is_loaded(forget, monkeypatch):
    offer(monkeypatch, Afar("broken", ImportError("never")), Afar("whole", GoodLookup))
    assert isinstance(get_algorithm("whole"), GoodLookup)
    with pytest.raises(ConfigError, match=r"did you mean 'BROKEN'.*known: .*BROKEN, WHOLE|known: .*WHOLE, BROKEN"):
        get_algorithm("broke")


def test_a_name_that_two_packages_offer_is_refused_with_both(forget, monkeypatch):
    offer(monkeypatch, Afar("twin", GoodLookup, "one:Plugin"), Afar("TWIN", GoodLookup, "two:Plugin"))
    with pytest.raises(ConfigError, match="TWIN is offered twice, by one:Plugin and two:Plugin"):
        get_algorithm("twin")
    offer(monkeypatch, Afar("twin", GoodLookup, "one:Plugin"), Afar("twin", GoodLookup, "one:Plugin"))
    assert isinstance(get_algorithm("twin"), GoodLookup)


def test_no_package_replaces_a_built_in_name(monkeypatch):
    offer(monkeypatch, Afar("EAGLE", GoodLookup))
    assert get_algorithm("EAGLE") is not GoodLookup and get_algorithm("EAGLE").drafter is Drafter.HEAD


def test_the_names_of_servers_are_understood():
    found = [get_algorithm(name).name for name in ("NEXTN", "mtp", "DRAFT_MODEL")]
    assert found == ["EAGLE", "EAGLE", "STANDALONE"]
