"""What an operator says of chats holds, also for the router, which gets the tokenizer from the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from microserving.engine.config import EngineConfig
from microserving.errors import ConfigError
from microserving.model_files import DEFAULT_MODEL, open_model
from microserving.protocol.microserving import TokenizerDocument
from microserving.server.tokenizers import open_tokenizer
from microserving.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "hi"}]


def opened(**config: object) -> Tokenizer:
    return open_tokenizer(EngineConfig.model_validate(config), open_model(DEFAULT_MODEL))


@pytest.mark.case("TK-07")
def test_a_template_of_the_operators(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %} é")
    tokenizer = opened(chat_template=path, tool_call_format="llama3", reasoning_format="think")
    assert tokenizer.render_chat(CHAT) == "[user] hi é"
    wire = TokenizerDocument.model_validate(tokenizer.to_dict()).model_dump()
    copy = Tokenizer.from_dict(wire)
    assert copy.encode_chat(CHAT) == tokenizer.encode_chat(CHAT)
    assert (copy.tool_call_format, copy.reasoning_format) == ("llama3", "think")
    assert (opened().tool_call_format, opened().reasoning_format) == ("auto", "auto")


@pytest.mark.case("TK-07")
@pytest.mark.parametrize(
    ("data", "message"),
    [(b"{% for %}", "line 1"), (b"\xff", "UTF-8"), (None, "No such file"), (b"x" * 2**21, "longer")],
)
def test_one_that_cannot_be_used_is_a_fault_of_the_configuration(
    data: bytes | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "template.jinja"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ConfigError, match=message) as caught:
        opened(chat_template=path)
    assert str(path) in str(caught.value)
