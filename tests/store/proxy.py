"""A TCP proxy that misbehaves on demand, and heals: put it between a client and a real server."""

from __future__ import annotations

import contextlib
import socket
import threading
from enum import Enum


class Mode(Enum):
    """What the proxy does with bytes from the server; connections are accepted in each."""

    PASS = "pass"
    STALL = "stall"
    """Nothing is passed on, either way, and nothing is closed."""
    CUT = "cut"
    """The connection is closed in the middle of an answer's body."""
    CORRUPT = "corrupt"
    """One bit of an answer's body is flipped."""
    CLOSE = "close"
    """Connections are closed at once."""
    UNAVAILABLE = "unavailable"
    """Every request is answered 503."""


_UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_BODY_AFTER = 4096  # bytes of an answer that pass before it is cut or corrupted: headers, and the start of the body


class Proxy:
    """Listens on a free port of the loopback address until `close`."""

    def __init__(self, target_port: int) -> None:
        self._target = ("127.0.0.1", target_port)
        self._mode = Mode.PASS
        self._changed = threading.Condition()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def set_mode(self, mode: Mode) -> None:
        """Misbehave from now on, on connections that are open too; those of the old mode that stalled go on."""
        with self._changed:
            self._mode = mode
            self._changed.notify_all()

    def close(self) -> None:
        """Close everything."""
        self.set_mode(Mode.CLOSE)
        for sock in (self._listener, *self._open):
            _shut(sock)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        if self._mode is Mode.CLOSE:
            _shut(client)
            return
        if self._mode is Mode.UNAVAILABLE:
            with contextlib.suppress(OSError):
                client.recv(65536)
                client.sendall(_UNAVAILABLE)
            _shut(client)
            return
        try:
            server = socket.create_connection(self._target)
        except OSError:
            _shut(client)
            return
        self._open |= {client, server}
        threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
        self._pump(server, client, True)
        self._open -= {client, server}

    def _pump(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(65536)):
                with self._changed:
                    self._changed.wait_for(lambda: self._mode is not Mode.STALL)
                    mode = self._mode
                if not answers:
                    passed = 0
                if mode in (Mode.CLOSE, Mode.UNAVAILABLE):
                    break
                if answers and passed + len(data) > _BODY_AFTER:
                    if mode is Mode.CUT:
                        target.sendall(data[: max(0, _BODY_AFTER - passed)])
                        break
                    if mode is Mode.CORRUPT:
                        data[-1] ^= 1
                target.sendall(data)
                passed += len(data)
        _shut(source)
        _shut(target)


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
