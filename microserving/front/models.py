"""Which model is served, under which names: GET `/v1/models`, `/v1/models/{id}` and `/ready`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from microserving.errors import NoEngine
from microserving.front.backend import Backend, ServedModel
from microserving.protocol.responses import ModelCard, ModelList, Status
from microserving.tokenizer import Tokenizer


class ModelsFront:
    """The handlers. Holds no state of requests."""

    def __init__(self, backend: Backend, check_ready: Callable[[], Awaitable[None]] | None = None) -> None:
        """check_ready: raises the error that `/ready` answers with although the backend is ready."""
        self._backend = backend
        self._check_ready = check_ready

    async def served(self, name: str | None) -> tuple[ServedModel, Tokenizer]:
        """The model that serves a request for ``name``, under that name. Raises NoEngine while nothing does,
        ModelNotFound."""
        backend = self._backend
        ready = backend.ready
        if not ready:
            await backend.refresh()
            ready = backend.ready
        model, tokenizer = backend.model, backend.tokenizer
        if model is not None:
            model = model.named(name)
        if not ready or model is None or tokenizer is None:
            raise NoEngine("no engine is ready to serve this", retry_after_s=1)
        return model, tokenizer

    async def models(self) -> ModelList:
        """The served model, once under each of its names."""
        model = await self._known(None)
        return ModelList(data=[_card(model.named(name)) for name in (model.id, *model.aliases)])

    async def model(self, model_id: str) -> ModelCard:
        """One name of the served model."""
        return _card(await self._known(model_id))

    async def ready(self) -> Status:
        """Whether a request sent now would be served."""
        await self.served(None)
        if self._check_ready is not None:
            await self._check_ready()
        return Status(status="ready")

    async def _known(self, name: str | None) -> ServedModel:
        """The served model, also while nothing serves it. Raises NoEngine while it is unknown, ModelNotFound."""
        model = self._backend.model
        return (await self.served(name))[0] if model is None else model.named(name)


def _card(model: ServedModel) -> ModelCard:
    return ModelCard(
        id=model.id, created=model.created, owned_by=model.owned_by, max_model_len=model.max_context
    )
