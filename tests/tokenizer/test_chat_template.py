"""Chat templates: what they render, what they may not do, and what a client may send."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from microserving.errors import InvalidRequest
from microserving.tokenizer import Tokenizer
from microserving.tokenizer.chat_template import ChatTemplate, TemplateUnusableError

USER = {"role": "user", "content": "What is the capital of France?"}
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
FANCY = """
{%- set ns = namespace(count=0, text='') %}
{%- macro show(message, number) %}{{ number ~ ': ' ~ message.role | upper ~ ' ' ~ message.content | trim }}{% endmacro %}
{%- for message in messages if message.content %}
    {%- set ns.count = ns.count + loop.index * 2 ** 2 %}
    {%- set ns.text = ns.text + '%s|' % message.role %}
    {%- if loop.last %}[{{ loop.length }}/{{ loop.revindex }}/{{ loop.cycle('a', 'b') }}]{% endif %}
    {%- if message.content == 'stop' %}{% break %}{% endif %}
    {{ show(message, loop.index) }}
{%- else %}none
{%- endfor %}
{{ ns.count }} {{ ns.text }} {{ messages | length }} {{ messages | map(attribute='role') | join(', ') }}
{{ messages[0] | tojson }} {{ ['x', 'y'] | join('-') }} {{ 'a,b'.split(',')[-1] }} {{ 'aXb'.replace('X', '&') }}
{% for a in [[1, [2]], [3]] recursive %}{{ a if a is number else loop(a) }};{% endfor %}
{% set block %}{{ '-' * 5 }}{% endset %}{{ block }}{{ undefined_name is defined }}
{% generation %}kept{% endgeneration %}
"""


def plain_jinja(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    """Jinja2 with the settings that Hugging Face documents, and nothing of ours."""
    import json

    def refuse(text: str) -> None:
        raise ValueError(text)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    source = source.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    return environment.from_string(source).render(messages=messages, add_generation_prompt=True, **variables)


@pytest.mark.parametrize("source", [CHATML, LLAMA2, FANCY], ids=["chatml", "llama2", "fancy"])
def test_renderings_equal_plain_jinja2(source: str) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    chat = [
        {"role": "system", "content": "Be <brief> & kind."},
        {"role": "user", "content": " Größe? 😀 "},
        {"role": "assistant", "content": "1 < 2"},
        {"role": "user", "content": "go on"},
    ]
    assert ChatTemplate(source, special).render(chat) == plain_jinja(source, chat, **special)


def test_the_default_models_template_equals_transformers(smollm2: Tokenizer) -> None:
    from tokenizers import Tokenizer as Library
    from transformers import PreTrainedTokenizerFast

    document = smollm2.to_dict()
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=Library.from_str(document["tokenizer"]),
        chat_template=document["chat_template"],
        **document["special_tokens"],
    )
    for chat in (
        [USER],
        [{"role": "system", "content": "Short."}, USER],
        [USER, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "日本は？\n"}],
    ):
        for generate in (True, False):
            options = {"add_generation_prompt": generate}
            assert smollm2.render_chat(chat, **options) == theirs.apply_chat_template(
                chat, tokenize=False, **options
            )
            expected = theirs.apply_chat_template(chat, tokenize=True, return_dict=False, **options)
            assert smollm2.encode_chat(chat, **options) == expected


HOSTILE = {
    "attribute walk": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['__builtins__'] }}",
    "through a macro": "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}",
    "format walk": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "getattr filter": "{{ ''|attr('__class__') | string | upper }}{{ (''|attr('__class__')).mro() }}",
    "huge range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested loops": "{% set r = range(99999) | list %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "extends": "{% extends 'base' %}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "recursive loop": "{% for a in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "one gigabyte": "{% for i in range(100000) %}{{ 'x' * 10000 }}{% endfor %}",
    "one big string": "{{ 'x' * 10**9 }}",
    "doubling": "{% set ns = namespace(s='xx') %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
    "tilde": "{% set ns = namespace(s='xx') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "in a macro": "{% macro m() %}{% for i in range(100000) %}{{ 'x' * 10000 }}{% endfor %}{% endmacro %}{{ m() }}",
    "in a block": "{% set b %}{% for i in range(99999) %}" + "x" * 5000 + "{% endfor %}{% endset %}{{ b }}",
    "center": "{{ 'x' | center(10**9) }}",
    "center method": "{{ 'x'.center(10**9) }}",
    "wide format": "{{ '%1000000000d' % 1 }}",
    "wide format filter": "{{ '%1000000000d' | format(1) }}",
    "wide format method": "{{ '{:1000000000}'.format(1) }}",
    "star format": "{{ '%*d' % (1000000000, 1) }}",
    "indent": "{{ ('x\n' * 100000) | indent(100000) }}",
    "replace": "{{ ('x' * 100000).replace('x', 'y' * 100000) }}",
    "replace filter": "{{ ('x' * 100000) | replace('x', 'y' * 100000) }}",
    "join": "{{ range(100000) | join('y' * 100000) }}",
    "join method": "{{ ('y' * 100000).join(['a'] * 100000) }}",
    "list product": "{{ ([0] * 100000) * 100000 }}",
    "batch": "{{ [] | batch(10**9, 'x') | list }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "squaring": "{% set ns = namespace(n=9) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n }}",
    "sum of lists": "{% set r = range(99999) | list %}{{ ([r] * 80) | sum(start=[]) | length }}",
    "select in": "{% set r = range(99999) | list %}{{ r | select('in', r) | list | length }}",
    "many comparisons": "{% set r = range(99999) | list %}" + "{% if '' in r %}{% endif %}" * 1500,
    "many slices": "{% set s = 'x' * 8000000 %}" + "{% set t = s[1:] %}" * 1500,
    "explode": "{% set s = 'x' * 8000000 %}{% for i in range(99) %}{% set l = s | list %}{% endfor %}",
    "lipsum": "{{ lipsum(n=100000) }}",
    "changes its input": "{{ messages.append(1) }}{{ messages.clear() }}",
    "tojson indent": "{{ messages | tojson(indent=10**9) }}",
}


@pytest.mark.case("SC-20")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_stopped(name: str, tmp_path: Path) -> None:
    started = time.thread_time()  # a template cannot wait, and the machine may be busy
    messages = [dict(USER)]
    with pytest.raises((TemplateUnusableError, InvalidRequest)) as caught:
        ChatTemplate(HOSTILE[name], {}).render(messages)
    assert time.thread_time() - started < 2
    assert 0 < len(str(caught.value)) <= 300
    assert messages == [USER]
    if isinstance(caught.value, InvalidRequest):
        assert caught.value.param == "messages"
        assert "drops messages" not in str(caught.value)


@pytest.mark.case("SC-20")
def test_one_rendering_does_not_use_up_the_next_ones_budget() -> None:
    template = ChatTemplate("{% for i in range(50000) %}{% endfor %}{{ messages[0].content }}", {})
    for _ in range(60):  # 3 million steps together
        assert template.render([{"role": "user", "content": "x"}]) == "x"


REFUSES_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported' + '!' * 1000) }}"
    "{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.mark.case("TK-01")
@pytest.mark.parametrize(
    ("roles", "fine"),
    [("su", False), ("s", False), ("ss", False), ("", False), ("au", True), ("u", True)],
)
def test_a_template_that_refuses_a_role_is_the_clients_error(roles: str, fine: bool) -> None:
    names = {"s": "system", "u": "user", "a": "assistant"}
    chat = [{"role": names[role], "content": "hello"} for role in roles]
    template = ChatTemplate(REFUSES_SYSTEM, {})
    if fine:
        assert template.render(chat) == "hello" * len(roles)
        return
    with pytest.raises(InvalidRequest) as caught:
        template.render(chat)
    assert caught.value.param == "messages"
    assert len(str(caught.value)) <= 300
    assert not roles or "System role not supported" in str(caught.value)


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].nope.nope }}", "{{ 1 / 0 }}", "{{ messages | nope }}", "{{ messages[0].content + 1 }}"],
)
def test_a_template_that_fails_is_never_our_bug(source: str) -> None:
    with pytest.raises((InvalidRequest, TemplateUnusableError)):
        ChatTemplate(source, {}).render([USER])


@pytest.mark.case("TK-07")
@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("{% for m in messages %}\n{{ m.content }}\n{% endfo %}", "line 3"),
        ("{{ 1 +", "line 1"),
        ("x" * (2**20 + 1), "longer than"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", ""),
    ],
)
def test_a_broken_template_is_found_at_load_and_turns_only_chat_off(
    source: str, part: str, smollm2: Tokenizer
) -> None:
    broken = Tokenizer.from_dict({**smollm2.to_dict(), "chat_template": source})
    assert broken.chat_unavailable is not None
    assert part in broken.chat_unavailable
    assert broken.encode("plain text") == smollm2.encode("plain text")
    with pytest.raises(
        InvalidRequest, match="chat is not available: the model's chat template cannot be used"
    ) as caught:
        broken.encode_chat([USER])
    assert caught.value.param == "messages"


@pytest.mark.case("TK-07")
def test_a_model_without_a_template(smollm2: Tokenizer) -> None:
    bare = Tokenizer.from_dict({**smollm2.to_dict(), "chat_template": None})
    assert bare.chat_unavailable == "the model has no chat template"
    with pytest.raises(InvalidRequest, match="the model has no chat template"):
        bare.render_chat([USER])


@pytest.mark.case("API-31")
@pytest.mark.parametrize(
    "role", ["system", "developer", "user", "assistant", "tool", "function", "SYSTEM", "admin", ""]
)
@pytest.mark.parametrize("source", [CHATML, LLAMA2], ids=["chatml", "llama2"])
def test_no_role_is_dropped_silently(role: str, source: str) -> None:
    chat = [{"role": role, "content": "an instruction"}, USER]
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    refused_as: str | None = None
    text = "an instruction"
    try:
        text = template.render(chat)
    except InvalidRequest as error:
        refused_as = error.param
    assert refused_as in (None, "messages", "messages[0].role")
    assert "an instruction" in text
    assert "developer" not in text


@pytest.mark.case("API-31")
def test_developer_stays_when_the_template_knows_it() -> None:
    source = "{% for m in messages %}{% if m.role == 'developer' %}DEV {% endif %}{{ m.content }}{% endfor %}"
    assert ChatTemplate(source, {}).render([{"role": "developer", "content": "x"}]) == "DEV x"


@pytest.mark.case("API-31")
def test_a_dropped_message_is_refused_but_an_escaped_one_is_not() -> None:
    drops = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(InvalidRequest, match="drops messages of role 'system'") as caught:
        ChatTemplate(drops, {}).render([USER, {"role": "system", "content": "lost"}])
    assert caught.value.param == "messages[1].role"
    escapes = "{% for m in messages %}{{ m.content | tojson }}{% endfor %}"
    assert ChatTemplate(escapes, {}).render([{"role": "tool", "content": 'a "b"\n'}]) == '"a \\"b\\"\\n"'


@pytest.mark.case("API-32")
def test_text_parts_are_joined(smollm2: Tokenizer) -> None:
    parts = [{"type": "text", "text": "count to "}, {"type": "text", "text": "three"}]
    assert smollm2.encode_chat([{"role": "user", "content": parts}]) == smollm2.encode_chat(
        [{"role": "user", "content": "count to three"}]
    )


@pytest.mark.case("API-32")
@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "assistant", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ("x", "messages[0]"),
        ({"role": "assistant", "content": "x", "tool_calls": "y"}, "messages[0].tool_calls"),
    ],
)
def test_what_is_not_a_message_is_refused_by_name(message: Any, param: str, smollm2: Tokenizer) -> None:
    with pytest.raises(InvalidRequest) as caught:
        smollm2.render_chat([message])
    assert caught.value.param == param


def test_tool_calls_reach_the_template_parsed() -> None:
    source = "{% for m in messages %}{{ m.content }}{{ m.tool_calls[0].function.arguments.city }}{% endfor %}"
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert ChatTemplate(source, {}).render([message]) == "Paris"


@pytest.mark.parametrize("arguments", ["not JSON", "[" * 100_000, "1" * 5000])
def test_tool_arguments_that_do_not_parse_stay_text(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": "x", "tool_calls": [call]}
    source = "{{ messages[0].tool_calls[0].function.arguments }}"
    assert ChatTemplate(source, {}).render([message]) == arguments


TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
TOOL_CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "c2", "content": "warm"},
]


def test_a_template_that_shows_tools_gets_them() -> None:
    source = "{{ tools[0].function.name }} {{ messages[0].content }}"
    assert ChatTemplate(source, {}).shows_tools
    assert ChatTemplate(source, {}).render([USER], tools=[TOOL]) == f"weather {USER['content']}"
    assert not ChatTemplate(CHATML + "{# tools #}", {}).shows_tools


def test_tools_stand_in_the_messages_where_the_template_has_no_place_for_them() -> None:
    text = ChatTemplate(CHATML, {}).render(TOOL_CHAT, tools=[TOOL])
    system, user, call, answers, rest = text.split("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert "<tools>\n" + json.dumps(TOOL) + "\n</tools>" in system
    assert user == f"<|im_start|>user\n{USER['content']}"
    said = '{"name": "weather", "arguments": {"city": "Paris"}}'
    assert call == f"<|im_start|>assistant\n<tool_call>\n{said}\n</tool_call>"
    responses = [f"<tool_response>\n{answer}\n</tool_response>" for answer in ("sunny", "warm")]
    assert answers == "<|im_start|>user\n" + "\n".join(responses)
    assert rest == "<|im_start|>assistant\n"
    assert "# Tools" in ChatTemplate(CHATML, {}).render([USER], tools=[TOOL])


@pytest.mark.case("API-31")
def test_calls_in_the_history_are_not_dropped_without_tools_either() -> None:
    assert '"city": "Paris"' in ChatTemplate(CHATML, {}).render(TOOL_CHAT)


def test_variables_reach_the_template_but_do_not_take_the_requests_place() -> None:
    source = "{{ messages[0].content }}{% if enable_thinking is false %}!{% endif %}{{ bos_token }}"
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.render([USER], variables={"enable_thinking": False}) == f"{USER['content']}!<s>"
    for name in ("messages", "tools", "bos_token", "add_generation_prompt"):
        with pytest.raises(InvalidRequest) as caught:
            template.render([USER], variables={name: "x"})
        assert caught.value.param == "chat_template_kwargs"


TRIMS = CHATML.replace("message['content']", "message['content'] | trim")


@pytest.mark.parametrize("source", [CHATML, TRIMS], ids=["keeps space", "trims"])
@pytest.mark.parametrize("text", ["The answer is", "The answer is ", "", "x\n\n"])
def test_a_message_is_continued_as_transformers_does(source: str, text: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    chat = [USER, {"role": "assistant", "content": text}]
    rendered: Any = render_jinja_template([chat], chat_template=source, continue_final_message=True)
    expected = rendered[0][0]
    assert ChatTemplate(source, {}).render(chat, continue_final_message=True) == expected
    assert expected.rstrip().endswith(text.strip())


@pytest.mark.parametrize("last", [USER, {"role": "assistant", "content": "x", "tool_calls": [CALL]}])
def test_only_the_assistants_text_is_continued(last: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(CHATML, {}).render([USER, last], continue_final_message=True)
    assert caught.value.param == "messages"


def test_what_a_template_cuts_off_cannot_be_continued() -> None:
    source = "{% for m in messages %}{{ m.content[:3] }}{% endfor %}"
    with pytest.raises(InvalidRequest, match="drops parts"):
        ChatTemplate(source, {}).render(
            [{"role": "assistant", "content": "abcdef"}], continue_final_message=True
        )


def test_strftime_now() -> None:
    text = ChatTemplate("{{ strftime_now('%Y') }} {{ messages[0].content }}", {}).render(
        [{"role": "user", "content": "x"}]
    )
    year, _, content = text.partition(" ")
    assert year.isdigit()
    assert content == "x"
