"""Config models as argparse flags: one flag a field, the default shown from the model, validation by the model."""

from __future__ import annotations

import argparse
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from microserving.cluster.command_line import flag_name

ConfigT = TypeVar("ConfigT", bound=BaseModel)
_DEST = "config_"


def add_config_flags(
    parser: argparse.ArgumentParser,
    model: type[BaseModel],
    help_texts: Mapping[str, str],
    skip: Iterable[str] = (),
    in_force: Mapping[str, object] | None = None,
) -> None:
    """A flag for every field of ``model`` but ``skip``. help_texts: field -> what it is, without its default.

    in_force: field whose default is None -> what then holds.
    """
    for name, field in model.model_fields.items():
        if name not in skip:
            text = f"{help_texts[name]} ({shown_default(field, (in_force or {}).get(name))})"
            parser.add_argument(
                flag_name(name),
                dest=_DEST + name,
                default=argparse.SUPPRESS,
                help=text.replace("%", "%%"),
                required=field.is_required(),
                **_value_form(field.annotation),
            )


def shown_default(field: FieldInfo, in_force: object = None) -> str:
    """A field's default as help shows it: `default: 8000`. in_force: what a default of None stands for."""
    if field.is_required():
        return "must be given"
    value = field.get_default(call_default_factory=True)
    value = in_force if value in (None, ()) and in_force is not None else value
    return "default: none" if value in (None, ()) else f"default: {value}"


def config_from(
    options: argparse.Namespace, model: type[ConfigT], extra: Mapping[str, object] | None = None
) -> ConfigT:
    """The config that the flags (and ``extra`` fields) say. A wrong value ends the process with status 2.

    options: parsed by a parser that stands in ``options.parser``.
    """
    parser: argparse.ArgumentParser = options.parser
    given = {
        name.removeprefix(_DEST): value for name, value in vars(options).items() if name.startswith(_DEST)
    }
    try:
        return model.model_validate(given | dict(extra or {}))
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        where = f"argument {flag_name(str(fault['loc'][0]))}: " if fault["loc"] else ""
        parser.error(where + fault["msg"].removeprefix("Value error, "))


def _value_form(annotation: Any) -> dict[str, Any]:
    """How argparse reads a value of this type."""
    kind = _without_none(annotation)
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        return {"choices": choices, "type": type(choices[0])}
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if kind in (int, float):
        return {"type": kind, "metavar": "N" if kind is int else "X"}
    if kind is Path:
        return {"type": Path, "metavar": "PATH"}
    if get_origin(kind) is tuple:
        return {"metavar": "A,B,...", "action": "append"}
    return {"metavar": "TEXT"}


def _without_none(annotation: Any) -> Any:
    """``T`` for ``T | None``."""
    if get_origin(annotation) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        return kinds[0] if len(kinds) == 1 else str
    return annotation
