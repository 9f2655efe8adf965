"""Token ids of the default model, against two references that share no code with ours."""

from __future__ import annotations

import pytest

from microserving.errors import InvalidRequest
from microserving.model_files import GGUFMetadata
from microserving.tokenizer import Tokenizer
from tests.reference.gpt2_bpe import ReferenceBPE
from tests.tokenizer.texts import texts

CONTROL = 3


@pytest.fixture(scope="module")
def reference(smollm2_metadata: GGUFMetadata) -> ReferenceBPE:
    tokens = smollm2_metadata.strings("tokenizer.ggml.tokens")
    types = smollm2_metadata.int32s("tokenizer.ggml.token_type").tolist()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    return ReferenceBPE(tokens, smollm2_metadata.strings("tokenizer.ggml.merges"), special, digits=True)


def test_ids_equal_the_plain_python_bpe(smollm2: Tokenizer, reference: ReferenceBPE) -> None:
    cases = texts()
    assert len(set(cases)) >= 200
    for text in cases:
        if len(text) < 1500:  # the reference is quadratic in a word's length
            assert smollm2.encode(text) == reference.encode(text), repr(text)


def test_ids_equal_transformers(smollm2: Tokenizer, smollm2_metadata: GGUFMetadata) -> None:
    """Built by transformers' own class from the vocabulary, as SmolLM2's tokenizer_class GPT2Tokenizer is."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import GPT2Tokenizer

    tokens = smollm2_metadata.strings("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in smollm2_metadata.strings("tokenizer.ggml.merges")]
    theirs = GPT2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=merges,
        additional_special_tokens=tokens[:17],
    )
    theirs.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    for text in texts():
        ids = smollm2.encode(text)
        assert ids == theirs.encode(text), repr(text)
        assert smollm2.decode(ids, skip_special_tokens=False) == theirs.decode(ids), repr(text)


def test_decoding_gives_the_text_back(smollm2: Tokenizer) -> None:
    for text in texts():
        assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


def test_facts_of_the_default_model(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.bos_token_id == 1
    assert smollm2.eos_token_ids == {0, 2}  # <|endoftext|>, <|im_end|>
    assert smollm2.encode("<|im_end|>") == [2]
    assert smollm2.encode("a", add_special_tokens=False) == smollm2.encode(
        "a"
    )  # the model has no start token
    assert smollm2.chat_unavailable is None


def test_half_a_surrogate_pair_is_the_clients_fault(smollm2: Tokenizer) -> None:
    with pytest.raises(InvalidRequest) as caught:
        smollm2.encode("a\ud800b")
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequest) as caught:
        smollm2.encode_chat([{"role": "user", "content": "a\udc00"}])
    assert caught.value.param == "messages"


def test_a_round_trip_through_json_changes_nothing(smollm2: Tokenizer) -> None:
    import json

    copy = Tokenizer.from_dict(json.loads(json.dumps(smollm2.to_dict())))
    assert copy.to_dict() == smollm2.to_dict()
    assert (copy.vocab_size, copy.bos_token_id, copy.eos_token_ids) == (49152, 1, {0, 2})
    for text in texts()[:80]:
        assert copy.encode(text) == smollm2.encode(text)
    messages = [{"role": "user", "content": "hi"}]
    assert copy.encode_chat(messages) == smollm2.encode_chat(messages)
