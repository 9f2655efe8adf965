"""What was deployed, in a file: a router that is started again goes on with it.

The last decision counts. A deployment stands until the configuration names another program, or other settings, than it
did then; a rollback to the configured program ends it as well, and the file goes. A file that is broken, or that others
may write (its text is executed), is told of and ignored. Does not know who deploys (``program_host`` says what changed).
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from microserving.errors import ConfigError, ProgramError
from microserving.router.config import Setting
from microserving.router.program_host import ProgramHost, Version
from microserving.router.program_loader import MAX_PROGRAM_BYTES, load_source, read_program, source_of

_logger = logging.getLogger(__name__)
_MAX_FILE_BYTES = 64 * MAX_PROGRAM_BYTES
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class _Configured(_Part):
    """What the configuration said when the program was deployed. program: an absolute path, or a shipped one's name."""

    program: str
    settings: dict[str, Setting]


class _Kept(_Part):
    """One version, with the settings that it was deployed with. source: its text; None for a shipped one, of which another
    release may bring another text."""

    version: int = Field(ge=1)
    since: float
    path: str = Field(min_length=1)
    source: str | None
    settings: dict[str, Setting]

    def load(self) -> Version:
        """Raises ProgramError."""
        if self.source is None:
            source = read_program(self.path)
        else:
            source = source_of(Path(self.path), self.source.encode("utf-8"))
        return Version(self.version, load_source(source, self.settings), since=self.since)


class _State(_Part):
    """The file. last_version: the highest number that was given. versions: the oldest first; the last one is in charge."""

    format: Literal[1] = 1
    configured: _Configured
    last_version: int
    versions: tuple[_Kept, ...] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class Recalled:
    """For ``ProgramHost.resume``."""

    versions: tuple[Version, ...]
    last_number: int


class ProgramMemory:
    """path: None = nothing is remembered. program, settings: the configuration's. Raises ConfigError when there is no
    directory for the file."""

    def __init__(self, path: Path | None, program: str, settings: Mapping[str, Setting]) -> None:
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"cannot keep the program's state in {path}: there is no such directory")
        self._path = path
        self._configured = _Configured(program=_named(program), settings=dict(settings))

    def recall(self) -> Recalled | None:
        """What was deployed; None when the configured program is to be in charge. Never raises, but logs why."""
        state = self._read()
        if state is None:
            return None
        if state.configured != self._configured:
            what = "the configuration names another program, or other settings, than when it was deployed"
            _logger.warning("version %d is forgotten: %s", state.last_version, what)
            self._forget()
            return None
        versions = tuple(version for kept in state.versions if (version := self._load(kept)) is not None)
        if not versions or versions[-1].number == 1:
            return None
        _logger.warning(
            "%s, deployed at %s, is in charge, not the configured program (a rollback, or another program or other "
            "settings in the configuration, ends that)",
            versions[-1].label,
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(versions[-1].since)),
        )
        return Recalled(versions, state.last_version)

    def remember(self, host: ProgramHost) -> None:
        """Whenever another version is in charge. Never raises; a reader finds the old file or the new one.

        Not forced to the disk: after a crash of the machine the file may be broken.
        """
        if self._path is None:
            return
        if host.current.number == 1:
            self._forget()
            return
        versions = tuple(kept for version in host.kept if (kept := _kept(version)) is not None)
        if not versions:
            return
        state = _State(configured=self._configured, last_version=host.last_number, versions=versions)
        try:
            _write_whole(self._path, state.model_dump_json(indent=1).encode("utf-8"))
        except OSError as error:
            _logger.error("%s is not remembered: cannot write %s: %s", host.current.label, self._path, error)

    def _read(self) -> _State | None:
        if self._path is None:
            return None
        try:
            with self._path.open("rb") as file:
                if (reason := _not_ours(os.fstat(file.fileno()))) is not None:
                    raise ValueError(reason)
                return _State.model_validate_json(file.read(_MAX_FILE_BYTES))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:  # pydantic's is a ValueError
            _logger.error(
                "%s is ignored, the configured program is in charge: %s", self._path, _reason(error)
            )
            return None

    def _load(self, kept: _Kept) -> Version | None:
        try:
            return kept.load()
        except ProgramError as error:
            _logger.error("version %d cannot be loaded any more: %s", kept.version, error.message)
            return None

    def _forget(self) -> None:
        if self._path is not None:
            with contextlib.suppress(OSError):  # what cannot be removed is told of when it is read
                self._path.unlink(missing_ok=True)


def _named(program: str) -> str:
    return program if program.isidentifier() else str(Path(program).expanduser().absolute())


def _kept(version: Version) -> _Kept | None:
    """None for a program that has no text."""
    source = version.program.source
    if source is None:
        return None
    told = {"version": version.number, "since": version.since, "source": None}
    return _Kept.model_validate(told | source.deployment(version.program.settings))


def _not_ours(status: os.stat_result) -> str | None:
    """Why a file must not be executed."""
    if not stat.S_ISREG(status.st_mode):
        return "it is no plain file"
    if status.st_uid not in (0, os.geteuid()):
        return "it belongs to another user"
    return "others may write it" if status.st_mode & _OTHERS_MAY_WRITE else None


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        return ": ".join(filter(None, [place, first["msg"]]))
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _write_whole(path: Path, data: bytes) -> None:
    """For this user only (mkstemp's mode is 0600)."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
