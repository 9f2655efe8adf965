"""The tokenizer that an engine serves with: the model's, with what the operator says of chats."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from microserving.engine.config import EngineConfig
from microserving.errors import ConfigError
from microserving.model_files.resolved_model import ResolvedModel
from microserving.tokenizer import Tokenizer

_MAX_TEMPLATE_BYTES: Final = 2**20


def open_tokenizer(config: EngineConfig, model: ResolvedModel) -> Tokenizer:
    """Raises ModelLoadError, and ConfigError when ``config.chat_template`` cannot be used."""
    tokenizer = Tokenizer.load(model)
    changes: dict[str, Any] = {}
    if config.chat_template is not None:
        changes["chat_template"] = _template(config.chat_template)
    for name in ("tool_call_format", "reasoning_format"):
        if getattr(config, name) != "auto":
            changes[name] = getattr(config, name)
    if changes:
        tokenizer = tokenizer.with_facts(**changes)
    if config.chat_template is not None and tokenizer.chat_unavailable is not None:
        raise ConfigError(f"{config.chat_template}: {tokenizer.chat_unavailable}")
    return tokenizer


def _template(path: Path) -> str:
    try:
        data = path.read_bytes()[: _MAX_TEMPLATE_BYTES + 1]
        return data.decode()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: the chat template is not valid UTF-8") from None
