"""A model's chat template: messages in OpenAI's shape -> the prompt text, as Hugging Face defines it.

Owns what a message may be, and that no text of a message is dropped without an error. Does not tokenise.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final, NoReturn

from jinja2.exceptions import TemplateError

from microserving.errors import InvalidRequest
from microserving.tokenizer.template_guard import MAX_SOURCE_CHARS, GuardedEnvironment, render
from microserving.tokenizer.tool_messages import as_text, with_tools

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_MESSAGE_CHARS = 300

_SENTINEL = "qzsentinelqz"
_CONTINUE_TAG: Final = "qzcontinueqz "
"""Put behind the text that is to be continued. Its space shows whether the template keeps spaces at a text's end."""
_OURS: Final = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})

Messages = Sequence[Mapping[str, Any]]


class TemplateUnusableError(Exception):
    """The template does not parse; the text says why and where."""


class ChatTemplate:
    """One parsed template. Thread-safe.

    special_tokens: the names a template may use, such as ``bos_token``. Raises TemplateUnusableError when made from a
    template that cannot work.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        environment = GuardedEnvironment()
        environment.add_filter("tojson", _tojson)
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateUnusableError(f"it is longer than {MAX_SOURCE_CHARS} characters")
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # noqa: BLE001 - an untrusted file: parser and compiler may raise anything
            line = getattr(error, "lineno", None)
            where = "" if line is None else f"line {line}: "
            raise TemplateUnusableError(f"{where}{_first_line(error)}") from None

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the template writes tools that it is given. Others get them in the messages (``tool_messages``)."""
        if "tools" not in self.source:
            return False
        function = {"name": _SENTINEL, "description": "", "parameters": {"type": "object", "properties": {}}}
        chat = [{"role": "user", "content": "x"}]
        try:
            return _SENTINEL in self._render(
                chat, self._variables([{"type": "function", "function": function}])
            )
        except InvalidRequest:  # it wants another chat
            return True

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text.

        continue_final_message: end in the middle of the last message, the assistant's, as Hugging Face does; no
        generation prompt then. variables: what the template may use besides (`chat_template_kwargs`). Raises
        InvalidRequest (``messages``, ``chat_template_kwargs``) for what the model cannot be told.
        """
        chat = self._normalise(messages)
        if continue_final_message and (chat[-1]["role"] != "assistant" or chat[-1].get("tool_calls")):
            raise InvalidRequest(
                "only a last message of the assistant without tool calls can be continued", param="messages"
            )
        chat = self._for_template(chat, tools)
        given = self._variables(
            tools, add_generation_prompt and not continue_final_message, self._checked(variables or {})
        )
        if continue_final_message:
            return self._continued(chat, given)
        text = self._render(chat, given)
        self._refuse_dropped(chat, given, text)
        return text

    def _for_template(self, chat: list[dict[str, Any]], tools: Sequence[Any] | None) -> list[dict[str, Any]]:
        """``chat``, in which tools that the template would not show are text."""
        if tools and not self.shows_tools:
            return with_tools(as_text(chat), tools)
        calls = any(message.get("tool_calls") for message in chat)
        return as_text(chat) if calls and "tool_calls" not in self.source else chat

    def _checked(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        for name in variables:
            if name in _OURS or name in self._special_tokens:
                raise InvalidRequest(
                    "a variable has a name that is not the request's", param="chat_template_kwargs"
                )
        return variables

    def _variables(
        self, tools: Sequence[Any] | None, generate: bool = True, others: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        return {
            **self._special_tokens,
            "documents": None,
            **(others or {}),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": generate,
        }

    def _render(self, chat: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        try:
            return render(self._template, {**variables, "messages": chat})
        except TemplateError as error:
            _refuse(str(error))
        except RecursionError:
            _refuse("the template recurses without an end")
        except Exception as error:  # noqa: BLE001 - whatever a template raises is the request's fault, never ours
            _refuse(f"{type(error).__name__}: {error}")

    def _continued(self, chat: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        last = chat[-1]
        text = self._render([*chat[:-1], {**last, "content": last["content"] + _CONTINUE_TAG}], variables)
        at = text.rfind(_CONTINUE_TAG.strip())
        if at < 0 or last["content"].strip() not in text:
            raise InvalidRequest(
                "the model's chat template drops parts of the last message", param="messages"
            )
        self._refuse_dropped(chat, variables, text)
        return text[:at] if text.startswith(_CONTINUE_TAG, at) else text[:at].rstrip()

    def _refuse_dropped(self, chat: list[dict[str, Any]], variables: Mapping[str, Any], text: str) -> None:
        """Raises InvalidRequest unless every message but the assistant's (whose thoughts templates cut) reached the
        prompt ``text`` in some form (escaped, say)."""
        for index, message in enumerate(chat):
            if message["role"] == "assistant" or message["content"].strip() in text:
                continue
            marked = [*chat[:index], {**message, "content": _SENTINEL}, *chat[index + 1 :]]
            if _SENTINEL not in self._render(marked, variables):
                raise InvalidRequest(
                    f"the model's chat template drops messages of role {message['role']!r}",
                    param=f"messages[{index}].role",
                )

    def _normalise(self, messages: Messages) -> list[dict[str, Any]]:
        if not messages:
            raise InvalidRequest("there must be at least one message", param="messages")
        chat = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
        for message in chat:
            if message["role"] == "developer" and "developer" not in self.source:
                message["role"] = "system"
        return chat


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A copy whose content is a string and whose role is known."""
    if not isinstance(message, Mapping):
        raise InvalidRequest("a message must be an object", param=where)
    if message.get("role") not in ROLES:
        raise InvalidRequest(f"the role must be one of {', '.join(ROLES)}", param=f"{where}.role")
    result = dict(message)
    content = message.get("content")
    if content is None and message["role"] == "assistant" and message.get("tool_calls"):
        result["content"] = ""
    else:
        result["content"] = _text(content, f"{where}.content")
    if message.get("tool_calls"):
        result["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    return result


def _text(content: object, where: str) -> str:
    """A string, or text parts joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequest("the content must be a string or a list of text parts", param=where)
    texts = []
    for index, part in enumerate(content):
        if (
            not isinstance(part, Mapping)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            raise InvalidRequest("only parts of type 'text' are supported", param=f"{where}[{index}]")
        texts.append(part["text"])
    return "".join(texts)


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    """Arguments as objects: OpenAI sends them as JSON text, templates expect them parsed."""
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise InvalidRequest("tool calls must be a list of objects", param=where)
    result = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            call = {**call, "function": {**function, "arguments": _parsed(function["arguments"])}}
        result.append(dict(call))
    return result


def _parsed(arguments: str) -> object:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _refuse(reason: str) -> NoReturn:
    text = f"the chat template refused the messages: {reason}"
    raise InvalidRequest(text[:MAX_MESSAGE_CHARS], param="messages") from None


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:MAX_MESSAGE_CHARS]


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form[:1000])


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, as Hugging Face's templates expect it."""
    width = None if indent is None else min(indent, 16)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=width, separators=separators, sort_keys=sort_keys
    )
