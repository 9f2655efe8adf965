"""The cluster's TOML file: frozen, strict at every depth, every fault one line that names file and key.

Knows nothing of processes or ports that are free; ``topology`` makes the plan.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, ValidationError, create_model
from pydantic.fields import FieldInfo

from microserving.cluster.addresses import Address, parse_address
from microserving.engine.config import EngineConfig, NodeRole
from microserving.errors import ConfigError
from microserving.protocol.names import ModelNames
from microserving.router.config import RouterConfig

OWNED_ENGINE_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "model": "model.name",
        "served_model_name": "model.served_model_name",
        "serving_bind": "nodes.address",
        "port": "nodes.address",
        "node_role": "nodes.role",
        "node_id": "nodes.id",
        "rank": "nodes.rank",
        "threads": "nodes.resources.cpus or nodes.resources.compute_units",
        "kv_cache_bytes": "nodes.resources.memory_bytes",
        "cluster_secret_file": "cluster.secret_file",
        "runtime_dir": "no key, it is made for each run",
        "cache_dir": "no key but the flag --cache-dir",
    }
)
"""Fields of ``EngineConfig`` that cannot stand in `[engine]`, each with the key of the file that decides it."""

OWNED_ROUTER_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "program_settings": "router.settings",
        "prefill_peers": "nodes.role",
        "decode_peers": "nodes.role",
        "serving_bind": "router.address",
        "port": "router.address",
        "cluster_secret_file": "cluster.secret_file",
        "admin_socket": "no key, it is made for each run",
    }
)
"""The same for ``RouterConfig`` and `[router]`."""


def _checked_address(text: str) -> str:
    return str(parse_address(text))


def _checked_node_id(text: str) -> str:
    if not _NODE_ID.fullmatch(text):
        raise ValueError(f"{text!r} is not 1 to 128 letters, digits, '.', '_' and '-'")
    return text


def parse_cpus(text: str) -> frozenset[int]:
    """The cores of "0" or "0-3,8" (the form of `taskset -c`). Raises ValueError."""
    cpus: set[int] = set()
    for part in text.split(","):
        match = _CPU_RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise ValueError(f'{text!r} is no list of cores, as in "0" or "0-3,8"')
        cpus.update(range(first, last + 1))
    return frozenset(cpus)


def _checked_cpus(text: str) -> str:
    parse_cpus(text)
    return text


def _checked_setting(value: object) -> Setting:
    if not isinstance(value, (str, int, float, bool)):
        raise ValueError("a setting is a text, a number or true/false")
    return value


Setting = str | int | float | bool
AddressText = Annotated[str, AfterValidator(_checked_address)]
NodeId = Annotated[str, AfterValidator(_checked_node_id)]
CpuList = Annotated[str, AfterValidator(_checked_cpus)]
SettingValue = Annotated[Any, AfterValidator(_checked_setting)]
_NO_NODES = "at least one [[nodes]] is needed"
_CPU_RANGE = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", re.ASCII)
_NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ClusterSection(_Section):
    """`[cluster]`. secret_file: relative to the TOML file; none = a fresh secret for every run."""

    name: str = Field(default="local", min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")
    tensor_parallel_size: int = Field(default=1, ge=1)
    pipeline_parallel_size: int = Field(default=1, ge=1)
    secret_file: str | None = Field(default=None, min_length=1)


class ModelSection(_Section):
    """`[model]`. name: a model of the catalog, a GGUF file or a HF directory."""

    name: str = Field(default=EngineConfig.model_fields["model"].default, min_length=1)
    served_model_name: ModelNames = ()


class RouterSection(_Section):
    """`[router]`. program: a name in `router_programs/` or a file; settings: the program's own typed settings.

    Further keys are fields of ``RouterConfig``, except ``OWNED_ROUTER_FIELDS``.
    """

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    address: AddressText = "127.0.0.1:8000"
    program: str | None = Field(default=None, min_length=1)
    settings: dict[str, SettingValue] = {}


class NodeResources(_Section):
    """`[nodes.resources]`. memory_bytes: size of the KV pool; compute_units: threads of the engine.

    cpus: the cores that the engine is pinned to, as in "0" or "0-3,8"; without it the launcher shares out those that
    nobody names. compute_units, when it is not given, is their number.
    """

    memory_bytes: int | None = Field(default=None, ge=2**20)
    compute_units: int | None = Field(default=None, ge=1, le=1024)
    cpus: CpuList | None = None

    @property
    def pinned_to(self) -> frozenset[int] | None:
        """The cores named by ``cpus``."""
        return None if self.cpus is None else parse_cpus(self.cpus)


class NodeSection(_Section):
    """One of `[[nodes]]`: an engine. Port 0 = any free port. engine: `EngineConfig` fields for this node only."""

    id: NodeId
    address: AddressText = "127.0.0.1:0"
    role: NodeRole = "hybrid"
    rank: int = Field(default=0, ge=0)
    resources: NodeResources = NodeResources()
    engine: dict[str, Any] = {}


class ClusterConfig(_Section):
    """The whole file. engine: `EngineConfig` fields for every node."""

    cluster: ClusterSection = ClusterSection()
    model: ModelSection = ModelSection()
    engine: dict[str, Any] = {}
    router: RouterSection | None = None
    nodes: tuple[NodeSection, ...] = Field(strict=False)

    def engine_settings(self, node: NodeSection) -> dict[str, Any]:
        """What the file says about ``node`` in terms of ``EngineConfig``: defaults are left out."""
        given: dict[str, Any] = {"model": self.model.name, "node_id": node.id, "node_role": node.role}
        optional = {
            "served_model_name": self.model.served_model_name or None,
            "rank": node.rank or None,
            "kv_cache_bytes": node.resources.memory_bytes,
            "threads": node.resources.compute_units,
        }
        given |= {field: value for field, value in optional.items() if value is not None}
        return given | self.engine | node.engine

    def with_overrides(
        self,
        *,
        model: str | None = None,
        port: int | None = None,
        program: str | None = None,
        settings: Mapping[str, Setting] | None = None,
    ) -> ClusterConfig:
        """The same with what the command line says instead. port: where clients send their requests.

        settings: of the program, over those of the file; another ``program`` leaves the file's settings behind.
        """
        config = self
        if model is not None:
            config = config.model_copy(update={"model": ModelSection(name=model)})
        if program is not None:
            config = config._with_router(program=program, settings={})
        if settings:
            given = {} if config.router is None else config.router.settings
            config = config._with_router(settings=given | dict(settings))
        if port is None:
            return config
        if config.router is not None or len(config.nodes) > 1:
            return config._with_router(address=_with_port((config.router or RouterSection()).address, port))
        node = config.nodes[0]
        moved = node.model_copy(update={"address": _with_port(node.address, port)})
        return config.model_copy(update={"nodes": (moved,)})

    def _with_router(self, **changes: Any) -> ClusterConfig:
        return self.model_copy(update={"router": (self.router or RouterSection()).model_copy(update=changes)})


def _with_port(address: str, port: int) -> str:
    return str(Address(parse_address(address).host, port))


def _part_of(model: type[BaseModel], name: str, without: Collection[str]) -> type[BaseModel]:
    """A strict model of the fields of ``model`` that are not in ``without``. A path is a text, as TOML has no other."""
    fields: dict[str, Any] = {
        key: (Annotated[field.annotation, Strict(False)] if _is_path(field) else field.annotation, field)
        for key, field in model.model_fields.items()
        if key not in without
    }
    part: type[BaseModel] = create_model(name, __base__=_Section, **fields)
    return part


def _is_path(field: FieldInfo) -> bool:
    return Path in (field.annotation, *get_args(field.annotation))


_EngineSettings = _part_of(EngineConfig, "_EngineSettings", OWNED_ENGINE_FIELDS)
_RouterSettings = _part_of(RouterConfig, "_RouterSettings", {*OWNED_ROUTER_FIELDS, "program"})


_PATHS = frozenset(
    key
    for part in (_EngineSettings, _RouterSettings)
    for key, field in part.model_fields.items()
    if _is_path(field)
)
"""Keys of `[engine]` and `[router]` whose value names a file or a directory."""


def load_cluster_config(path: Path) -> ClusterConfig:
    """Read and check the file. Raises ConfigError with one line."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8") from error
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    return _located(parse_cluster_config(data, str(path)), path.parent)


def _located(config: ClusterConfig, directory: Path) -> ClusterConfig:
    """The same with the file names in it resolved against the file's directory."""
    cluster, model, router = config.cluster, config.model, config.router
    if cluster.secret_file is not None:
        path = directory / Path(cluster.secret_file).expanduser()
        cluster = cluster.model_copy(update={"secret_file": str(path)})
    if (directory / model.name).exists():
        model = model.model_copy(update={"name": str(directory / model.name)})
    if router is not None and router.program is not None and router.program.endswith(".py"):
        router = router.model_copy(update={"program": str(directory / router.program)})
    if router is not None:
        router = router.model_copy(update=_placed(router.model_extra or {}, directory))
    engine = config.engine | _placed(config.engine, directory)
    nodes = tuple(
        node.model_copy(update={"engine": node.engine | _placed(node.engine, directory)})
        for node in config.nodes
    )
    sections = {"cluster": cluster, "model": model, "engine": engine, "router": router, "nodes": nodes}
    return config.model_copy(update=sections)


def _placed(settings: Mapping[str, Any], directory: Path) -> dict[str, str]:
    """The paths in ``settings``, relative to ``directory``."""
    return {
        key: str(directory / Path(path).expanduser())
        for key, path in settings.items()
        if key in _PATHS and path is not None
    }


def parse_cluster_config(data: Mapping[str, Any], source: str) -> ClusterConfig:
    """Check what a TOML file held. source: how messages call the file. Raises ConfigError with one line."""
    config: ClusterConfig = _validated(ClusterConfig, data, source, "")
    if config.router is not None:
        _validated(_RouterSettings, config.router.model_extra or {}, source, "router")
    _validated(_EngineSettings, config.engine, source, "engine")
    for index, node in enumerate(config.nodes):
        _validated(_EngineSettings, node.engine, source, f"nodes[{index}].engine")
    try:
        _check_whole(config)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from error
    return config


def _check_whole(config: ClusterConfig) -> None:
    """The rules that span several keys. Raises ValueError."""
    for key in ("tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(config.cluster, key) != 1:
            raise ValueError(f"cluster.{key}: only 1 is supported so far")
    if not config.nodes:
        raise ValueError(f"nodes: {_NO_NODES}")
    _check_unique("id", [node.id for node in config.nodes])
    fixed = [node.address for node in config.nodes if parse_address(node.address).port != 0]
    if config.router is not None:
        fixed.append(config.router.address)
    _check_unique("address", fixed)
    roles = Counter(node.role for node in config.nodes)
    if not roles["hybrid"] and not (roles["prefill"] and roles["decode"]):
        missing = "decode" if roles["prefill"] else "prefill"
        raise ValueError(f"nodes: there is no {missing} engine (and no hybrid one)")


def _check_unique(key: str, values: Sequence[str]) -> None:
    for value, count in Counter(values).items():
        if count > 1:
            raise ValueError(f"nodes: {key} {value!r} is there {count} times; each must be unique")


def _validated(model: type[BaseModel], data: Mapping[str, Any], source: str, prefix: str) -> Any:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_one_line(error, source, prefix)) from error


def _one_line(error: ValidationError, source: str, prefix: str) -> str:
    """The first fault, and how many more there are."""
    faults = error.errors(include_url=False, include_context=False)
    first = faults[0]
    key = _key_path(prefix, first["loc"])
    if first["type"] == "extra_forbidden":
        message = "unknown key" + _suggestion(str(first["loc"][-1]), prefix)
    elif first["type"] == "missing":
        message = _NO_NODES if key == "nodes" else "this key is missing"
    elif first["type"] == "tuple_type":
        message = f"write each of them as a table [[{key}]]"
    else:
        message = first["msg"].removeprefix("Value error, ")
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return f"{source}: {key}: {message}{more}"


def _key_path(prefix: str, location: Sequence[str | int]) -> str:
    path = prefix
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path


def _suggestion(key: str, prefix: str) -> str:
    owned: Mapping[str, str] = (
        OWNED_ROUTER_FIELDS if prefix == "router" else OWNED_ENGINE_FIELDS if prefix else {}
    )
    if key in owned:
        return f" here: it is decided by {owned[key]}"
    near = difflib.get_close_matches(key, sorted({*_all_keys(), *owned}), n=1)
    if not near or near[0] == key:
        return ""
    decided = f", which is decided by {owned[near[0]]}" if near[0] in owned else ""
    return f" (did you mean {near[0]!r}{decided}?)"


def _all_keys() -> set[str]:
    sections = (ClusterConfig, ClusterSection, ModelSection, RouterSection, NodeSection, NodeResources)
    keys = {key for section in sections for key in section.model_fields}
    return keys | set(_EngineSettings.model_fields) | set(_RouterSettings.model_fields)
