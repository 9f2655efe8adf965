"""The README's table of parameters says what the models of the bodies say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from microserving.errors import InvalidRequest
from microserving.protocol.body import WireModel, ignored_fields, validate
from microserving.protocol.chat import ChatCompletionRequest
from microserving.protocol.openai import CompletionRequest

README = Path(__file__).parents[2] / "README.md"
BASE: dict[type[WireModel], dict[str, Any]] = {
    CompletionRequest: {"prompt": "a"},
    ChatCompletionRequest: {"messages": [{"role": "user", "content": "a"}]},
}
COLUMNS = pytest.mark.parametrize(("column", "model"), [(0, CompletionRequest), (1, ChatCompletionRequest)])
_RANGE = re.compile(r"\(?-?\d+(?:\.\d+)?")


def rows() -> dict[str, tuple[str, str, str]]:
    """Parameter -> what the table says: completions, chat, limits."""
    lines = README.read_text().split("| parameter | completions | chat | limits |\n")[1].split("\n\n")[0]
    found: dict[str, tuple[str, str, str]] = {}
    for line in lines.splitlines()[1:]:
        names, completions, chat, limits = (cell.strip() for cell in line.strip().strip("|").split("|"))
        for name in names.split(", "):
            assert name not in found
            found[name.strip("`")] = completions, chat, limits
    return found


@COLUMNS
def test_every_field_is_there_and_no_other(column: int, model: type[WireModel]) -> None:
    supported = {name for name, row in rows().items() if row[column] in ("yes", "refused")}
    told = {name for name, row in rows().items() if row[column] != "-"}
    assert supported <= set(model.model_fields) <= told
    assert all(row[column] in ("yes", "ignored", "refused", "-") for row in rows().values())


@COLUMNS
def test_what_is_refused_is_refused_by_name(column: int, model: type[WireModel]) -> None:
    for name in (name for name, row in rows().items() if row[column] == "refused"):
        with pytest.raises(InvalidRequest) as refused:
            validate(model, {**BASE[model], name: [{"name": "x"}] if name == "functions" else "x"})
        assert refused.value.param == name


@COLUMNS
def test_what_is_ignored_is_accepted_whatever_it_is(column: int, model: type[WireModel]) -> None:
    for name in (name for name, row in rows().items() if row[column] == "ignored"):
        body = {**BASE[model], name: "x"}
        validate(model, body)
        assert ignored_fields(model, body) in ([], [name])


@COLUMNS
def test_limits_are_those_of_the_fields(column: int, model: type[WireModel]) -> None:
    """Where a field has a range that the schema tells, the table tells it, too."""
    properties = model.model_json_schema()["properties"]
    checked = 0
    for name, row in rows().items():
        for form in properties.get(name, {}).get("anyOf", [properties.get(name, {})]):
            limit = form.get("maximum", 10**9)
            if row[column] == "yes" and limit < 10**6:
                assert f"{limit:g}" in [number.lstrip("(") for number in _RANGE.findall(row[2])], name
                checked += 1
    assert checked >= 6
