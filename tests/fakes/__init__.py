"""Servers that speak a provider's protocol on a loopback port, faults included, and record what they were asked."""

from __future__ import annotations

import hashlib
import json
import math
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# A client that waits longer than this for a server that hangs has no deadline of its own.
HANG_S = 30.0


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


class Exchange(BaseHTTPRequestHandler):
    """One request and its answer, with as much control over the bytes of the answer as a fault needs."""

    protocol_version = "HTTP/1.1"
    server: LoopbackServer

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        length = int(self.headers.get("content-length", 0))
        raw = self.rfile.read(length)
        self.body = json.loads(raw) if raw else None
        self.server.requests.append(
            Recorded(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, self.body)
        )
        try:
            self.server.answer_with(self)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client hung up, as it may
            self.server.hung_up.set()

    def log_message(self, format: str, *args: object) -> None:
        return None

    # --- ways to answer --------------------------------------------------------------------------

    def send(
        self,
        status: int,
        content: object,
        *,
        media_type: str = "application/json",
        headers: dict[str, str] | None = None,
    ) -> None:
        """A whole answer: bytes as they are, anything else as JSON."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def begin_stream(self, *, media_type: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", media_type)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def stream(self, part: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        self.wfile.flush()

    def end_stream(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    # --- ways to fail ----------------------------------------------------------------------------

    def send_html(self, status: int = 200) -> None:
        """What a proxy or a wrong port answers."""
        self.send(status, b"<!doctype html><title>Welcome</title>", media_type="text/html")

    def begin_slowly(self) -> None:
        """Send headers for ever, a byte at a time."""
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        while not self.server.stopping.wait(0.02):
            self.wfile.write(b"a")

    def cut(self) -> None:
        """Close the connection at this point, in the middle of whatever was being sent."""
        self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def reset(self) -> None:
        """Drop the connection with a TCP reset instead of an answer."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def hang(self, seconds: float = HANG_S) -> None:
        """Say nothing for so long, or until the client hangs up, or the server is stopped."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.server.stopping.wait(0.02):
            heard, _, _ = select.select([self.connection], [], [], 0)
            if heard and not self.connection.recv(1, socket.MSG_PEEK):
                raise ConnectionResetError

    def drip(self, part: bytes, *, every_s: float = 0.02) -> None:
        """Send a part over and over, so that no single read ever times out."""
        while not self.server.stopping.wait(every_s):
            self.stream(part)


class LoopbackServer(ThreadingHTTPServer):
    """An HTTP server on 127.0.0.1, on a free port unless one is given; one thread a connection."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, answer_with: Callable[[Exchange], None], *, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Exchange)
        self.answer_with = answer_with
        self.requests: list[Recorded] = []
        self.stopping = threading.Event()
        self.hung_up = threading.Event()
        """A client closed its connection before it had all of an answer."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Connections that were reset on purpose are no news."""


@contextmanager
def serving(answer_with: Callable[[Exchange], None], *, port: int = 0) -> Iterator[LoopbackServer]:
    """Run a server until the block ends."""
    server = LoopbackServer(answer_with, port=port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stopping.set()
        server.shutdown()
        server.server_close()
        thread.join()


def refusing_url() -> str:
    """The address of a port on which nothing listens."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{reserved.getsockname()[1]}"


def unit_vector(text: str, dimensions: int) -> list[float]:
    """A vector that depends on nothing but the text."""
    numbers = random.Random(hashlib.sha256(text.encode()).digest())
    raw = [numbers.gauss(0, 1) for _ in range(dimensions)]
    norm = math.hypot(*raw)
    return [value / norm for value in raw]


def spoil(vectors: list[list[float]], fault: str) -> list[Any]:
    """Damage the vectors of an answer in the way that the fault is called."""
    first, *others = vectors
    match fault:
        case "wrong_count":
            return others
        case "wrong_dimension":
            return [[*vector, 0.5] for vector in vectors]
        case "ragged":
            return [*others, first[:-1]]
        case "nan":
            return [[math.nan, *first[1:]], *others]
        case "infinity":
            return [[math.inf, *first[1:]], *others]
        case "strings":
            return [[str(value) for value in first], *others]
        case "nulls":
            return [[None, *first[1:]], *others]
        case "null_vector":
            return [None, *others]
        case "bools":
            return [[True, *first[1:]], *others]
        case "zeros":
            return [[0.0] * len(first), *others]
        case "huge":
            return [[1e38] * len(first), *others]
        case "beyond_float":
            return [[10**400, *first[1:]], *others]
    raise ValueError(fault)


# The faults of vectors, by which any provider's answer can be spoilt.
VECTOR_FAULTS = (
    "wrong_count",
    "wrong_dimension",
    "ragged",
    "nan",
    "infinity",
    "strings",
    "nulls",
    "null_vector",
    "bools",
    "zeros",
    "huge",
    "beyond_float",
)
