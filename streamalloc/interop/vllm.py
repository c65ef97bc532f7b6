"""Interface of vLLM's ``CuMemAllocator`` over a sleep group, and a backend of vLLM's sleep mode with it.

With ``STREAMALLOC_VLLM=1`` in the environment, vLLM's sleep mode uses :class:`CuMemAllocator` of this module: vLLM
calls :func:`register` as a plugin. :doc:`/docs/recipes/vllm-sleep` has programs.
"""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections.abc import Iterator
from typing import Any

from streamalloc.core.errors import EvictedError, InUseError
from streamalloc.core.internal import Device
from streamalloc.core.properties import checked_type
from streamalloc.interop.bridge import Sources, library
from streamalloc.interop.torch import TorchBridge, asleep, collect, prepare, unrouted, without_expandable
from streamalloc.vmm import SleepGroup, VirtualBuffer

__all__ = ["AllocationData", "CuMemAllocator", "SleepModeBackend", "install", "register"]

_INTERNAL = ("runtime", "cudagraph")
"""Tags of which every sleep keeps the bytes, also those that ``offload_tags`` does not name."""
_DEFERRABLE = ("weights", "kv_cache")
"""Tags whose memory stays asleep if a wake names other tags. Memory with a tag that is neither of these two wakes at
every wake.
"""
_NAME = "streamalloc"
_CUMEM, _BACKENDS = (f"vllm.device_allocator.{name}" for name in ("cumem", "sleep_mode_backend"))


class AllocationData:
    """Description of one segment of PyTorch's memory. :attr:`is_asleep` and :attr:`cpu_backup_tensor` show the present
    state; the other attributes do not change.

    :attr:`CuMemAllocator.pointer_to_data` returns a dictionary of these objects.
    """

    def __init__(self, allocator: CuMemAllocator, buffer: VirtualBuffer, tag: str) -> None:
        self._allocator = allocator
        # The reference is weak: a program may keep this description, and the memory must be freed all the same.
        self._buffer = weakref.ref(buffer)
        self.handle: tuple[int, int, int, int] = (buffer.device.ordinal, buffer.nbytes, buffer.address, 0)
        """Device ordinal, bytes, address, and 0 in place of the driver's handle, which belongs to the package."""
        self.tag: str = tag
        """Tag of the memory (:meth:`CuMemAllocator.use_memory_pool`)."""

    @property
    def is_asleep(self) -> bool:
        """Whether the device memory is released now, and only the address is kept. False if the memory was freed."""
        buffer = self._buffer()
        return buffer is not None and buffer.evicted

    @property
    def cpu_backup_tensor(self) -> Any:
        """The kept bytes as a ``uint8`` tensor in pinned host memory. None if the memory is awake or freed, or its
        bytes were discarded.
        """
        buffer = self._buffer()
        return None if buffer is None else self._allocator._kept.get(buffer)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.tag!r} of {self._buffer()!r}>"


class CuMemAllocator:
    """Memory of PyTorch that sleeps and wakes by tags, with the interface of vLLM's ``CuMemAllocator``.

    The allocator has memory of one device: the device that is current at the first use. ::

        allocator = CuMemAllocator.get_instance()
        with allocator.use_memory_pool(tag="weights"):
            weights = torch.randn(1 << 20, device="cuda")
        allocator.sleep(offload_tags=("weights",))
        allocator.wake_up()    # same address, same bytes

    If a method raises an error, all memory is as before the call.
    """

    instance: CuMemAllocator | None = None
    """The allocator of this process; None before the first :meth:`get_instance`."""
    default_tag: str = "default"
    """Tag of the memory that is allocated in a block of :meth:`use_memory_pool` without a tag."""
    cudagraph_tag: str = "cudagraph"
    """Tag of the memory of captured graphs."""

    @staticmethod
    def get_instance() -> CuMemAllocator:
        """Return the one allocator of this process. The first call makes it, for PyTorch's current device. Raises
        ModuleNotFoundError if PyTorch is not installed.
        """
        if CuMemAllocator.instance is None:
            CuMemAllocator.instance = CuMemAllocator()
        return CuMemAllocator.instance

    def __init__(self) -> None:
        self.group: SleepGroup = SleepGroup(Device(int(library("torch").cuda.current_device())))
        """Sleep group with all memory of this allocator."""
        self.current_tag: str = self.default_tag
        """Tag of the innermost block of :meth:`use_memory_pool`."""
        self._bridges: dict[str, TorchBridge] = {}
        self._kept: weakref.WeakKeyDictionary[VirtualBuffer, Any] = weakref.WeakKeyDictionary()
        """Tensors with the kept bytes, by buffer."""

    @property
    def pointer_to_data(self) -> dict[int, AllocationData]:
        """Descriptions of the segments by their device addresses. Segments that PyTorch has freed are released first,
        and are not among them.
        """
        collect()
        buffers = self.group.buffers
        return {buffer.address: AllocationData(self, buffer, tag) for buffer, tag in buffers.items()}

    @property
    def allocator_and_pools(self) -> dict[str, list[tuple[Any, Any]]]:
        """Pools of PyTorch by tag: for each tag, a list of tuples of a ``torch.cuda.MemPool`` and its bridge. In vLLM's
        class the second item is the allocator.
        """
        return {tag: [(pool, one) for pool in one.pools.values()] for tag, one in self._bridges.items()}

    def get_current_usage(self) -> int:
        """Return the size of all segments of PyTorch in bytes, asleep or not."""
        return sum(data.handle[1] for data in self.pointer_to_data.values())

    @contextlib.contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """Tag the memory of the tensors that this thread makes in the ``with`` block. Blocks may nest.

        Memory of this tag that no tensor uses is released at the beginning and at the end of the block, except during a
        capture and while another thread allocates from a bridge. PyTorch's option ``expandable_segments`` is off in the
        block.

        Parameters
        ----------
        tag
            The tag; default: ``"default"``.

        Raises
        ------
        TypeError
            The tag is not a ``str``.
        """
        tag = self.default_tag if tag is None else checked_type("tag", tag, str)
        bridge = self._bridge(tag)
        with self._tagged(tag), bridge.routed(), without_expandable():
            self._trim(bridge)
            try:
                yield
            finally:
                self._trim(bridge)

    @contextlib.contextmanager
    def reuse_memory_pool(self, tag: str) -> Iterator[None]:
        """Tag memory as :meth:`use_memory_pool` does, with a tag that was used before, but release no memory.

        Raises
        ------
        ValueError
            The tag was not used, or its pool was released.
        """
        if tag not in self._bridges:
            raise ValueError(f"tag={tag!r} was not used: there are {sorted(self._bridges)}")
        with self._tagged(tag), self._bridges[tag].routed(), without_expandable():
            yield

    @contextlib.contextmanager
    def use_cudagraph_pool(self) -> Iterator[Any]:
        """Provide a pool for captures. ``with ... as pool_id`` gives the id for ``torch.cuda.graph(pool=pool_id)``. The
        pool's memory has the tag ``"cudagraph"``: each sleep keeps its bytes, and each wake restores it.

        Raises
        ------
        EvictedError
            The memory of earlier graphs is asleep.
        """
        tag = self.cudagraph_tag
        if asleep(tag, [self.group]):
            raise EvictedError("the memory of the captured graphs is asleep: wake_up() before another is captured")
        # If several pools are active, PyTorch allocates from the outermost one, so the pool of an outer block is
        # deactivated here.
        with self._tagged(tag), unrouted():
            yield self._bridge(tag).pool.id

    def release_cudagraph_pool(self) -> None:
        """Release the memory of captured graphs. No effect if no graph pool was used. Destroy the graphs before:
        otherwise their memory stays until the graphs are destroyed and, for example, :attr:`pointer_to_data` is read.

        Do not call this during a capture: PyTorch aborts the process (:meth:`TorchBridge.close`).
        """
        bridge = self._bridges.pop(self.cudagraph_tag, None)
        if bridge is not None:
            bridge.close()

    def sleep(self, offload_tags: tuple[str, ...] | str | None = None) -> None:
        """Release the device memory of all tags; the addresses stay.

        The bytes of the tags in ``offload_tags``, and always those of the tags ``"runtime"`` and ``"cudagraph"``, are
        kept in pinned host memory. The bytes of all other tags are lost. Memory that is asleep already stays as it is,
        with its kept bytes.

        Parameters
        ----------
        offload_tags
            Tags whose bytes are kept; default: ``"default"`` alone.

        Raises
        ------
        InUseError
            Memory was exported, or is mapped at a second address.
        CaptureError
            PyTorch captures its current stream, or this thread a stream of this package.
        OutOfMemoryError, RuntimeError
            There is not enough host memory, or the driver refused a call. After each error nothing has changed.
        TypeError
            ``offload_tags`` is neither a ``str`` nor a list or tuple of them.
        """
        keep = {*_tags("offload_tags", (self.default_tag,) if offload_tags is None else offload_tags), *_INTERNAL}
        torch = library("torch")
        kept: dict[VirtualBuffer, Any] = {}

        def place(buffer: VirtualBuffer, tag: str) -> Any:
            if tag not in keep:
                return None
            kept[buffer] = torch.empty(buffer.nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            return kept[buffer].numpy()

        prepare([self.group])
        self.group.sleep(backup=place)
        self._kept.update(kept)
        gc.collect()
        torch.cuda.empty_cache()

    def discard(self, tags: tuple[str, ...] | str) -> None:
        """Release the device memory of these tags. The bytes are lost. Tags without memory are ignored.

        Raises the errors of :meth:`sleep`; after each error nothing has changed.
        """
        prepare([self.group])
        found = set(_tags("tags", tags)).intersection(self.group.buffers.values())
        if found:
            self.group.sleep(*found, keep=False)

    def wake_up(self, tags: list[str] | tuple[str, ...] | str | None = None) -> None:
        """Restore the device memory at the same addresses, with the bytes that were kept.

        The bytes are complete when this method returns.

        Parameters
        ----------
        tags
            Tags of the memory; default: all. Memory with other tags than ``"weights"`` and ``"kv_cache"`` always wakes.
            Unknown tags are ignored.

        Raises
        ------
        OutOfMemoryError
            There is not enough device memory. All is still asleep, with its bytes.
        CudaError
            The driver refused a call. All is still asleep, with its bytes.
        CaptureError
            As for :meth:`sleep`. Nothing has changed.
        TypeError
            ``tags`` is neither a ``str`` nor a list or tuple of them.
        """
        named = _DEFERRABLE if tags is None else _tags("tags", tags)
        prepare([self.group])
        sleeping = {
            buffer: tag
            for buffer, tag in self.group.buffers.items()
            if buffer.evicted and (tags is None or tag in named or tag not in _DEFERRABLE)
        }
        if sleeping:
            self.group.wake(*set(sleeping.values()))
            self.group.device.synchronize()
        for buffer in sleeping:
            self._kept.pop(buffer, None)

    def release_pools(self) -> None:
        """Release the memory of this allocator that no tensor uses, and end the pools of PyTorch that this allocator
        has made. Idempotent. Destroy captured graphs before: memory that a graph uses stays until the graph is
        destroyed (:meth:`release_cudagraph_pool`). Do not call this during a capture, because PyTorch would abort the
        process.
        """
        while self._bridges:
            self._bridges.popitem()[1].close()

    def close(self) -> None:
        """Call :meth:`release_pools`, with the same effect and limits."""
        self.release_pools()

    def _bridge(self, tag: str) -> TorchBridge:
        if tag not in self._bridges:
            self._bridges[tag] = TorchBridge(Sources([self.group.tagged(tag)]))
        return self._bridges[tag]

    @contextlib.contextmanager
    def _tagged(self, tag: str) -> Iterator[None]:
        before, self.current_tag = self.current_tag, tag
        try:
            yield
        finally:
            self.current_tag = before

    @staticmethod
    def _trim(bridge: TorchBridge) -> None:
        """Release the memory of the bridge's pools that no tensor uses. During a capture nothing is released, because
        PyTorch would abort the process.
        """
        if not library("torch").cuda.is_current_stream_capturing():
            with contextlib.suppress(InUseError):  # Another thread is allocating: no trim.
                bridge.trim()


class SleepModeBackend:
    """Backend of vLLM's sleep mode over :class:`CuMemAllocator`; its name in vLLM is ``"streamalloc"``.

    vLLM makes this backend if its option ``sleep_mode_backend`` has this name. :func:`register` must have been called
    with ``STREAMALLOC_VLLM=1``.

    Raises
    ------
    RuntimeError
        vLLM allocates from its own allocator: :func:`install` was not called.
    """

    def __init__(self) -> None:
        if library(_CUMEM).CuMemAllocator is not CuMemAllocator:
            raise RuntimeError("vLLM allocates from its own CuMemAllocator: start it with STREAMALLOC_VLLM=1")
        self._state = "RUNNING"

    def suspend(self, level: int = 1) -> None:
        """Put all memory to sleep. Level 1 keeps the bytes with the tag ``"weights"``, level 2 does not.

        Raises ``ValueError`` for another level, and the errors of :meth:`CuMemAllocator.sleep`.
        """
        if level not in (1, 2):
            raise ValueError(f"level={level!r}: allowed are 1 and 2")
        CuMemAllocator.get_instance().sleep(("weights",) if level == 1 else ())
        self._state = "SUSPENDED"

    def resume(self, tags: list[str] | None = None) -> None:
        """Wake the memory of ``tags``, or all if None, by :meth:`CuMemAllocator.wake_up`. Raises the errors of that
        method.
        """
        before, self._state = self._state, "RESUMING"
        try:
            CuMemAllocator.get_instance().wake_up(tags)
            before = "RUNNING"
        finally:
            self._state = before

    def discard(self, tags: tuple[str, ...]) -> None:
        """Release the memory with one of ``tags``, and lose its bytes. Afterwards :attr:`state` is ``"SUSPENDED"``.
        Raises the errors of :meth:`CuMemAllocator.discard`.
        """
        CuMemAllocator.get_instance().discard(tags)
        self._state = "SUSPENDED"

    def state(self) -> str:
        """State of the memory: ``"RUNNING"``, ``"SUSPENDED"``, or ``"RESUMING"`` during a wake."""
        return self._state

    @classmethod
    def is_supported(cls) -> bool:
        """Whether PyTorch has a CUDA device."""
        return bool(library("torch").cuda.is_available())

    @classmethod
    def preserves_communicators(cls) -> bool:
        """True: the memory of communicators is not of this allocator, so communicators stay valid across a sleep."""
        return True

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        """True: a sleep releases no compiled kernels."""
        return True

    @classmethod
    def preserves_graphs_with_communicators(cls) -> bool:
        """False: NCCL registers the buffers of graphs, and these registrations are stale after a wake, unless
        ``NCCL_GRAPH_REGISTER=0``.
        """
        return False

    @classmethod
    def supports_durable_storage(cls) -> bool:
        """False: the kept bytes are in host memory of this process, and end with it."""
        return False


def install() -> None:
    """Replace vLLM's class ``CuMemAllocator`` by :class:`CuMemAllocator`. Idempotent.

    Raises
    ------
    ModuleNotFoundError
        vLLM is not installed.
    RuntimeError
        vLLM has allocated from its own allocator already.
    """
    module = library(_CUMEM)
    if module.CuMemAllocator is CuMemAllocator:
        return
    if module.CuMemAllocator.instance is not None:
        raise RuntimeError("vLLM has made its own CuMemAllocator already: install this one before")
    module.CuMemAllocator = CuMemAllocator
    module.cumem_available = True


def register() -> None:
    """Call :func:`install`, and register :class:`SleepModeBackend`, if the environment has ``STREAMALLOC_VLLM=1``.

    This function is the package's entry point in the group ``vllm.general_plugins``: vLLM calls it in each process,
    perhaps twice. Raises the errors of :func:`install`.
    """
    if os.environ.get("STREAMALLOC_VLLM") != "1":
        return
    install()
    # Older versions of vLLM lack this module; a second registration raises ValueError.
    with contextlib.suppress(ModuleNotFoundError, ValueError):
        module = library(_BACKENDS)
        module.SleepModeBackend.register(SleepModeBackend)
        module.SleepModeBackendFactory.register_backend(_NAME, __name__, SleepModeBackend.__name__)


def _tags(name: str, tags: object) -> tuple[str, ...]:
    if not isinstance(tags, (str, list, tuple)):
        raise TypeError(f"{name} must be a tag or a sequence of tags, not {tags!r}")
    return tuple(checked_type(name, tag, str) for tag in ((tags,) if isinstance(tags, str) else tags))
