"""Read this machine's profile as JSON: its driver's answers about devices, limits, granularities and links.

A simulated machine with the profile answers as this machine does: STREAMALLOC_DRIVER=simulated:profile=FILE. Run this
on an idle machine: memory that others use on device 0 counts as overhead of the driver.
"""

from __future__ import annotations

import argparse
import json

from streamalloc.cli.machine import Chosen
from streamalloc.cli.terminal import Terminal, UsageError, write_file
from streamalloc.simulator.internal import UnreadableMachineError, read_profile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``profile``."""
    parser.add_argument("-o", "--output", metavar="FILE", help="file to write (default: the standard output)")
    about = "query granularities of multicast objects, too; no object is made"
    parser.add_argument("--multicast", action="store_true", help=about)


def run(chosen: Chosen, terminal: Terminal, options: argparse.Namespace) -> int:
    """Write the profile."""
    if chosen.not_found:
        raise UsageError(f"{chosen.not_found} --driver=simulated reads a simulated machine.")
    try:
        with terminal.progress() as note:
            note("reading the devices", 0)
            read = read_profile(chosen.driver, multicast=options.multicast)
    except UnreadableMachineError as error:
        raise UsageError(str(error)) from None
    text = json.dumps(read, indent=1)
    if options.output is None:
        terminal.line(text)
        return 0
    write_file(options.output, text + "\n")
    count = len(read["devices"])
    terminal.line(f"read {read['source']} to {options.output}")
    terminal.line(f"STREAMALLOC_DRIVER=simulated:{f'devices={count},' * (count > 1)}profile={options.output}")
    return 0
