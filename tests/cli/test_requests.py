"""`microserving requests`: what it asks of a router, and how it shows the answer."""

from __future__ import annotations

import json
from typing import Any

from .test_program import Router, admin, router  # noqa: F401 - fixtures

ATTEMPT = {
    "program": "prefill_decode",
    "prefill": "prefill-0",
    "decode": "decode-0",
    "prefix_matched_length": 16,
    "tokens_sent": 583,
    "error": None,
    "why": "prefill-0 computed the prompt up to 599, decode-0 the rest",
}
REQUEST = {
    "request_id": "ab12",
    "started": "2026-01-02T03:04:05.678+00:00",
    "state": "complete",
    "outcome": "ok",
    "prompt_tokens": 600,
    "output_tokens": 60,
    "ttft_s": 1.25,
    "duration_s": None,
    "attempts": [ATTEMPT],
}


def test_requests(admin: Any, router: Router) -> None:  # noqa: F811 - fixtures
    router.answer = 200, {"requests": [REQUEST]}
    ran = admin("requests")
    assert [line.split() for line in ran.out.splitlines()] == [
        ["REQUEST", "STARTED", "STATE", "PROMPT", "OUTPUT", "TTFT", "TOOK", "TRIED"],
        ["ab12", "2026-01-02T03:04:05", "ok", "600", "60", "1.250", "s", "-", "1"],
    ]
    ran = admin("requests", "chatcmpl-ab12", "--limit", "3")
    assert ran.out.endswith("583   -      prefill-0 computed the prompt up to 599, decode-0 the rest\n")
    assert json.loads(admin("requests", "--json").out) == {"requests": [REQUEST]}
    assert [path for _, path, _, _ in router.asked] == [
        "/admin/requests?request_id=&limit=20",
        "/admin/requests?request_id=ab12&limit=3",
        "/admin/requests?request_id=&limit=20",
    ]
