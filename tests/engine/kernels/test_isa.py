"""The instruction set: found from the CPU's flags, or named by the environment."""

from __future__ import annotations

import pytest

from microserving.engine.kernels.isa import ISA_VARIABLE, _best_isa, detect_isa, make_isa
from microserving.errors import ConfigError

AVX2 = {"avx2", "fma", "f16c", "bmi2"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (AVX512, "avx512"),
        (AVX512 - {"avx512vl"}, "avx2"),
        (AVX2, "avx2"),
        (AVX2 - {"f16c"}, "generic"),
        (AVX512 - {"fma"}, "generic"),
        (set(), "generic"),
    ],
)
def test_all_instructions_of_a_set_must_be_there(flags: set[str], name: str) -> None:
    assert _best_isa(frozenset(flags)) == name


@pytest.mark.parametrize("name", ["avx512", "avx2", "generic"])
def test_the_environment_names_the_isa(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, name)
    assert detect_isa().name == name


def test_an_unknown_isa_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "avx1024")
    with pytest.raises(ConfigError, match="avx512, avx2, generic") as caught:
        detect_isa()
    assert caught.value.param == ISA_VARIABLE


def test_optional_instructions_become_target_features() -> None:
    assert make_isa("avx512", frozenset({"avx512_vnni"})).target == {
        "kind": "llvm",
        "mcpu": "x86-64-v4",
        "mattr": ["+avx512vnni"],
    }
    assert make_isa("avx2").target == {"kind": "llvm", "mcpu": "x86-64-v3"}
    assert make_isa("generic").target == {"kind": "llvm"}


def test_half_pages_need_half_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    make_isa("avx2").check_kv_dtype("float16")
    make_isa("generic").check_kv_dtype("float32")
    with pytest.raises(ConfigError, match="float32") as caught:
        make_isa("generic").check_kv_dtype("float16")
    assert caught.value.param == "kv_dtype"
