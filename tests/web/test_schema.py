"""What the API says of itself is true for whatever is asked: no fault, and answers as documented."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

schemathesis = pytest.importorskip("schemathesis")

from schemathesis import checks  # noqa: E402
from schemathesis.specs.openapi import checks as openapi  # noqa: E402

from meshwright.web.app import Settings, create_app  # noqa: E402  # after the check that it can be tested

CHECKS = [
    checks.not_a_server_error,
    openapi.status_code_conformance,
    openapi.content_type_conformance,
    openapi.response_schema_conformance,
]
"""All but that whatever has the right form is understood: a name must also be known."""
EXAMPLES = int(os.environ.get("SCHEMA_EXAMPLES", "4"))
MANY = 20
schema = schemathesis.openapi.from_asgi(
    "/api/openapi.json", create_app(Settings(workers=0, allow_hosts=("testserver",)))
)
if EXAMPLES < MANY:
    schema = schema.exclude(path="/api/accuracy")  # takes seconds, and has nothing to be asked wrongly


@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES < MANY,
    phases=(Phase.generate,) if EXAMPLES < MANY else (Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
def test_no_question_is_a_fault(case: Any) -> None:
    answer = case.call(timeout=120)
    assert answer.status_code < 500, answer.text
    case.validate_response(answer, checks=CHECKS)
