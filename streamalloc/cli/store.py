"""List, show, load or remove the keys of this user's stores."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from typing import Any

from streamalloc.cli.machine import choose
from streamalloc.cli.terminal import Terminal, UsageError, add_json_argument, error_text
from streamalloc.core.errors import size_text
from streamalloc.driver import DriverNotFoundError
from streamalloc.formats.sizes import counted
from streamalloc.ipc import Store, StoreEntry, StoreError
from streamalloc.ipc.internal import store_names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action, NAME, KEY, the files and the options of ``load`` to the parser of the command."""
    about = "list keys (default); show, remove or load one"
    parser.add_argument("action", nargs="?", default="list", choices=_ACTIONS, help=about)
    parser.add_argument("name", metavar="NAME", nargs="?", help="name of the store; default for list: all")
    parser.add_argument("key", metavar="KEY", nargs="?", help="key, for show, remove and load")
    parser.add_argument("files", metavar="FILE", nargs="*", help="safetensors files, or folders of them, for load")
    about = "load a key that exists: its readers keep what they read"
    parser.add_argument("--replace", action="store_true", help=about)
    parser.add_argument("--on", metavar="ORDINAL", type=int, default=0, help="device that load writes to (default: 0)")
    add_json_argument(parser)


def run(terminal: Terminal, options: argparse.Namespace) -> int:
    """Run the action that the arguments name: list, show, remove or load. Returns the exit code 0.

    The result of the action is also the JSON report. Raises :class:`UsageError` if an argument is missing or the store
    refuses.
    """
    if options.action != "list" and (options.name is None or options.key is None):
        raise UsageError(f"{options.action} needs NAME and KEY")
    if (options.action == "load") != bool(options.files):
        raise UsageError("load needs a FILE" if options.action == "load" else f"{options.action} takes no FILE")
    try:
        terminal.write_json(_ACTIONS[options.action](terminal, options))
    except (StoreError, DriverNotFoundError, ValueError, OSError) as error:
        raise UsageError(error_text(error)) from None
    return 0


def _list(terminal: Terminal, options: argparse.Namespace) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for name in store_names() if options.name is None else [options.name]:
        with Store(name) as store:
            about, entries = store.statistics(), store.list()
        limit = "" if about.limit is None else f" of {size_text(about.limit)} a device"
        head = f"{name}: {counted(about.keys, 'key')}, {size_text(about.nbytes)}{limit}, process {about.pid}"
        terminal.paragraph(terminal.bold(head), 0)
        terminal.table(map(_row, entries))
        for key, reason in about.lost.items():
            terminal.line(terminal.warning(f"  {key}  lost: {reason}"))
        report[name] = dataclasses.asdict(about) | {"entries": [dataclasses.asdict(entry) for entry in entries]}
    if not report:
        terminal.line("no store is served")
    return report


def _row(entry: StoreEntry) -> tuple[str, ...]:
    users = [*(f"read by {pid}" for pid in entry.readers), *([f"written by {entry.writer}"] if entry.writer else [])]
    users += [f"epoch {number} read by {', '.join(map(str, pids))}" for number, _, pids in entry.older]
    users += [f"{size_text(entry.spare)} kept for the next epoch"] if entry.spare else []
    counts = counted(entry.tensors, "tensor")
    return entry.key, f"epoch {entry.epoch}", counts, size_text(entry.nbytes), "; ".join(users)


def _entry(options: argparse.Namespace) -> StoreEntry:
    with Store(options.name) as store:
        for entry in store.list():
            if entry.key == options.key:
                return entry
    raise StoreError(f"the store {options.name!r} holds nothing under {options.key!r}")


def _show(terminal: Terminal, options: argparse.Namespace) -> dict[str, Any]:
    report = dataclasses.asdict(_entry(options))
    for name, value in report.items():
        terminal.line(f"{name:10} {_SHOWN.get(name, str)(value)}")
    return report


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "never"


_SHOWN: dict[str, Callable[[Any], str]] = {
    "created": _moment,
    "used": _moment,
    "nbytes": size_text,
    "spare": size_text,
    "address": hex,
}
"""Function that formats a field of an entry as text, by name of the field. Other fields are formatted by ``str``."""


def _remove(terminal: Terminal, options: argparse.Namespace) -> dict[str, Any]:
    entry = _entry(options)
    with Store(options.name) as store:
        store.remove(options.key)
    readers = len(entry.readers) + sum(len(pids) for _, _, pids in entry.older)
    waits = f", once {counted(readers, 'reader')} {'has' if readers == 1 else 'have'} closed it" if readers else ""
    terminal.line(f"removed {options.key}: {size_text(entry.nbytes)} go back{waits}")
    return {"removed": options.key, "nbytes": entry.nbytes, "readers": readers}


def _load(terminal: Terminal, options: argparse.Namespace) -> dict[str, Any]:
    driver = choose(options.driver, options.devices).driver
    with Store(options.name, driver=driver) as store, terminal.progress() as note:

        def copied(done: int, total: int) -> None:
            note(f"{size_text(done)} of {size_text(total)} copied to {options.key}", done / total)

        with store.load(*options.files, key=options.key, device=options.on, replace=options.replace, progress=copied):
            pass
    entry = _entry(options)
    terminal.line(f"loaded {options.key}: {counted(entry.tensors, 'tensor')}, {size_text(entry.nbytes)}")
    return dataclasses.asdict(entry)


_ACTIONS = {"list": _list, "show": _show, "remove": _remove, "load": _load}
