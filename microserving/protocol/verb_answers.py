"""The answers of `prep_recv` and `remote_send` as a router reads them: once for every request, so with msgspec.

A peer of another make may leave out what is ours, or say null.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from microserving.protocol.generation import RemoteSendResult

Count = Annotated[int, msgspec.Meta(ge=0)]


class PrepRecvReply(msgspec.Struct):
    kv_append_metadata: str
    prefix_matched_length: Count
    lease_ttl_s: float | None = None


class RemoteSendReply(msgspec.Struct):
    """MLC's is empty."""

    tokens_computed: Count | None = None
    tokens_sent: Count | None = None
    bytes_sent: Count | None = None
    prefix_matched_length: Count | None = None
    prefill_ms: float | None = None
    transfer_ms: float | None = None
    exposed_ms: float | None = None

    def result(self) -> RemoteSendResult:
        return RemoteSendResult(
            self.tokens_computed or 0,
            self.tokens_sent or 0,
            self.bytes_sent or 0,
            self.prefix_matched_length or 0,
            self.prefill_ms or 0.0,
            self.transfer_ms or 0.0,
            self.exposed_ms or 0.0,
        )


PREP_RECV: Final = msgspec.json.Decoder(PrepRecvReply)
REMOTE_SEND: Final = msgspec.json.Decoder(RemoteSendReply)


def remote_send_result(content: bytes) -> RemoteSendResult:
    """Raises msgspec's errors."""
    return REMOTE_SEND.decode(content).result()
