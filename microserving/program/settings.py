"""A program's settings: its annotated class attributes, checked."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, get_origin, get_type_hints

from pydantic import Field, PydanticSchemaGenerationError, TypeAdapter, ValidationError

from microserving.errors import ProgramError

Fraction = Annotated[float, Field(ge=0, le=1)]
"""A number in [0, 1]."""

_MAX_REASONS = 3
"""Of one wrong value: a union tells of each of its members."""


def setting_types(program: type) -> dict[str, Any]:
    """Every setting of a program class with its annotation, inherited ones first.

    Names with a leading underscore and ``ClassVar``s are not settings.
    Raises: ProgramError when an annotation cannot be resolved.
    """
    try:
        hints = get_type_hints(program, include_extras=True)
    except (NameError, TypeError, AttributeError) as error:
        raise ProgramError(f"{program.__name__}: an annotation is wrong: {error}") from error
    return {
        name: hint for name, hint in hints.items() if not name.startswith("_") and not _is_class_var(hint)
    }


def check_settings(program: type, given: Mapping[str, object]) -> dict[str, object]:
    """The value of every setting: the given one, else a copy of its default.

    Text is converted as the annotation asks ("0.5" is a float), so that settings can come from a command line.
    Raises: ProgramError (``param`` names the setting).
    """
    types = setting_types(program)
    if unknown := [name for name in given if name not in types]:
        known = ", ".join(types) or "it has none"
        raise ProgramError(
            f"{program.__name__} has no setting {unknown[0]!r} (settings: {known})", param=unknown[0]
        )
    return {name: _checked(program, name, hint, given) for name, hint in types.items()}


def _checked(program: type, name: str, hint: Any, given: Mapping[str, object]) -> object:
    if name in given:
        value, what = given[name], "setting"
    elif hasattr(program, name):
        value, what = copy.deepcopy(getattr(program, name)), "default of setting"
    else:
        raise ProgramError(f"{program.__name__}: setting {name!r} must be given", param=name)
    try:
        # strict for a bool: `true` is no number
        return TypeAdapter(hint).validate_python(value, strict=isinstance(value, bool))
    except ValidationError as error:
        reason = " / ".join(dict.fromkeys(fault["msg"] for fault in error.errors()[:_MAX_REASONS]))
        raise ProgramError(
            f"{program.__name__}: {what} {name!r} is wrong: {reason} (got {value!r})", param=name
        ) from error
    except PydanticSchemaGenerationError as error:
        raise ProgramError(
            f"{program.__name__}: setting {name!r} cannot have this type", param=name
        ) from error


def _is_class_var(hint: object) -> bool:
    return hint is ClassVar or get_origin(hint) is ClassVar
