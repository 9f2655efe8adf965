"""The cluster file: what it says, and the one line for every fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from microserving.cli.up import DEFAULT_CLUSTER
from microserving.cluster.config import (
    OWNED_ENGINE_FIELDS,
    OWNED_ROUTER_FIELDS,
    load_cluster_config,
    parse_cluster_config,
)
from microserving.engine.config import EngineConfig
from microserving.errors import ConfigError
from microserving.router.config import RouterConfig

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
ONE = {"nodes": [{"id": "a"}]}


def fault(data: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_cluster_config(data, "my.toml")
    assert "\n" not in caught.value.message
    return caught.value.message


def node(**keys: Any) -> dict[str, Any]:
    return {"nodes": [{"id": "a"} | keys]}


@pytest.mark.case("CF-03")
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (ONE | {"ruoter": {}}, "my.toml: ruoter: unknown key (did you mean 'router'?)"),
        (ONE | {"cluster": {"nmae": "x"}}, "my.toml: cluster.nmae: unknown key (did you mean 'name'?)"),
        (ONE | {"model": {"path": "x"}}, "my.toml: model.path: unknown key"),
        (ONE | {"router": {"adress": "x:1"}}, "my.toml: router.adress: unknown key (did you mean 'address'?)"),
        (ONE | {"router": {"probe_missed": 1}}, "my.toml: router.probe_missed: unknown key (did you mean 'probe_misses'?)"),
        (ONE | {"router": {"admin_socket": "/s"}}, "my.toml: router.admin_socket: unknown key here: it is decided by no key, it is made for each run"),
        (ONE | {"router": {"port": 1}}, "my.toml: router.port: unknown key here: it is decided by router.address"),
        (node(rolle="prefill"), "my.toml: nodes[0].rolle: unknown key (did you mean 'role'?)"),
        (node(resources={"memory": 1}), "my.toml: nodes[0].resources.memory: unknown key (did you mean 'memory_bytes'?)"),
        (node(engine={"kvcache_pages": 9}), "my.toml: nodes[0].engine.kvcache_pages: unknown key (did you mean 'kv_cache_bytes', which is decided by nodes.resources.memory_bytes?)"),
        (node(engine={"zzz": 9}), "my.toml: nodes[0].engine.zzz: unknown key"),
        (ONE | {"engine": {"threds": 2}}, "my.toml: engine.threds: unknown key (did you mean 'threads', which is decided by nodes.resources.cpus or nodes.resources.compute_units?)"),
        (node(engine={"chunk_size_token": 9}), "my.toml: nodes[0].engine.chunk_size_token: unknown key (did you mean 'chunk_size_tokens'?)"),
        (ONE | {"engine": {"kv_dtyp": "float16"}}, "my.toml: engine.kv_dtyp: unknown key (did you mean 'kv_dtype'?)"),
        (ONE | {"engine": {"node_id": "b"}}, "my.toml: engine.node_id: unknown key here: it is decided by nodes.id"),
    ],
)  # fmt: skip
def test_an_unknown_key_is_refused_at_every_depth(data: dict[str, Any], message: str) -> None:
    assert fault(data) == message


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "my.toml: nodes: at least one [[nodes]] is needed"),
        ({"nodes": []}, "my.toml: nodes: at least one [[nodes]] is needed"),
        ({"nodes": {"id": "a"}}, "my.toml: nodes: write each of them as a table [[nodes]]"),
        ({"nodes": [{}]}, "my.toml: nodes[0].id: this key is missing"),
        ({"nodes": [{"id": "a"}, {"id": "a"}]}, "my.toml: nodes: id 'a' is there 2 times; each must be unique"),
        (
            {"nodes": [{"id": "a", "address": "h:1"}, {"id": "b", "address": "h:1"}]},
            "my.toml: nodes: address 'h:1' is there 2 times; each must be unique",
        ),
        (
            {"nodes": [{"id": "a", "address": "h:1"}], "router": {"address": "h:1"}},
            "my.toml: nodes: address 'h:1' is there 2 times; each must be unique",
        ),
        (node(role="prefill"), "my.toml: nodes: there is no decode engine (and no hybrid one)"),
        (node(role="decode"), "my.toml: nodes: there is no prefill engine (and no hybrid one)"),
        (node(resources={"cpus": "1-0"}), """my.toml: nodes[0].resources.cpus: '1-0' is no list of cores, as in "0" or "0-3,8\""""),
        (node(resources={"cpus": "all"}), """my.toml: nodes[0].resources.cpus: 'all' is no list of cores, as in "0" or "0-3,8\""""),
        (node(resources={"cpus": ""}), """my.toml: nodes[0].resources.cpus: '' is no list of cores, as in "0" or "0-3,8\""""),
        (node(resources={"cpus": 0}), "my.toml: nodes[0].resources.cpus: Input should be a valid string"),
        (node(role="router"), "my.toml: nodes[0].role: Input should be 'hybrid', 'prefill' or 'decode'"),
        (node(rank=-1), "my.toml: nodes[0].rank: Input should be greater than or equal to 0"),
        (node(rank="0"), "my.toml: nodes[0].rank: Input should be a valid integer"),
        (node(address="8000"), "my.toml: nodes[0].address: '8000' is not host:port"),
        (node(resources={"memory_bytes": 7}), "my.toml: nodes[0].resources.memory_bytes: Input should be greater than or equal to 1048576"),
        (node(resources={"compute_units": 0}), "my.toml: nodes[0].resources.compute_units: Input should be greater than or equal to 1"),
        (node(engine={"page_size": 17}), "my.toml: nodes[0].engine.page_size: Input should be 16, 32 or 64"),
        (node(engine={"lease_ttl_s": "30s"}), "my.toml: nodes[0].engine.lease_ttl_s: Input should be a valid number"),
        (node(engine={"lease_ttl_s": 0}), "my.toml: nodes[0].engine.lease_ttl_s: Input should be greater than 0"),
        (ONE | {"engine": {"strict_fields": 1}}, "my.toml: engine.strict_fields: Input should be a valid boolean"),
        (ONE | {"cluster": {"tensor_parallel_size": 2}}, "my.toml: cluster.tensor_parallel_size: only 1 is supported so far"),
        (ONE | {"cluster": {"pipeline_parallel_size": 2}}, "my.toml: cluster.pipeline_parallel_size: only 1 is supported so far"),
        (ONE | {"cluster": {"name": "a\x07"}}, r"my.toml: cluster.name: String should match pattern '^[^\x00-\x1f\x7f-\x9f]+$'"),
        (ONE | {"cluster": {"name": "a" * 129}}, "my.toml: cluster.name: String should have at most 128 characters"),
        (ONE | {"router": {"settings": {"f": [1]}}}, "my.toml: router.settings.f: a setting is a text, a number or true/false"),
        (ONE | {"cluster": {"name": 1, "secret_file": 2}}, "my.toml: cluster.name: Input should be a valid string (and 1 more)"),
    ],
)  # fmt: skip
def test_a_fault_is_one_line_with_its_key(data: dict[str, Any], message: str) -> None:
    assert fault(data) == message


@pytest.mark.parametrize("bad", ["", "a" * 129, "a b", "a\n", "a\x00", "-a", "é", "a/b"])
def test_a_bad_node_id(bad: str) -> None:
    assert fault({"nodes": [{"id": bad}]}).startswith("my.toml: nodes[0].id: ")


def test_the_longest_node_id_and_name() -> None:
    config = parse_cluster_config({"nodes": [{"id": "a" * 128}], "cluster": {"name": "é" * 128}}, "x")
    assert config.nodes[0].id == "a" * 128
    assert config.cluster.name == "é" * 128


def test_several_nodes_may_have_port_0() -> None:
    config = parse_cluster_config({"nodes": [{"id": "a"}, {"id": "b"}]}, "x")
    assert [n.address for n in config.nodes] == ["127.0.0.1:0", "127.0.0.1:0"]


def test_node_settings_stand_over_engine_settings() -> None:
    data = {
        "model": {"name": "m", "served_model_name": "s"},
        "engine": {"kv_dtype": "float32", "chunk_size_tokens": 64},
        "nodes": [
            {"id": "a", "engine": {"chunk_size_tokens": 128}},
            {"id": "b", "rank": 1, "resources": {"memory_bytes": 2**20, "compute_units": 3}},
        ],
    }
    config = parse_cluster_config(data, "x")
    common = {"model": "m", "served_model_name": ("s",), "node_role": "hybrid", "kv_dtype": "float32"}
    assert config.engine_settings(config.nodes[0]) == common | {"node_id": "a", "chunk_size_tokens": 128}
    assert config.engine_settings(config.nodes[1]) == common | {
        "node_id": "b",
        "chunk_size_tokens": 64,
        "rank": 1,
        "kv_cache_bytes": 2**20,
        "threads": 3,
    }


def test_the_owned_fields_are_fields() -> None:
    assert set(EngineConfig.model_fields) >= set(OWNED_ENGINE_FIELDS)
    assert set(RouterConfig.model_fields) >= set(OWNED_ROUTER_FIELDS)


def test_overrides() -> None:
    two = parse_cluster_config(DEFAULT_CLUSTER, "x").with_overrides(model="m", port=9, program="p")
    assert two.model.name == "m"
    assert two.router is not None
    assert (two.router.address, two.router.program) == ("127.0.0.1:9", "p")
    one = parse_cluster_config(node(address="[::1]:8000"), "x").with_overrides(port=9)
    assert one.router is None
    assert one.nodes[0].address == "[::1]:9"


def test_settings_of_the_command_line_stand_over_those_of_the_file() -> None:
    file = DEFAULT_CLUSTER | {"router": {"program": "p", "settings": {"a": 1, "b": 2}}}
    config = parse_cluster_config(file, "x")

    def settings(**overrides: Any) -> dict[str, Any]:
        router = config.with_overrides(**overrides).router
        assert router is not None
        return router.settings

    assert settings() == {"a": 1, "b": 2}
    assert settings(settings={"b": 0.3, "c": "x"}) == {"a": 1, "b": 0.3, "c": "x"}
    assert settings(program="other") == {}
    assert settings(program="other", settings={"c": True}) == {"c": True}


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*no\.toml: No such file or directory"):
        load_cluster_config(tmp_path / "no.toml")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"a = ", "not TOML: Invalid value"), (b"\xff", "not a text file in UTF-8"), (b"a=1\nb=\n", "line 2")],
)
def test_a_file_that_is_not_toml(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_cluster_config(path)
    assert str(path) in caught.value.message
    assert message in caught.value.message


def test_file_names_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    (tmp_path / "x.toml").write_text(
        'cluster.secret_file = "s"\nmodel.name = "m.gguf"\nrouter.program = "../p.py"\n'
        'router.admin_key_file = "k"\nnodes = [{ id = "a" }]\n'
    )
    config = load_cluster_config(tmp_path / "x.toml")
    assert config.cluster.secret_file == str(tmp_path / "s")
    assert config.model.name == str(tmp_path / "m.gguf")
    assert config.router is not None
    assert config.router.program == str(tmp_path / "../p.py")
    assert config.router.model_extra == {"admin_key_file": str(tmp_path / "k")}


def test_every_path_of_a_process_may_stand_in_the_file(tmp_path: Path) -> None:
    """Each is a text there, relative to the file as the others."""
    engine = path_fields(EngineConfig) - set(OWNED_ENGINE_FIELDS)
    router = path_fields(RouterConfig) - set(OWNED_ROUTER_FIELDS)
    assert "api_key_file" in engine
    assert "tokenizer_dir" in router
    tables = [("engine", engine), ("router", router), ("nodes.engine", engine)]
    text = ['[[nodes]]\nid = "a"']
    text += [f"[{name}]\n" + "\n".join(f'{key} = "sub/{key}"' for key in keys) for name, keys in tables]
    (tmp_path / "x.toml").write_text("\n".join(text))
    config = load_cluster_config(tmp_path / "x.toml")
    assert config.router is not None
    for section, keys in (
        (config.engine, engine),
        (config.nodes[0].engine, engine),
        (config.router.model_extra, router),
    ):
        assert section == {key: str(tmp_path / "sub" / key) for key in keys}
    assert "engine.api_key_file" in fault(ONE | {"engine": {"api_key_file": 7}})


def path_fields(model: type[BaseModel]) -> set[str]:
    return {name for name, field in model.model_fields.items() if "Path" in str(field.annotation)}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_the_shipped_files_are_good(path: Path) -> None:
    config = load_cluster_config(path)
    public = config.router.address if config.router is not None else config.nodes[0].address
    assert public == "127.0.0.1:8000"


@pytest.mark.case("CF-05")
def test_the_default_cluster_is_1p1d() -> None:
    assert parse_cluster_config(DEFAULT_CLUSTER, "x") == load_cluster_config(CONFIGS / "1p1d.toml")
