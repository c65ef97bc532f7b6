"""Interface of the library ``torch_memory_saver`` over sleep groups: memory of PyTorch is released and restored by
tags.

Replace ``from torch_memory_saver import torch_memory_saver`` by
``from streamalloc.interop.memory_saver import torch_memory_saver``; :doc:`/docs/recipes/memory-saver` has programs.

No library is preloaded. A region routes the allocations of its thread to a ``torch.cuda.MemPool``
(:mod:`streamalloc.interop.torch`). So memory of other threads is not paused, nor memory that other libraries get by
``cudaMalloc``. Each pool of PyTorch has one tag and one kind of backup. Its buffers have the tag ``"tag:kind"`` in the
sleep group of the device.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from streamalloc.core.errors import EvictedError, OutOfMemoryError, refused, size_text
from streamalloc.core.internal import Device, StreamLike, work
from streamalloc.core.properties import checked_number, checked_size, checked_type
from streamalloc.core.session import session_of
from streamalloc.driver import Driver
from streamalloc.interop.bridge import Sources, library
from streamalloc.interop.torch import TorchBridge, asleep, expandable, plain, prepare, unrouted
from streamalloc.vmm import DiskTier, SleepGroup, VirtualBuffer
from streamalloc.vmm.internal import HostMemory, Tagged, host_segments

__all__ = ["TorchMemorySaver", "configure_subprocess", "sglang_plugin", "torch_memory_saver"]

_HOOK_MODES = ("preload", "torch")
_BACKENDS = ("pinned", "mmap")
_NONE, _DISK = "none", "disk"
# Number of slots in the staging memory of a DiskTier, and the largest size of a slot in bytes.
_SLOTS, _MOST_BLOCK = 16, 64 << 20
_ADAPTERS = "sglang.srt.utils.torch_memory_saver_adapter"


class TorchMemorySaver:
    """Memory of PyTorch that is paused and resumed by tags, with the interface of ``torch_memory_saver``.

    The module's ``torch_memory_saver`` is an object of this class. Further objects are independent of it. ::

        with torch_memory_saver.region(tag="weights", enable_cpu_backup=True):
            weights = torch.randn(1 << 20, device="cuda")
        torch_memory_saver.pause("weights")     # the bytes are in host memory, the device memory is free
        torch_memory_saver.resume("weights")    # same address, same bytes

    On errors for which the library ``torch_memory_saver`` ends the process, this class raises an exception and changes
    nothing. The environment variables of ``torch_memory_saver`` are read at the first use. ``TMS_INIT_ENABLE=1`` begins
    a region on the thread of the first use. This region lasts until the process ends.

    Parameters
    ----------
    driver
        The driver to use; default: the default driver of the package.
    """

    def __init__(self, driver: Driver | None = None) -> None:
        self._driver = driver
        self._hook_mode = _HOOK_MODES[0]
        self._margin = 0
        self._initialized = False
        self._regions = 0
        """Number of regions that are active now."""
        self._groups: dict[int, SleepGroup] = {}
        """Sleep groups by device ordinal."""
        self._bridges: dict[tuple[int, str, object], TorchBridge] = {}
        """Bridges by device ordinal, tag ``"tag:kind"`` and, for graphs, the pool of PyTorch that the bridge replaces
        (or None).
        """
        self._hosts: weakref.WeakKeyDictionary[VirtualBuffer, HostMemory] = weakref.WeakKeyDictionary()
        """Backups in pinned or pageable host memory, by buffer."""
        self._files: weakref.WeakKeyDictionary[VirtualBuffer, Path] = weakref.WeakKeyDictionary()
        """Paths of backups on disk, by buffer. A file is removed when its buffer is dropped."""
        self._disks: dict[tuple[Device, Path], DiskTier] = {}

    def _ensure_initialized(self) -> None:
        if self._initialized:
            return
        self._backend = _checked_backend(os.environ.get("TMS_INIT_CPU_BACKUP_BACKEND") or None) or _BACKENDS[0]
        self._retain = _flag("TMS_RETAIN_CPU_BACKUP")
        self._folder = Path(os.environ.get("TMS_DISK_BACKUP_DIR") or "/tmp")
        self._initialized = True
        if _flag("TMS_INIT_ENABLE"):
            on_host, on_disk = map(_flag, ("TMS_INIT_ENABLE_CPU_BACKUP", "TMS_INIT_ENABLE_DISK_BACKUP"))
            whole = self.region("default", on_host, on_disk)
            whole.__enter__()
            # The region ends before the interpreter's finalization, in which a use of PyTorch's pools would fail.
            atexit.register(whole.__exit__, None, None, None)

    @contextlib.contextmanager
    def region(
        self,
        tag: str = "default",
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: str | None = None,
    ) -> Iterator[None]:
        """Tag the memory of the tensors that this thread makes on the current device in the ``with`` block. Regions may
        nest.

        Parameters
        ----------
        tag
            Name of the tag, for :meth:`pause` and :meth:`resume`.
        enable_cpu_backup, enable_disk_backup
            Whether a pause keeps the bytes in host memory, or in files. At most one may be True. If both are False, the
            bytes are lost.
        cpu_backup_backend
            ``"pinned"``, or ``"mmap"`` for pageable memory, which is slower and is returned to the system at once.
            Default: the value of ``TMS_INIT_CPU_BACKUP_BACKEND``, otherwise ``"pinned"``.

        Raises
        ------
        TypeError, ValueError
            ``tag`` is no ``str``, both backups are True, or ``cpu_backup_backend`` has another value or no
            ``enable_cpu_backup``.
        RuntimeError
            PyTorch's option ``expandable_segments`` is on.
        ModuleNotFoundError
            PyTorch is not installed.
        """
        kind = self._kind(tag, enable_cpu_backup, enable_disk_backup, cpu_backup_backend)
        bridge = self._bridge(kind)
        if asleep(kind, self._groups.values()):
            bridge.renew()
        self._regions += 1
        try:
            with bridge.routed():
                yield
        finally:
            self._regions -= 1

    @contextlib.contextmanager
    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        tag: str = "default",
        enable_cpu_backup: bool = True,
        cpu_backup_backend: str | None = None,
    ) -> Iterator[None]:
        """Capture a graph as ``torch.cuda.graph`` does, in memory that can be paused and resumed.

        Graphs with the same ``pool`` and tag share memory, in a pool of this saver. ``cuda_graph.pool()`` returns the
        handle of that pool. A pause keeps the bytes by default, because a replay may read bytes that it does not write.

        Parameters
        ----------
        cuda_graph, pool, stream, capture_error_mode
            As for ``torch.cuda.graph``.
        tag, enable_cpu_backup, cpu_backup_backend
            As for :meth:`region`.

        Raises
        ------
        EvictedError
            The memory of the graphs of this pool is paused.
        TypeError, ValueError, RuntimeError
            As for :meth:`region`.
        """
        kind = self._kind(tag, enable_cpu_backup, False, cpu_backup_backend)
        if asleep(kind, self._groups.values()):
            raise EvictedError(f"graphs of tag={tag!r} are paused: resume() them before another is captured")
        graphs = {key: bridge for key, bridge in self._bridges.items() if key[2] is not None}
        for key, bridge in graphs.items():
            if bridge.pool.use_count() == 1:  # No graph of the pool is left, so its memory can be freed.
                self._bridges.pop(key).close()
        ours = next((one for one in graphs.values() if one.pools and one.pool.id == pool), None)
        bridge = ours or self._bridge(kind, object() if pool is None else pool)
        options = {} if stream is None else {"stream": stream}
        cuda = library("torch").cuda
        # If several pools are active, PyTorch allocates from the outermost one. That would be the pool of a region
        # instead of the graph's pool.
        with unrouted(), cuda.graph(cuda_graph, bridge.pool.id, capture_error_mode=capture_error_mode, **options):
            yield

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        """Put the tensors that this thread makes in the ``with`` block into memory of PyTorch, without a tag.

        A pause leaves this memory as it is. At the end of the block, the part of it that no tensor uses is released; if
        another thread allocates from a bridge then, it is released later.

        Raises
        ------
        RuntimeError
            No region is active.
        """
        self._ensure_initialized()
        if not self._regions:
            raise RuntimeError("disable() is for use inside region(), and no region is active")
        with plain():
            yield

    def pause(self, tag: str | None = None) -> None:
        """Release the device memory of a tag (None: of all tags). The addresses stay reserved. An unknown tag is
        ignored.

        The host waits until the device has done all its work, and until the backups are complete.

        Raises
        ------
        EvictedError
            Memory of the tag is paused already.
        InUseError
            Memory of the tag was exported, or is mapped at a second address.
        CaptureError
            PyTorch captures its current stream, or this thread a stream of this package.
        OutOfMemoryError, OSError
            There is not enough memory or disk space for a backup. After each of these errors nothing has changed.
        TypeError
            The tag is not a ``str``.
        """
        chosen = self._chosen(tag)
        if any(buffer.evicted for buffers in chosen.values() for buffer in buffers):
            raise EvictedError(f"memory of tag={tag!r} is paused already: resume() it first")
        made: dict[VirtualBuffer, HostMemory] = {}
        for buffers in chosen.values():
            made |= self._made(buffers)
        with contextlib.ExitStack() as undo:
            for group, buffers in chosen.items():
                tags = set(buffers.values())
                group.sleep(*tags, backup=functools.partial(self._place, made))
                undo.callback(group.wake, *tags)
            undo.pop_all()
        self._hosts.update(made)

    def resume(self, tag: str | None = None) -> None:
        """Restore the device memory of a tag (None: of all tags) at the same addresses. An unknown tag is ignored.

        The bytes are complete when this method returns. Backups in host memory are dropped, unless
        :attr:`retain_cpu_backup`.

        Raises
        ------
        EvictedError
            There is memory of the tag, and none of it is paused.
        CaptureError
            As for :meth:`pause`.
        OutOfMemoryError
            There is not enough device memory.
        OSError, DamagedBackupError
            A file cannot be read, or is damaged. After each of these errors nothing has changed.
        TypeError
            The tag is not a ``str``.
        """
        chosen = self._chosen(tag)
        paused = {
            group: evicted
            for group, buffers in chosen.items()
            if (evicted := {buffer: one for buffer, one in buffers.items() if buffer.evicted})
        }
        if chosen and not paused:
            raise EvictedError(f"no memory of tag={tag!r} is paused")
        with contextlib.ExitStack() as undo:
            for group, buffers in paused.items():
                group.wake(*set(buffers.values()))
                undo.callback(self._evict, buffers)
            undo.pop_all()
        for group, buffers in paused.items():
            group.device.synchronize()
            for buffer in () if self._retain else buffers:
                self._hosts.pop(buffer, None)
            # Without this, the host memory of the backups would stay until another call attempts the deferred releases.
            work(session_of(group))

    @property
    def enabled(self) -> bool:
        """True in each process, because regions need no preloaded library to have an effect."""
        return True

    @property
    def hook_mode(self) -> str:
        """``"preload"`` (default) or ``"torch"``, as in ``torch_memory_saver``. Both mean the same here: regions use
        pools of PyTorch. An assignment is a first use of the saver. ValueError for another value.
        """
        return self._hook_mode

    @hook_mode.setter
    def hook_mode(self, mode: str) -> None:
        if mode not in _HOOK_MODES:
            raise ValueError(f"hook_mode={mode!r}: allowed are {_HOOK_MODES}")
        self._hook_mode = mode
        self._ensure_initialized()

    @property
    def memory_margin_bytes(self) -> int:
        """Device memory in bytes that allocations in regions leave free; default: 0. PyTorch runs out of memory that
        much earlier. An assignment raises TypeError or ValueError if the value is not an integer from 0 on.
        """
        return self._margin

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, nbytes: int) -> None:
        self._margin = checked_number("memory_margin_bytes", nbytes)

    @property
    def retain_cpu_backup(self) -> bool:
        """Whether :meth:`resume` keeps backups in host memory, for :meth:`get_cpu_backup` and for the next pause. False
        by default, unless ``TMS_RETAIN_CPU_BACKUP`` is 1, true or yes. Can be assigned.
        """
        self._ensure_initialized()
        return self._retain

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, retain: bool) -> None:
        self._ensure_initialized()
        self._retain = bool(retain)

    def get_cpu_backup(self, x: Any, zero_copy: bool = False) -> Any:
        """Return a tensor's backup in host memory, as a tensor. None if the tensor is awake and has none, or its backup
        is on disk.

        Parameters
        ----------
        x
            A contiguous tensor that was made in a region.
        zero_copy
            True: return the backup itself, which changes at the next pause. False: return a copy.

        Raises
        ------
        ValueError
            The tensor was not made in a region, is not contiguous, or is paused without a backup.
        """
        self._ensure_initialized()
        if not x.is_contiguous():
            raise ValueError(f"a tensor of the shape {tuple(x.shape)} is not contiguous")
        first, nbytes = x.data_ptr(), x.numel() * x.element_size()
        for group in self._groups.values():
            for buffer, tag in group.buffers.items():
                start = first - buffer.address
                if start >= 0 and start + nbytes <= buffer.nbytes:
                    return self._backup_of(x, buffer, tag, slice(start, start + nbytes), zero_copy)
        raise ValueError(f"the tensor at {first:#x} was not made in a region")

    def _backup_of(self, x: Any, buffer: VirtualBuffer, tag: str, part: slice, zero_copy: bool) -> Any:
        host = self._hosts.get(buffer)
        if host is not None:
            found = library("torch").from_numpy(host.slots[0][part]).view(x.dtype).view(x.shape)
            return found if zero_copy else found.clone()
        if buffer.evicted and tag.endswith(f":{_NONE}"):
            raise ValueError(f"the tensor at {x.data_ptr():#x} is paused without a backup")
        return None

    def set_disk_backup_dir(self, path: str | os.PathLike[str]) -> None:
        """Set the folder of later backups on disk, and make the folder if it is missing. Without this call, the folder
        is the value of ``TMS_DISK_BACKUP_DIR``, or else ``/tmp``. Raises ``OSError`` if the folder cannot be made.
        """
        self._ensure_initialized()
        os.makedirs(path, exist_ok=True)
        self._folder = Path(path)

    def _kind(self, tag: str, on_host: bool, on_disk: bool, backend: str | None) -> str:
        """Check the arguments of a region, and return its tag in the sleep group: ``"tag:kind"``.

        Raises the errors of :meth:`region`.
        """
        if backend is not None and not on_host:
            raise ValueError("cpu_backup_backend requires enable_cpu_backup=True")
        if on_host and on_disk:
            raise ValueError("enable_cpu_backup and enable_disk_backup are mutually exclusive")
        checked_type("tag", tag, str)
        _checked_backend(backend)
        self._ensure_initialized()
        if expandable():
            raise RuntimeError(
                "PyTorch's expandable_segments leave no segments to pause: unset it in PYTORCH_ALLOC_CONF"
            )
        return f"{tag}:{(backend or self._backend) if on_host else _DISK if on_disk else _NONE}"

    def _bridge(self, tag: str, of: object = None) -> TorchBridge:
        """Return the bridge of a tag (``"tag:kind"``) for the current device. ``of``: for graphs, the pool of PyTorch
        that the bridge replaces.
        """
        ordinal = int(library("torch").cuda.current_device())
        device = Device(ordinal, driver=self._driver)
        group = self._groups.get(ordinal) or self._groups.setdefault(ordinal, SleepGroup(device))
        key = ordinal, tag, of
        if key not in self._bridges:
            self._bridges[key] = TorchBridge(Sources([_Source(self, group, tag)]))
        return self._bridges[key]

    def _chosen(self, tag: str | None) -> dict[SleepGroup, dict[VirtualBuffer, str]]:
        """Return the buffers of a tag (None: of all tags) by sleep group. The value for a group is each buffer's tag in
        the group.

        Groups without such buffers are left out.
        """
        if tag is not None:
            checked_type("tag", tag, str)
        self._ensure_initialized()
        prepare(self._groups.values())
        found = {}
        for group in self._groups.values():
            buffers = {buffer: one for buffer, one in group.buffers.items() if not tag or one.rpartition(":")[0] == tag}
            if buffers:
                found[group] = buffers
        return found

    def _evict(self, buffers: dict[VirtualBuffer, str]) -> None:
        """Put buffers to sleep again, to undo a wake that failed later. Their backups in host memory still exist."""
        for buffer, tag in buffers.items():
            buffer.evict(self._place({}, buffer, tag))

    def _made(self, buffers: Mapping[VirtualBuffer, str]) -> dict[VirtualBuffer, HostMemory]:
        """Allocate host memory for those buffers whose tags require host memory and that have none yet. All buffers are
        of one device.

        Returns the new host memory by buffer.
        """
        made: dict[VirtualBuffer, HostMemory] = {}
        for kind in _BACKENDS:
            new = [one for one, tag in buffers.items() if tag.endswith(f":{kind}") and one not in self._hosts]
            if new:
                sizes, pinned = [buffer.nbytes for buffer in new], kind == _BACKENDS[0]
                made.update(zip(new, host_segments(new[0].device, sizes, pinned=pinned), strict=True))
        return made

    def _place(self, made: dict[VirtualBuffer, HostMemory], buffer: VirtualBuffer, tag: str) -> Any:
        """Return where :meth:`VirtualBuffer.evict` is to store the bytes of a buffer; None if they are to be lost.

        ``made``: new host memory by buffer. This method may add to it.
        """
        kind = tag.rpartition(":")[2]
        if kind == _NONE:
            return None
        if kind == _DISK:
            return self._on_disk(buffer)
        # Not in `made` if another thread has allocated the buffer since.
        if buffer not in made and buffer not in self._hosts:
            made |= self._made({buffer: tag})
        return (self._hosts.get(buffer) or made[buffer]).slots[0]

    def _on_disk(self, buffer: VirtualBuffer) -> Any:
        device, folder = buffer.device, self._folder
        tier = self._disks.get((device, folder))
        if tier is None:
            # The size of the staging memory is that of torch_memory_saver.
            staging = int(os.environ.get("TMS_DISK_BACKUP_CHUNK_MB") or 0) or 256
            tier = DiskTier(device, folder, persistent=True, block=min((staging << 20) // _SLOTS, _MOST_BLOCK))
            self._disks[device, folder] = tier
        name = f"tms_{os.getpid()}_{buffer.address:x}"
        path = folder / f"{name}.backup"
        if self._files.get(buffer) != path:
            self._files[buffer] = path
            weakref.finalize(buffer, _remove, path, os.getpid())
        return tier.hold([buffer.nbytes], device.default_stream, name)[0]


class _Source(Tagged):
    """Allocator of buffers with one tag of a sleep group. It leaves :attr:`memory_margin_bytes` of the device memory
    free.
    """

    def __init__(self, saver: TorchMemorySaver, group: SleepGroup, tag: str) -> None:
        super().__init__(group, tag)
        self._saver = saver

    def allocate(self, nbytes: int | str, stream: StreamLike | None = None) -> VirtualBuffer:
        margin = self._saver.memory_margin_bytes
        if margin:
            free = self.group.device.memory_info().free
            size = checked_size("nbytes", nbytes)
            if margin + size > free:
                why = f"{size_text(size)} with memory_margin_bytes={margin}, and {size_text(free)} are free"
                raise refused(OutOfMemoryError, "cuMemCreate", why)
        return super().allocate(nbytes, stream)


def _flag(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes")


def _checked_backend(backend: str | None) -> str | None:
    if backend not in (None, *_BACKENDS):
        raise ValueError(f"cpu_backup_backend={backend!r}: allowed are {_BACKENDS}")
    return backend


def _remove(path: Path, process: int) -> None:
    if process == os.getpid():  # The exit of a forked child would remove the parent's files.
        path.unlink(missing_ok=True)


torch_memory_saver = TorchMemorySaver()
"""Memory saver for the whole process, in place of the object of this name in ``torch_memory_saver``."""


@contextlib.contextmanager
def configure_subprocess() -> Iterator[None]:
    """Do nothing. The function of this name in ``torch_memory_saver`` preloads a library in child processes, which is
    not needed here.

    :doc:`/docs/recipes/memory-saver` has all differences.
    """
    yield


def sglang_plugin() -> None:
    """Make SGLang use the memory saver of this process, if the environment variable ``STREAMALLOC_MEMORY_SAVER`` is 1,
    true or yes.

    :doc:`/docs/recipes/memory-saver` has an example. SGLang calls this function in each process, by the package's entry
    point in the group ``sglang.srt.plugins``. The function registers a hook around ``TorchMemorySaverAdapter.create``.

    Raises
    ------
    ModuleNotFoundError
        SGLang is not installed.
    """
    if not _flag("STREAMALLOC_MEMORY_SAVER"):
        return
    registry = library("sglang.srt.plugins.hook_registry")
    adapters = library(_ADAPTERS)

    class Adapter(adapters.TorchMemorySaverAdapter):  # type: ignore[misc, name-defined]
        """Adapter for SGLang that calls this module's memory saver, with the interface that SGLang uses."""

        region = staticmethod(torch_memory_saver.region)
        cuda_graph = staticmethod(torch_memory_saver.cuda_graph)
        disable = staticmethod(torch_memory_saver.disable)
        pause = staticmethod(torch_memory_saver.pause)
        resume = staticmethod(torch_memory_saver.resume)
        configure_subprocess = staticmethod(configure_subprocess)
        enabled = True

    def create(original: Any, enable: bool) -> Any:
        return Adapter() if enable else original(enable)

    registry.HookRegistry.register(f"{_ADAPTERS}.TorchMemorySaverAdapter.create", create, registry.HookType.AROUND)
