"""The default model's tokenizer, fetched into the user's cache when it is not there yet."""

from __future__ import annotations

import pytest

from microserving.model_files import DEFAULT_MODEL, GGUFMetadata, open_model
from microserving.model_files.resolved_model import ResolvedModel
from microserving.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm2_model() -> ResolvedModel:
    return open_model(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_model: ResolvedModel) -> GGUFMetadata:
    assert isinstance(smollm2_model.tokenizer_source, GGUFMetadata)
    return smollm2_model.tokenizer_source


@pytest.fixture(scope="session")
def smollm2(smollm2_model: ResolvedModel) -> Tokenizer:
    return Tokenizer.load(smollm2_model)
