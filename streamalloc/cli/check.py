"""Run a Python program, unchanged, and report where its GPU work lacks an order: a tensor that is dropped while another
stream reads it, a buffer that is written before its copy has ended, a missing wait between two streams.

On a GPU it follows the driver calls of all libraries (PyTorch, CuPy, Numba and others) through NVIDIA's CUPTI. On the
simulated driver it follows programs that call cuda.bindings. The exit status is 1 if something was found, and otherwise
that of the program.
"""

from __future__ import annotations

import argparse
from typing import Any

from streamalloc.cli import run as running
from streamalloc.cli.machine import Chosen
from streamalloc.cli.terminal import Terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    running.add_arguments(parser)


def run(chosen: Chosen, terminal: Terminal, options: argparse.Namespace) -> int:
    """Run the program under the check; its exceptions and exit codes are those of the command."""
    running.check_files(options)
    if chosen.is_simulated:
        return _on_simulated(chosen, options)
    from streamalloc import cupti

    with cupti.check(at_once=True) as check:
        running.run_program(options)
    return 1 if check.hazards else 0


def _on_simulated(chosen: Chosen, options: argparse.Namespace) -> int:
    from streamalloc.driver import checked

    driver: Any = checked(chosen.driver)
    driver.show_at_once(None)
    running.run_on(driver, options)
    return 1 if driver.finish() else 0
