"""The plan: ports, cores, peers."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microserving.cluster.addresses import Address, claim_ports, parse_address
from microserving.cluster.config import parse_cluster_config
from microserving.cluster.topology import Topology, describe, plan, share_cpus
from microserving.errors import ConfigError, StartupError


def planned(data: dict[str, Any], cpus: tuple[int, ...] = (0, 1)) -> Topology:
    config = parse_cluster_config(data, "x")
    return plan(config, secret_file=Path("/s"), runtime_dir=Path("/r"), cache_dir=None, cpus=cpus)


PD = {
    "nodes": [
        {"id": "p", "role": "prefill"},
        {"id": "d", "role": "decode"},
        {"id": "h", "role": "hybrid"},
    ],
    "router": {"address": "127.0.0.1:0"},
}


def test_peers_by_role() -> None:
    topology = planned(PD)
    assert topology.router is not None
    p, d, h = (engine.address.url for engine in topology.engines)
    assert topology.router.config.prefill_peers == (p, h)
    assert topology.router.config.decode_peers == (d, h)
    assert topology.router.config.program == "prefill_decode"
    assert topology.public_url == topology.router.address.url
    ports = {engine.config.port for engine in topology.engines} | {topology.router.config.port}
    assert len(ports) == 4
    assert 0 not in ports


def test_only_hybrids_get_round_robin() -> None:
    topology = planned({"nodes": [{"id": "a"}, {"id": "b"}], "router": {"address": "127.0.0.1:0"}})
    assert topology.router is not None
    assert topology.router.config.program == "round_robin"


def test_one_hybrid_has_no_router_unless_the_file_has_one() -> None:
    assert planned({"nodes": [{"id": "a"}]}).router is None
    topology = planned({"nodes": [{"id": "a"}], "router": {"address": "127.0.0.1:0"}})
    assert topology.router is not None


def test_every_engine_gets_the_secret_and_the_runtime_directory() -> None:
    for engine in planned(PD).engines:
        assert engine.config.cluster_secret_file == Path("/s")
        assert engine.config.runtime_dir == Path("/r")


def test_the_router_has_an_admin_socket_in_the_runtime_directory() -> None:
    topology = planned(PD)
    assert topology.router is not None
    assert topology.router.config.admin_socket == Path("/r/admin.sock")


def test_an_admin_port_for_others_needs_a_key() -> None:
    section = {"address": "127.0.0.1:0", "admin_bind": "0.0.0.0", "admin_port": 9}
    with pytest.raises(
        ConfigError, match=r"^router: the admin routes listen on 0\.0\.0\.0 only with admin_key_file"
    ):
        planned(PD | {"router": section})
    topology = planned(PD | {"router": section | {"admin_key_file": "/k"}})
    assert topology.router is not None
    assert topology.router.config.admin_key_file == Path("/k")


def test_router_settings_of_the_file_reach_the_router() -> None:
    data = PD | {"router": {"address": "127.0.0.1:0", "probe_misses": 7, "settings": {"f": 0.1}}}
    topology = planned(data)
    assert topology.router is not None
    assert topology.router.config.probe_misses == 7
    assert topology.router.config.program_settings == {"f": 0.1}


def test_running_requests_have_time_to_finish_where_clients_ask() -> None:
    def times(data: dict[str, Any]) -> list[float]:
        topology = planned(data)
        engines = [node.config.drain_s for node in topology.engines]
        return engines + ([] if topology.router is None else [topology.router.config.shutdown_timeout_s])

    assert times(PD) == [0.0, 0.0, 0.0, 10.0]
    assert times(PD | {"router": {"address": "127.0.0.1:0", "shutdown_timeout_s": 3}})[-1] == 3.0
    assert times({"nodes": [{"id": "a"}]}) == [10.0]
    assert times({"nodes": [{"id": "a"}], "engine": {"shutdown_timeout_s": 2.5}}) == [2.5]


def test_the_router_shows_its_engines_the_key_that_they_want() -> None:
    def shown(data: dict[str, Any]) -> Path | None:
        router = planned(data).router
        assert router is not None
        return router.config.engine_api_key_file

    two = [{"id": "p", "role": "prefill"}, {"id": "d", "role": "decode"}]
    differing = [node | {"engine": {"api_key_file": f"/{node['id']}"}} for node in two]
    named = {"address": "127.0.0.1:0", "engine_api_key_file": "/r"}
    assert shown(PD) is None
    assert shown(PD | {"engine": {"api_key_file": "/k"}}) == Path("/k")
    assert shown(PD | {"nodes": [differing[0], two[1]]}) == Path("/p")
    assert shown(PD | {"nodes": differing, "router": named}) == Path("/r")
    with pytest.raises(ConfigError, match=r"^router\.engine_api_key_file must name .*: theirs are in /d, /p"):
        planned(PD | {"nodes": differing})


@pytest.mark.parametrize(
    ("units", "cores", "shares"),
    [
        ([None, None], 2, [{0}, {1}]),
        ([None, None], 5, [{0, 1, 2}, {3, 4}]),
        ([None], 4, [{0, 1, 2, 3}]),
        ([None, None, None], 2, [{0}, {1}, {0}]),
        ([3, None], 4, [{0, 1, 2}, {3}]),
        ([None, 1], 4, [{0, 1, 2}, {3}]),
        ([2, 2], 2, [{0, 1}, {0, 1}]),
        ([8], 2, [{0, 1}]),
        ([2, None], 2, [{0, 1}, {0}]),
    ],
)
def test_share_cpus(units: list[int | None], cores: int, shares: list[set[int]]) -> None:
    assert share_cpus(units, range(cores)) == [frozenset(share) for share in shares]


@given(
    st.lists(st.none() | st.integers(1, 8), min_size=1, max_size=8),
    st.lists(st.integers(0, 99), min_size=1, max_size=16, unique=True),
)
def test_share_cpus_gives_every_engine_cores_and_shares_only_when_it_must(
    units: list[int | None], cpus: list[int]
) -> None:
    shares = share_cpus(units, cpus)
    assert all(share and share <= set(cpus) for share in shares)
    assert all(
        unit is None or len(share) == min(unit, len(cpus)) for unit, share in zip(units, shares, strict=True)
    )
    if sum(unit or 1 for unit in units) <= len(cpus):
        assert sum(map(len, shares)) == len(frozenset().union(*shares))


def test_threads_asked_for_are_kept_when_there_are_fewer_cores() -> None:
    topology = planned({"nodes": [{"id": "a", "resources": {"compute_units": 3}}]})
    assert topology.engines[0].config.threads == 3
    assert topology.engines[0].cpus == {0, 1}


def pinned(*resources: dict[str, Any], cpus: tuple[int, ...] = (0, 1, 2, 3)) -> list[tuple[set[int], int]]:
    """The cores and the threads of one engine for each of the ``resources``."""
    nodes = [{"id": f"n{i}", "resources": of} for i, of in enumerate(resources)]
    engines = planned({"nodes": nodes}, cpus).engines
    return [(set(engine.cpus), engine.config.threads) for engine in engines]


def test_an_engine_is_pinned_to_the_cores_that_it_names_and_has_as_many_threads() -> None:
    assert pinned({"cpus": "0"}, {"cpus": "1"}) == [({0}, 1), ({1}, 1)]
    assert pinned({"cpus": "1-3, 0"}) == [({0, 1, 2, 3}, 4)]
    assert pinned({"cpus": "0,1", "compute_units": 1}) == [({0, 1}, 1)]


def test_who_names_no_cores_gets_those_that_are_left() -> None:
    assert pinned({}, {"cpus": "0-1"}, {}) == [({2}, 1), ({0, 1}, 2), ({3}, 1)]
    assert pinned({"cpus": "0-3"}, {}) == [({0, 1, 2, 3}, 4), ({0, 1, 2, 3}, 4)]


def test_a_core_that_there_is_not() -> None:
    message = r"^node n0: resources\.cpus names core 1, 7; this process may use 0, 2$"
    with pytest.raises(ConfigError, match=message):
        pinned({"cpus": "0,1,7"}, cpus=(0, 2))


@pytest.mark.case("CF-03")
def test_the_effective_configuration_names_the_origin_of_every_value() -> None:
    data = {"engine": {"chunk_size_tokens": 64}, "nodes": [{"id": "a"}], "router": {"address": "127.0.0.1:0"}}
    lines = describe(parse_cluster_config(data, "x"), planned(data))
    assert "nodes.a.chunk_size_tokens = 64 (given)" in lines
    assert "nodes.a.max_batch_size = 32 (default)" in lines
    assert "nodes.a.threads = 2 (chosen)" in lines
    assert "router.probe_misses = 3 (default)" in lines


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:0", Address("127.0.0.1", 0)),
        ("localhost:65535", Address("localhost", 65535)),
        ("[::1]:80", Address("::1", 80)),
    ],
)
def test_parse_address(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    ["", "x", ":1", "x:", "x:-1", "x:65536", "x:1a", "x:١", "::1:80", "[]:1", "a b:1", "http://x:1", "x\n:1"],
)
def test_parse_address_refuses(text: str) -> None:
    with pytest.raises(ValueError, match=r"host:port|port number|brackets"):
        parse_address(text)


def test_urls() -> None:
    assert Address("0.0.0.0", 1).url == "http://127.0.0.1:1"
    assert Address("::", 1).url == "http://[::1]:1"
    assert Address("::1", 1).url == "http://[::1]:1"


def test_claim_ports_chooses_free_ones_and_never_a_named_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    wanted = {f"n{i}": Address("127.0.0.1", 0) for i in range(20)} | {"fixed": Address("127.0.0.1", free)}
    claimed = claim_ports(wanted)
    assert list(claimed) == list(wanted)
    assert claimed["fixed"].port == free
    assert len({address.port for address in claimed.values()}) == 21


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (Address("192.0.2.1", 0), "node a: 192.0.2.1 is not an address of this machine"),
        (Address("no-such-host.invalid", 0), "node a: the host of no-such-host.invalid:0 is not known"),
    ],
)
def test_an_address_that_cannot_be_used(address: Address, message: str) -> None:
    with pytest.raises(StartupError) as caught:
        claim_ports({"node a": address})
    assert caught.value.message == message


def test_a_port_that_someone_listens_on_is_busy_even_on_the_wildcard() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for host in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(StartupError, match=f"port {port} on {host} is already in use"):
                claim_ports({"router": Address(host, port)})
