"""Run a Python program, unchanged, and record its allocations and frees of device memory as a trace for `streamalloc
replay`: the blocks of PyTorch and CuPy, allocations from pools, and those of cuMemAlloc.

On a GPU the command follows the calls of all libraries through NVIDIA's CUPTI. On the simulated driver it follows
programs that call cuda.bindings or use this package. The exit status is that of the program.
"""

from __future__ import annotations

import argparse
import dataclasses

from streamalloc import traces
from streamalloc.cli import run as running
from streamalloc.cli.machine import Chosen
from streamalloc.cli.terminal import Terminal, writing
from streamalloc.cupti import internal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--output`` and the arguments of the program to the parser of this command."""
    about = "trace to write, compressed if its name ends in .gz"
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help=about)
    running.add_arguments(parser)


def run(chosen: Chosen, terminal: Terminal, options: argparse.Namespace) -> int:
    """Run the program and write the trace of its allocations. Returns the exit code 0.

    Exceptions and exit codes of the program are those of the command. After an exception of the program, the
    trace is written first. Raises :class:`UsageError` if the trace cannot be written, or if the program or a file of
    ``--kernels`` does not exist.
    """
    running.check_files(options)
    recording = internal.Recording()

    def program() -> None:
        if chosen.is_simulated:
            running.run_on(internal.Followed(chosen.driver, recording, internal.ALLOCATIONS), options)
        else:
            with recording.running():
                running.run_program(options)

    running.reported(program, lambda: _save(terminal, options, recording))
    return 0


def _save(terminal: Terminal, options: argparse.Namespace, recording: internal.Recording) -> None:
    trace = dataclasses.replace(traces.from_calls(recording.calls()), source=f"streamalloc record {options.program}")
    with writing(options.output):
        trace.save(options.output)
    terminal.line(f"{options.output}: {trace!r}")
    if recording.failure is not None:
        terminal.line(f"the recording ended early: {type(recording.failure).__name__}: {recording.failure}")
    for what, number in trace.skipped.items():
        terminal.line(terminal.dim(f"left out: {number:,} {what}"))
