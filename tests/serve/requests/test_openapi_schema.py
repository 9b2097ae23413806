"""The published schema: what it says of unsupported parameters; and by Schemathesis: answers are of the statuses, types
and forms that it has, whatever is asked, and what it does not allow is refused."""

from __future__ import annotations

import httpx
import pytest
from foredraft.serve.app import GONE
from foredraft.serve.base.limits import Limits
from foredraft.serve.requests.schema import ChatRequest, CompletionRequest
from http_server import Served, serving, simulated_body
from hypothesis import HealthCheck, given, settings

EXAMPLES = 150
ANSWERS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")
"""Schemathesis' checks of answers. Not all that the schema allows can be served: a prompt may be too long."""


def test_an_unsupported_parameter_may_have_its_values_without_effect_alone():
    """Values that Python takes for equal, such as 0 and False, belong to different parameters here."""
    shown = {
        name: one["enum"]
        for request in (CompletionRequest, ChatRequest)
        for name, one in request.model_json_schema()["properties"].items()
        if "enum" in one
    }
    expected = {
        "store": [None, False],
        "best_of": [None, 1],
    }
    assert {name: repr(shown[name]) for name in expected} == {name: repr(values) for name, values in expected.items()}


@pytest.mark.parametrize("path", GONE)
def test_an_endpoint_that_is_gone_names_its_successor(simulated: Served, path: str):
    for method, below in (("POST", ""), ("GET", ""), ("GET", "/resp_1"), ("DELETE", "/resp_1")):
        answer = httpx.request(method, f"{simulated.url}{path}{below}")
        assert answer.status_code == 404, (method, below)
        assert answer.json()["error"]["message"] == f"{path} is gone: {GONE[path]}"
    assert httpx.get(f"{simulated.url}/x{path}").json()["error"]["message"] == "Not Found"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_answers_are_as_the_schema_says(mode: str):
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    names = (*ANSWERS, "negative_data_rejection") if mode == "NEGATIVE" else ANSWERS
    with serving(simulated_body(speed=1000.0), Limits(deadline_s=1.0, max_streams=64), strict=True) as served:
        schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
        checks = [schemathesis.checks.CHECKS.get_one(name) for name in names]
        paths, statuses = set(), []
        for operation in (result.ok() for result in schema.get_all_operations()):
            strategy = operation.as_strategy(generation_mode=schemathesis.GenerationMode[mode])

            @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            @given(strategy)
            def ask(case) -> None:
                answer = case.call(timeout=60)
                statuses.append(answer.status_code)
                case.validate_response(answer, checks=checks)

            if mode == "POSITIVE" or operation.body:
                ask()
                paths.add(operation.path)
        assert paths >= {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/abort"}
        assert len(statuses) > 5 * EXAMPLES // 2
        served.wait_until_idle()
