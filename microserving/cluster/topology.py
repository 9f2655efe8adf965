"""The plan made from a cluster's file: which process listens where, on which cores, with which settings.

Pure but for ``claim_ports`` (it looks which ports are free). Starts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from microserving.cluster.addresses import Address, claim_ports, parse_address
from microserving.cluster.config import ClusterConfig, NodeSection, RouterSection
from microserving.cluster.runtime_dir import ADMIN_SOCKET, PROGRAM_STATE
from microserving.engine.config import DRAIN_S, EngineConfig
from microserving.errors import ConfigError
from microserving.router.config import RouterConfig


@dataclass(frozen=True, slots=True)
class EngineNode:
    """One engine process. cpus: the cores it is pinned to."""

    config: EngineConfig
    address: Address
    cpus: frozenset[int]


@dataclass(frozen=True, slots=True)
class RouterNode:
    """The router process. Peers are URLs; a hybrid engine is a peer of both kinds."""

    config: RouterConfig
    address: Address


@dataclass(frozen=True, slots=True)
class Topology:
    """What runs. Without a router the only engine is what clients talk to."""

    name: str
    model: str
    engines: tuple[EngineNode, ...]
    router: RouterNode | None

    @property
    def public_url(self) -> str:
        """Where clients send their requests."""
        front = self.router if self.router is not None else self.engines[0]
        return front.address.url

    @property
    def api_key_file(self) -> Path | None:
        """Where the keys of clients are, if they need one."""
        front = self.router if self.router is not None else self.engines[0]
        return front.config.api_key_file

    @property
    def served_model_name(self) -> str | None:
        """The first name that the file gives the model, if it gives one."""
        return next(iter(self.engines[0].config.served_model_name), None)


def plan(
    config: ClusterConfig,
    *,
    secret_file: Path,
    runtime_dir: Path,
    cache_dir: Path | None,
    cpus: Sequence[int],
) -> Topology:
    """Choose ports and cores. cpus: the cores to share out. Raises StartupError when a port is busy, ConfigError."""
    router = _router_section(config)
    wanted = {f"node {node.id}": parse_address(node.address) for node in config.nodes}
    if router is not None:
        wanted["router"] = parse_address(router.address)
    addresses = claim_ports(wanted)
    shares = _cpu_shares(config.nodes, cpus)
    common = {"cluster_secret_file": secret_file, "runtime_dir": runtime_dir}
    # Behind a router nothing runs on an engine that the cluster tells to stop.
    behind: dict[str, Any] = {} if router is None else {"shutdown_timeout_s": 0.0}
    if cache_dir is not None:
        common["cache_dir"] = cache_dir
    engines = tuple(
        _engine_node(behind | config.engine_settings(node) | common, addresses[f"node {node.id}"], share)
        for node, share in zip(config.nodes, shares, strict=True)
    )
    return Topology(
        name=config.cluster.name,
        model=config.model.name,
        engines=engines,
        router=None if router is None else _router_node(router, addresses["router"], engines, common),
    )


def share_cpus(units: Sequence[int | None], cpus: Sequence[int]) -> list[frozenset[int]]:
    """Cores for each engine: as many as its compute units, or an even part of what the others leave (at least one).

    When more are wanted than there are, engines share: the cores are dealt out in turn, over and over.
    """
    unset = sum(1 for unit in units if unit is None)
    left = max(len(cpus) - sum(unit or 0 for unit in units), 0)
    shares: list[frozenset[int]] = []
    dealt = 0
    unset_dealt = 0
    for unit in units:
        if unit is None:
            count = max(left // unset + (unset_dealt < left % unset), 1)
            unset_dealt += 1
        else:
            count = min(unit, len(cpus))
        shares.append(frozenset(cpus[(dealt + i) % len(cpus)] for i in range(count)))
        dealt += count
    return shares


def _cpu_shares(nodes: Sequence[NodeSection], cpus: Sequence[int]) -> list[frozenset[int]]:
    """Cores for each engine: those that it names; the others share what nobody names (all, when nothing is left)."""
    named: set[int] = set()
    for node in nodes:
        pinned = node.resources.pinned_to or frozenset()
        if unknown := pinned - set(cpus):
            raise ConfigError(
                f"node {node.id}: resources.cpus names core {_shown(unknown)}; this process may use {_shown(cpus)}"
            )
        named |= pinned
    free = [cpu for cpu in cpus if cpu not in named] or cpus
    unpinned = [node for node in nodes if node.resources.pinned_to is None]
    shares = iter(share_cpus([node.resources.compute_units for node in unpinned], free))
    return [node.resources.pinned_to or next(shares) for node in nodes]


def _shown(cpus: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(cpus)))


def _router_section(config: ClusterConfig) -> RouterSection | None:
    """One hybrid engine needs no router; everything else gets one."""
    if config.router is None and len(config.nodes) > 1:
        return RouterSection()
    return config.router


def _engine_node(settings: dict[str, Any], address: Address, cpus: frozenset[int]) -> EngineNode:
    placed = {"serving_bind": address.host, "port": address.port, "threads": len(cpus)}
    return EngineNode(EngineConfig.model_validate(placed | settings), address, cpus)


def _router_node(
    section: RouterSection, address: Address, engines: Sequence[EngineNode], common: Mapping[str, Path]
) -> RouterNode:
    """common: what all processes share."""
    disaggregated = any(engine.config.node_role == "prefill" for engine in engines)
    given = section.model_extra or {}
    settings = {
        "program": section.program or ("prefill_decode" if disaggregated else "round_robin"),
        "program_settings": section.settings,
        "prefill_peers": _peers(engines, "prefill"),
        "decode_peers": _peers(engines, "decode"),
        "serving_bind": address.host,
        "port": address.port,
        "cluster_secret_file": common["cluster_secret_file"],
        "admin_socket": common["runtime_dir"] / ADMIN_SOCKET,
        "program_state_file": common["runtime_dir"] / PROGRAM_STATE,
        "shutdown_timeout_s": DRAIN_S,
    }
    if given.get("engine_api_key_file") is None and (key_file := _engine_key_file(engines)) is not None:
        settings["engine_api_key_file"] = key_file
    try:
        return RouterNode(RouterConfig.model_validate(settings | given), address)
    except ValidationError as error:  # a rule that spans several keys; each by itself was checked before
        message = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(f"router: {message}") from error


def _engine_key_file(engines: Sequence[EngineNode]) -> Path | None:
    """Whose first key the router shows its engines. Raises ConfigError when the file does not tell which."""
    files = {engine.config.api_key_file for engine in engines} - {None}
    if len(files) > 1:
        named = ", ".join(sorted(map(str, files)))
        raise ConfigError(
            f"router.engine_api_key_file must name the key that all engines take: theirs are in {named}"
        )
    return next(iter(files), None)


def _peers(engines: Sequence[EngineNode], role: str) -> tuple[str, ...]:
    return tuple(engine.address.url for engine in engines if engine.config.node_role in (role, "hybrid"))


def describe(config: ClusterConfig, topology: Topology) -> list[str]:
    """The effective configuration, one `key = value (origin)` a line."""
    lines = [f"cluster.name = {topology.name!r}", f"model.name = {topology.model!r}"]
    if topology.router is not None:
        given = set((config.router or RouterSection()).model_fields_set)
        lines += _describe(topology.router.config, "router", given | {"program_settings"})
    for node, engine in zip(config.nodes, topology.engines, strict=True):
        lines += _describe(engine.config, f"nodes.{node.id}", set(config.engine_settings(node)))
    return lines


def _describe(settings: BaseModel, prefix: str, given: set[str]) -> list[str]:
    """origin: given (by the file or a flag), chosen by the plan, or the default."""
    lines = []
    for field in type(settings).model_fields:
        value = getattr(settings, field)
        chosen = "chosen" if field in settings.model_fields_set else "default"
        shown = str(value) if isinstance(value, Path) else value
        lines.append(f"{prefix}.{field} = {shown!r} ({'given' if field in given else chosen})")
    return lines
