"""Tour of sharing between processes, multicast objects and symmetric memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np

import streamalloc as sa
from streamalloc import ipc, vmm
from streamalloc.cli.machine import (
    KEEP_ALL,
    POSIX,
    is_simulated,
    need,
    need_gates,
    need_peers,
    need_shared_pools,
    need_virtual_memory,
)
from streamalloc.cli.steps import Claim, MiB, Parts, Tour, equal, every_byte, raised
from streamalloc.cli.terminal import plural
from streamalloc.cli.worker import Worker, WorkerBase, read
from streamalloc.core.errors import size_text
from streamalloc.driver import checked, simulated
from streamalloc.multicast import MulticastObject, SymmetricMemory
from streamalloc.testing import Gate

IPC, MULTICAST = Parts(), Parts()


# --- the other process ----------------------------------------------------------------------------------------------


class WorkerActions(WorkerBase):
    """Actions of the other process; ``name`` is the key of an opened object."""

    def open(self, name: str, shared: str = "") -> list[Any]:
        """Open a descriptor given in hexadecimal, or receive an object; return its class, size and address."""
        opened = ipc.open(bytes.fromhex(shared), stream=self.stream) if shared else self.receive()
        self.opened[name] = opened
        return [type(opened).__name__, opened.nbytes, opened.address]

    def differing(self, name: str, value: int) -> int:
        """Return the number of bytes that differ from ``value``."""
        return int(np.count_nonzero(read(self.opened[name], self.stream) != value))

    def fill(self, name: str, start: int, stop: int, value: int) -> None:
        """Fill a range of bytes and wait for it."""
        self.opened[name][start:stop].fill(value, self.stream)
        self.stream.synchronize()

    def done(self) -> bool:
        """Whether the stream has no work left."""
        return self.stream.query()

    def close(self, name: str) -> None:
        """Close an opened object and wait for the stream."""
        self.opened.pop(name).close()
        self.stream.synchronize()

    def consume(self) -> list[int]:
        """Read a ring to its end; return the value that fills each item, or -1 for a mixed one."""
        numbers = []
        with ipc.Ring.consumer(ipc.Channel.from_fd(self.handles[0]), stream=self.stream, timeout=20) as ring:
            for item in ring:
                host = read(item, self.stream)
                numbers.append(int(host[0]) if (host == host[0]).all() else -1)
        return numbers


# --- sharing --------------------------------------------------------------------------------------------------------


def _worker(tour: Tour) -> Worker:
    """Return the other process, shared by the parts; skip the part if pools cannot be shared."""
    need_shared_pools(tour.device)
    if tour.worker is None:
        tour.worker = tour.enter_context(Worker(tour.device.driver, __name__))
    return tour.worker


def _holds(worker: Worker, name: str, value: int) -> Claim:
    """Claim that all bytes of an opened object have this value, as the other process reads them."""
    return equal("bytes that differ in the other process", worker.ask("differing", name, value), 0)


_SHARED: dict[str, Any] = {"handle_types": POSIX, "release_threshold": KEEP_ALL}


@IPC.add(
    "One buffer in two processes",
    "A second Python process opens memory of this one, reads and writes it, and closes it.",
)
def two_processes(tour: Tour, stream: sa.Stream) -> None:
    worker = _worker(tour)
    with tour.pool(stream, **_SHARED) as pool, Gate(tour.device) as gate:
        buffer = pool.allocate(8 * MiB, stream)
        gate.hold(stream)
        buffer.fill(0x11)
        kind, nbytes, _ = worker.give("open", buffer, "first")
        tour.step(
            "another process opens 8 MiB, while a gate holds the fill",
            equal("it has", kind, ipc.ImportedBuffer.__name__),
            equal("size", nbytes, buffer.nbytes, size_text),
            equal("its stream has done its work", worker.ask("done"), False),
            figures=f"process {worker.process.pid}",
        )
        gate.open()
        filled = _holds(worker, "first", 0x11)
        tour.step("gate opened: its stream continues by itself, and it reads the filled bytes", filled)
        worker.ask("fill", "first", 2 * MiB, 6 * MiB, 0x22)
        quarters = read(buffer, stream).reshape(4, -1)
        ends, middle = every_byte("the ends", quarters[[0, 3]], 0x11), every_byte("the middle", quarters[1:3], 0x22)
        tour.step("it fills the middle, and this process sees that", ends, middle)
        second = pool.allocate(4 * MiB, stream)
        second.fill(0x33)
        shared = bytes(ipc.share(second))
        size = equal("size", worker.ask("open", "second", shared.hex())[1], second.nbytes, size_text)
        text = f"more memory of this pool is shared by {len(shared)} bytes, without a file descriptor"
        tour.step(text, size, _holds(worker, "second", 0x33))
        for name, memory in (("first", buffer), ("second", second)):
            worker.ask("close", name)
            memory.free()
        stream.synchronize()
        tour.pool_step("both closed there and freed here", pool, used=0)


@IPC.add(
    "The lease", "The driver would reuse freed memory even if another process still reads it. Here the free waits."
)
def lease(tour: Tour, stream: sa.Stream) -> None:
    worker = _worker(tour)
    with tour.pool(stream, **_SHARED) as pool:
        buffer = pool.allocate(8 * MiB, stream)
        buffer.fill(0x44)
        worker.give("open", buffer, "leased")
        refused = raised("the free", sa.StillImportedError, lambda: buffer.free(still_imported="raise"))
        tour.pool_step("a free that may not wait raises an error", pool, refused, used=8 * MiB)
        buffer.free()
        with pool.allocate(8 * MiB, stream) as other:
            other.fill(0x55)
            stream.synchronize()
            untouched = "freed here, new memory allocated and written: the first is unchanged"
            tour.pool_step(untouched, pool, _holds(worker, "leased", 0x44), used=16 * MiB)
            worker.ask("close", "leased")
            tour.pool_step("closed there: now its memory is free", pool, used=8 * MiB)


@IPC.add("A ring", "A sequence of items, sent through slots that are shared once.")
def ring(tour: Tour, stream: sa.Stream) -> None:
    worker = _worker(tour)
    slots, items = 4, 20
    with tour.pool(stream, **_SHARED) as pool:
        ours, theirs = ipc.Channel.pair()
        with ipc.Ring.producer(pool, MiB, slots, stream=stream) as producer:
            with theirs:
                worker.begin("consume", fds=[theirs.fileno()])
            producer.add(ours, timeout=20)
            used = pool.statistics().used
            for number in range(items):
                with producer.next(timeout=20) as slot:
                    slot.nbytes_used = MiB >> number % 3
                    slot.fill(number)
            memory = equal("used", used, slots * MiB, size_text)
            handed_off = equal("handed off", producer.statistics().handed_off, items)
            tour.step(f"{items} items sent through {slots} slots", handed_off, memory)
        tour.step("the other process received all of them in order", equal("items", worker.result(), [*range(items)]))
        stream.synchronize()
        tour.pool_step("closed on both sides", pool, used=0)


# --- multicast ------------------------------------------------------------------------------------------------------

_PERMISSION = "STREAMALLOC_TEST_MULTICAST"
"""Environment variable that permits multicast objects on shared NVSwitches."""
_DEVICES = 4


def _may_make_objects(driver: Any) -> bool:
    return is_simulated(driver) or os.environ.get(_PERMISSION) == "1"


def _on_several(show: Callable[[Tour, Any], None]) -> Callable[[Tour, sa.Stream], None]:
    """Run a part on the tour's machine, or on another simulated one if the tour's has one device."""

    def run(tour: Tour, _: sa.Stream) -> None:
        driver: Any = tour.device.driver
        need_virtual_memory(tour.device)
        if sa.Device.count(driver) > 1 or not is_simulated(driver):
            show(tour, driver)
            return
        tour.terminal.paragraph(f"This machine has one device: shown on one that is simulated with {_DEVICES} devices.")
        own = checked(simulated(devices=_DEVICES))
        show(tour, own)
        sa.Device(0, driver=own).synchronize()  # releases dropped objects
        own.assert_nothing_left()

    return run


@MULTICAST.add(
    "Multicast", "One address for memory on several GPUs: the switches between them copy a store to all of them."
)
@_on_several
def multicast(tour: Tour, driver: Any) -> None:
    # Checked first: without permission no multicast call reaches real hardware.
    need(_may_make_objects(driver), f"multicast objects are created on real GPUs only with {_PERMISSION}=1")
    devices = [device for device in sa.Device.all(driver) if device.supports.multicast]
    need(len(devices) > 1, "this machine has no two GPUs that support multicast objects")
    count, (*first, last) = len(devices), devices
    size = 2 * MulticastObject.granularity(count, driver=driver)
    with contextlib.ExitStack() as resources:
        keep = resources.enter_context
        streams = [keep(device.create_stream()) for device in devices]
        memories = [keep(vmm.PhysicalMemory(device, size)) for device in devices]
        addresses = keep(vmm.AddressRange(count * size, driver=driver))
        with MulticastObject(size, count, driver=driver) as team:
            for device in first:
                team.add_device(device)
            tour.step(
                f"a team of {plural(count, 'GPU')}, one still missing: binding raises an error",
                raised("binding", sa.IncompleteTeamError, lambda: team.bind(memories[0])),
                equal("bound", len(team.bindings), 0),
            )
            team.add_device(last)
            refused = raised("adding it", ValueError, lambda: team.add_device(first[0]))
            complete = equal("team is complete", team.complete, True)
            tour.step("all added; a GPU cannot be added twice", refused, complete)

            for memory in memories:
                team.bind(memory)
            view = team.map(access=devices)
            own = [addresses.map(memory, at * size, access=devices) for at, memory in enumerate(memories)]
            tour.step(
                "memory of each GPU bound, and the object mapped",
                equal("bound for", [binding.device for binding in team.bindings], devices),
                equal("size", view.nbytes, size, size_text),
                figures=f"{count} x {size_text(size)} at {view.address:#x}",
            )

            _write(tour, view, own, streams)
            for one in (*own, *memories):
                one.close()
            view.fill(0x5A, streams[0])
            tour.step("closed memory is usable as long as it is bound", equal("bound", len(team.bindings), count))
        refused = raised("a fill", sa.ClosedError, lambda: view.fill(0, streams[0]))
        tour.step("left the `with` block: unbound, unmapped and released", refused)


def _write(tour: Tour, view: vmm.Mapping, own: list[vmm.Mapping], streams: list[sa.Stream]) -> None:
    """Write by the object's mapping and by a GPU's own; compare the memory of all GPUs."""
    names = [f"GPU {stream.device.ordinal}" for stream in streams]
    first, half = streams[0], view.nbytes // 2

    def replicas() -> list[tuple[str, np.ndarray[Any, Any]]]:
        """Return each device's name and both halves of its memory, read by its own address."""
        for stream in streams[1:]:
            stream.wait(first)
        halves = [read(replica, stream).reshape(2, -1) for replica, stream in zip(own, streams, strict=True)]
        return list(zip(names, halves, strict=True))

    view.fill(0x2D, first)
    filled = [every_byte(f"on {name}", halves, 0x2D) for name, halves in replicas()]
    tour.step(f"{names[0]} fills the mapping: the memory of every GPU is filled", *filled)
    own[1][:half].fill(0x3E, first)
    view[half:].fill(0x4F, first)
    found = replicas()
    tour.step(
        "a write to one GPU's own memory changes that GPU's memory only",
        *(every_byte(f"first half on {at}", one, 0x3E if at == names[1] else 0x2D) for at, (one, _) in found),
        *(every_byte(f"second half on {at}", one, 0x4F) for at, (_, one) in found),
    )
    host = np.empty(view.nbytes, np.uint8)
    refused = raised("the copy", ValueError, lambda: view.copy_to(host, first))
    tour.step("ordinary reads of the mapping are undefined, so a copy from it raises an error", refused)


@MULTICAST.add(
    "Symmetric memory",
    "Memory of the same size on every GPU, mapped for all of them, set up in one call: on all or on none.",
)
@_on_several
def symmetric(tour: Tour, driver: Any) -> None:
    need_gates(tour.device)
    with contextlib.ExitStack() as resources:
        devices = need_peers(driver)
        count, share = len(devices), 64 << 10
        streams = [resources.enter_context(device.create_stream()) for device in devices]
        may = _may_make_objects(driver)
        with SymmetricMemory.local(devices, count * share, multicast="auto" if may else False) as memory:
            view = memory.multicast_buffer
            expected = may and all(device.supports.multicast for device in devices)
            tour.step(
                f"{size_text(count * share)} on each of {plural(count, 'GPU')}, every one mapped for all",
                equal("ranks", memory.size, count),
                equal("different addresses", len(set(memory.addresses.tolist())), count),
                equal("there is a multicast view", view is not None, expected),
                figures="no multicast view" if view is None else f"multicast view at {view.address:#x}",
            )

            targets = memory.buffers if view is None else (view,)
            for rank, stream in enumerate(streams):
                for target in targets:
                    target[rank * share : (rank + 1) * share].fill(rank + 1, stream)
            memory.barrier(*streams)
            gathered = np.array([read(buffer, stream) for buffer, stream in zip(memory.buffers, streams, strict=True)])
            parts = np.repeat(np.arange(1, count + 1, dtype=np.uint8), share)
            tour.step(
                "each GPU stores its part on all, then a barrier: all have all parts",
                equal("bytes that differ", int(np.count_nonzero(gathered != parts)), 0),
                figures=plural(count * len(targets), "store"),
            )

            memory.wait_signal(0, streams[1])
            waiting = streams[1].query()
            memory.put_signal(1, streams[0])
            streams[1].synchronize()
            before = equal("the stream is done before it", waiting, False)
            after = equal("the stream is done after it", streams[1].query(), True)
            text = f"a signal from GPU {devices[0].ordinal} to GPU {devices[1].ordinal}: the host waits for neither"
            tour.step(text, before, after)
        refused = raised("using it", sa.ClosedError, lambda: memory.buffers)
        tour.step("closed: using it raises an error", refused)
