"""What LiteLLM makes of our answers; run as a process: its imports warn. Arguments: base URL, model. Prints JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm


def main(url: str, model: str) -> dict[str, Any]:
    common: dict[str, Any] = {
        "api_base": url,
        "api_key": "none",
        "temperature": 0,
        "max_tokens": 12,
        "num_retries": 0,
    }
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    chat = litellm.completion(f"openai/{model}", messages=messages, **common)
    pieces = list(litellm.completion(f"openai/{model}", messages=messages, stream=True, **common))
    text = litellm.text_completion(
        model=f"text-completion-openai/{model}", prompt="The capital of France is", **common
    )
    try:
        litellm.completion("openai/gpt-17", messages=messages, **common)
    except litellm.NotFoundError as error:
        missing = error.status_code
    return {
        "chat": chat.choices[0].message.content,
        "usage": [chat.usage.prompt_tokens, chat.usage.completion_tokens],
        "streamed": "".join(piece.choices[0].delta.content or "" for piece in pieces),
        "text": text.choices[0].text,
        "missing": missing,
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
