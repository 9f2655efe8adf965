from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import Field

from microserving.errors import ProgramError
from microserving.program import Chunks, Cluster, Fraction, Program, Request, setting_types


class _Base(Program):
    pd_balance_factor: Fraction = 0.1

    async def route(self, request: Request, cluster: Cluster) -> Chunks:
        for chunk in ():
            yield chunk


class _Example(_Base):
    plain: float = 0.25
    policy: Literal["least_loaded", "round_robin"] = "least_loaded"
    names: list[str] = []  # noqa: RUF012 - copied for every instance
    tries: Annotated[int, Field(ge=1)] = 2
    verbose: bool = False
    factor: Fraction | Literal["auto"] = "auto"
    limit: ClassVar[int] = 7
    _private: int = 3


def test_defaults_and_inheritance() -> None:
    program = _Example()
    assert (program.pd_balance_factor, program.plain, program.policy, program.tries) == (
        0.1,
        0.25,
        "least_loaded",
        2,
    )
    assert list(setting_types(_Example)) == [
        "pd_balance_factor",
        "plain",
        "policy",
        "names",
        "tries",
        "verbose",
        "factor",
    ]


def test_values_are_set_and_converted() -> None:
    program = _Example(plain="0.5", tries="3", verbose="true", pd_balance_factor=1)
    assert (program.plain, program.tries, program.verbose, program.pd_balance_factor) == (0.5, 3, True, 1.0)


@pytest.mark.parametrize(("given", "value"), [("auto", "auto"), ("0.3", 0.3), (0, 0.0), (1, 1.0)])
def test_a_number_or_a_word(given: object, value: object) -> None:
    assert _Example(factor=given).factor == value


def test_a_wrong_union_tells_of_all_its_members() -> None:
    with pytest.raises(ProgramError, match=r"a valid number.* / Input should be 'auto'"):
        _Example(factor="fast")


def test_a_mutable_default_is_not_shared() -> None:
    _Example().names.append("x")
    assert _Example().names == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pd_balance_factor", 1.5),
        ("pd_balance_factor", -0.1),
        ("pd_balance_factor", float("nan")),
        ("pd_balance_factor", "much"),
        ("pd_balance_factor", True),
        ("pd_balance_factor", None),
        ("tries", 0),
        ("tries", 1.5),
        ("tries", False),
        ("policy", "fastest"),
        ("names", "one"),
        ("verbose", 3),
        ("factor", 1.5),
        ("factor", True),
    ],
)
@pytest.mark.case("PD-29")
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ProgramError, match=f"setting {name!r} is wrong: .*got {value!r}") as caught:
        _Example(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("name", ["pd_balance_facter", "limit", "_private", "route"])
def test_an_unknown_setting_is_refused_by_name(name: str) -> None:
    with pytest.raises(
        ProgramError, match=rf"has no setting {name!r} \(settings: pd_balance_factor, "
    ) as caught:
        _Example(**{name: 1})
    assert caught.value.param == name


def test_a_wrong_default_is_found() -> None:
    class Wrong(_Base):
        tries: int = "many"  # type: ignore[assignment]

    with pytest.raises(ProgramError, match="default of setting 'tries' is wrong"):
        Wrong()


def test_a_setting_without_default_must_be_given() -> None:
    class Needs(_Base):
        target: str

    with pytest.raises(ProgramError, match="setting 'target' must be given"):
        Needs()
    assert Needs(target="x").target == "x"


def test_a_type_that_cannot_be_checked() -> None:
    class Opaque:
        pass

    class Odd(_Base):
        thing: Opaque = Opaque()

    Odd.__annotations__["thing"] = Opaque
    with pytest.raises(ProgramError, match="setting 'thing' cannot have this type"):
        Odd()


def test_an_annotation_that_does_not_exist() -> None:
    class Missing(_Base):
        thing: Nowhere = 1  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(ProgramError, match=r"Missing: an annotation is wrong: .*Nowhere"):
        Missing()
