"""Text <-> token ids: the tokenizer of a model, its chat template in a sandbox, and the incremental detokeniser.

Used by the engine and by the router. Importing it reads no model files; ``Tokenizer.load`` does.
"""

from microserving.tokenizer.pieces import IncrementalDetokenizer
from microserving.tokenizer.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "Tokenizer"]
