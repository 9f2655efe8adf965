"""The ledger as the admin route shows it."""

from __future__ import annotations

from typing import Any

from .test_admin import Admin, with_admin


def test_what_became_of_requests_and_why() -> None:
    async def scenario(admin: Admin) -> None:
        assert await admin.ask("GET", "/admin/requests") == {"requests": []}
        ids = []
        for _ in range(2):
            answer = await admin.public.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 2})
            assert answer.status_code == 200, answer.text
            ids.append(answer.json()["id"].removeprefix("cmpl-"))
        shown: list[dict[str, Any]] = (await admin.ask("GET", "/admin/requests"))["requests"]
        assert [one["request_id"] for one in shown] == ids[::-1]  # the newest first
        (one,) = (await admin.ask("GET", f"/admin/requests?request_id={ids[0][:12]}"))["requests"]
        assert (one["state"], one["outcome"], one["prompt_tokens"]) == ("complete", "ok", 3)
        assert one["output_tokens"] == answer.json()["usage"]["completion_tokens"]
        (attempt,) = one["attempts"]
        assert (attempt["program"], attempt["why"]) == ("round_robin", "the program asked for no hand-off")
        assert attempt["decode"] in {"prefill-0", "decode-0"}
        assert len((await admin.ask("GET", "/admin/requests?limit=1"))["requests"]) == 1
        for wrong in ("0", "1001", "x"):
            status, error = await admin.refusal("GET", f"/admin/requests?limit={wrong}")
            assert (status, error["param"]) == (400, "limit")
        assert (await admin.public.get("/admin/requests")).status_code == 404

    with_admin(scenario)
