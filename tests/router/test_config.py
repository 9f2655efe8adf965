from __future__ import annotations

import pytest
from pydantic import ValidationError

from microserving.router import RouterConfig


def test_peers_from_flags_and_files() -> None:
    config = RouterConfig(
        program="round_robin",
        prefill_peers="127.0.0.1:8101, http://[::1]:8102/",  # type: ignore[arg-type]
        decode_peers=["https://d:1"],  # type: ignore[arg-type]
    )
    assert config.prefill_peers == ("http://127.0.0.1:8101", "http://[::1]:8102")
    assert config.decode_peers == ("https://d:1",)


@pytest.mark.parametrize(
    "peer",
    ["http://", "ftp://a:1", "http://a:1/v1", "http://a:b", "http://u:p@a:1", "http://a:1?x=1", "a:99999"],
)
def test_what_is_no_address_is_refused(peer: str) -> None:
    with pytest.raises(ValidationError):
        RouterConfig(program="p", decode_peers=[peer])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"decode_peers": ["a:1", "http://a:1"]},
        {"decode_peers": ["a:1"], "port": 70000},
        {"decode_peers": ["a:1"], "unknown": 1},
        {"decode_peers": ["a:1"], "program": ""},
        {"decode_peers": ["a:1"], "probe_interval_s": 0},
    ],
)
def test_wrong_configurations_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RouterConfig.model_validate({"program": "p"} | fields)
