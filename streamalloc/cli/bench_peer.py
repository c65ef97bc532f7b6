"""The other process of the benchmark on sharing: it takes what it is handed, says so, and does nothing else."""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing.connection
import pickle
from collections.abc import Callable
from typing import Any, cast

from streamalloc import ipc
from streamalloc.cli.measuring import value_of
from streamalloc.cli.peer import Action, Here

__all__ = ["ACTIONS", "HANDLE_BYTES", "answer_queue", "cuda_core"]

HANDLE_BYTES = 64
"""What the driver's opaque structures for other processes have."""

Serve = Callable[[int], None]
"""Takes so many hand-offs."""


def answer_queue(things: Any, answers: Any) -> None:
    """Take what comes through a queue of multiprocessing, let go of it, and say so; None is the end."""
    while True:
        thing = things.get()
        if thing is None:
            return
        if hasattr(thing, "close"):
            thing.close()
        del thing
        answers.put(True)


def cuda_core() -> tuple[Any, Any, Any]:
    """cuda.core, its device and a stream of it."""
    core = importlib.import_module("cuda.core")
    device = core.Device(0)
    device.set_current()
    return core, device, device.create_stream()


def _connection(here: Here) -> Any:
    return multiprocessing.connection.Connection(here.handles[0].detach())


def _pipe(here: Here) -> Serve:
    connection = _connection(here)

    def serve(count: int) -> None:
        for _ in range(count):
            connection.send_bytes(connection.recv_bytes())

    return serve


def _raw(here: Here, ready_handle: str) -> Serve:
    driver = cast(Any, here.device.driver)
    here.resources.enter_context(here.device.current())
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    connection = _connection(here)
    pool = value_of(driver.cuMemPoolImportFromShareableHandle(here.handles[1].fileno(), kind, 0))
    handle = driver.CUipcEventHandle()
    ctypes.memmove(handle.getPtr(), bytes.fromhex(ready_handle), HANDLE_BYTES)
    ready = value_of(driver.cuIpcOpenEventHandle(handle))
    flags = driver.CUevent_flags
    done = value_of(driver.cuEventCreate(int(flags.CU_EVENT_DISABLE_TIMING) | int(flags.CU_EVENT_INTERPROCESS)))
    connection.send_bytes(ctypes.string_at(value_of(driver.cuIpcGetEventHandle(done)).getPtr(), HANDLE_BYTES))
    stream = driver.CUstream(here.stream.handle)
    make = driver.CUmemPoolPtrExportData
    import_, wait, free, record = (
        driver.cuMemPoolImportPointer,
        driver.cuStreamWaitEvent,
        driver.cuMemFreeAsync,
        driver.cuEventRecord,
    )

    def serve(count: int) -> None:
        for _ in range(count):
            data = make()
            ctypes.memmove(data.getPtr(), connection.recv_bytes(), HANDLE_BYTES)
            error, pointer = import_(pool, data)
            if error:
                raise RuntimeError(error)
            (error,) = wait(stream, ready, 0)
            if error:
                raise RuntimeError(error)
            (error,) = free(pointer, stream)
            if error:
                raise RuntimeError(error)
            (error,) = record(done, stream)
            if error:
                raise RuntimeError(error)
            connection.send_bytes(b"k")

    return serve


def _ours(here: Here) -> Serve:
    channel = ipc.Channel.from_fd(here.handles[0])
    stream, driver = here.stream, here.device.driver

    def serve(count: int) -> None:
        for _ in range(count):
            ipc.receive(channel, stream=stream, driver=driver).close()
            channel.send(b"k")

    return serve


def _cuda_core(here: Here) -> Serve:
    connection = _connection(here)
    core, device, stream = cuda_core()
    resource = core.DeviceMemoryResource.from_allocation_handle(device, here.handles[1].fileno())
    open_ = core.Buffer.from_ipc_descriptor

    def serve(count: int) -> None:
        for _ in range(count):
            open_(resource, pickle.loads(connection.recv_bytes()), stream=stream).close()
            connection.send_bytes(b"k")

    return serve


def _ring_item(here: Here) -> Serve:
    replies = ipc.Channel.from_fd(here.handles[1])
    ring = ipc.Ring.consumer(ipc.Channel.from_fd(here.handles[0]), stream=here.stream, timeout=60)

    def serve(count: int) -> None:
        for _ in range(count):
            with ring.next():
                replies.send(b"k")

    return serve


def _ring_stream(here: Here) -> Serve:
    ring = ipc.Ring.consumer(ipc.Channel.from_fd(here.handles[0]), stream=here.stream, timeout=60)

    def serve(count: int) -> None:
        for _ in range(count):
            ring.next().release()

    return serve


_WAYS: dict[str, Callable[..., Serve]] = {
    "pipe": _pipe,
    "raw": _raw,
    "streamalloc": _ours,
    "cuda.core": _cuda_core,
    "ring item": _ring_item,
    "ring stream": _ring_stream,
}


def _set_up(here: Here, way: str, *arguments: Any) -> None:
    here.opened[way] = _WAYS[way](here, *arguments)


def _serve(here: Here, way: str, count: int) -> None:
    here.opened[way](count)
    here.stream.synchronize()


ACTIONS: dict[str, Action] = {"set up": _set_up, "serve": _serve}
