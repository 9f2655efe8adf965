"""What an engine tells of itself, and that the models which say so on the wire leave nothing out."""

from __future__ import annotations

import dataclasses
import hmac
import logging

import pytest

from microserving.engine.fake_runner import TINY_LAYOUT
from microserving.engine.jobs import Counters, LoadSnapshot
from microserving.protocol.microserving import EngineCounters, EngineInfo, EngineLoad
from microserving.server import create_app
from microserving.transports.fake import FakeNetwork, FakeTransport

from .engines import MODEL, SECRET, Running, make_node

VERBS = ("prep_recv", "remote_send", "start_generate", "commit", "abort", "renew", "match_prefix")


def test_the_wire_models_have_every_figure_of_the_engine() -> None:
    assert [f.name for f in dataclasses.fields(LoadSnapshot)] == list(EngineLoad.model_fields)
    assert [f.name for f in dataclasses.fields(Counters)] == list(EngineCounters.model_fields)


def test_info_and_load(prefill: Running) -> None:
    info = EngineInfo.model_validate(prefill.http.get("/microserving/info").json())
    assert (info.engine_id, info.model, info.kv_layout_hash) == ("prefill-0", MODEL, TINY_LAYOUT.hash)
    digest = hmac.new(SECRET, b"microserving cluster secret id", "sha256").hexdigest()
    assert info.cluster_secret_id == digest[:16]
    assert prefill.post("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 2}).status_code == 200
    load = prefill.load()
    assert load["total_pages"] == 64
    assert load["counters"]["prompt_tokens_computed"] >= 3
    assert load["counters"]["requests_finished"]["length"] >= 1


def test_an_engine_without_a_secret_says_so() -> None:
    node, _ = make_node("alone", FakeTransport(network=FakeNetwork()), secret=None)
    assert node.services.info.cluster_secret_id == ""


def test_the_document_has_the_verbs(prefill: Running) -> None:
    document = prefill.http.get("/openapi.json").json()
    for verb in VERBS:
        body = document["paths"][f"/microserving/{verb}"]["post"]["requestBody"]["content"]
        name = body["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
        assert "request_id" in document["components"]["schemas"][name]["properties"]
    for name in ("info", "load", "tokenizer"):
        assert set(document["paths"][f"/microserving/{name}"]) == {"get"}
    remote_send = document["components"]["schemas"]["RemoteSendRequest"]
    assert set(remote_send["required"]) == {"prompt", "begin", "end", "kv_addr_info", "recv_rank"}


@pytest.mark.case("TK-07")
def test_an_engine_without_chat_says_why_when_it_starts(caplog: pytest.LogCaptureFixture) -> None:
    node, _ = make_node("alone", FakeTransport(network=FakeNetwork()))
    caplog.set_level(logging.WARNING)
    create_app(node.services)
    assert not caplog.records
    node.services.tokenizer.chat_unavailable = "the template is broken at line 3"
    create_app(node.services)
    assert [record.getMessage() for record in caplog.records] == [
        "/v1/chat/completions is off: the template is broken at line 3"
    ]
