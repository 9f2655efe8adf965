"""Compiles grammars for one tokenizer, each once, within limits, and off the event loop.

Compiling is bounded in time and memory by ``limits`` (before it) and by the library's own limits (in it, and in every
step afterwards). One thread compiles, so whatever is sent takes at most one core from the others.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import llguidance
import numpy as np
import numpy.typing as npt
from llguidance.gbnf_to_lark import any_to_lark

from microserving.errors import InvalidRequest, Overloaded
from microserving.grammar.limits import check_limits, check_text
from microserving.grammar.matcher import CompiledGrammar, GrammarError, Matcher
from microserving.grammar.vocabulary import GrammarTokenizer, make_vocabulary, space_first
from microserving.protocol.generation import Grammar

KEPT: Final = 64
"""Compiled grammars that are kept, some 100 kB each."""
MAX_WAITING: Final = 64
_MAX_MESSAGE_CHARS: Final = 200
_LIMITS: Final = llguidance.LLParserLimits(
    initial_lexer_fuel=500_000,  # 10 ms
    step_lexer_fuel=100_000,  # 7 ms
    step_max_items=20_000,  # 1 ms
    max_lexer_states=20_000,  # 40 MB
    max_grammar_size=200_000,
    verbose_errors=False,
)
_SCHEMA_OPTIONS: Final[llguidance._lib.JsonCompileOptions] = {
    # At most so much white space in one place: a model that has begun with it may not find an end.
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}",
    "whitespace_flexible": True,
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,  # it would take what two branches match
    "lenient": False,  # a keyword that cannot be enforced is refused
}
_ANY_OBJECT: Final = json.dumps({"type": "object"})


class GrammarCompiler:
    """Thread-safe. ``tokenizer``: whose tokens the outputs are made of."""

    def __init__(
        self, tokenizer: GrammarTokenizer, *, kept: int = KEPT, max_waiting: int = MAX_WAITING
    ) -> None:
        """kept: compiled grammars (and refusals) that are remembered, the last used ones."""
        self.tokenizer = tokenizer
        self._kept = kept
        self._max_waiting = max_waiting
        self._waiting = 0
        self._known: OrderedDict[Grammar, CompiledGrammar | str] = OrderedDict()
        self._lock = threading.Lock()
        self._compiling = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._not_first: npt.NDArray[np.bool_] | None = None
        self._thread: ThreadPoolExecutor | None = None

    def prepare(self) -> None:
        """Do what the first grammar would have to wait for: read the vocabulary, which holds the GIL for 0.2 s (50,000
        tokens). For a process that serves nobody yet. Idempotent. Raises ModelLoadError."""
        with self._compiling:
            self._prepared()

    def _prepared(self) -> llguidance.LLTokenizer:
        if self._vocabulary is None:
            self._not_first = space_first(self.tokenizer)
            self._vocabulary = make_vocabulary(self.tokenizer)
        return self._vocabulary

    async def compile_off_loop(self, grammar: Grammar, *, param: str = "grammar") -> CompiledGrammar:
        """As ``compile``; the event loop goes on meanwhile. Raises also Overloaded. On one event loop only."""
        known = self._find(grammar)
        if known is not None:
            return _unless_refused(known, param)
        if self._waiting >= self._max_waiting:
            raise Overloaded(f"{self._waiting} grammars wait to be compiled", retry_after_s=1.0)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, lambda: self.compile(grammar, param=param))
        finally:
            self._waiting -= 1

    def compile(self, grammar: Grammar, *, param: str = "grammar") -> CompiledGrammar:
        """Takes milliseconds, seconds at the worst. Raises InvalidRequest naming ``param``."""
        with self._compiling:
            known = self._find(grammar)
            if known is None:
                try:
                    known = self._compile(grammar)
                except ValueError as error:
                    known = str(error)
                self._remember(grammar, known)
        return _unless_refused(known, param)

    def _find(self, grammar: Grammar) -> CompiledGrammar | str | None:
        with self._lock:
            if grammar in self._known:
                self._known.move_to_end(grammar)
            return self._known.get(grammar)

    def _remember(self, grammar: Grammar, compiled: CompiledGrammar | str) -> None:
        with self._lock:
            self._known[grammar] = compiled
            while len(self._known) > self._kept:
                self._known.popitem(last=False)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises ValueError."""
        check_text(grammar)
        if grammar.kind == "lark":
            grammar = Grammar("lark", _lark(grammar.text))
        check_limits(grammar)
        source = _source(grammar)
        start = llguidance.LLMatcher(self._prepared(), source, log_level=0, limits=_LIMITS)
        if start.is_error():
            raise ValueError(_one_line(start.get_error()))
        vocab_size = self.tokenizer.vocab_size
        try:
            # Here, and not in a step: what the first token may be takes the most work.
            allowed = Matcher(start, vocab_size).allowed()
        except GrammarError as error:
            raise ValueError(_one_line(str(error))) from None
        if not allowed.tokens.any():
            raise ValueError(
                "nothing but an empty output matches it" if allowed.may_end else "nothing matches it"
            )
        return CompiledGrammar(start, vocab_size, self._not_first)


def _source(grammar: Grammar) -> str:
    """``grammar`` in the library's JSON. Raises ValueError."""
    matcher, text = llguidance.LLMatcher, grammar.text
    match grammar.kind:
        case "json_object":
            return matcher.grammar_from_json_schema(_ANY_OBJECT, overrides=_SCHEMA_OPTIONS)
        case "json_schema":
            return matcher.grammar_from_json_schema(text, overrides=_SCHEMA_OPTIONS)
        case "regex":
            return matcher.grammar_from_regex(text)
        case "lark":
            return matcher.grammar_from_lark(text)


def _lark(text: str) -> str:
    """Rules that are written ``root ::= ...`` (GBNF, as vLLM and llama.cpp take them) in Lark; Lark as it is."""
    if "::=" not in text:
        return text
    try:
        return str(any_to_lark(text))
    except Exception as error:  # noqa: BLE001 - the library's converter raises whatever its parser stumbles over
        raise ValueError(_one_line(f"it is not valid GBNF: {error}")) from None


def _unless_refused(known: CompiledGrammar | str, param: str) -> CompiledGrammar:
    if isinstance(known, str):
        raise InvalidRequest(f"{param} cannot be used: {known}", param=param)
    return known


def _one_line(message: str) -> str:
    text = " ".join(message.split()).partition(" Enable 'coerce_one_of'")[0]  # no option of a request
    if text.startswith("panic"):
        return "it is not understood"
    return "".join(c if c.isprintable() else "?" for c in text)[:_MAX_MESSAGE_CHARS]
