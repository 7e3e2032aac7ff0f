"""Ports of this machine for servers of tests, which parallel tests do not take from each other by chance."""

import random
import socket

HOST = "127.0.0.1"
# above those of Ray's workers (10002 to 19999), below those that Linux gives to connections (from 32768)
RANGE = range(20_000, 32_700)
# tcpmux, at which no server listens
CLOSED_PORT = 1


def free_port() -> int:
    """Return a free port, which no connection and no Ray worker is given later."""
    draw = random.SystemRandom()  # processes of one test run share the seed of `random`
    while True:
        port = draw.choice(RANGE)
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        return port
