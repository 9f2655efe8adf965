"""What the two ends say to each other: fixed little binary frames, one per SOCK_SEQPACKET message.

hello (receiver -> writer, once, with the pool's memfd), then BEGIN and FINISH (writer -> receiver) and one REPLY to
each, which carries the same number; REVOKED (receiver -> writer) at any time. Whatever does not parse is a FrameError;
nothing here is trusted or evaluated.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from microserving.protocol.kv_descriptor import MAX_REQUEST_ID_BYTES

PROTOCOL_VERSION = 3
_MAGIC = b"MSKV"
_HELLO = struct.Struct(
    "<4sHHHQQ"
)  # magic, version, length of engine id, length of epoch, nbytes, total_pages
_FRAME = struct.Struct("<BBHIQQ")  # op, flag, length of request id, lease word, number, lease id
MAX_NAME_BYTES = 128
MAX_FRAME_BYTES = _FRAME.size + MAX_REQUEST_ID_BYTES
"""No message is longer."""


class FrameError(ValueError):
    """The peer sent something that is not a frame."""


class Op(IntEnum):
    BEGIN = 1
    FINISH = 2
    REPLY = 3
    REVOKED = 4


@dataclass(frozen=True, slots=True)
class Hello:
    """Who the receiver is and what its pool has: nbytes in total, total_pages equal pages."""

    engine_id: str
    epoch: str
    nbytes: int
    total_pages: int


@dataclass(frozen=True, slots=True)
class Frame:
    """flag: of FINISH, whether every byte is in place; of REPLY, whether it was granted. request_id: BEGIN only.

    number: 0 of REVOKED, which answers nothing and is not answered. word: of a REPLY that grants, the lease's word.
    """

    op: Op
    number: int
    lease_id: int
    flag: bool = False
    request_id: str = ""
    word: int = 0


def encode_hello(hello: Hello) -> bytes:
    names = hello.engine_id.encode(), hello.epoch.encode()
    head = (_MAGIC, PROTOCOL_VERSION, len(names[0]), len(names[1]), hello.nbytes, hello.total_pages)
    return _HELLO.pack(*head) + b"".join(names)


def decode_hello(data: bytes) -> Hello:
    """Raises FrameError."""
    try:
        magic, version, id_length, epoch_length, nbytes, total_pages = _HELLO.unpack_from(data)
    except struct.error:
        raise FrameError("short hello") from None
    if magic != _MAGIC or version != PROTOCOL_VERSION:
        raise FrameError("another protocol or version")
    names = data[_HELLO.size :]
    if len(names) != id_length + epoch_length:
        raise FrameError("hello of a wrong length")
    return Hello(_text(names[:id_length]), _text(names[id_length:]), nbytes, total_pages)


def encode_frame(frame: Frame) -> bytes:
    name = frame.request_id.encode()
    return _FRAME.pack(frame.op, frame.flag, len(name), frame.word, frame.number, frame.lease_id) + name


def decode_frame(data: bytes) -> Frame:
    """Raises FrameError."""
    try:
        op, flag, length, word, number, lease_id = _FRAME.unpack_from(data)
        known = Op(op)
    except (struct.error, ValueError):
        raise FrameError("not a frame") from None
    if flag > 1 or len(data) != _FRAME.size + length or length > MAX_REQUEST_ID_BYTES:
        raise FrameError("frame of a wrong length or flag")
    return Frame(known, number, lease_id, bool(flag), _text(data[_FRAME.size :]), word)


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise FrameError("not UTF-8") from None
