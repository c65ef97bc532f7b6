"""Show driver, versions, supported features of each device, and requirements of unsupported ones."""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import sys
from typing import Any

import numpy as np

import streamalloc as sa
from streamalloc.cli.choice import Chosen, add_json_argument, cuda_version, plural
from streamalloc.cli.terminal import Terminal
from streamalloc.cli.trials import query_multicast, try_sharing, try_virtual_memory
from streamalloc.core.errors import size_text
from streamalloc.core.internal import address_space_limit, imex_channels, missing_for
from streamalloc.driver import Driver
from streamalloc.driver.internal import BINDINGS_VERSION
from streamalloc.pool.internal import ATTRIBUTES

_ULIMIT = (
    "ulimit -v limits this process to {limit} of address space. The stream-ordered allocator reserves much more than "
    "it uses, and NVIDIA does not support such a limit: allocations can fail although memory is free. "
    "Remove the limit with `ulimit -v unlimited`."
)
_ANSWERS = {True: "yes", False: "no", None: "unknown"}
_SHARED = {
    "NONE": "within this process",
    "POSIX_FILE_DESCRIPTOR": "by file descriptors, on this machine",
    "FABRIC": "by fabric handles, also between machines",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``info``."""
    add_json_argument(parser)


def run(chosen: Chosen, terminal: Terminal, options: argparse.Namespace) -> int:
    """Print the report as tables, as JSON, or both."""
    found = report(chosen)
    _show(terminal, found, chosen)
    terminal.write_json(found)
    return 0


def report(chosen: Chosen) -> dict[str, Any]:
    """Collect the report as plain data."""
    devices = sa.Device.all(chosen.driver)
    imex = [{"path": path, "permitted": os.access(path, os.R_OK | os.W_OK)} for path in imex_channels()]
    return {
        "headline": chosen.headline,
        "simulated": chosen.is_simulated,
        "driver_not_found": chosen.not_found or None,
        "versions": versions(chosen),
        "devices": [_device_report(device) for device in devices],
        # A row for each device: access to each device's memory.
        "peer_access": [[device.can_access(other) for other in devices] for device in devices],
        "sharing": try_sharing(devices[0]),
        "imex_channels": imex,
        "multicast": query_multicast(devices),
        "unreadable_pool_attributes": unreadable_attributes(chosen.driver),
        "address_space_limit": address_space_limit(),
    }


def versions(chosen: Chosen) -> dict[str, str | None]:
    """Return the versions of the software."""
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
        "virtual_memory": try_virtual_memory(device),
    }


def _plain(value: object) -> object:
    """Convert a capability to JSON: handle types become names."""
    if isinstance(value, sa.MemHandleType):
        return [member.name for member in sa.MemHandleType if member and member in value]
    return value


def unreadable_attributes(driver: Driver) -> dict[str, str]:
    """Return the pool attributes that these bindings or this driver cannot read, with the requirement of each."""
    # Reading attributes does not change the default pool.
    attributes = sa.MemoryPool.default(sa.Device(0, driver=driver)).attributes
    found = {}
    for name in ATTRIBUTES:
        try:
            getattr(attributes, name)
        except sa.NotSupportedError as error:
            found[name] = error.hint
    return found


def _show(terminal: Terminal, found: dict[str, Any], chosen: Chosen) -> None:
    """Print the whole report."""
    terminal.line(terminal.bold(found["headline"]))
    if found["driver_not_found"]:
        terminal.line()
        terminal.paragraph(found["driver_not_found"])

    terminal.heading("Versions")
    version = {name.replace("_", "-"): number for name, number in found["versions"].items()}
    version["python"] += f" ({sys.executable})"
    version["driver"] = f"{'simulated' if found['simulated'] else 'NVIDIA'}, {chosen.version}"
    del version["cuda"]  # part of the driver's version
    terminal.table(version.items())
    for device in found["devices"]:
        _device(terminal, device, sa.Device(device["ordinal"], driver=chosen.driver).supports)
    if len(found["devices"]) > 1:
        _peers(terminal, found["peer_access"])

    terminal.heading("Sharing between processes")
    rows = ((one["what"], one["how"], _found(terminal, one)) for one in found["sharing"])
    terminal.table(rows, header=("", "by", "tried, on device 0"))
    _imex(terminal, found["imex_channels"])
    _multicast(terminal, found["multicast"])

    terminal.heading("Pool attributes that cannot be read")
    for reason, names in _by_reason(found["unreadable_pool_attributes"]).items():
        terminal.paragraph(", ".join(names))
        terminal.paragraph(reason, indent=4)

    if (limit := found["address_space_limit"]) is not None:
        terminal.line()
        terminal.paragraph(_ULIMIT.format(limit=size_text(limit)), indent=9, first=terminal.warning("Warning: "))


def _found(terminal: Terminal, trial: dict[str, Any]) -> str:
    found: str = trial["found"]
    return found if trial.get("works") else terminal.warning(found)


def _answer(terminal: Terminal, answer: str) -> str:
    colours = {"yes": terminal.good, "no": terminal.dim, "unknown": terminal.warning}
    return colours.get(answer, str)(answer)


def _device(terminal: Terminal, device: dict[str, Any], supports: sa.Capabilities) -> None:
    terminal.heading(f"Device {device['ordinal']}: {device['name']}")
    facts = {
        "memory": f"{device['total_memory'] / (1 << 30):,.1f} GiB",
        "compute capability": ".".join(map(str, device["compute_capability"])),
        "UUID": device["uuid"],
        "PCI bus": device["pci_bus_id"],
    }
    terminal.table(facts.items())
    terminal.line()
    rows = []
    for name, answer, about in supports.rows():
        # One line for each handle type keeps the column narrow.
        first, *others = answer.split(" | ")
        rows.append((name, _answer(terminal, first), about))
        rows += [("", other, "") for other in others]
    terminal.table(rows)
    if device["virtual_memory"]:
        _granularities(terminal, "virtual memory", "one granule, tried", device["virtual_memory"])
    if device["missing"]:
        terminal.line()
        terminal.line("  " + terminal.bold("Missing requirements"))
        for line in device["missing"]:
            terminal.paragraph(line, indent=4, first="  - ")


def _granularities(terminal: Terminal, what: str, found: str, rows: list[dict[str, Any]]) -> None:
    """Print a table of granularities."""
    cells = []
    for row in rows:
        sizes = ("" if row[key] is None else size_text(row[key]) for key in ("granularity", "recommended"))
        cells.append((row["what"], *sizes, _found(terminal, row)))
    terminal.line()
    terminal.table(cells, header=(what, "granularity", "recommended", found), align="lrrl")


def _peers(terminal: Terminal, peer_access: list[list[bool]]) -> None:
    terminal.heading("Peer access")
    terminal.paragraph("Access of the row's device to the memory of the column's device.")
    rows = [
        [f"device {here}", *("own" if here == there else _ANSWERS[can] for there, can in enumerate(row))]
        for here, row in enumerate(peer_access)
    ]
    terminal.table(rows, header=["", *map(str, range(len(rows)))], align="l" + "r" * len(rows))


def _imex(terminal: Terminal, channels: list[dict[str, Any]]) -> None:
    terminal.heading("IMEX channels")
    terminal.table(
        (one["path"], terminal.good("may be opened") if one["permitted"] else terminal.warning("may not be opened"))
        for one in channels
    )
    if not channels:
        terminal.paragraph("none: /dev/nvidia-caps-imex-channels is absent or empty")


def _multicast(terminal: Terminal, found: dict[str, Any]) -> None:
    count = found["largest_team"]
    terminal.heading("Multicast")
    terminal.table(
        (f"device {one['ordinal']}", _answer(terminal, _ANSWERS[one["supported"]]), "supports multicast objects")
        for one in found["devices"]
    )
    if count:
        ways = found["granularity"]
        how = [{**one, "what": _SHARED[one["handle_type"]], "granularity": one["minimum"]} for one in ways]
        _granularities(terminal, f"shared, {plural(count, 'device')}", "", how)
        terminal.line()
        terminal.paragraph(
            f"A team has up to {count} devices of this process, plus those that other processes add. With fabric "
            "handles (see IMEX channels), these can run on other machines. The driver does not report how many "
            "objects fit into the switches, and no object was created to find out."
        )
    for line in found["needs"]:
        terminal.paragraph(line)


def _by_reason(unreadable: dict[str, str]) -> dict[str, list[str]]:
    """Group the attributes by reason; ``none`` if there are none."""
    reasons: dict[str, list[str]] = {}
    for name, reason in unreadable.items():
        # Some reasons end with the driver's name of the attribute; without it they are equal.
        reasons.setdefault(reason.removesuffix(f": {ATTRIBUTES[name].driver_name}"), []).append(name)
    return reasons or {"": ["none"]}
