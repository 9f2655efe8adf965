"""What the OpenAI front needs from whoever generates: an engine in this process, or a router program.

The front (tokenising, chat template, OpenAI JSON and SSE) is the same code in both cases, so one engine alone and
the router in front of it serve the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Protocol

from microserving import __version__
from microserving.errors import ModelNotFound
from microserving.grammar import GrammarCompiler
from microserving.observability import escape_controls
from microserving.protocol.generation import GenerationChunk, GenerationRequest
from microserving.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as `/v1/models` shows it. max_context: prompt plus output tokens. aliases: further names of it. model_hash:
    of its weights, "" = unknown."""

    id: str
    max_context: int
    created: int
    owned_by: str = "microserving"
    aliases: tuple[str, ...] = ()
    model_hash: str = ""

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: changes with the model and with the build that serves it."""
        return "fp_" + hashlib.sha256(f"{self.model_hash} {__version__}".encode()).hexdigest()[:12]

    def named(self, name: str | None) -> ServedModel:
        """The model under the name that it was asked for. Raises ModelNotFound when that is none of its names."""
        if name is None or name == self.id:
            return self
        if name not in self.aliases:
            raise ModelNotFound(f"the model '{escape_controls(name[:64])}' does not exist", param="model")
        return replace(self, id=name, aliases=(self.id, *(other for other in self.aliases if other != name)))


class Backend(Protocol):
    """Generates for the front. Called on the event loop only."""

    @property
    def model(self) -> ServedModel | None:
        """The served model; None while it is not known (no engine was reached yet)."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The served model's tokenizer; None while it is not known."""

    @property
    def grammars(self) -> GrammarCompiler | None:
        """Compiles for that tokenizer, whose vocabulary it has read; None while that is not known."""

    @property
    def ready(self) -> bool:
        """Whether a request sent now would be served."""

    async def refresh(self) -> None:
        """Try to become ready (the router re-probes its engines); returns at once when ready."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        """Stream the output. Everything that can be refused is refused before the first chunk is yielded.

        The last chunk has a finish_reason. Closing the iterator (or cancelling the task that reads it) aborts the
        generation and frees all that it held. Raises: MicroservingError leaves.
        """
