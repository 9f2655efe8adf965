"""Outputs that must match a grammar: through resumes, preemptions and neighbours, and where they end."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from microserving.engine.async_engine import AsyncEngine
from microserving.engine.constraint import Constraint
from microserving.engine.fake_runner import FakeRunner
from microserving.errors import InvalidRequest
from microserving.grammar import GrammarError, Matcher
from microserving.protocol.generation import GenerationRequest, Grammar, SamplingParams, StopParams

from .harness import GREEDY, SEEDED, Node, Outcome, prompt_of

PROMPT = prompt_of(20, salt=3)
WORDS = Grammar("regex", "[a-f]{6,20}!")
OBJECT = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
                "list": {
                    "type": "array",
                    "items": {"type": "integer", "minimum": 0, "maximum": 99},
                    "maxItems": 3,
                },
            },
            "required": ["name", "list"],
            "additionalProperties": False,
        }
    ),
)
PENALISED = SamplingParams(
    temperature=0.9,
    seed=7,
    presence_penalty=1.5,
    repetition_penalty=1.3,
    top_p=0.9,
    logit_bias={97: 50.0, 1: 100.0},
)
EOS = 0


def ask(node: Node, grammar: Grammar | None, sampling: SamplingParams = SEEDED, **options: Any) -> Outcome:
    more = {"grammar": grammar, **options.pop("more", {})}
    return node.submit(PROMPT, options.pop("max_tokens", 200), sampling, more=more, **options)


def answer(grammar: Grammar, sampling: SamplingParams = SEEDED, **options: Any) -> list[int]:
    node = Node(eos=(EOS,))
    outcome = ask(node, grammar, sampling, **options)
    node.run()
    node.assert_idle()
    return outcome.tokens


def text_of(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token != EOS).decode()


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, PENALISED])
def test_what_comes_matches(sampling: SamplingParams) -> None:
    """A bias or a penalty chooses among what is allowed and lifts nothing else."""
    assert re.fullmatch(WORDS.text, text_of(answer(WORDS, sampling)))
    value = json.loads(text_of(answer(OBJECT, sampling)))
    assert re.fullmatch("[a-z]{1,8}", value["name"])
    assert all(0 <= number <= 99 for number in value["list"])
    assert len(value["list"]) <= 3


def test_an_output_with_nothing_but_its_end_left_has_ended() -> None:
    node = Node(eos=(EOS,))
    outcome = ask(node, Grammar("regex", "abc"), max_tokens=3)
    node.run()
    assert outcome.tokens == list(b"abc")  # no end token
    assert outcome.finish_reason == "stop"  # although the last token was the last one it might have


def test_the_end_comes_only_where_the_grammar_may_end() -> None:
    """The model would end at once, and cannot; it may behind the third letter, and does."""
    eager = SamplingParams(temperature=0.0, logit_bias={EOS: 100.0})
    assert answer(Grammar("regex", "[a-c]{3,9}"), eager)[3:] == [EOS]


def test_a_stop_id_that_is_text_ends_only_where_the_grammar_may_end() -> None:
    wanted = SamplingParams(temperature=0.0, logit_bias={ord("a"): 100.0})
    tokens = answer(Grammar("regex", "[a-c]{3,9}"), wanted, stop_token_ids=(ord("a"),))
    assert tokens[3:] == [ord("a")]
    assert ord("a") not in tokens[:3]


def test_no_end_before_min_tokens_unless_nothing_else_may_come() -> None:
    eager = SamplingParams(temperature=0.0, logit_bias={EOS: 100.0})
    assert answer(Grammar("regex", "[a-c]{3,9}"), eager, min_tokens=5)[5:] == [EOS]
    assert answer(Grammar("regex", "[a-c]{3}"), eager, min_tokens=5)[3:] == []


def test_max_tokens_cuts_it() -> None:
    node = Node(eos=(EOS,))
    outcome = ask(node, WORDS, max_tokens=4)
    node.run()
    assert (len(outcome.tokens), outcome.finish_reason) == (4, "length")


def test_a_stop_string_ends_it() -> None:
    node = Node(eos=(EOS,))
    outcome = ask(node, Grammar("regex", "ab{9}c"), stop=("<98><98>",))
    node.run()
    assert (outcome.text, outcome.finish_reason) == ("<97>", "stop")


@pytest.mark.case("PD-36")
@pytest.mark.parametrize("sampling", [SEEDED, PENALISED])
@pytest.mark.parametrize("grammar", [WORDS, OBJECT])
def test_a_resumed_output_is_the_uninterrupted_one(grammar: Grammar, sampling: SamplingParams) -> None:
    """At any token: the grammar does not start from its root again."""
    node, other = Node(eos=(EOS,)), Node(eos=(EOS,))
    first = ask(node, grammar, sampling)
    node.run()
    full = first.tokens
    for cut in [*range(1, len(full), 7), len(full)]:
        rest = ask(other, grammar, sampling, more={"resume_output_ids": tuple(full[:cut])})
        other.run()
        assert rest.tokens == full[cut:]
        assert rest.finish_reason == first.finish_reason
    other.assert_idle()


def test_an_output_whose_pages_were_taken_goes_on_where_it_was() -> None:
    node = Node(FakeRunner(total_pages=8), eos=(EOS,), memory_threshold=1.0)
    outcomes = [ask(node, OBJECT, max_tokens=60) for _ in range(3)]
    node.run()
    assert node.engine.load().counters.preemptions > 0
    assert [outcome.tokens for outcome in outcomes] == [answer(OBJECT, max_tokens=60)] * 3
    node.assert_idle()


def test_tokens_that_do_not_match_cannot_be_resumed() -> None:
    with pytest.raises(InvalidRequest) as refused:
        answer(WORDS, more={"resume_output_ids": (ord("x"),)})
    assert refused.value.param == "resume_output_ids"


def test_ignore_eos_is_refused() -> None:
    with pytest.raises(InvalidRequest) as refused:
        answer(WORDS, ignore_eos=True)
    assert refused.value.param == "ignore_eos"


def test_neighbours_change_nothing_for_each_other() -> None:
    node = Node(eos=(EOS,))
    grammars = [None, WORDS, OBJECT, WORDS, None]
    outcomes = [ask(node, grammar, max_tokens=30) for grammar in grammars]
    node.run()
    for grammar, outcome in zip(grammars, outcomes, strict=True):
        alone = Node(eos=(EOS,))
        expected = ask(alone, grammar, max_tokens=30)
        alone.run()
        assert outcome.tokens == expected.tokens
    node.assert_idle()


@pytest.mark.case("STR-05")
@pytest.mark.parametrize("broken", ["accept", "allowed"])
def test_a_grammar_that_fails_ends_its_request_only(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(eos=(EOS,))
    struck, mate, free = ask(node, WORDS), ask(node, OBJECT), ask(node, None, max_tokens=20)
    constraint = next(iter(node.engine._books._tasks.values())).output.constraint  # type: ignore[union-attr]
    assert isinstance(constraint, Constraint)
    taken = 0
    real = getattr(Matcher, broken)

    def failing(self: Matcher, *arguments: Any) -> Any:
        nonlocal taken
        if self is constraint._matcher:
            taken += 1
            if taken == 7:
                raise GrammarError("too much work")
        return real(self, *arguments)

    monkeypatch.setattr(Matcher, broken, failing)
    node.run()
    assert isinstance(struck.error, InvalidRequest)
    assert struck.error.param == "grammar"
    assert text_of(mate.tokens) == text_of(answer(OBJECT))
    assert len(free.tokens) == 20
    assert [record for record in caplog.records if record.levelname != "INFO"] == []
    node.assert_idle()


TOO_MANY = Grammar("lark", "start: " + " | ".join(f'"{number}"' for number in range(9000)))
"""The parser has 2,000 places for what may stand in one place: where a number begins are more."""


@pytest.mark.case("STR-05")
def test_a_grammar_that_becomes_too_much_work_is_the_requests_fault() -> None:
    """A router does not try it on other engines, nor think the less of them."""
    node = Node(eos=(EOS,))
    outcome, mate = ask(node, TOO_MANY), ask(node, WORDS)
    node.run()
    assert isinstance(outcome.error, InvalidRequest)
    assert outcome.error.param == "grammar"
    assert text_of(mate.tokens) == text_of(answer(WORDS))
    node.assert_idle()


def test_a_resume_whose_grammar_becomes_too_much_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    node, taken = Node(eos=(EOS,)), answer(WORDS)[:3]
    real = Constraint.look
    looks = []

    def failing(self: Constraint) -> bool:
        looks.append(self)
        if len(looks) == 2:
            raise GrammarError("too much work")
        return real(self)

    monkeypatch.setattr(Constraint, "look", failing)
    with pytest.raises(InvalidRequest) as refused:
        ask(node, WORDS, more={"resume_output_ids": tuple(taken)})
    assert refused.value.param == "grammar"
    node.assert_idle()


def test_tokens_that_nothing_can_follow_end_the_request() -> None:
    """The only way on is a token that the request calls an end."""
    node = Node(eos=(EOS,))
    outcome = ask(node, Grammar("regex", "abc"), stop_token_ids=(ord("b"),))
    node.run()
    assert isinstance(outcome.error, InvalidRequest)
    with pytest.raises(InvalidRequest):
        ask(node, Grammar("regex", "abc"), stop_token_ids=(ord("a"),))
    node.assert_idle()


def test_the_async_engine_compiles_before_it_queues() -> None:
    async def scenario() -> None:
        engine = AsyncEngine(Node(eos=(EOS,)).engine)
        await engine.start()
        try:
            request = GenerationRequest("r", tuple(PROMPT), SEEDED, StopParams(max_tokens=99), grammar=OBJECT)
            chunks = [chunk async for chunk in engine.generate(request)]
            assert [token for chunk in chunks for token in chunk.token_ids] == answer(OBJECT)
            wrong = GenerationRequest("w", (1,), SEEDED, StopParams(), grammar=Grammar("regex", "("))
            with pytest.raises(InvalidRequest) as refused:
                await anext(engine.generate(wrong))
            assert refused.value.param == "grammar"
        finally:
            await engine.stop()

    asyncio.run(scenario())
