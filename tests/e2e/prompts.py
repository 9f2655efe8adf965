"""The prompts of the parity matrix: every edge that a page, a chunk or a split can have.

Token-id prompts have exact lengths; their ids come from a fixed linear congruential sequence, so that they are
varied, the same on every run, and never special tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PAGE = 16
CHUNK = 256


@dataclass(frozen=True)
class Prompt:
    name: str
    body: dict[str, Any]
    chat: bool = False


def ids(length: int, seed: int = 1) -> list[int]:
    """``length`` token ids in [1000, 41000)."""
    values, state = [], seed
    for _ in range(length):
        state = (state * 1103515245 + 12345) % 2**31
        values.append(1000 + (state >> 8) % 40000)
    return values


_LENGTHS = (
    [1, 2, 3, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1, 5 * PAGE, 63, 64, 65, 90, 100]
    + [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 6]
    + [1500]
)

_TEXTS = {
    "one word": "Hello",
    "english": "The capital of France is",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "spaces": "a    b\t\tc\n\n\n   d",
    "digits": "3.14159 26535 89793 2,384,626",
    "emoji": "I love 🍕 and 🧑‍🚀 so much 😀",
    "chinese": "人工智能正在改变世界,",
    "arabic": "مرحبا بالعالم، كيف",
    "accents": "Ça va très bien à l'école, naïve façade – œuvre",
    "combining": "e\u0301a\u0308o\u0302 zalgo h\u0337e\u0338",
    "russian": "Съешь же ещё этих мягких французских",
    "repetition": "yes no " * 60,
}

_CHATS = {
    "capital": [{"role": "user", "content": "What is the capital of France?"}],
    "system": [
        {"role": "system", "content": "You answer in rhymes."},
        {"role": "user", "content": "Tell me about the sea."},
    ],
    "turns": [
        {"role": "user", "content": "My name is Zoë."},
        {"role": "assistant", "content": "Nice to meet you, Zoë!"},
        {"role": "user", "content": "What is my name?"},
    ],
    "multi-byte": [{"role": "user", "content": "Traduis « bonjour » en japonais: こんにちは"}],
    "question": [{"role": "user", "content": "Write one sentence about rain."}],
    "list": [{"role": "user", "content": "Name three colours."}],
    "maths": [{"role": "user", "content": "What is 7 times 8? Explain step by step."}],
}

PROMPTS: list[Prompt] = (
    [Prompt(f"{n} tokens", {"prompt": ids(n, seed=n)}) for n in _LENGTHS]
    + [Prompt(name, {"prompt": text}) for name, text in _TEXTS.items()]
    + [Prompt(f"chat {name}", {"messages": messages}, chat=True) for name, messages in _CHATS.items()]
)
