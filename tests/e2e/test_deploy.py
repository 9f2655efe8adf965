"""Another program is put in charge of a real router while streams run, by the command line."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from .conftest import Cluster, Starter
from .processes import MODEL, REPOSITORY, completion, environment, token_ids, wait_idle
from .prompts import ids

TOKENS = 80
MINE = """\
from microserving.program import Chunks, Cluster, Program, Request


class Mine(Program):
    keep: int = 1

    async def route(self, request: Request, cluster: Cluster) -> Chunks:
        decode = cluster.decode.least_loaded()
        end = max(0, request.prompt_length - self.keep)
        received = await decode.prep_recv(request, end=end)
        await cluster.prefill.least_loaded().remote_send(request, to=received)
        async for chunk in decode.start_generate(request, begin=end):
            yield chunk
"""


def microserving(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "microserving", *arguments],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def stream(url: str, prompt: list[int], begun: threading.Barrier) -> list[int]:
    """The token ids of a whole stream; ``begun`` is passed after the first one."""
    body = {
        "model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
        "stream": True, "return_token_ids": True,
    }  # fmt: skip
    tokens: list[int] = []
    events: list[str] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
                if events[-1] != "[DONE]":
                    tokens += json.loads(events[-1])["choices"][0].get("token_ids", [])
                if len(events) == 1:
                    begun.wait(60)
    assert events.count("[DONE]") == 1
    return tokens


@pytest.mark.timeout(200)
def test_a_deployment_while_streams_run(start: Starter, cluster: Cluster, tmp_path: Path) -> None:
    admin = ("--admin", str(tmp_path / "admin.sock"))
    peers = ("--prefill-peers", cluster.prefill, "--decode-peers", cluster.decode)
    url = start.server("router", "--program", "prefill_decode", *peers, "--admin-socket", admin[1])
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    prompts = [ids(40 + 7 * number) for number in range(3)]

    def whole(prompt: list[int], tokens: int = TOKENS) -> list[int]:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return token_ids(completion(url, **body))

    begun = threading.Barrier(len(prompts) + 1)
    with ThreadPoolExecutor(len(prompts)) as pool:
        expected = list(pool.map(whole, prompts))
        streams = [pool.submit(stream, url, prompt, begun) for prompt in prompts]
        begun.wait(60)
        deployed = microserving("program", "deploy", str(mine), "--set", "keep=5", *admin)
        after = whole(prompts[0], 8)
        assert [one.result() for one in streams] == expected
    assert (deployed.returncode, deployed.stdout) == (0, "version 2 is in charge: mine (keep=5)\n")
    assert after == expected[0][:8]

    mine.write_text(MINE.replace("request, end=end", "request, nd=end"))
    refused = microserving("program", "deploy", str(mine), *admin)
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"microserving: error: {mine}:10: TypeError: ")
    assert refused.stderr.count("\n") == 1

    status = json.loads(microserving("program", "status", "--json", *admin).stdout)
    assert [(v["name"], v["state"], v["ok"]) for v in status["versions"]] == [
        ("mine", "in_charge", 1),
        ("prefill_decode", "kept", 2 * len(prompts)),
    ]
    assert status["refused"] == 1
    back = microserving("program", "rollback", *admin)
    assert back.stdout == "version 1 is in charge: prefill_decode\n"
    engines = microserving("engines", "list", *admin).stdout.splitlines()
    assert [line.split()[:3] for line in engines[1:]] == [
        ["prefill-0", "prefill", "up"],
        ["decode-0", "decode", "up"],
    ]
    wait_idle(cluster.engines)


@pytest.mark.timeout(200)
def test_the_router_of_up_has_an_admin_socket(cluster: Cluster) -> None:
    shown = microserving("program", "status", "--admin", cluster.ready["admin"])
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[1].split()[:4] == ["1", "prefill_decode", "in", "charge"]
    assert "microserving program deploy FILE" in cluster.process.output()
