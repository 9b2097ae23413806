"""Algorithms by name: the built-in ones, plugins from a file of their own, and what is refused at registration."""

from importlib.metadata import EntryPoint

import pytest
from foretoken.core import registry
from foretoken.core.algorithm import AlgorithmShape, SpecAlgorithm
from foretoken.core.algorithms import BUILT_IN, Standalone
from foretoken.core.errors import ConfigError
from foretoken.core.registry import algorithm_names, get_algorithm, register_algorithm, unregister_algorithm
from foretoken.properties.reference import plain_greedy
from served_engine import MODEL, ask, finish, make


@pytest.fixture
def forget():
    before = set(algorithm_names())
    yield
    for name in algorithm_names():
        if name not in before:
            unregister_algorithm(name)


@pytest.mark.parametrize("name", ["NONE", "STANDALONE", "EAGLE", "EAGLE3", "MULTI_LAYER_EAGLE", "NGRAM"])
def test_names_are_case_insensitive(name):
    assert get_algorithm(name) is get_algorithm(name.lower()) is get_algorithm(name.title())
    assert get_algorithm(name).name == name


def test_an_unknown_name_is_answered_with_the_nearest_and_all_known():
    with pytest.raises(ConfigError) as error:
        get_algorithm("EAGEL")
    assert "EAGLE" in str(error.value) and "NGRAM" in str(error.value)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("shape", [{}, {"topk": 3, "num_draft_tokens": 7}], ids=["chain", "tree"])
def test_a_plugin_serves_from_its_own_file_alone(forget, overlap, shape):
    @register_algorithm("MyDraft")
    class MyDraft(Standalone):
        """Nothing of the core knows this class."""

    assert get_algorithm("mydraft").name == "MYDRAFT"
    engine, executor = make(algorithm="mYdRaFt", overlap=overlap, shape=shape, block_rounds=4)
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
    for expected in (
        "build_disagg_draft_input",
        "relay_fields",
        "draft_kv",
        "accept_width",
        "num_draft_tokens",
        "__init__",
    ):
        assert expected in message, expected
    assert "BARE" not in algorithm_names()


def test_an_entry_point_is_loaded_when_it_is_asked_for(forget, monkeypatch):
    class FromAfar(Standalone):
        pass

    class Entry:
        name = "afar"
        value = "far.away:FromAfar"

        def load(self):
            return FromAfar

    asked = []
    monkeypatch.setattr(registry, "entry_points", lambda group: asked.append(group) or [Entry()])
    assert isinstance(get_algorithm("AFAR"), FromAfar)
    assert asked == [registry.ENTRY_POINT_GROUP]
    assert get_algorithm("afar") is get_algorithm("AFAR")
    assert len(asked) == 1, "once it is known nothing is looked up again"
    assert EntryPoint  # the port that `Entry` stands for


def test_built_in_names_cannot_be_forgotten():
    with pytest.raises(ConfigError):
        unregister_algorithm("EAGLE")


# -- what the built-in algorithms say of themselves ---------------------------------------------------------------------------


@pytest.mark.parametrize("cls", BUILT_IN)
def test_hidden_states_are_relayed_exactly_by_those_that_need_them(cls):
    algorithm = cls()
    names = [field.name for field in algorithm.relay_fields(AlgorithmShape(3, 2, hidden_size=8))]
    assert ("hidden_states" in names) == algorithm.needs_hidden_states == (algorithm.name.endswith(("EAGLE", "EAGLE3")))
    assert names[0] == "bonus_tokens"


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
