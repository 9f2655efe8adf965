"""Tokenizers from GGUF metadata and from Hugging Face directories; start and end tokens; what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, pre_tokenizers, processors
from tokenizers import Tokenizer as Library
from tokenizers.models import BPE

from microserving.errors import ModelLoadError
from microserving.model_files import open_model
from microserving.tokenizer import Tokenizer
from tests.reference.gpt2_bpe import byte_characters
from tests.reference.model_builder import tiny_gguf, write_tiny_hf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

ECHO = "{% for m in messages %}{{ m.content }}{% endfor %}"
ECHO_WITH_BOS = "{{ bos_token }}" + ECHO

# Single bytes are ids 0..255 in the order of their characters' bytes, then merged words, then special tokens.
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ h", "Ġh e", "1 2", "12 3", "123 4"]
TOKENS = [
    *byte_characters(),
    *(merge.replace(" ", "") for merge in MERGES),
    "<s>",
    "</s>",
    "<|im_end|>",
    "user text",
]
BOS, EOS, IM_END = (TOKENS.index(token) for token in ("<s>", "</s>", "<|im_end|>"))
TYPES = [NORMAL] * (len(TOKENS) - 4) + [CONTROL] * 3 + [USER_DEFINED]


def pairs(**change: Any) -> dict[str, tuple[str, Any]]:
    """GGUF tokenizer metadata of a small byte-level vocabulary; a value None removes the key."""
    values: dict[str, Any] = {
        "model": ("STRING", "gpt2"),
        "pre": ("STRING", "gpt-2"),
        "tokens": ("ARRAY[STRING]", TOKENS),
        "token_type": ("ARRAY[INT32]", TYPES),
        "merges": ("ARRAY[STRING]", MERGES),
        "bos_token_id": ("UINT32", BOS),
        "eos_token_id": ("UINT32", EOS),
        **change,
    }
    template = values.pop("chat_template", ("STRING", ECHO))
    keyed = {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}
    return keyed if template is None else {**keyed, "tokenizer.chat_template": template}


def from_gguf(directory: Path, **change: Any) -> Tokenizer:
    path = tiny_gguf(pairs=pairs(**change)).write(directory / "tiny.gguf")
    return Tokenizer.load(open_model(str(path)))


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([token_id]) for token_id in tokenizer.encode(text, add_special_tokens=False)]


def test_a_byte_level_vocabulary(tmp_path: Path) -> None:
    tokenizer = from_gguf(tmp_path)
    assert words(tokenizer, "hello hell") == ["hello", " ", "hell"]
    assert tokenizer.encode("</s>hé") == [EOS, ord("h"), 0xC3, 0xA9]
    assert tokenizer.decode([EOS, ord("h"), 0xC3, 0xA9]) == "hé"
    assert tokenizer.decode(tokenizer.encode("a user text")) == "a user text"
    assert tokenizer.eos_token_ids == {EOS, IM_END}
    assert tokenizer.vocab_size == len(TOKENS)


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["1234", "5"]),
        ("smollm", ["1", "2", "3", "4", "5"]),
        ("starcoder", ["1", "2", "3", "4", "5"]),
        ("qwen2", ["1", "2", "3", "4", "5"]),
        ("llama-bpe", ["123", "4", "5"]),
    ],
)
def test_pre_tokenizers_split_numbers_as_their_models_do(
    pre: str, expected: list[str], tmp_path: Path
) -> None:
    assert words(from_gguf(tmp_path, pre=("STRING", pre)), "12345") == expected


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["\n", "\n", "'", "S", " hello"]),
        ("llama-bpe", ["\n\n", "'S", " hello"]),
        ("qwen2", ["\n\n", "'S", " hello"]),
    ],
)
def test_pre_tokenizers_split_space_and_contractions(pre: str, expected: list[str], tmp_path: Path) -> None:
    """Any two characters may merge here, so that only the pre-tokenizer keeps pieces apart."""
    text = "\n\n'S hello"
    shown = byte_characters()
    merges = [f"{shown[10]} {shown[10]}", "' S", *MERGES, "Ġ hello", f"{shown[10]} '"]
    tokens = [*byte_characters(), *(merge.replace(" ", "") for merge in merges)]
    types = [NORMAL] * len(tokens)
    tokenizer = from_gguf(
        tmp_path,
        pre=("STRING", pre),
        tokens=("ARRAY[STRING]", tokens),
        token_type=("ARRAY[INT32]", types),
        merges=("ARRAY[STRING]", merges),
        bos_token_id=None,
        eos_token_id=None,
    )
    assert words(tokenizer, text) == expected


def test_qwen2_composes_characters(tmp_path: Path) -> None:
    assert from_gguf(tmp_path, pre=("STRING", "qwen2")).encode("e\u0301") == [0xC3, 0xA9]
    assert from_gguf(tmp_path).encode("e\u0301") == [ord("e"), 0xCC, 0x81]


@pytest.mark.case("TK-03")
@pytest.mark.parametrize("template", [ECHO, ECHO_WITH_BOS])
@pytest.mark.parametrize("adds", [True, False, None])
@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
def test_a_chat_has_one_start_token(template: str, adds: bool | None, pre: str, tmp_path: Path) -> None:
    tokenizer = from_gguf(
        tmp_path,
        pre=("STRING", pre),
        chat_template=("STRING", template),
        add_bos_token=None if adds is None else ("BOOL", adds),
    )
    ids = tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    expected = adds is True or (adds is None and pre == "llama-bpe") or template == ECHO_WITH_BOS
    assert ids.count(BOS) == expected
    assert ids[-1] == TOKENS.index("hello")


@pytest.mark.case("TK-03")
def test_a_text_that_starts_with_the_start_token_gets_no_second(tmp_path: Path) -> None:
    tokenizer = from_gguf(tmp_path, add_bos_token=("BOOL", True), add_eos_token=("BOOL", True))
    hello = TOKENS.index("hello")
    assert tokenizer.encode("hello") == [BOS, hello, EOS]
    assert tokenizer.encode("<s>hello") == [BOS, hello, EOS]
    assert tokenizer.encode("hello", add_special_tokens=False) == [hello]
    assert tokenizer.encode("") == [BOS, EOS]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"model": ("STRING", "bert")}, "tokenizer model 'bert' is not supported"),
        ({"model": None}, "'tokenizer.ggml.model' is missing"),
        ({"pre": ("STRING", "weird")}, "pre-tokenizer 'weird' (tokenizer.ggml.pre) is not supported"),
        ({"pre": None}, "'tokenizer.ggml.pre' is missing"),
        ({"tokens": ("ARRAY[INT32]", [1])}, "'tokenizer.ggml.tokens' has type ARRAY[INT32]"),
        ({"tokens": ("ARRAY[STRING]", ["a", "a"])}, "holds a token twice"),
        ({"token_type": ("ARRAY[STRING]", ["x"])}, "'tokenizer.ggml.token_type' has type ARRAY[STRING]"),
        ({"token_type": ("ARRAY[INT32]", [1])}, "but 1 token types"),
        ({"merges": ("ARRAY[STRING]", ["h nope"])}, "merges do not fit its tokens"),
        ({"merges": ("ARRAY[STRING]", ["he"])}, "is not a pair"),
        ({"merges": ("ARRAY[STRING]", ["h e l"])}, "is not a pair"),
        ({"bos_token_id": ("UINT32", 9999)}, "'tokenizer.ggml.bos_token_id' is 9999"),
        ({"bos_token_id": ("FLOAT32", 1.0)}, "'tokenizer.ggml.bos_token_id' has type FLOAT32"),
        ({"add_bos_token": ("UINT8", 1)}, "'tokenizer.ggml.add_bos_token' has type UINT8"),
        (
            {"model": ("STRING", "llama"), "scores": ("ARRAY[UINT8]", [1])},
            "'tokenizer.ggml.scores' has type ARRAY[UINT8]",
        ),
        ({"model": ("STRING", "llama"), "scores": ("ARRAY[FLOAT32]", [1.0])}, "but 1 scores"),
        ({"chat_template": ("UINT32", 1)}, "'tokenizer.chat_template' has type UINT32"),
    ],
)
@pytest.mark.case("LD-01")
def test_bad_vocabularies_are_refused_by_name(change: dict[str, Any], part: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as caught:
        from_gguf(tmp_path, **change)
    assert part in str(caught.value)
    assert str(tmp_path / "tiny.gguf") in str(caught.value)


def test_more_tokens_than_the_model_has_rows(tmp_path: Path) -> None:
    tokens = ("ARRAY[STRING]", [*TOKENS, *(f"extra{i}" for i in range(100))])
    with pytest.raises(ModelLoadError, match="but the model only 300"):
        from_gguf(tmp_path, tokens=tokens, token_type=None)


SPM_PIECES = {"▁": -5.0, "h": -20.0, "e": -20.0, "l": -20.0, "o": -20.0, "he": -2.0, "ll": -3.0, "el": -1.0, "hell": -4.0,
              "▁h": -9.0, "▁hello": -1.5, "lo": -2.5, "hello": -6.0, "el lo".replace(" ", ""): -0.5}  # fmt: skip


def spm_reference(text: str, ids: dict[str, int]) -> list[int]:
    """SentencePiece's BPE: merge the neighbours whose union has the best score, leftmost first; then bytes."""
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        unions = [(SPM_PIECES.get(a + b), -i) for i, (a, b) in enumerate(pairwise(pieces))]
        known = [(score, place) for score, place in unions if score is not None]
        if not known:
            break
        at = -max(known)[1]
        pieces[at : at + 2] = ["".join(pieces[at : at + 2])]
    return [i for p in pieces for i in ([ids[p]] if p in ids else [ids[f"<0x{b:02X}>"] for b in p.encode()])]


def test_a_sentencepiece_vocabulary(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SPM_PIECES]
    scores = [0.0] * 259 + list(SPM_PIECES.values())
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(SPM_PIECES)
    tokenizer = from_gguf(
        tmp_path,
        model=("STRING", "llama"),
        pre=None,
        merges=None,
        tokens=("ARRAY[STRING]", tokens),
        scores=("ARRAY[FLOAT32]", scores),
        token_type=("ARRAY[INT32]", types),
        bos_token_id=("UINT32", 1),
        eos_token_id=("UINT32", 2),
        unknown_token_id=("UINT32", 0),
    )
    ids = {token: index for index, token in enumerate(tokens)}
    for text in ("hello", "hell hello", "ello lol", "  he", "x", "héllo 😀", "oooo"):
        assert tokenizer.encode(text) == [1, *spm_reference(text, ids)], text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token_ids == {2}


def write_tokenizer(directory: Path, *, adds_bos: bool = False) -> None:
    library = Library(
        BPE(vocab={token: i for i, token in enumerate(TOKENS)}, merges=[tuple(m.split()) for m in MERGES])
    )
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(
        [AddedToken(TOKENS[i], normalized=False, special=True) for i in (BOS, EOS, IM_END)]
    )
    if adds_bos:
        library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    library.enable_truncation(3)  # as some published files have it; must not cut prompts
    library.save(str(directory / "tokenizer.json"))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_tiny_hf(tmp_path / "hf")


def load(directory: Path, **files: Any) -> Tokenizer:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return Tokenizer.load(open_model(str(directory)))


def test_a_hugging_face_directory(directory: Path) -> None:
    write_tokenizer(directory)
    tokenizer = load(
        directory,
        tokenizer_config={
            "bos_token": {"content": "<s>", "special": True},
            "eos_token": "<|im_end|>",
            "chat_template": ECHO_WITH_BOS,
        },
        generation_config={"eos_token_id": [EOS]},
    )
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (BOS, {EOS, IM_END})
    assert tokenizer.encode("hello hello hello") == tokenizer.encode(
        "hello hello hello", add_special_tokens=False
    )
    assert len(tokenizer.encode("hello hello hello")) > 3
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "<s>x"
    assert tokenizer.encode_chat([{"role": "user", "content": "hello"}]) == [BOS, TOKENS.index("hello")]


@pytest.mark.case("TK-03")
@pytest.mark.parametrize(
    ("post_processor", "config", "expected"),
    [
        (True, {}, True),
        (False, {}, False),
        (False, {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}, True),
        (True, {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}, False),
        (False, {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True}, False),
    ],
)
def test_who_decides_about_the_start_token(
    post_processor: bool, config: dict[str, Any], expected: bool, directory: Path
) -> None:
    write_tokenizer(directory, adds_bos=post_processor)
    tokenizer = load(directory, tokenizer_config={"bos_token": "<s>", "chat_template": ECHO, **config})
    assert tokenizer.encode("hello").count(BOS) == expected
    assert tokenizer.encode_chat([{"role": "user", "content": "hello"}]).count(BOS) == expected


def test_where_a_chat_template_comes_from(directory: Path) -> None:
    write_tokenizer(directory)
    assert load(directory).chat_unavailable == "the model has no chat template"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "D" + ECHO}]
    chat = [{"role": "user", "content": "x"}]
    assert load(directory, tokenizer_config={"chat_template": named}).render_chat(chat) == "Dx"
    (directory / "chat_template.jinja").write_text("J" + ECHO)
    assert load(directory).render_chat(chat) == "Jx"


def test_eos_falls_back_to_config_json(directory: Path) -> None:
    write_tokenizer(directory)
    config = json.loads((directory / "config.json").read_text())
    assert load(directory, config={**config, "eos_token_id": IM_END}).eos_token_ids == {IM_END}
    with pytest.raises(ModelLoadError, match="'eos_token_id' must be an integer"):
        load(directory, generation_config={"eos_token_id": "2"})


@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"model": 3}', "\udcff"])
def test_a_bad_tokenizer_json_is_one_error(content: str | None, directory: Path) -> None:
    if content is not None:
        (directory / "tokenizer.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelLoadError) as caught:
        load(directory)
    assert "tokenizer.json" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "line 1 column" not in str(caught.value), "no text of the library"


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"tokenizer": "{}"},
        {"tokenizer": None},
        {"eos_token_ids": 3},
        {"bos_token_id": "x"},
        {"special_tokens": []},
    ],
)
def test_a_bad_serialised_tokenizer_is_one_error(change: dict[str, Any], tmp_path: Path) -> None:
    document = {**from_gguf(tmp_path).to_dict(), **change}
    with pytest.raises(ModelLoadError):
        Tokenizer.from_dict(document)
    document.pop(next(iter(change)))
    with pytest.raises(ModelLoadError):
        Tokenizer.from_dict(document)


def test_importing_the_tokenizer_reads_no_model_code() -> None:
    script = (
        "import sys, microserving.tokenizer; sys.exit(any('model_files' in name for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0
