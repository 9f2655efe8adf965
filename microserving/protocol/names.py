"""Lists of names as settings have them: one text with commas, or an array of texts."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

MAX_MODEL_NAME_CHARS = 256


def split_names(value: Any) -> Any:
    """``value`` as a tuple of texts when it is "a,b" or ["a", "b,c"]; else as it is, for the type to refuse."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value):
        return tuple(name for part in value for name in split_names(part))
    return value


def _model_names(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if len(name) > MAX_MODEL_NAME_CHARS or not name.isprintable():
            raise ValueError(f"a model name has at most {MAX_MODEL_NAME_CHARS} printable characters")
        if names.count(name) > 1:
            raise ValueError(f"{name} is there more than once")
    return names


Names = Annotated[tuple[str, ...], BeforeValidator(split_names)]
ModelNames = Annotated[Names, AfterValidator(_model_names)]
"""The names that a model is served under; the first one is its own."""
