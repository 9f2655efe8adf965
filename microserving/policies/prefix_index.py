"""What the router remembers of which engine has which prompt prefix in its cache.

An estimate: it grows with every request that is routed, engines evict as they like and are not asked. What they say of
cached tokens when a request gets there is fed back (``observe``), and scales what is believed of that engine from then
on. Wrong estimates cost time, never correctness.

Holds no tokens: only keyed digests of whole blocks of them, each chained to its predecessor and to the request's cache
salt, so that requests with different salts share nothing. Independent of Python's hash seed. Bounded.
"""

from __future__ import annotations

import secrets
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

BLOCK_TOKENS = 32
MAX_BLOCKS = 32_768
"""About a million tokens, and 10 MB."""
_MAX_EXPECTATIONS = 4096
_DIGEST_BYTES = 16
_TRUST_WEIGHT = 0.25
"""Of the newest observation (an exponentially weighted mean)."""
_NOBODY: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Prefix:
    """What the index knows of one prompt.

    matched: engine id -> how many leading tokens it probably has cached, scaled by how right that was of late;
    remembered: not scaled. Engines without any are absent. digests: of the prompt's whole blocks.
    """

    matched: Mapping[str, int]
    remembered: Mapping[str, int]
    digests: tuple[bytes, ...]


class PrefixIndex:
    """Prompt prefixes -> engine ids, in blocks of ``block_tokens``; the least recently used ones are dropped beyond
    ``max_blocks``. Used on the event loop only."""

    def __init__(self, *, block_tokens: int = BLOCK_TOKENS, max_blocks: int = MAX_BLOCKS) -> None:
        self._block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._secret = secrets.token_bytes(_DIGEST_BYTES)
        self._holders: OrderedDict[bytes, frozenset[str]] = OrderedDict()
        self._expected: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._trust: dict[str, float] = {}

    def __len__(self) -> int:
        """Blocks that are remembered."""
        return len(self._holders)

    def look_up(self, salt: str, tokens: Sequence[int]) -> Prefix:
        """Who probably has how much of the prompt. Linear in the prompt, whatever is remembered."""
        digests = self._digests(salt, tokens)
        found: dict[str, int] = {}
        holding: frozenset[str] | None = None
        for number, digest in enumerate(digests, start=1):
            holders = self._holders.get(digest, _NOBODY)
            holding = holders if holding is None else holding & holders
            if not holding:
                break
            for engine_id in holding:
                found[engine_id] = number * self._block_tokens
        believed = {
            engine_id: round(count * self._trust.get(engine_id, 1.0)) for engine_id, count in found.items()
        }
        return Prefix(believed, found, digests)

    def routed(self, prefix: Prefix, request_id: str, engine_id: str) -> None:
        """The request goes to the engine, which will therefore have the whole prompt in its cache."""
        if expected := prefix.remembered.get(engine_id, 0):
            self._expected[request_id, engine_id] = expected
            if len(self._expected) > _MAX_EXPECTATIONS:
                self._expected.popitem(last=False)
        engine = frozenset((engine_id,))
        # Backwards: of a prompt the last blocks are forgotten first, so that what is left is a prefix.
        for digest in reversed(prefix.digests):
            self._holders[digest] = self._holders.pop(digest, _NOBODY) | engine
        while len(self._holders) > self._max_blocks:
            self._holders.popitem(last=False)

    def observe(self, request_id: str, engine_id: str, cached: int) -> None:
        """The engine found ``cached`` tokens of the request in its cache. Only the first word about a request that was
        routed there for a match counts."""
        expected = self._expected.pop((request_id, engine_id), None)
        if expected is None:
            return
        # An engine computes the last token again and may share larger pages: a block less is as expected.
        right = min(1.0, (cached + self._block_tokens) / expected) if cached else 0.0
        trust = self._trust.get(engine_id, 1.0)
        self._trust[engine_id] = trust + _TRUST_WEIGHT * (right - trust)

    def forget(self, engine_id: str) -> None:
        """The engine is gone, or was restarted: it has nothing cached."""
        self._trust.pop(engine_id, None)
        for digest, holders in list(self._holders.items()):
            if holders == {engine_id}:
                del self._holders[digest]
            elif engine_id in holders:
                self._holders[digest] = holders - {engine_id}

    def _digests(self, salt: str, tokens: Sequence[int]) -> tuple[bytes, ...]:
        """Of each whole block: a hash of the block, keyed with that of its predecessor; the first one's is the salt's."""
        digest = blake2b(salt.encode(), key=self._secret, digest_size=_DIGEST_BYTES).digest()
        size, packed = 8 * self._block_tokens, array("q", tokens).tobytes()
        digests = []
        for begin in range(0, len(packed) - size + 1, size):
            digest = blake2b(packed[begin : begin + size], key=digest, digest_size=_DIGEST_BYTES).digest()
            digests.append(digest)
        return tuple(digests)
