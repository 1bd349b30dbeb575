"""Moves bytes over bare sockets, a thread a connection, and does nothing else: the ceiling of a server in Python.

    python raw_server.py SOCKET_PATH MEMORY_BYTES

Prints the TCP port that it listens on. It sends and overwrites pieces of its memory as asked.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path

from kvhearth.store.protocol.address import Address, Listener
from kvhearth.store.protocol.sockets import keep_in_cache

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.lanes import RAW_REQUEST


def main() -> None:
    path, memory = sys.argv[1], memoryview(bytearray(os.urandom(int(sys.argv[2]))))
    tcp, unix = (Listener(address, where="raw") for address in (Address("127.0.0.1", 0), Address(path=path)))
    for listener in (tcp, unix):
        listener.open()
        threading.Thread(target=accept, args=(listener.sock, memory), daemon=True).start()
    print(tcp.address.port, flush=True)
    sys.stdin.read()  # until the benchmark closes it, or dies


def accept(listener: socket.socket, memory: memoryview) -> None:
    while True:
        sock, _ = listener.accept()
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_in_cache(sock)
        threading.Thread(target=serve, args=(sock, memory), daemon=True).start()


def serve(sock: socket.socket, memory: memoryview) -> None:
    request = bytearray(RAW_REQUEST.size)
    with sock:
        while sock.recv_into(request, len(request), socket.MSG_WAITALL) == len(request):
            operation, slot, nbytes = RAW_REQUEST.unpack(request)
            view = memory[slot * nbytes : (slot + 1) * nbytes]
            if operation == b"G":
                sock.sendall(view)
            elif sock.recv_into(view, nbytes, socket.MSG_WAITALL) == nbytes:
                sock.sendall(b"+")


if __name__ == "__main__":
    main()
