"""Show the driver, the versions, what each device supports, and what is missing for the rest."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import streamalloc as sa
from streamalloc.cli.choice import Chosen, cuda_version
from streamalloc.cli.info_ipc import Sharing, imex_report, show_imex, show_sharing, try_sharing
from streamalloc.cli.info_multicast import multicast_report, query_multicast, show_multicast
from streamalloc.cli.info_vmm import show_virtual_memory, try_virtual_memory
from streamalloc.cli.terminal import Terminal, mib
from streamalloc.core.capabilities import address_space_limit, missing_for
from streamalloc.driver import Driver
from streamalloc.driver.internal import BINDINGS_VERSION
from streamalloc.pool.attributes import ATTRIBUTES

__all__ = ["add_arguments", "add_json_argument", "run", "write_json"]

_ULIMIT = (
    "ulimit -v limits this process to {limit} of address space. The stream-ordered allocator reserves much more than "
    "it uses, and NVIDIA does not support such a limit: allocations can fail while there is memory. "
    "Lift it with `ulimit -v unlimited`."
)


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """``--json [FILE]``, the same for every command that has it."""
    parser.add_argument(
        "--json", metavar="FILE", nargs="?", const="-", help="write JSON to FILE, or to the output instead of the table"
    )


def write_json(report: dict[str, Any], path: str, terminal: Terminal) -> None:
    """Write a report where ``--json`` says."""
    text = json.dumps(report, indent=2)
    if path == "-":
        terminal.line(text)
    else:
        Path(path).write_text(text + "\n", encoding="utf-8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``info``."""
    add_json_argument(parser)


def run(chosen: Chosen, terminal: Terminal, options: argparse.Namespace) -> int:
    """Print the report as tables, as JSON, or both."""
    # Once for both, as it takes another process.
    sharing = functools.cache(lambda: try_sharing(sa.Device(0)))
    if options.json != "-":
        _print(chosen, terminal, sharing)
    if options.json is not None:
        write_json(report(chosen, sharing), options.json, terminal)
    return 0


def report(chosen: Chosen, sharing: Callable[[], list[Sharing]]) -> dict[str, Any]:
    """All that the command says, as plain data."""
    driver = chosen.driver
    devices = sa.Device.all(driver)
    return {
        "headline": chosen.headline,
        "simulated": chosen.is_simulated,
        "driver_not_found": chosen.not_found or None,
        "versions": versions(chosen),
        "devices": [_device_report(device) for device in devices],
        "peer_access": peer_access(devices),
        "sharing": [trial._asdict() for trial in sharing()],
        "imex_channels": imex_report(),
        "multicast": multicast_report(query_multicast(devices)),
        "unreadable_pool_attributes": unreadable_attributes(driver),
        "address_space_limit": address_space_limit(),
    }


def versions(chosen: Chosen) -> dict[str, str | None]:
    """What runs here, in which version."""
    return {
        "streamalloc": sa.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cuda_bindings": BINDINGS_VERSION,
        "driver": chosen.kernel_version,
        "cuda": cuda_version(chosen.driver),
    }


def _device_report(device: sa.Device) -> dict[str, Any]:
    supports = device.supports
    return {
        "ordinal": device.ordinal,
        "name": device.name,
        "uuid": str(device.uuid),
        "pci_bus_id": device.pci_bus_id,
        "compute_capability": list(device.compute_capability),
        "total_memory": device.total_memory,
        "supports": {item.name: _plain(getattr(supports, item.name)) for item in dataclasses.fields(supports)},
        "missing": missing_for(supports),
        "virtual_memory": [trial._asdict() for trial in try_virtual_memory(device)],
    }


def _plain(value: object) -> object:
    """A capability as JSON has it: handle types by their names."""
    if isinstance(value, sa.MemHandleType):
        return [member.name for member in sa.MemHandleType if member and member in value]
    return value


def peer_access(devices: list[sa.Device]) -> list[list[bool]]:
    """For each device, which devices' memory it can reach."""
    return [[device.can_access(other) for other in devices] for device in devices]


def unreadable_attributes(driver: Driver) -> dict[str, str]:
    """The pool attributes that bindings and driver, as they are here, cannot read; and what is needed for each."""
    # Reading the default pool's attributes changes nothing about it.
    attributes = sa.MemoryPool.default(sa.Device(0, driver=driver)).attributes
    found = {}
    for name in ATTRIBUTES:
        try:
            getattr(attributes, name)
        except sa.NotSupportedError as error:
            found[name] = error.hint
    return found


def _print(chosen: Chosen, terminal: Terminal, sharing: Callable[[], list[Sharing]]) -> None:
    terminal.line(terminal.bold(chosen.headline))
    if chosen.not_found:
        terminal.line()
        terminal.paragraph(chosen.not_found)

    terminal.heading("Versions")
    found = versions(chosen)
    kind = "simulated" if chosen.is_simulated else "NVIDIA"
    terminal.table(
        [
            ("streamalloc", f"{found['streamalloc']}"),
            ("Python", f"{found['python']} ({sys.executable})"),
            ("numpy", f"{found['numpy']}"),
            ("cuda-bindings", f"{found['cuda_bindings']}"),
            ("driver", f"{kind}, {chosen.version}"),
        ]
    )

    devices = sa.Device.all(chosen.driver)
    for device in devices:
        _print_device(device, terminal)
    if len(devices) > 1:
        _print_peers(devices, terminal)

    show_sharing(sharing(), terminal)
    show_imex(terminal, devices[0].supports)
    show_multicast(query_multicast(devices), terminal)

    terminal.heading("Pool attributes that cannot be read here")
    for reason, names in _by_reason(unreadable_attributes(chosen.driver)).items():
        terminal.paragraph(", ".join(names))
        terminal.paragraph(reason, indent=4)

    limit = address_space_limit()
    if limit is not None:
        terminal.line()
        terminal.paragraph(_ULIMIT.format(limit=mib(limit)), indent=9, first=terminal.odd("Warning: "))


def _by_reason(unreadable: dict[str, str]) -> dict[str, list[str]]:
    """Attributes that cannot be read for the same reason, together; ``none`` where there are none."""
    reasons: dict[str, list[str]] = {}
    for name, reason in unreadable.items():
        # Some reasons end with the driver's name of the attribute, which its own name tells as well.
        reasons.setdefault(reason.removesuffix(f": {ATTRIBUTES[name].driver_name}"), []).append(name)
    return reasons or {"": ["none"]}


def _print_device(device: sa.Device, terminal: Terminal) -> None:
    terminal.heading(f"Device {device.ordinal}: {device.name}")
    terminal.table(
        [
            ("memory", f"{device.total_memory / (1 << 30):,.1f} GiB"),
            ("compute capability", ".".join(map(str, device.compute_capability))),
            ("UUID", str(device.uuid)),
            ("PCI bus", device.pci_bus_id),
        ]
    )
    terminal.line()
    supports = device.supports
    colours = {"yes": terminal.good, "no": terminal.dim, "unknown": terminal.odd}
    rows = []
    for name, answer, about in supports.rows():
        # Several handle types take a line each: one long answer would push the last column out of a terminal.
        first, *others = answer.split(" | ")
        rows.append((name, colours.get(first, str)(first), about))
        rows += [("", other, "") for other in others]
    terminal.table(rows)
    trials = try_virtual_memory(device)
    if trials:
        terminal.line()
        show_virtual_memory(trials, terminal)
    missing = missing_for(supports)
    if missing:
        terminal.line()
        terminal.line("  " + terminal.bold("What is missing"))
        for line in missing:
            terminal.paragraph(line, indent=4, first="  - ")


def _print_peers(devices: list[sa.Device], terminal: Terminal) -> None:
    terminal.heading("Peer access")
    terminal.paragraph("Whether the device of the row can reach the memory of the device of the column.")
    answers = [
        ["own" if here == there else "yes" if can else "no" for there, can in enumerate(row)]
        for here, row in enumerate(peer_access(devices))
    ]
    terminal.table(
        ([f"device {ordinal}", *row] for ordinal, row in enumerate(answers)),
        header=["", *(str(device.ordinal) for device in devices)],
        align="l" + "r" * len(devices),
    )
