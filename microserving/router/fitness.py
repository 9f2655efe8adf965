"""Whether engines can work together: pure rules over what each tells of itself (`/microserving/info`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from microserving.protocol.microserving import EngineInfo

_SAME = ("protocol_version", "model_hash", "kv_layout_hash", "kv_bytes_per_token", "page_size")


def conflict(info: EngineInfo, others: Mapping[str, EngineInfo]) -> str | None:
    """Why an engine cannot work with the others (label -> what it is), for operators. None when it can.

    Of engines that know only the verbs nothing is known: they fit.
    """
    for label, known in others.items():
        if not (known.model_hash and info.model_hash):
            continue
        if known.engine_id == info.engine_id:
            return f"its node id {info.engine_id!r} is that of {label} too"
        if differences := [*_differences(info, known), *_secrets(info, known)]:
            return f"{info.engine_id} does not fit {known.engine_id}: {', '.join(differences)}"
    return None


def out_of_reach(info: EngineInfo, others: Iterable[EngineInfo]) -> tuple[str, str] | None:
    """(the engines that it can give KV by no transport, what to do); None when it reaches all.

    No conflict: a program need not hand anything off.
    """
    far = [other.engine_id for other in others if _apart(info, other)]
    return (", ".join(far), "give all engines of a host the same --runtime-dir") if far else None


def _differences(info: EngineInfo, known: EngineInfo) -> list[str]:
    """Both values of each."""
    pairs = [(name, getattr(info, name), getattr(known, name)) for name in _SAME]
    return [f"{name} {ours} vs {theirs}" for name, ours, theirs in pairs if ours != theirs]


def _secrets(info: EngineInfo, known: EngineInfo) -> list[str]:
    """Never a value: what one signed the other refuses."""
    ours, theirs = info.cluster_secret_id, known.cluster_secret_id
    if ours == theirs or ours is None or theirs is None:
        return []
    if not ours:
        return ["it has no cluster secret, the other has one"]
    return ["its cluster secret is another one" if theirs else "it has a cluster secret, the other has none"]


def _apart(info: EngineInfo, other: EngineInfo) -> bool:
    """Whether both tell what they can be reached by, and no transport is common to them."""
    if not (info.transports and other.transports):
        return False
    return not any(
        name in other.transports and told.get("domain") == other.transports[name].get("domain")
        for name, told in info.transports.items()
    )
