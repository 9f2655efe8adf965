"""Requests that two HTTP parsers may read as different ones, each of which must be refused, and what a server answers."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from typing import Final

BODY: Final = b'{"prompt":"a"}'
LENGTH: Final = b"content-length: 14\r\n"
CHUNKED: Final = b"transfer-encoding: chunked\r\n"
CHUNKS: Final = b"e\r\n" + BODY + b"\r\n0\r\n\r\n"
SMUGGLED: Final = b"GET /health HTTP/1.1\r\nhost: smuggled\r\nconnection: close\r\n\r\n"
"""Sent behind each of them: an answer to it is the second one."""


def post(fields: bytes, body: bytes = BODY, *, host: bytes = b"host: test\r\n") -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\n" + host + fields + b"\r\n" + body


def chunked(chunks: bytes) -> bytes:
    return post(CHUNKED, chunks)


def coded(value: bytes, body: bytes = CHUNKS) -> bytes:
    return post(b"transfer-encoding: " + value + b"\r\n", body)


def length(value: bytes) -> bytes:
    return post(b"content-length: " + value + b"\r\n")


AMBIGUOUS: Final[dict[str, bytes]] = {
    "garbage behind a chunk": chunked(b"e\r\n" + BODY + b"XX0\r\n\r\n"),
    "garbage line behind a chunk": chunked(b"e\r\n" + BODY + b"XX\r\n0\r\n\r\n"),
    "chunk lines end with LF": chunked(b"e\n" + BODY + b"\n0\n\n"),
    "chunk size ends with LF": chunked(b"e\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk ends with LF": chunked(b"e\r\n" + BODY + b"\n0\r\n\r\n"),
    "LF in a chunk extension": chunked(b"e;a\n=b\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "CR in a chunk extension": chunked(b"e;a\r=b\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "space behind a chunk size": chunked(b"e " + CHUNKS[1:]),
    "no chunk size": chunked(CHUNKS[1:]),
    "negative chunk size": chunked(b"-" + CHUNKS),
    "plus before a chunk size": chunked(b"+" + CHUNKS),
    "0x before a chunk size": chunked(b"0x" + CHUNKS),
    "underscore in a chunk size": chunked(b"0_" + CHUNKS),
    "chunk size beyond 64 bits": chunked(b"1" * 16 + CHUNKS),
    "length as a trailer": chunked(CHUNKS[:-2] + b"content-length: 5\r\n\r\n"),
    "trailer without a colon": chunked(CHUNKS[:-2] + b"x y\r\n\r\n"),
    "length, then coding": post(LENGTH + CHUNKED, CHUNKS),
    "coding, then length": post(CHUNKED + LENGTH, CHUNKS),
    "both, with an upgrade": post(LENGTH + CHUNKED + b"connection: upgrade\r\nupgrade: h2c\r\n", CHUNKS),
    "both, of a GET": post(LENGTH + CHUNKED, CHUNKS).replace(b"POST", b"GET"),
    "two lengths": post(LENGTH + b"content-length: 15\r\n"),
    "the same length twice": post(LENGTH + LENGTH),
    "list of lengths": length(b"14, 15"),
    "list of the same length": length(b"14, 14"),
    "negative length": length(b"-14"),
    "hexadecimal length": length(b"0xe"),
    "plus before the length": length(b"+14"),
    "length with a fraction": length(b"14.0"),
    "space in the length": length(b"1 4"),
    "underscore in the length": length(b"1_4"),
    "length beyond 64 bits": length(b"18446744073709551630"),
    "empty length": length(b""),
    "chunked, identity": coded(b"chunked, identity"),
    "identity, chunked": coded(b"identity, chunked"),
    "gzip, chunked": coded(b"gzip, chunked"),
    "chunked, chunked": coded(b"chunked, chunked"),
    "chunked twice": post(CHUNKED + CHUNKED, CHUNKS),
    "chunked and identity": post(CHUNKED + b"transfer-encoding: identity\r\n", CHUNKS),
    "identity": coded(b"identity", BODY),
    "gzip": coded(b"gzip", BODY),
    "empty coding": coded(b""),
    "unknown coding": coded(b"xchunked"),
    "vertical tab before chunked": coded(b"\x0bchunked"),
    "coding of HTTP/1.0": chunked(CHUNKS).replace(b"HTTP/1.1", b"HTTP/1.0"),
    "space before the colon of a length": post(b"content-length : 14\r\n"),
    "space before the colon of a coding": post(b"transfer-encoding : chunked\r\n", CHUNKS),
    "tab before a colon": post(LENGTH + b"x\t: 14\r\n"),
    "field without a name": post(LENGTH + b": x\r\n"),
    "LF behind a field": post(b"content-length: 14\n"),
    "LF behind the request line": post(LENGTH).replace(b"1.1\r\n", b"1.1\n"),
    "LF behind the head": b"POST /v1/completions HTTP/1.1\r\nhost: test\r\n" + LENGTH + b"\n" + BODY,
    "LF everywhere": post(LENGTH).replace(b"\r\n", b"\n"),
    "CR behind a field": post(b"x: a\r" + LENGTH),
    "CR in a field": post(b"x: a\rb\r\n" + LENGTH),
    "NUL in a field": post(b"x: a\0b\r\n" + LENGTH),
    "folded field": post(b"x: a\r\n b\r\n" + LENGTH),
    "folded length": post(b"content-length:\r\n 14\r\n"),
    "folded coding": post(b"transfer-encoding:\r\n chunked\r\n", CHUNKS),
    "fold before the first field": post(LENGTH, host=b" host: test\r\n"),
    "no host": post(LENGTH, host=b""),
    "two hosts": post(LENGTH + b"host: other\r\n"),
    "HTTP/0.9": post(LENGTH).replace(b"HTTP/1.1", b"HTTP/0.9"),
    "HTTP/1.2": post(LENGTH).replace(b"HTTP/1.1", b"HTTP/1.2"),
    "HTTP/2.0": post(LENGTH).replace(b"HTTP/1.1", b"HTTP/2.0"),
}
CLEAR: Final[dict[str, bytes]] = {
    "chunked": chunked(CHUNKS),
    "Chunked": coded(b"Chunked"),
    "chunk extension": chunked(b"e;a=b" + CHUNKS[1:]),
    "leading zeros": length(b"0014"),
    "connection names a field": post(LENGTH + b"connection: x-foo\r\nx-foo: 1\r\n"),
    "connection names the length": post(LENGTH + b"connection: content-length\r\n"),
    "upgrade of a chunked request": post(CHUNKED + b"connection: upgrade\r\nupgrade: h2c\r\n", CHUNKS),
}
"""Odd, but there is one way to read them."""


def exchange(port: int, request: bytes) -> bytes:
    """All that a server answers to ``request`` and what is behind it, until it closes."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(request)
        while data := client.recv(65536):
            received += data
    return received


def answers(received: bytes) -> Iterator[tuple[int, dict[str, str], bytes]]:
    """Each answer's status, headers and body, which its own framing delimits; fails when that leaves anything over."""
    while received:
        head, end, received = received.partition(b"\r\n\r\n")
        assert end
        first, *lines = head.decode("latin-1").split("\r\n")
        fields = [line.split(": ", 1) for line in lines]
        headers = {name.lower(): value for name, value in fields}
        assert len(headers) == len(fields), head
        framing = headers.keys() & {"content-length", "transfer-encoding"}
        assert len(framing) == 1, head
        if framing == {"content-length"}:
            size = int(headers["content-length"])
            body, received = received[:size], received[size:]
            assert len(body) == size
        else:
            body, received = _unchunked(received)
        yield int(first.split()[1]), headers, body


def _unchunked(received: bytes) -> tuple[bytes, bytes]:
    """(the body, what is behind it)."""
    body = b""
    while True:
        line, _, received = received.partition(b"\r\n")
        size = int(line, 16)
        assert received[size : size + 2] == b"\r\n"
        body, received = body + received[:size], received[size + 2 :]
        if not size:
            return body, received


def statuses(received: bytes) -> list[int]:
    """Of everything in ``received`` that looks like an answer's first line."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]
