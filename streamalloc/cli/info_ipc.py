"""What can be shared between processes here, and how: found by sharing a little of each with another process."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import numpy as np

import streamalloc as sa
from streamalloc import ipc, vmm
from streamalloc.cli.peer import Action, Here, Peer, PeerError
from streamalloc.cli.terminal import Terminal
from streamalloc.core.capabilities import imex_channels, missing_for

__all__ = ["ACTIONS", "Sharing", "imex_report", "show_imex", "show_sharing", "try_sharing"]

POSIX = sa.MemHandleType.POSIX_FILE_DESCRIPTOR
FABRIC = sa.MemHandleType.FABRIC

_PATTERN = 0x5A
# cuMemAlloc's memory is shared in blocks of this size.
_BLOCK = 2 << 20


class Sharing(NamedTuple):
    """One kind of thing that may be shared."""

    what: str
    how: str
    """The driver's mechanism, as its functions are called."""
    works: bool
    found: str


# --- the other process ----------------------------------------------------------------------------------------------


def _read(here: Here) -> int:
    """Open memory, and say how many bytes of it are not the pattern."""
    with here.receive() as memory:
        host = np.empty(memory.nbytes, np.uint8)
        memory.copy_to(host, here.stream)
        here.stream.synchronize()
    here.stream.synchronize()
    return int(np.count_nonzero(host != _PATTERN))


def _wait(here: Here) -> int:
    """Open an event, and wait for it in stream order and on the host."""
    with here.receive() as event:
        here.stream.wait(event)
        here.stream.synchronize()
        event.synchronize()
    return 0


ACTIONS: dict[str, Action] = {"read": _read, "wait": _wait}


# --- the trials -----------------------------------------------------------------------------------------------------


class Block:
    """Memory of ``cuMemAlloc``, as other libraries show theirs."""

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (_BLOCK,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "stream": None,
        }


def try_sharing(device: sa.Device) -> list[Sharing]:
    """Share a little of everything with another process, which reads it."""
    with contextlib.ExitStack() as resources:
        peer = resources.enter_context(Peer(device.driver, __name__))
        stream = resources.enter_context(device.create_stream())
        trials = [
            _tried(what, how, functools.partial(trial, peer, device, stream))
            for what, how, trial in (
                ("pool and its allocations", "file descriptor", _pool),
                ("memory mapped by hand", "file descriptor", _mapped),
                ("memory of cuMemAlloc", "cuIpcGetMemHandle", _plain),
                ("event", "cuIpcGetEventHandle", _event),
                ("memory between machines", "fabric handle", _fabric),
            )
        ]
        stream.synchronize()
    return trials


def _tried(what: str, how: str, trial: Callable[[], str]) -> Sharing:
    try:
        return Sharing(what, how, True, trial())
    except sa.CudaError as error:
        return Sharing(what, how, False, f"refused: {error.name}")
    except PeerError as error:
        return Sharing(what, how, False, f"the other process could not open it: {error.kind}: {error}")
    except (ValueError, OSError, NotImplementedError) as error:
        return Sharing(what, how, False, f"failed: {type(error).__name__}: {error}")


def _verdict(others: int) -> str:
    if others:
        raise ValueError(f"the other process read {others:,} wrong bytes")
    return "shared, and read by another process"


def _pool(peer: Peer, device: sa.Device, stream: sa.Stream) -> str:
    with sa.MemoryPool(device, handle_types=POSIX) as pool, pool.allocate(4096, stream) as buffer:
        buffer.fill(_PATTERN)
        return _verdict(peer.give("read", buffer))


def _mapped(peer: Peer, device: sa.Device, stream: sa.Stream) -> str:
    granule = vmm.PhysicalMemory.granularity(device)
    with vmm.GrowableBuffer(device, granule, granule, handle_types=POSIX, stream=stream) as buffer:
        buffer.fill(_PATTERN)
        return _verdict(peer.give("read", buffer))


def _plain(peer: Peer, device: sa.Device, stream: sa.Stream) -> str:
    # Any: the facade does not allocate such memory, so that this is the driver's own function.
    driver = cast(Any, device.driver)

    @contextlib.contextmanager
    def allocated() -> Iterator[int]:
        with device.current():
            error, pointer = driver.cuMemAlloc(_BLOCK)
            if error:
                raise MemoryError(f"cuMemAlloc answered {error.name}")
            try:
                driver.cuMemsetD8(pointer, _PATTERN, _BLOCK)
                driver.cuCtxSynchronize()
                yield int(pointer)
            finally:
                driver.cuMemFree(pointer)

    with allocated() as address:
        shared = ipc.share(Block(address), stream, expose_block=True)
        return _verdict(peer.give("read", shared))


def _event(peer: Peer, device: sa.Device, stream: sa.Stream) -> str:
    with device.create_event(interprocess=True) as event:
        stream.record(event)
        peer.give("wait", event)
    return "shared, and waited for by another process"


def _fabric(peer: Peer, device: sa.Device, stream: sa.Stream) -> str:
    granule = vmm.PhysicalMemory.granularity(device)
    with vmm.PhysicalMemory(granule, device, handle_types=FABRIC) as memory:
        memory.export(FABRIC)
    return "made and exported; another machine is needed to open it"


# --- IMEX channels --------------------------------------------------------------------------------------------------


def imex_report() -> list[dict[str, Any]]:
    """The IMEX channels of this machine, and which of them this user may open."""
    return [{"path": path, "permitted": os.access(path, os.R_OK | os.W_OK)} for path in imex_channels()]


def show_imex(terminal: Terminal, supports: sa.Capabilities) -> None:
    """The channels, and what to ask the administrator for where fabric handles need one."""
    terminal.heading("IMEX channels")
    channels = imex_report()
    terminal.table(
        (one["path"], terminal.good("may be opened") if one["permitted"] else terminal.odd("may not be opened"))
        for one in channels
    )
    if not channels:
        terminal.paragraph("none: /dev/nvidia-caps-imex-channels is absent or empty")
    for line in missing_for(supports):
        if line.startswith("fabric handles"):
            terminal.paragraph(line)


# --- how it is shown ------------------------------------------------------------------------------------------------


def show_sharing(trials: list[Sharing], terminal: Terminal) -> None:
    """The table of the trials."""
    terminal.heading("Sharing between processes")
    terminal.table(
        ((trial.what, trial.how, trial.found if trial.works else terminal.odd(trial.found)) for trial in trials),
        header=("", "by", "tried, on device 0"),
    )
