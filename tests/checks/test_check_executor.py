"""The executor contract: what is wrong is said, and what is looked at is really looked at."""

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import pytest
from foredraft.core.contract.hidden import merge_hidden
from foredraft.core.contract.step import MultiStepEnd
from foredraft.core.errors import ConfigError
from foredraft.properties.executor.contract import MANY, ExecutorCapabilities, ExecutorConfig
from foredraft.properties.executor.record import RecordedCore, first_unequal
from foredraft.properties.executor.reference.adapter import ReferenceAdapter
from foredraft.properties.executor.reference.adapter import make as make_reference
from foredraft.properties.executor.search import hidden_arrays
from foredraft.properties.executor.trial import ExecutorTrial
from foredraft.properties.harness.cases import Case
from foredraft.properties.harness.letters import Choices, simpler_choices
from foredraft.properties.harness.trial import Violation
from foredraft.properties.suites import suite_of

SUITE = suite_of("executor")
EVERYTHING = make_reference.capabilities
TALK = [ExecutorTrial.submit("a", 7, 12, 0, False, False), *[ExecutorTrial.launch(), ExecutorTrial.collect()] * 3]
PLAIN = ExecutorConfig(context_len=64, num_pages=256)


def run(make, operations, config=PLAIN, capabilities=EVERYTHING, drain=False):
    capabilities = ExecutorCapabilities.of(capabilities)
    config = replace(config, tokens=capabilities.tokens)
    return SUITE.component(make, capabilities).execute(config, operations, drain=drain)


def broken(make, operations=TALK, **arguments):
    with pytest.raises(Violation) as caught:
        run(make, operations, **arguments)
    return caught.value


# -- ours -------------------------------------------------------------------------------------------------------------


def test_every_drawn_configuration_and_what_is_simpler_makes_an_engine():
    seen = set()
    for number in range(400):
        choose = Choices(number * 2_654_435_761)
        config = ExecutorConfig.draw(choose, EVERYTHING)
        config.make_engine()
        seen.add((config.algorithm, config.topk > 1, config.adaptive, config.overlap, config.multi_step_rounds > 1))
        for simpler in simpler_choices(choose.taken)[:3]:
            ExecutorConfig.draw(Choices(given=simpler), EVERYTHING).make_engine()
    assert len(seen) > 40 and {algorithm for algorithm, *_ in seen} >= {"STANDALONE", "EAGLE", "NGRAM", "NONE"}
    with pytest.raises(ConfigError):
        ExecutorConfig(num_pages=1).make_engine()


def test_a_case_is_a_file_that_can_be_run_again(tmp_path):
    class Keeps(ReferenceAdapter):
        def collect(self):
            self.executor.last = np.zeros((2, 4), np.float32)
            return super().collect()

    case = Case(SUITE, "test:Keeps", EVERYTHING.declared, PLAIN, 1, 0, "ACCEPT-17", drain=False, operations=tuple(TALK))
    story = case.tell(Keeps)
    assert story.violation.id == "ACCEPT-17" and story.ends_in == "operation 3"
    assert story.history[1] == "launch  step 1: 7 prompt tokens"
    assert case.replay(make_reference) is None


# -- what is looked at ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Slotted:
    kept: object


class Bare:
    __slots__ = ("kept",)


class Tensor:
    """What is no NumPy array, but has the looks of one."""

    def __init__(self, *shape, dtype="torch.bfloat16"):
        self.shape, self.dtype = shape, dtype


def test_the_walk_reaches_everything():
    hidden = np.zeros((2, 44), np.float32)
    bare = Bare()
    bare.kept = Tensor(3, 5, 44)
    root = {
        "list": [1, deque([hidden.copy()])],
        "slots": Slotted({"deep": hidden.copy()}),
        "bare": bare,
        "closure": (lambda kept: lambda: kept)(hidden.copy()),
        "method": Slotted(hidden.copy()).__repr__,
        "set": {Tensor(1, 44, dtype="float16")},
        "circle": None,
        "other": [
            np.zeros(44, np.float32),
            np.zeros((2, 44), np.int64),
            np.zeros((44, 2), np.float32),
            Tensor(1, 44, dtype="int8"),
        ],
        "weights": Slotted(hidden),
    }
    root["circle"] = root
    found = {array.path: array for array in hidden_arrays({"root": root}, (44, 52), without=(root["weights"],))}
    assert found.keys() == {
        "root['bare'].kept",
        "root['closure'].<cell>",
        "root['list'][1][0]",
        "root['method'].kept",
        "root['set']{}",
        "root['slots'].kept['deep']",
    }
    assert found["root['bare'].kept"].shape == (3, 5, 44) and found["root['bare'].kept"].dtype == "torch.bfloat16"
    assert hidden_arrays({"root": root}, (45,)) == []


def test_the_walk_sees_what_an_executor_of_ours_keeps():
    """A positive control on the very objects: EAGLE keeps hidden states in its relay, STANDALONE
    nothing of that width."""
    found = {}
    for algorithm in ("EAGLE", "STANDALONE"):
        trial = run(make_reference, TALK, replace(PLAIN, algorithm=algorithm))
        found[algorithm] = [array.path for array in trial.moment.kept]
    assert found["STANDALONE"] == []
    assert [path for path in found["EAGLE"] if "future_map" in path and "hidden_states" in path]


def test_hidden_states_that_a_request_asked_to_see_are_no_fault():
    shown = [ExecutorTrial.submit("a", 7, 12, 0, False, True), *TALK[1:]]
    results = []

    class Noting(ReferenceAdapter):
        def collect(self):
            results.append(super().collect())
            return results[-1]

    trial = run(Noting, shown)
    assert trial.moment.in_result == [] and "hidden_states" in results[-1].decode.outputs[0]
    run(Noting, TALK)
    assert "hidden_states" not in results[-1].decode.outputs[0], "they were not asked for"


def test_what_a_user_asked_to_see_excuses_no_buffer():
    class Keeps(ReferenceAdapter):
        def launch(self, step):
            super().launch(step)
            self.executor.captured = {"hidden_states": np.zeros((2, 4), np.float32)}

    violation = broken(Keeps, [ExecutorTrial.submit("a", 7, 12, 0, False, True), ExecutorTrial.launch()])
    assert "ReferenceExecutor.captured['hidden_states']" in violation.broken[0].finding.was


def test_every_root_is_searched():
    class Two(ReferenceAdapter):
        def roots(self):
            return ([np.zeros((2, 4), np.float32)], [])

    assert "keeps list[0]: float32 [2, 4]" in broken(Two, []).broken[0].finding.was


def test_a_draft_hidden_state_hides_behind_no_user():
    class Draft(ReferenceAdapter):
        def collect(self):
            result = super().collect()
            if result.decode is None:
                return result
            extra = {"draft_hidden_states": np.zeros((1, 2, 4), np.float32)}
            return replace(result, decode=replace(result.decode, outputs=(extra | result.decode.outputs[0],)))

    violation = broken(Draft, [ExecutorTrial.submit("a", 7, 12, 0, False, True), *TALK[1:]])
    assert violation.id == "ACCEPT-17" and "draft_hidden_states" in violation.broken[0].finding.was


class ForgetsTheRelay(ReferenceAdapter):
    def relay_fields(self):
        return [field for field in super().relay_fields() if field[0] != "hidden_states"]


class MergesAnything(ReferenceAdapter):
    def merge(self, first, second):
        return None if first is None or second is None else merge_hidden(np.array(first), np.array(second))


class RefusesToMerge(ReferenceAdapter):
    def merge(self, first, second):
        raise ValueError("no")


@pytest.mark.parametrize(
    ("make", "algorithm", "operations", "words"),
    [
        (ForgetsTheRelay, "EAGLE", [], "the relay has bonus_tokens, topk_probabilities, topk_ids"),
        (MergesAnything, "EAGLE", [ExecutorTrial.merge(2, -1)], "2 rows and None were merged to None"),
        (RefusesToMerge, "EAGLE", [ExecutorTrial.merge(2, 1)], "2 rows and 1 rows were merged to ValueError: no"),
        (RefusesToMerge, "STANDALONE", [ExecutorTrial.merge(-1, -1)], "None and None were merged to ValueError: no"),
    ],
)
def test_presence_is_uniform(make, algorithm, operations, words):
    violation = broken(make, operations, config=replace(PLAIN, algorithm=algorithm))
    assert violation.id == "ACCEPT-17" and words in violation.broken[0].finding.was


# -- the record -------------------------------------------------------------------------------------------------------


def test_the_engine_that_is_fed_follows_through_retraction_and_abort():
    core = RecordedCore(replace(PLAIN, overlap=True, adaptive=True, steps=5, multi_step_rounds=8).make_engine)
    trial = run(make_reference, [], replace(PLAIN, overlap=True, adaptive=True, steps=5, multi_step_rounds=8))
    trial.core = core
    trial.engine = core.live
    for operation in [
        *(ExecutorTrial.submit(name, 7, 20, 3, True, False) for name in "abc"),
        *[ExecutorTrial.launch(), ExecutorTrial.launch(), ExecutorTrial.collect()] * 3,
        ExecutorTrial.retract("a"),
        *[ExecutorTrial.launch(), ExecutorTrial.launch(), ExecutorTrial.collect()] * 3,
        ExecutorTrial.abort("b"),
    ]:
        trial.apply(operation)
    trial.drain()
    assert core.difference is None and core.num_events > 30
    assert core.fed.is_idle and core.fed.last_step_id == core.live.last_step_id > 8


def test_the_first_field_that_differs():
    @dataclass
    class Part:
        rows: np.ndarray
        steps: int

    part = Part(np.array([1, 2]), 3)
    assert first_unequal(part, replace(part)) is None and first_unequal(None, None) is None
    assert first_unequal(part, replace(part, steps=4)) == ("steps", "3", "4")
    assert first_unequal(part, Part(np.array([2, 1]), 3))[0] == "rows"
    assert first_unequal(part, None)[0] == "is there"


# -- answers ----------------------------------------------------------------------------------------------------------


class Altered(ReferenceAdapter):
    """Answers with something else from the first decode step on."""

    def collect(self):
        result = super().collect()
        return result if result.decode is None else self.alter(result)


def altered(alter):
    kind = type("Alters", (Altered,), {"alter": lambda self, result: alter(result)})
    return broken(kind)


def decode_with(**changes):
    return altered(lambda result: replace(result, decode=replace(result.decode, **changes)))


@pytest.mark.parametrize(
    ("changes", "id", "words"),
    [
        ({"accept_lens": [[1]]}, "TYPE", "decode.accept_lens is list"),
        ({"accept_lens": np.ones((1, 1))}, "TYPE", "decode.accept_lens is float64 [1, 1]"),
        ({"accept_lens": np.ones((1, 2), np.int32)}, "TYPE", "int32 [1, 2]"),
        ({"accept_lens": np.full((1, 1), 3, np.int32)}, "ANSWER", "row 1 in round 1 emits 3 tokens"),
        ({"accept_lens": np.zeros((1, 1), np.int32)}, "ANSWER", "emits 0 tokens"),
        ({"ended": np.ones(1, np.int32)}, "TYPE", "decode.ended is int32"),
        ({"ended": np.ones(1, bool)}, "ANSWER", "decode.ended of row 1 is True"),
        ({"rounds": 2}, "ANSWER", "2 rounds"),
        ({"rounds": 0}, "ANSWER", "0 rounds"),
        ({"multi_step_end": MultiStepEnd.ASKED}, "ANSWER", "MultiStepEnd.ASKED"),
        ({"multi_step_end": MultiStepEnd.REQUEST_ENDED}, "ANSWER", "MultiStepEnd.REQUEST_ENDED"),
        ({"tokens": None}, "TYPE", "decode.tokens has shape ()"),
        ({"tokens": np.full((1, 1, 2), 24)}, "ANSWER", "emits [24, 24]"),
        ({"tokens": np.full((1, 1, 2), -1)}, "ANSWER", "emits [-1, -1]"),
        ({"tokens": np.full((1, 1, 0), 1)}, "ANSWER", "emits []"),
        ({"stop_index": np.zeros((1, 1), np.int32)}, "ANSWER", "stop_index 0"),
    ],
)
def test_a_decode_result_that_cannot_be(changes, id, words):
    violation = decode_with(**changes)
    assert violation.id == id and words in violation.broken[0].finding.was, violation


@pytest.mark.parametrize(
    ("alter", "id", "words"),
    [
        (lambda result: None, "TYPE", "a NoneType without step_id"),
        (lambda result: replace(result, step_id=7), "ANSWER", "the result of step 7"),
        (lambda result: replace(result, decode=None), "ANSWER", "result.decode is None"),
        (lambda result: replace(result, round_end_ns=np.array([-1])), "ANSWER", "rounds end at [-1]"),
        (lambda result: replace(result, decode=7), "TYPE", "a result that cannot be read"),
        (lambda result: replace(result, failures=3), "TYPE", "a result that cannot be read"),
        (lambda result: replace(result, round_end_ns=np.array([1, 2])), "TYPE", "round_end_ns is int64 [2]"),
        (lambda result: replace(result, failures=((9, "lost"),)), "ANSWER", "a failure of row 9 (lost)"),
    ],
)
def test_a_result_that_cannot_be(alter, id, words):
    violation = altered(alter)
    assert violation.id == id and words in violation.broken[0].finding.was, violation


def test_what_raises_hangs_or_is_not_there():
    class Raises(ReferenceAdapter):
        def launch(self, step):
            raise KeyError(step.step_id)

    class Missing:
        def __init__(self, config):
            pass

    assert broken(Raises).id == "RAISES"
    violation = broken(Missing)
    assert violation.id == "CAPABILITY" and "has no launch (every component has it)" in violation.broken[0].finding.was


def test_an_executor_that_loses_a_request_is_found_at_the_end():
    class Loses(ReferenceAdapter):
        def collect(self):
            result = super().collect()
            if result.decode is None:
                return result
            return replace(result, decode=replace(result.decode, ended=np.zeros_like(result.decode.ended)))

    violation = broken(Loses, [], drain=True)
    assert violation.id == "ANSWER" and "decode.ended" in violation.broken[0].finding.was


# -- sampled tokens ----------------------------------------------------------------------------------------------------


def same_coins_everywhere(executor):
    coins = executor._ops.coins
    executor._ops.coins = lambda keys, positions, seed, purpose: coins(keys, positions * 0, seed, purpose)


def same_coins_for_all(executor):
    coins = executor._ops.coins
    executor._ops.coins = lambda keys, positions, seed, purpose: coins(
        keys[:1].expand_as(keys), positions, seed, purpose
    )


def without_the_token_that_reaches_the_mass(executor):
    sampling = executor._rows.sampling

    def cut(numbers):
        found = sampling(numbers)
        return found and replace(found, top_p=np.where(found.top_p >= 1.0, found.top_p, 0.5 * found.top_p))

    executor._rows.sampling = cut


def one_coin_for_two_things(executor):
    verify = executor._ops.verify_sampling
    executor._ops.verify_sampling = lambda tree, probs, accept, bonus: verify(tree, probs, accept, accept)


@pytest.mark.fast("None-")
@pytest.mark.parametrize(
    ("defect", "words"),
    [
        (None, ""),
        (one_coin_for_two_things, "tokens that were no draft"),
        (same_coins_everywhere, "consecutive tokens"),
        (same_coins_for_all, "two requests"),
        (without_the_token_that_reaches_the_mass, "the least probable token"),
    ],
)
def test_sampled_tokens_are_independent_draws(defect, words):
    pytest.importorskip("torch")
    from foredraft.checks.adapters.torch_executor import CheckedExecutor

    def make(config):
        subject = CheckedExecutor(config)
        if defect is not None:
            defect(subject.executor)
        return subject

    config = ExecutorConfig(algorithm="STANDALONE", steps=2, max_running=MANY, num_pages=900)
    has = SUITE.capabilities.of(CheckedExecutor.capabilities)
    operations = [ExecutorTrial.sample()]
    if defect is None:
        assert SUITE.component(make, has).execute(config, operations).executed[ExecutorTrial.sample] == 1
        return
    with pytest.raises(Violation) as caught:
        SUITE.component(make, has).execute(config, operations)
    assert words in str(caught.value)
