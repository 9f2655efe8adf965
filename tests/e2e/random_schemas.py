"""Random JSON Schemas with short instances, the same for the same number."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]
_DEPTH = 3


def random_schema(number: int) -> Schema:
    """An object with nested objects, arrays, enums, bounds, patterns, formats, alternatives and references."""
    rng = random.Random(number)
    root = _object(rng, _DEPTH)
    root["$defs"] = {
        "leaf": _leaf(rng),
        "pair": _object(rng, 1),
        "chain": {
            "type": "object",
            "properties": {
                "value": _integer(rng),
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/chain"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        },
    }
    return root


def _any(rng: random.Random, depth: int) -> Schema:
    kinds = [_leaf, _leaf, _reference] + (
        [lambda r: _object(r, depth), lambda r: _array(r, depth)] * 2 if depth else []
    )
    if depth and rng.random() < 0.25:
        return {"anyOf": [_any(rng, depth - 1), _any(rng, depth - 1)]}
    return rng.choice(kinds)(rng)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(["id", "name", "größe", "items", "is_ok", "a b", "x-1"], rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: _any(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(1, len(names))),
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    return {
        "type": "array",
        "items": _any(rng, depth - 1),
        "minItems": least,
        "maxItems": least + rng.randint(0, 2),
    }


def _reference(rng: random.Random) -> Schema:
    return {"$ref": "#/$defs/" + rng.choice(["leaf"] * 4 + ["pair"] * 4 + ["chain"])}


def _integer(rng: random.Random) -> Schema:
    least = rng.randint(-500, 500)
    return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 1000)}


def _leaf(rng: random.Random) -> Schema:
    least = round(rng.uniform(-50, 50), 2)
    return rng.choice(
        [
            _integer(rng),
            {"type": "integer", "exclusiveMinimum": -3, "exclusiveMaximum": 3},
            {"type": "number", "minimum": least, "maximum": round(least + rng.uniform(0.5, 90), 2)},
            {"type": "string", "maxLength": rng.randint(0, 12)},
            {"type": "string", "minLength": 2, "maxLength": 6},
            {
                "type": "string",
                "pattern": rng.choice(["^[A-Z]{2}-[0-9]{3}$", "^(yes|no|maybe)$", "^[a-z]{1,6}@[a-z]{2,5}$"]),
            },
            {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])},
            {"enum": rng.sample(["red", "green", 'with "quotes"', "ünï", 7, -1.5, None, True], 3)},
            {"const": rng.choice(["fixed", 0, False, None])},
            {"type": ["boolean", "null"]},
        ]
    )
