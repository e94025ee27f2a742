"""A login shell on a pseudo terminal, for a person who looks at a sandbox: `python3 terminal.py SOCKET ROWS COLUMNS`.

Listens on a Unix socket, serves the one who connects, and ends with the shell.
"""

import fcntl
import os
import pty
import select
import signal
import socket
import struct
import sys
import termios
from typing import Any


def main(path: str, rows: int, columns: int) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        connection, _ = listener.accept()
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp("bash", ["bash", "--login"])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    with connection:
        relay(connection, terminal)
    os.kill(pid, signal.SIGHUP)
    os.waitpid(pid, 0)


def relay(connection: socket.socket, terminal: int) -> None:
    """Until either side has gone."""
    sources: list[Any] = [connection, terminal]
    while True:
        readable, _, _ = select.select(sources, [], [])
        try:
            if terminal in readable:
                if not (data := os.read(terminal, 65536)):
                    return
                connection.sendall(data)
            if connection in readable:
                if not (data := connection.recv(65536)):
                    return
                os.write(terminal, data)
        except OSError:  # a shell that has ended, a person who has left
            return


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
