"""Serve a store of GPU memory. The store holds weights while the engines that use them start and stop."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
from typing import Any

from streamalloc.cli.machine import choose
from streamalloc.cli.terminal import Terminal, UsageError
from streamalloc.core.errors import size_text
from streamalloc.driver import DriverNotFoundError
from streamalloc.formats.sizes import size_in
from streamalloc.ipc import StoreBusyError, StoreServer


def size_of(text: str) -> int:
    """Return the number of bytes that a text such as ``100GiB`` stands for. Raises ``argparse.ArgumentTypeError`` for
    other texts.
    """
    try:
        return size_in(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _ordinals(text: str) -> list[int]:
    try:
        return [int(one) for one in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write ordinals with commas, such as 0,1") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add NAME, ``--devices``, ``--limit``, ``--evict`` and ``--keep`` to the parser of the command."""
    parser.add_argument("name", metavar="NAME", help="name of the store: one server at a time has it")
    about = "devices whose memory it takes, such as 0,1; default: all"
    parser.add_argument("--devices", dest="served", metavar="ORDINALS", type=_ordinals, default=None, help=about)
    about = "memory of each device that it may hold, such as 100GiB; default: no limit"
    parser.add_argument("--limit", metavar="SIZE", type=size_of, default=None, help=about)
    about = "make room below the limit: remove keys that nobody reads, the least recently used first"
    parser.add_argument("--evict", action="store_true", help=about)
    about = "keep what the store holds in a second process, for the next server if this one is killed"
    parser.add_argument("--keep", action="store_true", help=about)


def run(terminal: Terminal, options: argparse.Namespace) -> int:
    """Serve a store until SIGTERM or SIGINT. Returns the exit code 0.

    Raises :class:`UsageError` if another server has the name, if the store's keeper does not answer, if the arguments
    are wrong, or if ``--devices`` is given and there is no driver.
    """
    try:
        # Only the option --devices needs a driver, for UUIDs. Without this option no driver is loaded.
        driver = None if options.served is None else choose(options.driver, options.devices).driver
        evict, keep = options.evict, options.keep
        server = StoreServer(options.name, options.served, options.limit, evict=evict, keep=keep, driver=driver)
    except (StoreBusyError, DriverNotFoundError, ValueError, TimeoutError) as error:
        raise UsageError(str(error)) from None

    def stop(*_: Any) -> None:
        server.stop()

    with contextlib.ExitStack() as undo:
        for number in (signal.SIGTERM, signal.SIGINT):
            undo.callback(signal.signal, number, signal.signal(number, stop))
        undo.callback(server.close)
        limit = "" if options.limit is None else f", at most {size_text(options.limit)} of each device"
        terminal.line(f"store {options.name!r} at {server.address}{limit}")
        for key, reason in server.lost.items():
            terminal.line(terminal.warning(f"lost: {key}: {reason}"))
        _notify_systemd(f"READY=1\nSTATUS=serving {server.address}")
        server.run()
        _notify_systemd("STOPPING=1")
        terminal.line(f"store {options.name!r} has stopped")
    return 0


def _notify_systemd(state: str) -> None:
    """Send a state such as ``READY=1`` to systemd (``sd_notify``), if systemd has started this process."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier:
            notifier.connect("\0" + address[1:] if address.startswith("@") else address)
            notifier.send(state.encode())
