"""Log-probabilities in OpenAI's shapes (completions, chat) and in vLLM's (prompt), and as engines tell them to routers.

Owns these shapes and how a token is written that is no text of its own. Does not know where the numbers come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

from microserving.protocol.generation import TokenLogprob

MAX_LOGPROBS: Final = 20
"""Limit of `logprobs`, `top_logprobs` and `prompt_logprobs` (OpenAI's of `top_logprobs`)."""
LOWEST: Final = -9999.0
"""No log-probability is told as lower (OpenAI's number for what is very unlikely): JSON has no minus infinity."""

TokenBytes = Callable[[int], bytes]
"""What a token stands for."""
WireLogprob = tuple[int, float, int, list[tuple[int, float]]]
"""``TokenLogprob`` as engines tell it to routers: ids, since texts of tokens are ambiguous."""


class Detokenizer(Protocol):
    """Of one text: the characters that are certain with each of its tokens."""

    def put(self, token_id: int, /) -> str: ...


class TokenTexts(Protocol):
    """What shapes need of a tokenizer (``microserving.tokenizer.Tokenizer`` has it)."""

    def token_bytes(self, token_id: int, /) -> bytes: ...

    def detokenizer(self) -> Detokenizer: ...


def token_text(data: bytes) -> str:
    """The text of a token; ``bytes:\\xe2\\x82`` for one that holds a part of a character (as OpenAI writes it)."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def mean_logprob(tokens: Sequence[TokenLogprob]) -> float:
    """Log-probability per token; 0.0 of no tokens."""
    return sum(token.logprob for token in tokens) / len(tokens) if tokens else 0.0


def chat_logprobs(tokens: Iterable[TokenLogprob], token_bytes: TokenBytes) -> dict[str, Any]:
    """`logprobs` of a chat's choice, whole or of one of its chunks: one entry for each token."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = token_bytes(token_id)
        return {"token": token_text(data), "logprob": logprob, "bytes": list(data)}

    content = [
        {
            **entry(token.token_id, token.logprob),
            "top_logprobs": [entry(token_id, logprob) for token_id, logprob in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    tokens: Iterable[TokenLogprob | None], count: int, token_bytes: TokenBytes
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each prompt token the ``count`` likeliest and itself, by id; null for the first."""

    def entries(token: TokenLogprob) -> dict[str, Any]:
        ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(token.top[:count], 1)]
        own = (token.token_id, token.logprob, token.rank)
        found = {token_id: (logprob, rank) for token_id, logprob, rank in (own, *ranked)}
        return {
            str(token_id): {
                "logprob": logprob,
                "rank": rank,
                "decoded_token": token_text(token_bytes(token_id)),
            }
            for token_id, (logprob, rank) in found.items()
        }

    return [None if token is None else entries(token) for token in tokens]


class CompletionLogprobs:
    """`logprobs` of one choice of a completion, which may come in pieces: each has the arrays of its tokens.

    count: so many of the likeliest tokens, and the token itself when it is not among them (OpenAI). start: characters
    of the choice's text before its first token (an echoed prompt).
    """

    def __init__(self, count: int, texts: TokenTexts, start: int = 0) -> None:
        self._count = count
        self._token_bytes = texts.token_bytes
        self._detokenizer = texts.detokenizer()
        self._texts = texts
        self._offset = start

    def piece(self, tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
        """The arrays of the next tokens. text_offset: characters of the text before the token's first whole one."""
        arrays = _arrays()
        for token in tokens:
            self._add(arrays, token, self._offset)
            self._offset += len(self._detokenizer.put(token.token_id))
        return arrays

    def echo(
        self, prompt: str, token_ids: Sequence[int], tokens: Sequence[TokenLogprob | None]
    ) -> dict[str, Any]:
        """The arrays of an echoed ``prompt``: null for the first token. tokens: of each of ``token_ids``.

        A special token has its place where its name stands in the prompt, which has no characters of one that the
        tokenizer has added.
        """
        arrays, detokenizer, offset = _arrays(), self._texts.detokenizer(), 0
        for token_id, token in zip(token_ids, tokens, strict=True):
            self._add(arrays, token or token_id, min(offset, len(prompt)))
            text = detokenizer.put(token_id)
            if not text:
                name = token_text(self._token_bytes(token_id))
                text = name if prompt.startswith(name, offset) else ""
            offset += len(text)
        return arrays

    def _add(self, arrays: dict[str, Any], token: TokenLogprob | int, offset: int) -> None:
        """token: an id when it has no log-probability."""
        token_id = token if isinstance(token, int) else token.token_id
        arrays["tokens"].append(self._text(token_id))
        arrays["token_logprobs"].append(None if isinstance(token, int) else token.logprob)
        arrays["top_logprobs"].append(None if isinstance(token, int) else self._top(token))
        arrays["text_offset"].append(offset)

    def _top(self, token: TokenLogprob) -> dict[str, float]:
        """Of tokens with the same text the likeliest counts."""
        top: dict[str, float] = {}
        for token_id, logprob in (*token.top[: self._count], (token.token_id, token.logprob)):
            top.setdefault(self._text(token_id), logprob)
        return top

    def _text(self, token_id: int) -> str:
        return token_text(self._token_bytes(token_id))


def joined_arrays(pieces: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The arrays of a choice, made of those of its pieces."""
    arrays = _arrays()
    for piece in pieces:
        for name, values in arrays.items():
            values += piece[name]
    return arrays


def to_wire(token: TokenLogprob) -> WireLogprob:
    return token.token_id, token.logprob, token.rank, list(token.top)


def from_wire(token: WireLogprob) -> TokenLogprob:
    return TokenLogprob(token[0], token[1], tuple(map(tuple, token[3])), token[2])  # type: ignore[arg-type]


def _arrays() -> dict[str, Any]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
