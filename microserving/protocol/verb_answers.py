"""The answers of the verbs that carry a request, as a router reads them: once for every request, so with msgspec.

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


class MatchPrefixReply(msgspec.Struct):
    prefix_matched_length: Count


PREP_RECV: Final = msgspec.json.Decoder(PrepRecvReply)
REMOTE_SEND: Final = msgspec.json.Decoder(RemoteSendReply)
MATCH_PREFIX: Final = msgspec.json.Decoder(MatchPrefixReply)


def remote_send_result(content: bytes) -> RemoteSendResult:
    """Raises msgspec's errors."""
    return REMOTE_SEND.decode(content).result()


def prefix_matched_length(content: bytes) -> int:
    """Of `match_prefix`. Raises msgspec's errors."""
    return MATCH_PREFIX.decode(content).prefix_matched_length
