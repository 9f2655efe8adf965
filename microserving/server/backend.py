"""The front's backend over the engine in this process: no routing, no transfer (hybrid mode)."""

from __future__ import annotations

from collections.abc import AsyncIterator

from microserving.front import ServedModel
from microserving.grammar import GrammarCompiler
from microserving.protocol.generation import GenerationChunk, GenerationRequest
from microserving.server.services import EngineServices
from microserving.tokenizer import Tokenizer


class EngineBackend:
    """A ``Backend``. begin: from which prompt token on the engine shall compute (None = it decides)."""

    def __init__(self, services: EngineServices, *, begin: int | None = None) -> None:
        self._engine = services.engine
        self._begin = begin
        info = services.info
        self._model = ServedModel(
            id=info.model,
            max_context=info.max_context,
            created=info.created,
            aliases=tuple(info.aliases),
            model_hash=info.model_hash,
        )
        self._tokenizer = services.tokenizer

    @property
    def model(self) -> ServedModel:
        return self._model

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def grammars(self) -> GrammarCompiler:
        return self._engine.grammars

    @property
    def ready(self) -> bool:
        return self._engine.healthy

    async def refresh(self) -> None:
        """Nothing to probe: the engine is in this process."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        return self._engine.generate(request, self._begin)
