"""A TCP proxy that reads what clients and a server say: it counts, delays, cuts and holds back."""

from __future__ import annotations

import asyncio
import ssl
import tempfile
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import redis
import trustme
from servers.server import HOST, PATIENCE, Closing, free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from servers.server import Server

Words = list[bytes]
Match = "Callable[[Words], bool] | str | None"

# what a client says to set its connection up, and to learn where it is
SETUP = {
    *(b"HELLO", b"AUTH", b"CLIENT", b"SELECT", b"PING", b"COMMAND", b"READONLY"),
    *(b"CLUSTER SLOTS", b"CLUSTER SHARDS", b"REPLCONF", b"PSYNC"),
}
# answered by one push for each channel
CHANNELS = {b"SUBSCRIBE", b"PSUBSCRIBE", b"SSUBSCRIBE"} | {
    *(b"UNSUBSCRIBE", b"PUNSUBSCRIBE", b"SUNSUBSCRIBE")
}
MESSAGES = {b"message", b"pmessage", b"smessage"}


async def read_frame(reader: asyncio.StreamReader) -> tuple[bytes, Any]:
    """One whole frame of RESP2 or RESP3: its bytes, and its parts as bytes and lists of them."""
    line = await reader.readuntil(b"\n")
    kind, rest = line[:1], line[1:-2]
    if kind in b"$!=":
        if rest.startswith(b"-"):
            return line, None
        body = await reader.readexactly(int(rest) + 2)
        return line + body, body[:-2]
    if kind in b"*~>%|":
        count = int(rest) * (2 if kind in b"%|" else 1)
        parts = [await read_frame(reader) for _ in range(count)]
        raw, values = line + b"".join(p[0] for p in parts), [p[1] for p in parts]
        if kind != b"|":
            return raw, values
        told, value = await read_frame(reader)  # attributes belong to what they precede
        return raw + told, value
    if kind in b"+-:_,#(":
        return line, rest
    return line, line.split()  # a command typed by hand


def name_of(words: Words) -> bytes:
    """The command's name, with its second word where that tells set-up from work."""
    name = words[0].upper() if words else b""
    return b" ".join(words[:2]).upper() if name == b"CLUSTER" else name


@dataclass(frozen=True)
class Noted:
    """A request, as a client sent it."""

    at: int  # nanoseconds
    frame: Words
    trip: bool  # whether nothing was unanswered on its connection

    @property
    def setup(self) -> bool:
        return name_of(self.frame) in SETUP


class Trap:
    """What happens to one request frame to come; made by the proxy's methods."""

    def __init__(self, proxy: Proxy, what: str, match: Any, nth: int) -> None:
        self._proxy = proxy
        self._match = match
        self._left = nth
        self.what = what
        self.frame: Words | None = None  # the request that it caught
        self._sprung = threading.Event()
        self.gate = asyncio.Event()

    def catches(self, words: Words) -> bool:
        """Whether it is this one; in the proxy's thread, once per frame."""
        if not self._left:
            return False
        if isinstance(self._match, str):
            found = name_of(words) == self._match.encode().upper()
        else:
            found = name_of(words) not in SETUP and (self._match is None or self._match(words))
        if found:
            self._left -= 1
            if not self._left:
                self.frame = words
                return True
        return False

    def spring(self) -> None:
        self._sprung.set()

    @property
    def sprung(self) -> bool:
        """Whether it has happened."""
        return self._sprung.is_set()

    def wait(self, patience: float = PATIENCE) -> Words:
        """Wait until it has happened; the request frame that it happened to.

        `swallow` and `hang` have happened when the server has answered, so it has applied it.
        """
        assert self._sprung.wait(patience), f"no frame was caught by {self.what}"
        assert self.frame is not None
        return self.frame

    def release(self) -> None:
        """Let go what is held back, now or when it is caught."""
        self._proxy.soon(self.gate.set)

    def cancel(self) -> None:
        """Catch nothing any more, and let go what is held back."""
        self._left = 0
        self.release()


@dataclass
class _Asked:
    """A request that is not answered yet."""

    words: Words
    trap: Trap | None
    pushes: int = 0  # how many confirmations answer it; 0: one reply does

    def is_answered_by(self, raw: bytes, value: Any) -> bool:
        """Whether it is; what is not its answer is a push, or a message of RESP2."""
        told = value[0] if raw[:1] in b">*" and value else None
        if self.pushes:
            return told == self.words[0].lower() or raw[:1] == b"-"
        return raw[:1] != b">"


@dataclass
class _Ready:
    """What is to be sent to a client."""

    raw: bytes
    due: float
    asked: _Asked | None
    last: bool = True  # whether it ends its request


class _Connection:
    """A client's connection and the one that it is passed on to."""

    def __init__(
        self, proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._proxy = proxy
        self._client = reader, writer
        self._server: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._asked: deque[_Asked] = deque()
        self._unanswered = 0  # as the client sees it
        self._subscribed = False
        self._ready: asyncio.Queue[_Ready | None] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self.lost = False  # bytes are missing in it
        self._ended = False
        writer.transport.set_write_buffer_limits(0)  # `drain` waits until all is out

    async def run(self) -> None:
        """Pass on until one side is closed."""
        try:
            with suppress(OSError):  # a server that is down: the client is hung up on
                self._server = await self._proxy.connect()
                if self._ended:
                    return
                self._server[1].transport.set_write_buffer_limits(0)
                pumps = self._requests, self._replies, self._deliveries
                self._tasks = [asyncio.create_task(self._quiet(pump)) for pump in pumps]
                requests, _, deliveries = self._tasks
                # what the server said before it closed is still delivered
                await asyncio.wait([requests, deliveries], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.end()
            for error in await asyncio.gather(*self._tasks, return_exceptions=True):
                if isinstance(error, Exception):
                    self._proxy.faults.append(error)

    @staticmethod
    async def _quiet(pump: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):  # a side is closed
            await pump()

    def end(self) -> None:
        """Close both sides."""
        self._ended = True
        for task in self._tasks:
            task.cancel()
        for _, writer in filter(None, (self._client, self._server)):
            # a child process may have the socket too, which keeps it open after a `close`
            sock = writer.get_extra_info("socket")
            if sock is not None:  # else it is closed
                with suppress(OSError):
                    sock.shutdown(2)
            writer.transport.abort()

    # --- to the server -----------------------------------------------------------------------------

    async def _requests(self) -> None:
        assert self._server is not None
        reader, writer = self._client[0], self._server[1]
        while True:
            raw, words = await read_frame(reader)
            self._proxy.note(Noted(time.monotonic_ns(), words, not self._unanswered))
            if self._proxy.holed:
                self.lost = True
                continue
            trap = self._proxy.trap_for(words)
            if trap is not None and trap.what == "cut_before":
                await writer.drain()
                self.end()
                trap.spring()
                return
            if trap is not None and trap.what == "hold":
                trap.spring()
                await trap.gate.wait()
            asked = _Asked(words, trap)
            if name_of(words) in CHANNELS:
                asked.pushes = max(1, len(words) - 1)
                self._subscribed = True
            self._asked.append(asked)
            self._unanswered += 1
            writer.write(raw)
            await writer.drain()
            if name_of(words) == b"PSYNC":
                await self._copy(reader, writer)

    @staticmethod
    async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while some := await reader.read(65536):
            writer.write(some)
            await writer.drain()

    # --- to the client -----------------------------------------------------------------------------

    def _answered(self, raw: bytes, value: Any) -> tuple[_Asked | None, bool]:
        """The request that this belongs to, and whether it is now answered in full."""
        told = value[0] if raw[:1] in b">*" and value else None
        if self._subscribed and told in MESSAGES:
            return None, False
        if not self._asked or not self._asked[0].is_answered_by(raw, value):
            return None, False
        asked = self._asked[0]
        asked.pushes -= 1
        if asked.pushes > 0 and raw[:1] != b"-":
            return asked, False
        return self._asked.popleft(), True

    async def _replies(self) -> None:
        assert self._server is not None
        reader = self._server[0]
        try:
            while True:
                raw, value = await read_frame(reader)
                asked, last = self._answered(raw, value)
                if asked is not None and asked.trap is not None:
                    if asked.trap.what == "swallow":
                        self._ready.put_nowait(None)
                        asked.trap.spring()
                        return
                    if asked.trap.what == "hang":
                        asked.trap.spring()
                due = time.monotonic() + self._proxy.delay
                self._ready.put_nowait(_Ready(raw, due, asked, last))
                if asked is not None and name_of(asked.words) == b"PSYNC":
                    while some := await reader.read(65536):
                        self._ready.put_nowait(_Ready(some, 0.0, None))
                    return
        finally:
            self._ready.put_nowait(None)

    async def _deliveries(self) -> None:
        writer = self._client[1]
        while (ready := await self._ready.get()) is not None:
            if (wait := ready.due - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            trap = None if ready.asked is None else ready.asked.trap
            if trap is not None and trap.what == "hang":
                await trap.gate.wait()
            if self._proxy.holed:
                self.lost = True
                continue
            if ready.asked is not None and ready.last:
                self._unanswered -= 1
            writer.write(ready.raw)
            await writer.drain()


class Proxy(Closing):
    """Stands between clients and one server.

    Where a method takes a `match`, it is a function of the request frame (a list of bytes) to
    bool, or a command's name, or nothing for any frame. Frames of a connection's set-up (`SETUP`)
    are seen only by a match that is a name.

    Args:
        server: where it passes on to.
        tls: whether it speaks TLS with its clients.

    """

    def __init__(self, server: Server, *, tls: bool = False) -> None:
        self._server = server
        self._tls = tls
        self.port = free_port()
        self.delay = 0.0  # seconds that each reply takes longer
        self.holed = False
        self._noted: list[Noted] = []
        self._traps: list[Trap] = []
        self._connections: set[_Connection] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stop: asyncio.Event | None = None
        self._clients: list[redis.Redis] = []
        self.faults: list[Exception] = []  # its own: what it could not read

    # --- its life ----------------------------------------------------------------------------------

    def start(self) -> Self:
        up = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main(up)), name="proxy", daemon=True
        )
        self._thread.start()
        assert up.wait(PATIENCE), "the proxy does not start"
        assert self._listener is not None
        return self

    async def _main(self, up: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            await self._listen()
        finally:
            up.set()
        await self._stop.wait()
        self._deafen()
        self._end_all()
        while self._serving:
            await asyncio.wait(self._serving)
        await asyncio.sleep(0)  # the transports tell that they are closed

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self._clients.clear()
        if self._thread is not None and self._thread.is_alive():
            assert self._stop is not None
            self.soon(self._stop.set)
            self._thread.join(PATIENCE)
            assert not self._thread.is_alive(), "the proxy does not end"
            assert not self.faults, self.faults
        if self._tls and "_folder" in self.__dict__:
            self._folder.cleanup()

    def soon(self, act: Callable[[], object]) -> None:
        """Do it in the proxy's thread, and do not wait for it."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(act)

    def _do(self, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(act(), self._loop).result(PATIENCE)

    async def _listen(self) -> None:
        if self._listener is None:
            self._listener = await asyncio.start_server(
                self._serve, HOST, self.port, ssl=self._server_side if self._tls else None
            )

    def _deafen(self) -> None:
        if self._listener is not None:
            for sock in self._listener.sockets:
                with suppress(OSError):
                    sock.shutdown(2)  # a child process may have it too
            self._listener.close()
            self._listener = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connection = _Connection(self, reader, writer)
        self._serving.add(task)
        self._connections.add(connection)
        try:
            await connection.run()
        except Exception as error:  # noqa: BLE001 - told when it is closed
            self.faults.append(error)
        finally:
            self._connections.discard(connection)
            self._serving.discard(task)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(HOST, self._server.port)

    # --- clients -----------------------------------------------------------------------------------

    @cached_property
    def _folder(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="ig")

    @cached_property
    def _server_side(self) -> ssl.SSLContext:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(Path(self._folder.name) / "ca.pem")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert(HOST, "localhost").configure_cert(context)
        return context

    @property
    def ca(self) -> str:
        """The file of the authority that vouches for it, with TLS."""
        assert self._server_side
        return str(Path(self._folder.name) / "ca.pem")

    def client(self, **options: Any) -> redis.Redis:
        """A client of redis-py with these options; it is closed with the proxy."""
        given = {"host": HOST, "port": self.port, "password": self._server.password}
        if self._tls:
            given |= {"ssl": True, "ssl_ca_certs": self.ca}
        self._clients.append(redis.Redis(**(given | options)))
        return self._clients[-1]

    @property
    def url(self) -> str:
        user = "" if self._server.password is None else f":{self._server.password}@"
        if self._tls:
            return f"rediss://{user}{HOST}:{self.port}/0?ssl_ca_certs={self.ca}"
        return f"redis://{user}{HOST}:{self.port}/0"

    # --- what it saw -------------------------------------------------------------------------------

    def note(self, noted: Noted) -> None:
        self._noted.append(noted)

    def noted(self) -> list[Noted]:
        """Every request so far, set-up too."""
        return list(self._noted)

    def _work(self) -> Iterator[Noted]:
        return (noted for noted in self.noted() if not noted.setup)

    @property
    def frames(self) -> list[Words]:
        """The requests so far, as lists of bytes, without set-up."""
        return [noted.frame for noted in self._work()]

    @property
    def counts(self) -> Counter[str]:
        """How many requests of each command, without set-up."""
        return Counter(noted.frame[0].decode().upper() for noted in self._work())

    @property
    def trips(self) -> int:
        """How many round trips, without set-up: a pipeline of any length is one.

        A request that is sent while an earlier one on its connection is unanswered adds none.
        """
        return sum(noted.trip for noted in self._work())

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._connections)

    def forget(self) -> None:
        """Forget the requests so far."""
        self._noted.clear()

    # --- what it does ------------------------------------------------------------------------------

    def _trap(self, what: str, match: Any, nth: int) -> Trap:
        trap = Trap(self, what, match, nth)
        self._traps.append(trap)
        return trap

    def trap_for(self, words: Words) -> Trap | None:
        """The trap that catches this request; each one of those that are set counts it."""
        caught = [trap for trap in self._traps if trap.catches(words)]
        for trap in caught:
            self._traps.remove(trap)
        return caught[0] if caught else None

    def cut_before(self, match: Any = None, nth: int = 1) -> Trap:
        """Close the connection that the n-th matching request comes on; the server never gets it."""
        return self._trap("cut_before", match, nth)

    def hold(self, match: Any = None, nth: int = 1) -> Trap:
        """Keep the n-th matching request, and what follows it there, from the server until `release`."""
        return self._trap("hold", match, nth)

    def swallow(self, match: Any = None, nth: int = 1) -> Trap:
        """Have the server apply the n-th matching request, then close; its reply is not passed on."""
        return self._trap("swallow", match, nth)

    def hang(self, match: Any = None, nth: int = 1) -> Trap:
        """Have the server apply the n-th matching request; hold its reply back until `release`."""
        return self._trap("hang", match, nth)

    def cut_all(self) -> None:
        """Close every connection now; they are closed when this returns."""

        async def cut() -> None:
            self._end_all()
            if self._serving:
                await asyncio.wait(set(self._serving))

        self._do(cut)

    def _end_all(self) -> None:
        for connection in list(self._connections):
            connection.end()

    def refuse(self) -> None:
        """Refuse new connections; those there are go on."""

        async def refuse() -> None:
            self._deafen()

        self._do(refuse)

    def blackhole(self) -> None:
        """Accept everything, pass nothing on and answer nothing, on open connections too."""

        async def swallow_all() -> None:
            self.holed = True

        self._do(swallow_all)

    def accept(self) -> None:
        """As at first, after `refuse` or `blackhole`; connections with a hole in them are closed."""

        async def accept() -> None:
            self.holed = False
            for connection in list(self._connections):
                if connection.lost:
                    connection.end()
            await self._listen()

        self._do(accept)

    def reset(self) -> None:
        """As it was when it was started, with nothing noted."""
        for trap in self._traps:
            trap.cancel()
        self._traps.clear()
        self.delay = 0.0
        self.accept()
        self.cut_all()
        self.forget()
