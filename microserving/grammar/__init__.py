"""Grammars that outputs must match: compiled once for a tokenizer, then followed token by token.

Used by the engine, which enforces them, and by the front (also the router's), which refuses what cannot be compiled.
The work is ``llguidance``'s, which nobody else imports. Knows no requests, no sampling, no HTTP.
"""

from microserving.grammar.compiler import GrammarCompiler
from microserving.grammar.matcher import CompiledGrammar, GrammarError, Matcher
from microserving.grammar.vocabulary import GrammarTokenizer

__all__ = ["CompiledGrammar", "GrammarCompiler", "GrammarError", "GrammarTokenizer", "Matcher"]
