"""The default model end to end without the engine: file, weights, tokenizer, chat template, the formulas."""

from __future__ import annotations

from microserving.model_files import DEFAULT_MODEL, open_model
from microserving.tokenizer import Tokenizer
from tests.reference.llama_numpy import ReferenceLlama

END_OF_TURN = 2  # <|im_end|>


def test_the_reference_answers_that_it_is_paris() -> None:
    model = open_model(DEFAULT_MODEL)
    tokenizer = Tokenizer.load(model)
    prompt = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    answer = [*tokenizer.encode("The capital of France is Paris."), END_OF_TURN]
    # One pass tells the greedy answer: every token of it must be the best one after all before it.
    best = ReferenceLlama(model.weights).logits([*prompt, *answer])[len(prompt) - 1 : -1].argmax(axis=-1)
    assert best.tolist() == answer
