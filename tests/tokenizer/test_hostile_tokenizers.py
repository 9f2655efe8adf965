"""Tokenizers and templates that are well formed and still wrong: the kinds of fault that damaged ones have shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from microserving.errors import InvalidRequest, ModelLoadError
from microserving.model_files import open_model
from microserving.tokenizer import Tokenizer
from microserving.tokenizer.chat_template import ChatTemplate
from microserving.tokenizer.panics import raising
from tests.fuzz.targets import CHATML, PIECES, TOKENS, tokenizer_document, vocabulary_pairs
from tests.reference.model_builder import tiny_gguf, write_tiny_hf


def load(directory: Path, **documents: Any) -> Tokenizer:
    write_tiny_hf(directory)
    for name, document in {"tokenizer": tokenizer_document("gpt2"), **documents}.items():
        (directory / f"{name}.json").write_text(json.dumps(document))
    return Tokenizer.load(open_model(str(directory)))


def test_a_panic_of_the_library_is_an_error(tmp_path: Path) -> None:
    broken = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: not a tokenizer that can be used"):
        load(tmp_path, tokenizer={**tokenizer_document("gpt2"), "normalizer": broken})


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_the_wall_lets_an_interrupt_through(stop: type[BaseException]) -> None:
    with pytest.raises(stop), raising(ModelLoadError("no")):
        raise stop


def test_a_tokenizer_that_cannot_encode_is_refused_at_load(tmp_path: Path) -> None:
    document = {
        **tokenizer_document("gpt2"),
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "gone"},
        "added_tokens": [],
        "post_processor": None,
    }
    with pytest.raises(ModelLoadError, match="the model's tokenizer cannot encode the text"):
        load(tmp_path, tokenizer=document)


@pytest.mark.parametrize(
    ("documents", "part"),
    [
        ({"generation_config": {"eos_token_id": 300}}, "'eos_token_id' lies beyond the model's 300 tokens"),
        ({"generation_config": {"eos_token_id": [2, 2**64]}}, "'eos_token_id' lies beyond"),
        ({"generation_config": {"eos_token_id": -1}}, "'eos_token_id' must be an integer"),
    ],
)
def test_an_end_that_the_model_cannot_sample(documents: dict[str, Any], part: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=part):
        load(tmp_path, **documents)


def test_odd_values_beside_a_tokenizer_do_no_harm(tmp_path: Path) -> None:
    templates = [{"name": ["default"], "template": "no"}, {"name": "default", "template": CHATML}]
    config = {"chat_template": templates, "bos_token": "\ud800", "eos_token": {"content": "\udfff"}}
    tokenizer = load(tmp_path, tokenizer_config=config)
    assert tokenizer.chat_template == CHATML
    assert tokenizer.bos_token_id is None
    assert tokenizer.encode("hello")


@pytest.mark.parametrize("length", [1025, 100_000])
def test_a_long_piece_of_sentencepiece_is_refused_at_once(length: int, tmp_path: Path) -> None:
    pairs = vocabulary_pairs("llama")
    pairs["tokenizer.ggml.tokens"] = ("ARRAY[STRING]", [*PIECES[:-1], "x" * length])
    with pytest.raises(ModelLoadError, match=rf"tokenizer\.ggml\.tokens.*a token of {length} characters"):
        Tokenizer.load(open_model(str(tiny_gguf(pairs=pairs).write(tmp_path / "m.gguf"))))


@pytest.mark.parametrize("value", [float("nan")])
def test_a_score_that_is_no_number_is_refused(value: float, tmp_path: Path) -> None:
    pairs = vocabulary_pairs("llama")
    pairs["tokenizer.ggml.scores"] = ("ARRAY[FLOAT32]", [value] * len(PIECES))
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.scores"):
        Tokenizer.load(open_model(str(tiny_gguf(pairs=pairs).write(tmp_path / "m.gguf"))))


def test_no_tokens_at_all(tmp_path: Path) -> None:
    pairs = vocabulary_pairs("gpt2")
    pairs["tokenizer.ggml.tokens"] = ("ARRAY[STRING]", [])
    for key in ("token_type", "merges", "bos_token_id", "eos_token_id"):
        del pairs[f"tokenizer.ggml.{key}"]
    pairs["tokenizer.ggml.merges"] = ("ARRAY[STRING]", [])
    with pytest.raises(ModelLoadError, match="has no tokens"):
        Tokenizer.load(open_model(str(tiny_gguf(pairs=pairs).write(tmp_path / "m.gguf"))))
    assert len(TOKENS) > 256


DOUBLED = "{% set x = messages %}" + "{% set x = [x, x] %}" * 40
DOUBLED_TWICE = DOUBLED + DOUBLED.replace("set x", "set y").replace("[x, x]", "[y, y]")


@pytest.mark.case("SC-20")
@pytest.mark.parametrize(
    "source",
    [
        DOUBLED + "{{ x }}",
        DOUBLED + "{{ x | tojson }}",
        DOUBLED + "{{ x | string }}",
        DOUBLED + "{{ 'a' ~ x }}",
        DOUBLED + "{{ '%s' % (x,) }}",
        DOUBLED + "{{ '{}'.format(x) }}",
        DOUBLED + "{{ namespace(a=x) }}",
        DOUBLED + "{{ {1: x}.values() }}",
        DOUBLED_TWICE + "{{ x == y }}",
        DOUBLED_TWICE + "{{ 1 != x == y }}",
        DOUBLED_TWICE + "{{ x is eq(y) }}",
        DOUBLED_TWICE + "{{ [x] | unique | list | length }}",
        DOUBLED_TWICE + "{{ x in [y] }}",
        DOUBLED_TWICE + "{{ [x].count(y) }}",
        "{% set n = namespace() %}{% set n.a = n %}{{ n }}",
        "{{ ('a ' * 500000) | wordwrap(1) | length }}",
        "{{ ('ab' * 500000) | list | sort | length }}",
        "{{ 'x' | center(99999) }}" * 2000,
    ],
    ids=range(18),
)
def test_one_operation_does_not_go_through_an_endless_value(source: str) -> None:
    with pytest.raises(InvalidRequest, match="the chat template refused the messages: "):
        ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])


@pytest.mark.case("SC-20")
def test_values_that_are_only_large_are_fine() -> None:
    chat = [{"role": "user", "content": f"message {i} " * 20} for i in range(500)]
    source = (
        "{% set ns = namespace(seen=[]) %}{% for m in messages %}{% set ns.seen = ns.seen + [m] %}{{ m.content }}"
        "{% if m in messages[-1:] %}end{% endif %}{% endfor %}{{ messages | tojson }}{{ messages | length }}"
    )
    text = ChatTemplate(source, {}).render(chat)
    assert text.endswith("500")
    assert "end[" in text
