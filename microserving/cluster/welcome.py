"""What the user of `microserving up` reads when all is ready: where the cluster is, and lines to paste that work there."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from microserving.cluster.topology import Topology

_KEY = "MICROSERVING_API_KEY"
"""The environment variable of what is pasted; the key itself is never shown."""


def welcome(topology: Topology) -> list[str]:
    """The lines."""
    url = topology.public_url
    if topology.router is not None:
        runs = f"router program {topology.router.config.program} over {len(topology.engines)} engines"
    else:
        runs = f"engine {topology.engines[0].config.node_id} alone, no router"
    return [
        "",
        f"Ready: {url}/v1   ({runs})",
        "",
        *_first_key(topology.api_key_file),
        *_curl(topology),
        "",
        *_python(topology),
        "",
        *_how_to_change(topology),
        "Ctrl-C stops everything.",
    ]


def _first_key(path: Path | None) -> list[str]:
    """The last word of the first line that holds a key (``front.access.ApiKeys``)."""
    if path is None:
        return []
    file = shlex.quote(str(path.absolute()))
    return [f"  export {_KEY}=\"$(awk 'NF && $1 !~ /^#/ {{print $NF; exit}}' {file})\"", ""]


def _curl(topology: Topology) -> list[str]:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": _model(topology), "messages": question, "temperature": 0, "max_tokens": 32}
    key = "" if topology.api_key_file is None else f' -H "Authorization: Bearer ${_KEY}"'
    return [
        f"  curl {topology.public_url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\",
        f"    -d {shlex.quote(json.dumps(body))}",
    ]


def _python(topology: Topology) -> list[str]:
    key = '"none"' if topology.api_key_file is None else f'os.environ["{_KEY}"]'
    return [
        *([] if topology.api_key_file is None else ["  import os"]),
        "  from openai import OpenAI",
        f'  client = OpenAI(base_url="{topology.public_url}/v1", api_key={key})',
        f'  prompt = {{"model": {json.dumps(_model(topology))}, "prompt": "Once upon a time"}}',
        "  print(client.completions.create(**prompt, temperature=0, max_tokens=32).choices[0].text)",
    ]


def _model(topology: Topology) -> str:
    return topology.served_model_name or topology.model


def _how_to_change(topology: Topology) -> list[str]:
    """Only a router can be given another program."""
    if topology.router is None:
        return []
    config = topology.router.config
    key = (
        ""
        if config.admin_key_file is None
        else f" --admin-key-file {shlex.quote(str(config.admin_key_file))}"
    )
    return [
        f"  microserving program deploy FILE{key}     another router program, while requests run",
        f"  microserving program status{key}          what is in charge; `rollback` puts the one before in charge",
        f"  (when several clusters run here: --admin {shlex.quote(str(config.admin_socket))})",
        "",
    ]
