"""What LangChain makes of our answers; run as a process: its imports warn. Arguments: base URL, model. Prints JSON."""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class City(BaseModel):
    """A city and how large it is."""

    name: Literal["Paris", "Rome"]
    large: bool


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather in a city."""
    return f"It is sunny in {city}."


def main(url: str, model: str) -> dict[str, Any]:
    common: dict[str, Any] = {
        "base_url": url,
        "api_key": "none",
        "model": model,
        "temperature": 0,
        "max_retries": 0,
    }
    chat = ChatOpenAI(**common, max_tokens=12, stream_usage=True)
    question = "What is the capital of France?"
    whole = chat.invoke(question)
    pieces = list(chat.stream(question))
    total = pieces[0]
    for piece in pieces[1:]:
        total = total + piece
    call = (
        ChatOpenAI(**common, max_tokens=80)
        .bind_tools([weather], tool_choice="required", parallel_tool_calls=False)
        .invoke(question)
    )
    parsed = (
        ChatOpenAI(**common, max_tokens=40)
        .with_structured_output(City, method="json_schema")
        .invoke(question)
    )
    return {
        "whole": whole.content,
        "whole_usage": whole.usage_metadata,
        "streamed": total.content,
        "streamed_usage": total.usage_metadata,
        "finish": [whole.response_metadata["finish_reason"], total.response_metadata["finish_reason"]],
        "calls": [(call["name"], call["args"]) for call in call.tool_calls],
        "parsed": parsed.model_dump(),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
