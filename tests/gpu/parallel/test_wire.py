"""Steps and results as JSON, and back."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
from foredraft.core.contract.handoff_batch import HandoffBatch
from foredraft.core.contract.request import Request, SamplingParams
from foredraft.core.contract.step import (
    Arrivals,
    DecodeResult,
    DecodeStep,
    DraftBudget,
    Join,
    MultiStepEnd,
    PrefillResult,
    PrefillStep,
    RoundShape,
    Step,
    StepResult,
    TableWrites,
    WrittenRanges,
)
from foredraft.core.prompt import Prompt
from foredraft.gpu.parallel.wire import result_digest, result_from_json, result_to_json, step_from_json, step_to_json


def ints(*numbers: int, dtype: type = np.int64) -> np.ndarray:
    return np.array(numbers, dtype)


def through_text(value: dict) -> dict:
    return json.loads(json.dumps(value, allow_nan=False))


def check_equal(found: object, expected: object) -> None:
    """The same classes, dtypes, shapes and values."""
    assert type(found) is type(expected), (found, expected)
    if isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype and found.flags.writeable
        np.testing.assert_array_equal(found, expected)
    elif isinstance(expected, tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            check_equal(one, other)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            check_equal(found[name], value)
    elif isinstance(expected, TableWrites):
        for name in ("rows", "columns", "slots"):
            check_equal(getattr(found, name), getattr(expected, name))
    elif hasattr(expected, "__dataclass_fields__") and not isinstance(expected, Request):
        for name in expected.__dataclass_fields__:
            check_equal(getattr(found, name), getattr(expected, name))
    else:
        assert found == expected


STEP = Step(
    step_id=7,
    joins=(
        Join(
            2, 1 << 40, Request("ü", Prompt.of_tokens([3, 4, 5]), 9, sampling=SamplingParams(0.5, seed=2**60)), 8, 0, 2,
            ints(3, 4),
        ),
    ),
    released=((1, 3), (4, 1)),
    table_writes=TableWrites([WrittenRanges(2, 5, 3, ints(9, 8, 7, dtype=np.int32))]),
    prefill=PrefillStep(
        ints(2, dtype=np.int32), ints(1), ints(2), ints(1), np.array([True]), ints(5), ints(-1)
    ),
    decode=DecodeStep(ints(3, 1, dtype=np.int32), ints(1, 2), ints(10, 11), ints(12, 13), RoundShape(2, 1, 3), 1),
)  # fmt: skip
RESULT = StepResult(
    7,
    PrefillResult(ints(6), None, {"logprobs": np.array([-0.25], np.float32)}),
    DecodeResult(
        1, ints(1, 3, dtype=np.int32)[None], None, np.array([False, True]), MultiStepEnd.REQUEST_ENDED,
        ints(4, -1, -1, 1, 2, 3).reshape(1, 2, 3), ({"hidden_states": np.ones((2, 3, 4))},),
    ),
    ints(123),
    ((1, "no distribution"),),
)  # fmt: skip


def test_a_step_comes_back_as_it_was():
    check_equal(step_from_json(through_text(step_to_json(STEP))), STEP)


def test_a_budget_comes_back_as_it_was():
    assert STEP.decode is not None
    for temperatures in ((), (1.0, 0.5)):
        decode = replace(STEP.decode, budget=DraftBudget(3, 0.5, (-0.2, 0.1), temperatures))
        found = step_from_json(through_text(step_to_json(replace(STEP, decode=decode)))).decode
        assert found is not None and found.budget == decode.budget


def test_a_result_comes_back_as_it_was():
    check_equal(result_from_json(through_text(result_to_json(RESULT))), RESULT)


def test_requests_that_have_arrived_come_back_as_they_were():
    batch = HandoffBatch(
        ints(2, 3, dtype=np.int32), ints(5, 6), ("a", "ü"), ints(9, 8), np.ones((2, 3), np.float32),
        ints(*range(6)).reshape(2, 3), (None, np.ones(4, np.float32)), 4, {"own": ints(1, 2)},
    )  # fmt: skip
    for arrived in (batch, replace(batch, probabilities=None, token_ids=None, hidden_states=(None, None), relayed={})):
        step = replace(STEP, arrivals=Arrivals(arrived, ints(7, 8)))
        check_equal(step_from_json(through_text(step_to_json(step))), step)


def test_parts_that_a_step_does_not_have_stay_away():
    plain = Step(1, (), (), TableWrites(), None, None)
    check_equal(step_from_json(through_text(step_to_json(plain))), plain)
    nothing = StepResult(1, None, None, ints())
    check_equal(result_from_json(through_text(result_to_json(nothing))), nothing)


def test_checksums_tell_results_apart_but_not_their_times():
    digest = result_digest(result_to_json(RESULT))
    later = StepResult(RESULT.step_id, RESULT.prefill, RESULT.decode, ints(456), RESULT.failures)
    assert result_digest(result_to_json(later)) == digest
    other = PrefillResult(ints(8), None, RESULT.prefill.outputs)
    changed = StepResult(RESULT.step_id, other, RESULT.decode, RESULT.round_end_ns, RESULT.failures)
    assert result_digest(result_to_json(changed)) != digest
