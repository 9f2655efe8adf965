"""What a model writes, taken apart: calls of tools, thoughts, text; wherever the text is cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microserving.front.chat_output import OutputForm
from microserving.front.chat_output.formats import reasoning_format, tool_call_format
from microserving.front.chat_output.tool_calls import new_call_id, new_mistral_id
from microserving.protocol.chat_formats import ToolCallFormat
from microserving.protocol.chat_responses import CallArguments, CallBegin, Content, Piece, Reasoning

TOOLS = ("f", "get_weather")


@dataclass
class Message:
    content: str = ""
    thoughts: str = ""
    calls: list[list[str]] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        match piece:
            case Content(text):
                assert text
                self.content += text
            case Reasoning(text):
                assert text
                self.thoughts += text
            case CallBegin(index, _, name):
                assert index == len(self.calls)
                self.calls.append([name, ""])
            case CallArguments(index, text):
                assert index == len(self.calls) - 1
                self.calls[index][1] += text


def read(form: OutputForm, texts: Sequence[str]) -> Message:
    assert form.make_reader is not None
    reader, message = form.make_reader(), Message()
    for text in texts:
        for piece in reader.put(text):
            message.add(piece)
    for piece in reader.end():
        message.add(piece)
    return message


def tools(form: ToolCallFormat, text: str, **options: Any) -> Message:
    return read(OutputForm(tools=TOOLS, calls=form, **options), [text])


@pytest.mark.parametrize("form", ["hermes", "llama3", "mistral"])
def test_a_forced_call_that_is_cut_shows_none_of_its_marks(form: ToolCallFormat) -> None:
    marks = {
        "hermes": '<tool_call>\n{"name": "f", ',
        "llama3": '{"name": "f", ',
        "mistral": '[TOOL_CALLS] [{"name": "f", ',
    }
    text = marks[form] + ('"parameters"' if form == "llama3" else '"arguments"') + ': {"a": 1'
    for end in range(len(text) + 1):
        message = tools(form, text[:end], only_calls=True)
        assert message.content == ""
        assert message.calls in ([], [["f", text[text.rindex("{") : end]]])


HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "}<tool_call>"], "b": "\\"]"}}\n</tool_call>'
HERMES_TWO = f'I look.\n\n{HERMES}\n<tool_call>\n{{"name": "g", "arguments": {{}}}}\n</tool_call>\n'
LLAMA = '{"name": "f", "parameters": {"a": "{"}}; {"name": "get_weather", "parameters": {}}'
MISTRAL = 'Yes. [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
MISTRAL_NAMES = '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{"b": {"c": 2}}'
ARGUMENTS = '{"a": [1, "}<tool_call>"], "b": "\\"]"}'


@pytest.mark.case("API-35")
@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("hermes", HERMES, "", [["f", ARGUMENTS]]),
        ("hermes", HERMES_TWO, "I look.", [["f", ARGUMENTS], ["g", "{}"]]),
        ("hermes", '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [["f", '{"x": 1}']]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call> done', " done", [["f", "{}"]]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [["f", "{}"]]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}', "", [["f", '{"x": 1}']]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}}\nSure', "\nSure", [["f", '{"x": 1}']]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": ', "", [["f", '{"x": ']]),
        ("hermes", HERMES + "\n</tool_", "\n</tool_", [["f", ARGUMENTS]]),
        ("llama3", LLAMA, "", [["f", '{"a": "{"}'], ["get_weather", "{}"]]),
        ("llama3", f"<|python_tag|>{LLAMA}", "", [["f", '{"a": "{"}'], ["get_weather", "{}"]]),
        ("llama3", '{"type": "function", "name": "f", "parameters": {}}\n', "", [["f", "{}"]]),
        ("mistral", MISTRAL, "Yes.", [["f", '{"a": 1}'], ["g", "{}"]]),
        ("mistral", MISTRAL_NAMES, "", [["f", '{"a": 1}'], ["g", '{"b": {"c": 2}}']]),
        ("mistral", '[{"name": "f", "arguments": {"a": 1}}]', "", [["f", '{"a": 1}']]),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}', "", [["f", "{}"]]),
    ],
)
def test_calls(form: ToolCallFormat, text: str, content: str, calls: list[list[str]]) -> None:
    message = tools(form, text)
    assert (message.content, message.calls) == (content, calls)


NO_CALLS: list[tuple[ToolCallFormat, str]] = [
    ("hermes", "a < b <tool_cal"),
    ("hermes", "  \n"),
    ("hermes", "<tool_call>hello</tool_call>"),
    ("hermes", '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>'),
    ("hermes", '<tool_call>{"nam'),
    ("hermes", "<tool_call>{} <tool_call>[]"),
    ("hermes", '<tool_call>{"name": "not a name!", "arguments": {}}</tool_call>'),
    ("llama3", '{"name": "Paris", "parameters": {}}'),
    ("llama3", '{"city": "Paris"} is JSON'),
    ("llama3", '  {"name": "f"'),
    ("llama3", 'See: {"name": "f", "parameters": {}}'),
    ("llama3", "<|python_tag|>print(1)"),
    ("llama3", "<|pyt"),
    ("mistral", '[{"name": "Paris", "arguments": {}}]'),
    ("mistral", "[1, 2]"),
    ("mistral", "[TOOL_CALLS] [1]"),
    ("mistral", "[TOOL_CALLS]a sentence. And another one."),
    ("mistral", "[TOOL_CALLS]" + "x" * 300 + "{}"),
    ("mistral", "[TOOL"),
    ("hermes", f'<tool_call>{{"name": {"[" * 5000 + "]" * 5000}, "arguments": {{}}}}</tool_call>'),
    ("mistral", "[ "),
]


@pytest.mark.parametrize(("form", "text"), NO_CALLS)
def test_what_is_no_call_is_text_whole(form: ToolCallFormat, text: str) -> None:
    assert tools(form, text) == Message(content=text)


def test_a_bad_call_does_not_hide_a_good_one() -> None:
    message = tools("hermes", "<tool_call>oh <tool_call>" + '{"name": "f", "arguments": {}}</tool_call>')
    assert (message.content, message.calls) == ("<tool_call>oh", [["f", "{}"]])


@pytest.mark.parametrize(("form", "text"), [("hermes", HERMES_TWO), ("llama3", LLAMA), ("mistral", MISTRAL)])
def test_only_one_call_when_the_client_wants_no_more(form: ToolCallFormat, text: str) -> None:
    assert [name for name, _ in tools(form, text, several=False).calls] == ["f"]


def test_arguments_stream_and_text_is_not_held_back_longer_than_needed() -> None:
    make = OutputForm(tools=TOOLS).make_reader
    assert make is not None
    reader = make()
    told = [
        reader.put(text) for text in ("Hi <b", "> <too", 'l_call>{"name": "f", "argu', 'ments": {"a', '": 1')
    ]
    assert told[:3] == [[Content("Hi <b")], [Content(">")], []]
    assert [type(piece) for piece in told[3]] == [CallBegin, CallArguments]
    assert told[4] == [CallArguments(0, '": 1')]


THOUGHTS = [
    ("<think>\nhm\n</think>\n\nYes", False, "hm", "Yes"),
    ("hm</think>Yes", True, "hm", "Yes"),
    ("<think>hm</think>Yes", True, "hm", "Yes"),
    ("Yes <think> no", False, "", "Yes <think> no"),
    ("  Yes", False, "", "  Yes"),
    ("<thin", False, "", "<thin"),
    ("<think>cut o", False, "cut o", ""),
    ("cut </thi", True, "cut </thi", ""),
    ("<think>\n\n</think>\n\nYes", False, "", "Yes"),
]


@pytest.mark.parametrize(("text", "opened", "thoughts", "content"), THOUGHTS)
def test_thoughts(text: str, opened: bool, thoughts: str, content: str) -> None:
    message = read(OutputForm(reasoning="think", thinks_already=opened), [text])
    assert (message.thoughts, message.content) == (thoughts, content)


def test_calls_within_thoughts_are_thoughts() -> None:
    message = read(OutputForm(tools=TOOLS, reasoning="think"), [f"<think>{HERMES}</think>{HERMES}"])
    assert (message.thoughts, message.content, message.calls) == (HERMES, "", [["f", ARGUMENTS]])


PARTS = [
    "<tool_call>",
    "</tool_call>",
    '{"name": "f", "arguments": ',
    '{"a": "x"}',
    "}",
    "]",
    "[",
    " ",
    "\n",
    ";",
    ",",
]
PARTS += [
    "<think>",
    "</think>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    '{"name": ',
    '"f"',
    "f",
    "hé",
    '"',
    "\\",
    "null",
]
FORMS: list[ToolCallFormat] = ["hermes", "llama3", "mistral"]
WHOLE = st.lists(
    st.sampled_from([*PARTS, HERMES, HERMES_TWO, LLAMA, MISTRAL, MISTRAL_NAMES]), max_size=10
).map("".join)


@given(WHOLE, st.sampled_from(FORMS), st.booleans(), st.booleans(), st.data())
def test_where_the_text_is_cut_makes_no_difference(
    text: str, calls: ToolCallFormat, thinks: bool, opened: bool, data: st.DataObject
) -> None:
    form = OutputForm(TOOLS, calls=calls, reasoning="think" if thinks else "none", thinks_already=opened)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    ends = [0, *cuts, len(text)]
    whole = read(form, [text])
    assert read(form, [text[a:b] for a, b in itertools.pairwise(ends)]) == whole
    assert read(form, list(text)) == whole
    if not whole.calls and not thinks:
        assert whole.content == text


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    ),
    st.booleans(),
)
def test_any_arguments_come_out_as_they_went_in(value: Any, ascii_only: bool) -> None:
    arguments = json.dumps({"x": value}, ensure_ascii=ascii_only)
    call = f'{{"name": "f", "arguments": {arguments}}}'
    for form, text in [
        ("hermes", f"<tool_call>{call}</tool_call>"),
        ("llama3", call),
        ("mistral", f"[{call}]"),
    ]:
        message = read(OutputForm(TOOLS, calls=form), list(text))  # type: ignore[arg-type]
        assert message == Message(calls=[["f", arguments]])


def test_formats_from_the_template_and_from_the_setting() -> None:
    for template, form in [
        (None, "hermes"),
        ("<tool_call>{{ x }}", "hermes"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3"),
        ('{"name": f, "parameters": x}', "llama3"),
    ]:
        assert tool_call_format("auto", template) == form
    assert tool_call_format("llama3", "[TOOL_CALLS]") == "llama3"
    assert [reasoning_format("auto", "<think>"), reasoning_format("auto", None)] == ["think", "none"]
    assert [reasoning_format("none", "<think>"), reasoning_format("think", None)] == ["none", "think"]


def test_ids_are_of_the_makers_forms() -> None:
    assert new_call_id().startswith("call_")
    assert len(new_mistral_id()) == 9
    assert new_mistral_id().isalnum()
    assert len({new_call_id() for _ in range(50)}) == 50
