"""Exceptions: one class for each kind of failure, what they carry, and their way into another process."""

import json
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc, vmm
from streamalloc.core.errors import error_from
from streamalloc.core.session import Session
from streamalloc.driver.bindings import cuda
from streamalloc.driver.errors import PreventedCallError
from streamalloc.vmm.pages.places import usage
from tests.support import GROWTH, MiB, each_raises

KINDS = {
    "CUDA_ERROR_INVALID_VALUE": sa.InvalidValueError,
    "CUDA_ERROR_OUT_OF_MEMORY": sa.OutOfMemoryError,
    "CUDA_ERROR_NOT_INITIALIZED": sa.NotInitializedError,
    "CUDA_ERROR_DEINITIALIZED": sa.NotInitializedError,
    "CUDA_ERROR_INVALID_DEVICE": sa.InvalidDeviceError,
    "CUDA_ERROR_NO_DEVICE": sa.InvalidDeviceError,
    "CUDA_ERROR_INVALID_CONTEXT": sa.InvalidContextError,
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": sa.InvalidContextError,
    "CUDA_ERROR_INVALID_HANDLE": sa.InvalidHandleError,
    "CUDA_ERROR_NOT_READY": sa.NotReadyError,
    "CUDA_ERROR_NOT_SUPPORTED": sa.NotSupportedError,
    "CUDA_ERROR_NOT_PERMITTED": sa.NotPermittedError,
    "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": sa.PeerAccessError,
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": sa.CaptureError,
    "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": sa.CaptureError,
    "CUDA_ERROR_STREAM_CAPTURE_UNJOINED": sa.CaptureError,
    "CUDA_ERROR_CAPTURED_EVENT": sa.CaptureError,
    "CUDA_ERROR_ILLEGAL_ADDRESS": sa.DeviceLostError,
    "CUDA_ERROR_UNKNOWN": sa.CudaError,
    "CUDA_ERROR_FILE_NOT_FOUND": sa.CudaError,
}


def _through_a_pipe(error: BaseException) -> Any:
    """As multiprocessing sends an exception to another process."""
    return pickle.loads(bytes(ForkingPickler.dumps(error)))


@pytest.mark.parametrize("name", KINDS)
def test_the_class_of_an_answer(name: str) -> None:
    result = getattr(cuda.CUresult, name)
    error = error_from(result, "cuMemPoolCreate", "a hint")
    assert isinstance(error, sa.CudaError) and type(error.code) is int
    for one in (error, _through_a_pipe(error)):
        figures = (name, int(result), "cuMemPoolCreate", "a hint")
        assert (one.__class__, one.name, one.code, one.call, one.hint) == (KINDS[name], *figures)
        assert "a hint" in str(one)


@pytest.mark.parametrize("result", [one for one in cuda.CUresult if int(one)], ids=lambda one: str(one.name))
def test_every_answer_has_an_error(result: Any) -> None:
    error = error_from(result, "cuInit")
    assert error.name == result.name and result.name in str(error) and "cuInit" in str(error)


def test_kinds_fit_python_s_own() -> None:
    assert issubclass(sa.OutOfMemoryError, MemoryError)
    assert issubclass(sa.InvalidValueError, ValueError)
    assert issubclass(sa.ClosedError, RuntimeError) and not issubclass(sa.ClosedError, sa.CudaError)
    assert issubclass(sa.PendingFreesWarning, RuntimeWarning)


def test_out_of_memory_of_a_pool(device: sa.Device, stream: sa.Stream) -> None:
    with sa.MemoryPool(device, max_size=GROWTH) as pool, pool.allocate(20 * MiB, stream):
        with pytest.raises(sa.OutOfMemoryError) as caught:
            pool.allocate(20 * MiB, stream)
        error = caught.value
        assert (error.requested, error.used, error.reserved, error.limit) == (20 * MiB, 20 * MiB, GROWTH, GROWTH)
        assert (error.free, error.total) == tuple(device.memory_info())
        assert error.code == 2 and error.call == "cuMemAllocFromPoolAsync"
        twin = _through_a_pipe(error)
        assert str(twin) == str(error) and twin.__dict__ == error.__dict__
        for figure in (f"{20 * MiB:,}", f"{GROWTH:,}", f"{error.free:,}"):
            assert figure in str(error)


def test_out_of_memory_of_the_current_pool(device: sa.Device, stream: sa.Stream) -> None:
    used = sa.MemoryPool.default(device).statistics().used
    with pytest.raises(sa.OutOfMemoryError) as caught:
        sa.allocate(1 << 46, stream)
    error = caught.value
    assert (error.requested, error.used, error.limit) == (1 << 46, used, None)
    assert error.total == device.memory_info().total
    sa.MemoryPool.default(device).trim()  # what it took while it tried to grow


def test_out_of_memory_says_why(device: sa.Device, stream: sa.Stream) -> None:
    """A pool that fails to grow keeps what it got: 64 MiB of a 100 MiB request (seen on an H200)."""
    with sa.MemoryPool(device, max_size=2 * GROWTH, release_threshold=1 << 40) as pool:
        with pytest.raises(sa.OutOfMemoryError, match="larger than the pool's max_size") as caught:
            pool.allocate(100 * MiB, stream)
        assert caught.value.reserved == pool.statistics().reserved == 64 * MiB
        with pool.allocate(GROWTH, stream), pytest.raises(sa.OutOfMemoryError, match="not leave room") as caught:
            pool.allocate(2 * GROWTH, stream)
        assert caught.value.used == GROWTH


WAYS_OUT: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "a stream of None": (lambda pool, stream: pool.allocate(64, None), "not None: name one, such as device.default"),
    "a stream of 0": (lambda pool, stream: pool.allocate(64, 0), r"not 0: .*of_handle\(.* 0 is device.default_stream"),
    "swapped arguments": (lambda pool, stream: pool.allocate(stream, 64), r"not 64: .* allocate\(nbytes, stream\)"),
    "swapped, of a cache": (
        lambda pool, stream: sa.CachingAllocator(pool).allocate(stream, 64),  # type: ignore[arg-type]
        r"not 64: .* allocate\(nbytes, stream\)",
    ),
    "a pickled buffer": (lambda pool, stream: pickle.dumps(pool.allocate(64, stream)), "ipc.share .*copy_to copies"),
    "an array as a size": (
        lambda pool, stream: pool.allocate(np.array([64]), stream),
        r"^nbytes must be an integer or text such as '2MiB', not ndarray",
    ),
    "a pool of no device": (
        lambda pool, stream: sa.MemoryPool(None),  # type: ignore[arg-type]
        "^where must be a Device, its ordinal, a MemLocation or MemPoolProps, not NoneType",
    ),
    "a double as a pattern": (
        lambda pool, stream: pool.allocate(64, stream).fill(np.float64(1)),
        r"^value=.* has 8 bytes: a pattern has 1, 2 or 4 bytes",
    ),
    "a wait for a text": (lambda pool, stream: stream.wait("event"), "^other must be an Event, a Stream or an object"),
    "an event of this process": (
        lambda pool, stream: sa.Event.from_handle(stream.record().handle, stream.device),
        "pass a CUevent of this process to Stream.wait",
    ),
    "a folder as a backup": (
        lambda pool, stream: vmm.SleepGroup(stream.device, backup="/tmp"),  # type: ignore[arg-type]
        r"not str \('/tmp'\): DiskTier\(device, '/tmp'\) stores in a folder",
    ),
    "elements that do not fit": (
        lambda pool, stream: pool.allocate(63, stream).view_as(np.float32),
        r"^no number of float32 \(each 4 bytes\) fills the 63 bytes",
    ),
}


@pytest.mark.parametrize("name", WAYS_OUT)
def test_says_the_way_out(pool: sa.MemoryPool, stream: sa.Stream, name: str) -> None:
    act, match = WAYS_OUT[name]
    with pytest.raises((TypeError, ValueError), match=match):
        act(pool, stream)


@pytest.mark.parametrize(
    ("call", "act"),
    [
        ("cuMemCreate", lambda device, buffer, pool: buffer.grow("2MiB")),
        ("cuMemExportToShareableHandle", lambda device, buffer, pool: ipc.share(buffer)),
        ("cuMemPoolExportToShareableHandle", lambda device, buffer, pool: ipc.share(pool)),
    ],
)
def test_names_the_limit_of_open_files(faults: Any, call: str, act: Callable[[Any, Any, Any], object]) -> None:
    """The driver answers so where the operating system gives it no file descriptor."""
    device = sa.Device(0, driver=faults)
    kind = sa.MemHandleType.POSIX_FILE_DESCRIPTOR
    with (
        vmm.GrowableBuffer(device, 4 * MiB, 2 * MiB, handle_types=kind) as buffer,
        sa.MemoryPool(device, handle_types=kind) as pool,
    ):
        faults.fail(call, result="CUDA_ERROR_OPERATING_SYSTEM")
        with pytest.raises(sa.CudaError, match=r"ulimit -n.*file descriptor"):
            act(device, buffer, pool)
        act(device, buffer, pool)


@pytest.mark.bindings("13.0")
@pytest.mark.simulated_only("a machine without these")
def test_what_a_refused_place_needs(tmp_path: Path) -> None:
    """Managed pools, and memory of a locality domain."""
    about = {"format": "streamalloc profile", "version": 1, "base": "h200"}
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(about | {"attributes": {"CONCURRENT_MANAGED_ACCESS": 0}}))
    machine = sd.simulated(profile=str(profile))
    managed = sa.MemPoolProps(alloc_type=sa.MemAllocationType.MANAGED, location=sa.MemLocation.none())
    with pytest.raises(sa.NotSupportedError, match="concurrent managed access on every device"):
        sa.MemoryPool(managed, driver=machine)
    domain = sa.MemLocation(sa.MemLocationType.DEVICE_LOCALITY_DOMAIN, localized=sa.MemLocality(0, 0))
    for make in (sa.MemoryPool, lambda place, driver: vmm.PhysicalMemory(place, 2 << 20, driver=driver)):
        with pytest.raises((sa.CudaError, sa.NotSupportedError), match=r"locality_domain|LOCALITY_DOMAIN"):
            make(domain, driver=machine)


def test_remedies_are_in_the_text(device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream) -> None:
    """An error says what to do, and names the object that the program has."""
    with device.create_stream() as closed:
        buffer = pool.allocate(64, closed)
    uses: list[Callable[[], object]] = [buffer.free, lambda: buffer.fill(1), lambda: buffer[:8].fill(1)]
    each_raises(sa.ClosedError, *uses, match="name another stream")
    with pytest.raises(sa.ClosedError, match="closed> was closed"):
        buffer.free(closed)
    buffer.free(stream)
    with vmm.GrowableBuffer(device, 2 * MiB, 2 * MiB) as growable:
        pass
    with pytest.raises(sa.ClosedError, match="<GrowableBuffer, closed> was closed"):
        growable.fill(1)
    with stream.capture() as graph:
        node = pool.allocate(64, stream)
    with graph:
        graph.launch(stream)
        node.free()
        uses = [node.free, lambda: node.fill(1), lambda: node.fill(1, width=4), lambda: node[:8].fill(1)]
        each_raises(sa.InvalidValueError, *uses, match="no launch has allocated the memory since its last free")


@pytest.mark.gpus(2)
def test_an_event_of_another_device(stream: sa.Stream, peer: sa.Device) -> None:
    with peer.create_event() as event:
        says = r"<Event \S+ of device 1> is not of the device of <Stream \S+ of device 0>"
        each_raises(sa.InvalidHandleError, lambda: stream.record(event), match=says)


def test_memory_that_cannot_be_shared_says_what_can(device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream) -> None:
    with (
        vmm.PageArena(device) as arena,
        arena.space(4 * MiB) as space,
        vmm.ExpandableCache(pool).allocate(MiB, stream) as expandable,
    ):
        space.commit(range(2))
        for memory in (space, expandable):
            with pytest.raises(ValueError, match="copy it to a pool with handle types"):
                ipc.share(memory)
        with pytest.raises(TypeError, match="pages must be an integer, not float"):
            space.commit(1.5)  # type: ignore[arg-type]
        space.release([1])
        stream.synchronize()
        arena.trim()
        assert usage(arena._physical).startswith("1 page is in use")


def test_a_handle_whose_end_was_prevented_is_kept(raw: Any) -> None:
    class Prevents:
        def __getattr__(self, name: str) -> Any:
            return getattr(raw, name)

        def cuEventDestroy(self, event: Any) -> Any:
            raise PreventedCallError("a hazard")

    owner = SimpleNamespace(_raw="handle")
    with pytest.raises(PreventedCallError):
        Session.of(Prevents()).release(owner, "cuEventDestroy")
    assert owner._raw == "handle"
