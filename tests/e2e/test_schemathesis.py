"""Both OpenAPI documents against the running servers: whatever a document allows, and any JSON at all, is answered as the
document says, never with a 5xx, and the processes live on.

MICROSERVING_FUZZ_EXAMPLES: how many requests per operation; the default is short.
"""

from __future__ import annotations

import os
from typing import Any, Final

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from .conftest import Cluster
from .processes import MODEL, PLAIN, completion, wait_idle

EXAMPLES: Final = int(os.environ.get("MICROSERVING_FUZZ_EXAMPLES", "6"))
SHORT: Final = {"max_tokens": 2, "max_completion_tokens": 2, "n": 1, "best_of": None, "timeout": None}
"""What would make an answer long is cut, so that requests are many."""
CHECKS: Final = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
ONLY: Final = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
JSON: Final = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
BASES: Final[dict[str, dict[str, Any]]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}
"""What a body has where it does not say otherwise."""


@pytest.fixture(params=["engine", "router"])
def server(request: pytest.FixtureRequest, tight: Cluster) -> str:
    return tight.decode if request.param == "engine" else tight.router


def still_right(tight: Cluster, pids: dict[str, int]) -> None:
    """The same processes, idle, with the same answer."""
    wait_idle(tight.engines, 10)
    assert {name: tight.pid(name) for name in pids} == pids
    answer = completion(tight.router, prompt="The capital of France is", max_tokens=4, temperature=0)
    assert "Paris" in answer["choices"][0]["text"]


@pytest.fixture
def unharmed(tight: Cluster) -> Any:
    pids = {name: tight.pid(name) for name in ("prefill-0", "decode-0", "router")}
    yield
    still_right(tight, pids)


def shortened(body: Any) -> Any:
    """A valid request that does not take long; anything else as it is."""
    if not isinstance(body, dict):
        return body
    if "input" in body:
        return {**body, "max_output_tokens": 2, "timeout": None}
    short = {name: value for name, value in SHORT.items() if name in body or name == "max_tokens"}
    return {**body, **short}


@pytest.mark.timeout(600)
@pytest.mark.case("API-39")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_what_the_document_allows_is_answered_as_it_says(
    server: str, unharmed: None, mode: GenerationMode
) -> None:
    document = httpx.get(f"{server}/openapi.json", verify=PLAIN).json()
    schema = schemathesis.openapi.from_dict(document)
    schema.config.base_url = server
    for result in schema.get_all_operations():
        operation = result.ok()
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue  # there is nothing to get wrong

        @seed(1)
        @ONLY
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: schemathesis.Case) -> None:
            if mode is GenerationMode.POSITIVE:
                case.body = shortened(case.body)
            case.call_and_validate(checks=CHECKS, timeout=60)

        check()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", BASES)
def test_any_json_is_answered(server: str, unharmed: None, path: str) -> None:
    """Also with the fields that there are and values of any kind in them."""
    document = httpx.get(f"{server}/openapi.json", verify=PLAIN).json()
    fields = sorted(_fields(document, path))
    bodies = JSON | st.dictionaries(st.sampled_from(fields), JSON | _plausible(), max_size=8)

    @seed(2)
    @settings(ONLY, max_examples=4 * EXAMPLES)
    @given(body=bodies)
    def check(body: Any) -> None:
        if isinstance(body, dict):
            body = {**BASES[path], **body}
        answer = http.post(path, json=body)
        assert answer.status_code in (200, 400, 404, 413), answer.text
        if answer.status_code != 200:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    with httpx.Client(base_url=server, timeout=100, verify=PLAIN) as http:
        check()


def _plausible() -> st.SearchStrategy[Any]:
    return st.sampled_from(
        [0, 1, 2, 0.5, True, False, "", "a", MODEL, [], {}, ["a"], [1], {"type": "text"}, "auto"]
    )


def _fields(document: dict[str, Any], path: str) -> set[str]:
    """The names of all fields that the body of ``path`` may have."""
    schemas = document["components"]["schemas"]
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    found: set[str] = set()
    waiting = [body]
    while waiting:
        part = waiting.pop()
        if "$ref" in part:
            part = schemas[part["$ref"].rsplit("/", 1)[1]]
        waiting += part.get("anyOf", [])
        found |= set(part.get("properties", {}))
    return found
