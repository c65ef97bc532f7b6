"""Spaces: address ranges that can be read everywhere, and written at committed pages, which have memory of their
own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from streamalloc.core.errors import CudaError, EvictedError, size_text, undoing
from streamalloc.core.internal import (
    PER_THREAD,
    CopySide,
    Device,
    Event,
    Fence,
    Stream,
    StreamLike,
    all_work,
    as_stream,
    copy_bytes,
    deferred_queue,
    queue_if_allowed,
)
from streamalloc.core.properties import MemLocation, checked_size, checked_type
from streamalloc.core.session import session_of
from streamalloc.formats.html import Row, gauge
from streamalloc.vmm.access import After, copying_stream, ends_of, listed, wait_for_users
from streamalloc.vmm.address_range import OwnsRange
from streamalloc.vmm.pages.places import Page, Parking, PhysicalPages, Places, mapped_apart
from streamalloc.vmm.stores.blocks import (
    Addresses,
    BlockTier,
    Kept,
    Stored,
    by_contents,
    drop_contents,
)
from streamalloc.vmm.stores.disk_file import DamagedBackupError

Pages: TypeAlias = "int | range | Iterable[int] | npt.NDArray[np.integer[Any]]"
"""Type of the argument ``pages``: the index of a page, or several indices as a range, an iterable or an array."""

T = TypeVar("T")
_BATCH = 64
"""Number of pages that a swap-in or a preparation maps in one step."""


class _ParkedAgainError(Exception):
    """Some places were parked again after the wait, so that the caller must wait again."""


class SpaceMemory(OwnsRange):
    """Base class of :class:`PageSpace`: the addresses, the state of the pages, and waits before pages are changed."""

    def __init__(self, arena: object, physical: PhysicalPages, nbytes: int | str, stream: StreamLike | None) -> None:
        size = checked_size("nbytes", nbytes)
        if not size:
            raise ValueError("nbytes=0: a space has at least one byte")
        self._arena = arena
        self._physical = physical
        self.page_size: int = physical.nbytes
        """Size of a page in bytes."""
        self._nbytes_asked = size
        self._reserve(physical.device, -(-size // physical.nbytes) * physical.nbytes, stream)
        node = self.range._node
        with undoing(self.range._free):
            physical.use_zero()
        self._places = Places(node, physical)
        node.add(self._places)
        with undoing(lambda: self.close(after=())):
            self._places.repair()

    def close(self, after: After = None) -> None:
        """Unmap all pages and free the addresses (``cuMemUnmap``, ``cuMemAddressFree``). The host first waits for
        ``after``, and for the work of parked pages. Idempotent.

        ``after`` is one or several events or streams whose work may use the pages; default: all work of the device.
        Raises InUseError if a signal handler called this method during another call on its thread, CudaError if the
        driver refuses, and the errors that :class:`AddressRange` names for ``after``.
        """
        if self.range.closed:
            return
        places = self._places
        wait_for_users(after, self._session, (places.rights,))
        self._locked_after(lambda: set(places.parked.values()), places.unmap_all, closing=True)
        self.range._free()
        self._physical.notify_watchers()

    @property
    def page_count(self) -> int:
        """Number of pages of the space. The last page may be larger than needed."""
        return len(self._places.numbers)

    @property
    def committed(self) -> npt.NDArray[np.int64]:
        """Array of the indices of the committed pages, in ascending order. Raises ClosedError for a closed space."""
        found: npt.NDArray[np.int64] = np.flatnonzero(self.numbers >= 0)
        return found

    @property
    def numbers(self) -> npt.NDArray[np.int64]:
        """A copy of the page table as an array: the number of each page's physical page, or -1 if the page is not
        committed.

        Pages that share memory have the same number. Numbers begin at 0 in each arena and are reused. Raises
        ClosedError if the space was closed.
        """
        self._check_open()
        with self._physical.lock:
            found: npt.NDArray[np.int64] = self._places.numbers.copy()
            return found

    @property
    def parked(self) -> int:
        """Number of released pages that queued work still uses or that are being cleared, and of pages that a swap is
        moving. The host asks the driver which work is done, and does not wait. While this package captures a stream,
        pages count as parked also after that.
        """
        self._physical.allocations.work()
        return len(self._places.parked)

    @property
    def kept(self) -> npt.NDArray[np.int64]:
        """Array of the indices of released and cleared pages that still have memory, in ascending order. A commit of
        these pages needs no driver call. Raises ClosedError if the space was closed.
        """
        self._check_open()
        self._physical.allocations.work()
        with self._physical.lock:
            mine = [place for places, place in self._physical.kept.values() if places is self._places]
        return np.array(sorted(mine), np.int64)

    def shared(self, pages: Pages) -> npt.NDArray[np.bool_]:
        """Return an array of bool, one element for each of ``pages``: True if another page shares the page's memory,
        False for a page without memory. A parked page still has its memory. Raises TypeError or ValueError for an index
        that is no page, and ClosedError if the space was closed.
        """
        self._check_open()
        chosen = self._chosen(pages)
        self._physical.allocations.work()
        with self._physical.lock:
            found = [self._places.backing[place] for place in chosen]
            return np.array([page is not None and page.users > 1 for page in found], np.bool_)

    @property
    def nbytes(self) -> int:
        """Size in bytes, as requested."""
        return self._nbytes_asked

    @property
    def owner(self) -> object:
        """The :class:`PageArena` of the space."""
        return self._arena

    @property
    def location(self) -> MemLocation:
        """Location of the memory."""
        return self.device.location

    @property
    def device_accessible(self) -> bool:
        """Whether the device of :attr:`stream` has access to the space."""
        return self.stream.device.ordinal == self.device.ordinal

    @property
    def closed(self) -> bool:
        """Whether the space was closed. Uses then raise :class:`ClosedError`."""
        return self.range.closed or self._places.given_up

    def check_usable(self) -> None:
        self._check_open()

        if self._places.broken:
            # A copy would treat the unmapped addresses as host addresses.
            why = "a call has failed, and its undo too: the next commit or release maps them again"
            raise EvictedError(f"pages of {self!r} are not mapped: {why}")

    def _kernels_may_use(self, blocks: Any, nbytes: int, write: bool) -> bool:
        if not write:
            return True
        # A block may begin in one page and end in another.
        first, last = (((blocks + end - self.address) // self.page_size).tolist() for end in (0, nbytes - 1))
        touched = {*zip(first, last, strict=True)}
        return all((self._places.numbers[one : other + 1] >= 0).all() for one, other in touched)

    def _access_hint(self, stream: Stream) -> str:
        if stream.device.ordinal != self.device.ordinal:
            return f"{stream.device!r} has no access to {self!r}"
        return "only committed pages can be written, and pages whose memory a call takes cannot be read meanwhile"

    def _about(self) -> Iterator[Row]:
        self._check_open()
        yield from super()._about()
        yield "committed", gauge(len(self.committed) * self.page_size, self.range.nbytes)
        yield "pages", f"{self.page_count} of {size_text(self.page_size)}, {self.parked} parked"

    def _text(self) -> str:
        if self.closed:
            return ", closed"
        pages = f"{len(self.committed)} of {self.page_count} pages of {size_text(self.page_size)} committed"
        return f" of {size_text(self.nbytes)} at {self._at:#x}, {pages}"

    def _addresses(self, places: Sequence[int]) -> Addresses:
        return self.address + np.array(places, np.int64) * self.page_size

    def _chosen(self, pages: Pages) -> list[int]:
        """Return indices of pages as a list, in the given order. Raises TypeError for other objects, ValueError for an
        index outside of the space.
        """
        count = self.page_count
        if isinstance(pages, np.ndarray):
            if pages.dtype.kind not in "iu":
                raise TypeError(f"pages must be indices, not an array of {pages.dtype}")
            chosen: list[int] = pages.ravel().tolist()
        else:
            listed = list(pages) if isinstance(pages, Iterable) else [pages]
            kinds = set(map(type, listed))
            if isinstance(pages, (bytes, bytearray, str)) or bool in kinds:
                raise TypeError(f"pages must be indices, not {pages!r}")
            chosen = listed if kinds <= {int} else [checked_type("pages", page, int) for page in listed]
        if chosen and not 0 <= min(chosen) <= max(chosen) < count:
            wrong = next(page for page in chosen if not 0 <= page < count)
            raise ValueError(f"pages: {wrong} is none of the {count} pages of {self!r}")
        return chosen

    def _unique(self, pages: Pages) -> list[int]:
        return sorted(set(self._chosen(pages)))

    def _change(self, chosen: Sequence[int], after: After, act: Callable[[], T]) -> T:
        """Block the host until ``after`` and the work of the parked pages among ``chosen`` are done. Then call ``act``,
        which changes pages, and return its result. Raises CaptureError, and the errors of :meth:`_locked_after`.
        """
        self._check_open()
        places = self._places
        wait_for_users(after, self._session, (places.rights,))
        return self._locked_after(lambda: places.parkings(chosen), act, len(chosen))

    def _locked_after(
        self, parkings: Callable[[], set[Parking]], act: Callable[[], T], needed: int = 0, *, closing: bool = False
    ) -> T:
        """Block the host until the work of all ``parkings()`` is done, then call ``act`` while no other thread changes
        pages of the space. Returns the result of ``act``. Raises InUseError, ClosedError.

        If fewer than ``needed`` physical pages are available, first wait until released pages are cleared.
        """
        physical = self._physical

        def attempt(short: bool) -> T:
            if not all(parking.fence.done() for parking in parkings()):
                raise _ParkedAgainError
            if short:
                physical.finish_clearing()
            return act()

        while True:
            for parking in parkings():
                parking.fence.synchronize()
            short = physical.available < needed and physical.parked > 0
            if short:
                # Make the pages of other parked places available if their work is done. No lock may be held here.
                physical.allocations.work()
                physical.await_clearing()
            with contextlib.suppress(_ParkedAgainError):
                return self._places.locked(functools.partial(attempt, short), closing=closing)

    def _check_here(self, chosen: Sequence[int]) -> None:
        stored = self._places.stored
        for place in chosen if stored else ():
            if place in stored:
                raise EvictedError(f"page {place} of {self!r} is swapped out: swap_in() or release() it")

    def _single(self, ends: Sequence[Any] | None) -> Stream | None:
        """Return the only element of ``ends`` if it is a stream on which released pages can be cleared; else None."""
        if ends is None or len(ends) != 1 or isinstance(ends[0], Event):
            return None
        stream = as_stream(ends[0], self._session)
        # The per-thread stream is excluded: a deferred item runs on any thread, where its handle names another stream.
        mine = stream.device.ordinal == self.device.ordinal and int(stream.checked_raw()) != PER_THREAD
        return stream if mine and not stream.capturing else None


class SwapSpace(SpaceMemory):
    """A space whose pages can be moved to a tier (host memory or disk) and back.

    The copies of a move are queued without a lock, because disks and long copies would block calls for other pages.
    Until the copies are queued, the pages of the move are parked with a fence that only this thread completes, so that
    no other call uses these pages meanwhile. The record of the stored contents is made before the pages are parked, and
    removed after they are committed: at any moment the bytes of a page are in memory or in the tier.
    """

    def swap_out(self, pages: Pages, tier: BlockTier, stream: StreamLike | None = None, after: After = ()) -> int:
        """Move the contents of pages to host memory or to disk, and release the pages. Returns the number of pages
        moved.

        The memory of the pages is available once the copies are done. With a :class:`HostTier` without checksums the
        copies are stream-ordered. Otherwise the host waits until the contents are stored; other threads can use other
        pages meanwhile.

        Parameters
        ----------
        pages
            An index, a range or an array of indices. Uncommitted pages are skipped.
        tier
            Tier that stores the contents: a :class:`HostTier` or a :class:`DiskTier` of the same device.
        stream
            Stream of the copies, ordered after the work that wrote the pages; default: the space's.
        after
            Further events or streams whose work may still read these pages; None for all work of the device. The host
            does not wait for this work.

        Raises
        ------
        OutOfMemoryError, OSError
            The tier is full, or a file cannot be written. No page is changed.
        TypeError, ValueError
            ``tier`` is no tier of this device, ``pages`` has something that is no index of a page, or ``stream`` or
            ``after`` is no stream or event of this driver.
        InUseError
            A signal handler called this method during another call on its thread.
        ClosedError
            The space, the tier, ``stream``, or an event or stream of ``after`` was closed. No page is changed.
        CudaError
            The driver refused a call. No page is changed.
        CaptureError
            ``stream``, or a stream of ``after``, is being captured.
        """
        chosen = self._unique(pages)
        ordered = copying_stream(stream, self)
        self._check_open()
        if not isinstance(tier, BlockTier) or tier.device != self.device:
            raise TypeError(f"tier must be a HostTier or DiskTier of {self.device!r}, not {tier!r}")
        places = self._places
        others = listed(after)
        ends = [*_ends_or_all(others, self.device)]
        Fence(self._session, ends).done()  # Raises for a captured stream, before a page is changed.
        kept: dict[int, Kept] = {}
        clear_on = self._single([ordered]) if others == [] else None
        # No lock is held, because it takes long to allocate host memory or disk space.
        tier.reserve(int((places.numbers[chosen] >= 0).sum()), self.page_size)

        def park(parking: Parking, used: contextlib.ExitStack) -> tuple[list[int], Stored]:
            committed = [place for place in chosen if places.numbers[place] >= 0]
            stored = tier._take(len(committed), self.page_size)
            # Another thread may release the pages before the copies are queued. Meanwhile the tier must not give the
            # same memory of a chunk to other contents.
            used.enter_context(stored.in_use())
            # Recorded before `places.park`, so that a signal handler that raises in between loses no contents.
            kept.update({place: (stored, index) for index, place in enumerate(committed)})
            places.stored |= kept
            places.park(committed, parking)
            return committed, stored

        def take_back() -> None:
            if kept:
                places.locked(lambda: self._forget_stored(kept, parking))

        with contextlib.ExitStack() as used, self._alone(ordered, *ends) as parking:
            with undoing(lambda: drop_contents(kept)), undoing(take_back):
                committed, stored = places.locked(lambda: park(parking, used))
                # No lock is held, because it takes long to write to a disk.
                stored.save(self._addresses(committed), ordered, ordered.device == self.device)
                parking.fence.queueing = 0
            places.locked(lambda: parking.begin(clear_on))
        self._physical.notify_watchers()
        return len(committed)

    @contextlib.contextmanager
    def _alone(self, *ends: Event | Stream) -> Iterator[Parking]:
        """Return a context manager for a move of contents. ``with`` gives a :class:`Parking` for the places of the
        move. Other calls wait for these places until the block has ended and the work of ``ends`` is done: otherwise
        they could use a page before its contents have arrived.
        """
        fence = Fence(self._session, ends, queueing=True)
        try:
            yield Parking(self._places, fence)
        finally:
            fence.queueing = 0

    def _forget_stored(self, kept: Mapping[int, Kept], parking: Parking) -> dict[int, Kept]:
        """Commit those places of ``kept`` whose contents are still stored, and remove these contents from
        :attr:`Places.stored`. Returns the removed contents by place. ``parking`` is the parking of the swap. Call this
        only within :meth:`Places.locked`.
        """
        places = self._places
        mine = {place: one for place, one in kept.items() if places.stored.get(place) is one}
        with undoing(places.as_now(mine)), undoing(lambda: places.stored.update(mine)):
            places.mark_committed(mine)
            for place in mine:
                del places.stored[place]
        if len(mine) < len(kept):  # Others were released meanwhile.
            parking.fence.queueing = 0
            parking.begin()
        return mine

    def swap_in(self, pages: Pages, stream: StreamLike | None = None, after: After = ()) -> int:
        """Commit swapped-out pages, and copy their contents back. Returns the number of pages moved.

        The copies are stream-ordered: use the pages on ``stream`` or after its work. The host waits for reads from
        disk. The tier may be closed. After an error all pages stay swapped out.

        Parameters
        ----------
        pages
            An index, a range or an array of indices. Pages that are not swapped out are skipped.
        stream
            Stream of the copies; default: the space's.
        after
            As for :meth:`commit`.

        Raises
        ------
        DamagedBackupError
            A checksum of the tier differs. ``block`` is the index of the damaged page: swap in the other pages without
            this page.
        OutOfMemoryError, InUseError, ClosedError, CudaError, TypeError, ValueError
            As for :meth:`commit`. Or ``stream`` is not an open stream of this driver.
        OSError
            A file cannot be read.
        CaptureError
            ``stream``, or a stream of ``after``, is being captured.
        """
        chosen = [*self._swapped(self._unique(pages))]  # Only these, so that the call waits for no work on other pages.
        ordered = copying_stream(stream, self)
        places = self._places
        for stored, indices, mine in by_contents(self._swapped(chosen)):
            with self._named(mine, indices):
                stored.check(indices)
        kept: dict[int, Kept] = {}
        left: dict[int, Page] = {}
        moved: dict[int, Kept] = {}

        def set_aside(parking: Parking, used: contextlib.ExitStack) -> list[int]:
            swapped = self._swapped(chosen)
            ready, pages_of_rest = places.claim([*swapped])
            left.update(pages_of_rest)
            kept.update(swapped)
            for stored, _, _ in by_contents(kept):
                used.enter_context(stored.in_use())
            places.set_aside(kept, parking)
            return ready

        try:
            with (
                contextlib.ExitStack() as used,
                self._alone(ordered) as parking,
                undoing(lambda: self._give_back(left, parking)),
            ):
                ready = self._change(chosen, after, lambda: set_aside(parking, used))
                while ready or left:
                    # The next batch is mapped while the copies of one batch run, which takes equally long.
                    batch = {place: left.pop(place) for place in [*left][:_BATCH]}
                    if batch:
                        places.locked(functools.partial(places.exchange, batch, parking=parking))
                    self._load({place: kept[place] for place in (*ready, *batch)}, ordered)
                    ready = []
                places.locked(lambda: moved.update(self._forget_stored(kept, parking)))
            with undoing(lambda: self._store_again(moved, ordered)):
                self._physical.notify_watchers()
        finally:
            drop_contents(moved)
        return len(kept)

    def _load(self, arrived: Mapping[int, Kept], stream: Stream) -> None:
        """Queue the copies of stored contents to their places. Raises OSError, DamagedBackupError, CudaError."""
        for stored, indices, mine in by_contents(arrived):
            with self._named(mine, indices):
                stored.load(indices, self._addresses(mine), stream, stream.device == self.device)

    def _store_again(self, moved: dict[int, Kept], stream: Stream) -> None:
        """After an error of a watcher, release the places of ``moved``, whose contents the tier still has, and remove
        them from ``moved``. ``stream`` has the copies to their pages.
        """
        places = self._places

        def store() -> None:
            mine = [place for place in moved if places.numbers[place] >= 0]  # Not released meanwhile.
            parking = Parking(places, Fence(self._session, [stream]))
            places.stored.update((place, moved.pop(place)) for place in mine)
            places.park(mine, parking)
            parking.begin()

        places.locked(store)

    def _give_back(self, left: Mapping[int, Page], parking: Parking) -> None:
        """After an error in a swap-in, release the physical pages in ``left``, which were not used, and the pages at
        the places of ``parking``, whose contents could not be copied.
        """
        places = self._places
        self._physical.drop(left.values())

        def unpark() -> None:
            parking.fence.queueing = 0
            # Another swap may have parked some of these places since then: leave those places alone.
            mine = [place for place in parking.places if places.parked.get(place) is parking]
            places.commit([place for place in mine if places.backing[place] is None])
            parking.begin()

        places.locked(unpark)

    @contextlib.contextmanager
    def _named(self, places: Sequence[int], indices: Sequence[int]) -> Iterator[None]:
        """Return a context manager that replaces the index of the tier's block by the index of the page in a
        DamagedBackupError of its block: ``indices[i]`` becomes ``places[i]``.
        """
        try:
            yield
        except DamagedBackupError as error:
            if error.block is None:
                raise
            place = places[indices.index(error.block)]
            raise DamagedBackupError(f"page {place} of {self!r}: {error}", place) from None

    def _swapped(self, chosen: Sequence[int]) -> dict[int, Kept]:
        stored = self._places.stored
        return {place: stored[place] for place in chosen if place in stored}


class PageSpace(SwapSpace):
    """A range of addresses with memory at the pages that are committed: the result of :meth:`PageArena.space`.

    All addresses can be read: uncommitted pages map the arena's page of zeros, which devices cannot write. So one
    tensor can cover the whole space, at a constant address. ::

        with vmm.PageArena(device) as arena, arena.space(1 << 40) as cache:
            cache.commit(range(64))
            tensor = sa.interop.torch.tensor(cache, torch.float16)
            cache.release([7, 9], after=stream)  # parked until the stream's work has completed

    Mapping is not stream-ordered. While a page is committed, aliased or made private, it may be unmapped for a moment.
    Work that uses *this page* then breaks the context; other pages can be used. So operations have an argument
    ``after``: events or streams whose work still uses the pages. The host waits for this work, except in
    :meth:`release`.

    A released page is cleared, and keeps its memory until another page of the arena needs the memory. So the next
    commit of the page usually makes no mapping call. While another page takes the memory, the released page is unmapped
    for a moment, too. So work that reads released pages must be named in ``after`` of commits in the arena. The driver
    does not refuse writes to a released page, but :func:`streamalloc.driver.checked` reports them.

    Each operation takes an index, a range or an array of indices. It changes all these pages; after an error it has
    changed none, except :meth:`prepare`. Pages that need no change are skipped. Thread-safe: operations on one space
    wait for each other.

    If a signal handler raises an exception during an operation, the operation has changed all pages or none. The
    physical pages that it was taking or returning at this moment may count as in use until the arena is closed, and
    room of a tier that it was returning may count as used until the tier is closed.

    A space that is dropped is unmapped after all queued work of the device, and its pages return to the arena.
    """

    def commit(self, pages: Pages, after: After = (), *, zero: bool = False) -> None:
        """Give pages memory of their own (``cuMemMap``, ``cuMemSetAccess``). Without ``zero`` the contents of newly
        committed pages are undefined.

        Pages that have kept their memory use it again, without a driver call. Other pages get spare physical pages of
        the arena, then memory that released pages keep, then new physical pages.

        If a page was released and queued work still uses it, the host waits for this work, without a limit. If there is
        no memory, the host waits for other released pages, at most for the ``patience`` of :class:`PageArena`.

        Parameters
        ----------
        pages
            An index, a range or an array of indices. Committed pages are skipped.
        after
            Events or streams whose work may still read the zeros of these pages, or of released pages whose memory may
            be taken; the host waits for this work. None means all work of the device. Default: nothing.
        zero
            Whether newly committed pages read as zeros, on every stream. Pages that have kept their memory are cleared
            already. For other pages the host waits until they are cleared (``cuMemsetD8Async``).

        Raises
        ------
        OutOfMemoryError
            The device has not enough memory, or the limit of the arena or of its budget is reached.
        EvictedError
            A page is swapped out: call :meth:`swap_in` or :meth:`release` for it.
        InUseError
            A signal handler called this method during another call on its thread.
        CaptureError
            A stream of ``after`` is being captured.
        ClosedError
            The space, or an event or stream of ``after``, was closed. Or the arena was closed, and a page has no
            memory.
        TypeError, ValueError
            ``pages`` has something that is no index of a page, or ``after`` something else than events and streams of
            this driver.
        CudaError
            The driver refused a call. In all these cases no page is changed.
        """
        chosen = self._unique(pages)

        def commit() -> list[int]:
            self._check_here(chosen)
            numbers = self._places.numbers[chosen].tolist()
            new = [place for place, number in zip(chosen, numbers, strict=True) if number < 0]
            ready, others = self._places.claim(new)
            if zero:
                self._clear_first(ready, others)
            if others:
                self._places.exchange(others, ready)
            else:
                self._places.commit(ready)
            return new

        new = self._change(chosen, after, commit)
        if self._physical.newly_watched:
            with undoing(lambda: self.release(new, ())):
                self._physical.notify_watchers()

    def _clear_first(self, ready: Sequence[int], others: Mapping[int, Page]) -> None:
        """Map the physical pages of ``others``, given by place. Queue zeros for these places and for places of
        ``ready`` that are not cleared, and park all of them until the zeros are written. Call this only within
        :meth:`Places.locked`.

        Raises
        ------
        _ParkedAgainError
            Zeros were queued. The caller waits for them and repeats the commit.
        CudaError
            The driver refused a call.
        """
        places, physical = self._places, self._physical
        stale = [place for place in ready if place in places.parked and not places.parked[place].cleared]
        if not (stale or others):
            return
        with undoing(lambda: physical.drop(others.values())):
            physical._check_open()
            with physical.session.relaxed():
                stream = physical.idle_stream() or self.device.create_stream()
        parking = Parking(places, Fence(self._session, ()))
        places.exchange(others, parking=parking)
        places.park([*others, *stale], parking)
        parking.begin(stream)
        raise parking.refused or _ParkedAgainError

    def prepare(self, pages: Pages) -> Future[int]:
        """Map memory at pages on a background thread, so that their commit makes no driver call.

        Afterwards the pages are in the same state as after a release: they read as zeros, and other pages may take
        their memory. Spare pages of the arena are used first, then new pages are created. No work may use the pages
        until the future is done.

        Parameters
        ----------
        pages
            An index, a range or an array of indices. Pages that have memory, or are swapped out, are skipped.

        Returns
        -------
        concurrent.futures.Future
            A future whose result is the number of pages that got memory. The future has the errors OutOfMemoryError,
            ClosedError or CudaError as for :meth:`commit`, but some pages may have got memory before the error.

        Raises
        ------
        TypeError, ValueError
            ``pages`` has something that is no index of a page.
        ClosedError
            The space or the arena was closed.
        """
        chosen = self._unique(pages)
        self._check_open()
        return self._physical.in_background(functools.partial(self._prepare, chosen))

    def _prepare(self, chosen: Sequence[int]) -> int:
        places, physical, made = self._places, self._physical, 0

        def prepare(batch: Sequence[int]) -> tuple[int, Parking]:
            # Parked places without a page are skipped: `swap_in()` on another thread gives them a page.
            new = [place for place in batch if places.backing[place] is None]
            new = [place for place in new if place not in places.stored and place not in places.parked]
            parking = Parking(places, Fence(self._session, ()))
            places.exchange(dict(zip(new, physical.take(len(new), physical.kept), strict=True)), parking=parking)
            return len(new), parking.begin() or parking

        for first in range(0, len(chosen), _BATCH):
            count, parking = places.locked(functools.partial(prepare, chosen[first : first + _BATCH]))
            made += count
            parking.fence.synchronize()
            places.locked(parking.finish)
        return made

    def release(self, pages: Pages, after: After = None) -> None:
        """Return the memory of pages to the arena. The pages then read as zeros (``cuMemsetD8Async``).

        The host does not wait, and the pages stay mapped. Zeros are queued after the work of ``after``. If ``after`` is
        one stream, the zeros are queued on this stream, and its later work reads zeros. Otherwise the zeros are queued
        on a stream of the arena. If the work of ``after`` is already done, later work of the space's stream also reads
        zeros.

        Other work may read a page once :attr:`parked` does not count it any more, or after a synchronisation of the
        device. From then on a commit of another page, :meth:`PageArena.trim`, and an allocation that finds no device
        memory may take the memory. They unmap the page for a moment, and work that reads the page at that moment breaks
        the context.

        If pages share memory, only the page that is released last is cleared. The other pages keep their bytes until
        they are unmapped, after the work of ``after``. If the driver refuses to clear pages, these pages are unmapped
        after the work, too.

        Parameters
        ----------
        pages
            An index, a range or an array of indices. Uncommitted pages are skipped. Contents of swapped-out pages are
            dropped.
        after
            Events or streams whose work may still use these pages; ``()`` for none. Default: all work that is queued on
            the device now.

        Raises
        ------
        CaptureError
            A stream of ``after`` is being captured.
        ClosedError
            The space, or an event or stream of ``after``, was closed.
        InUseError, CudaError, TypeError, ValueError
            As for :meth:`commit`. No page is changed.
        """
        chosen = self._unique(pages)
        places = self._places
        self._check_open()
        ends = listed(after)
        fence, stream = Fence(self._session, _ends_or_all(ends, self.device)), self._single(ends)
        zeros, now = None, False
        dropped: dict[int, Kept] = {}

        def release() -> None:
            nonlocal zeros, now
            committed = [place for place in chosen if places.numbers[place] >= 0]
            if committed:
                now = stream is None and fence.done()
                parking = Parking(places, fence)
                places.park(committed, parking)
                zeros = parking.begin(stream)
            dropped.update({place: places.stored.pop(place) for place in chosen if place in places.stored})

        places.locked(release)
        if zeros is not None and now:
            # An error of the stream is suppressed here, because the next call on the stream raises it. A captured
            # stream does not wait for these zeros.
            with contextlib.suppress(CudaError):
                queue_if_allowed(self.stream, functools.partial(zeros.fence.precede, self.stream), mine=True)
        drop_contents(dropped)
        self._physical.notify_watchers()
        # One release submits fewer items than are attempted here, so that the queue does not grow.
        deferred_queue(self._session).work(4)

    def alias(self, pages: Pages, of: PageSpace, its_pages: Pages, after: After = ()) -> None:
        """Have pages share the memory of committed pages in this space, or in another space of the same arena.

        A page and its counterpart then have the same bytes. The memory returns to the arena when the last page with
        this memory is released. Call :meth:`make_private` before a page is written that should not change the other
        pages.

        Parameters
        ----------
        pages
            Pages that are not committed, or that already share the memory of their counterpart.
        of, its_pages
            A space of the same arena, and the same number of committed pages of this space, in the order of ``pages``.
        after
            As for :meth:`commit`.

        Raises
        ------
        ValueError
            A page is committed with other memory, a page of ``of`` is not committed, a page is named twice in
            ``pages``, or the numbers of pages or the arenas differ.
        ClosedError
            One of the two spaces, or an event or stream of ``after``, was closed.
        EvictedError, InUseError, CaptureError, CudaError, TypeError, ValueError
            As for :meth:`commit`. No page is changed.
        """
        checked_type("of", of, PageSpace)._check_open()
        chosen, sources = self._chosen(pages), of._chosen(its_pages)
        if of._physical is not self._physical:
            raise ValueError(f"of={of!r} is a space of another arena than {self!r}")
        if len(chosen) != len(sources) or len(set(chosen)) != len(chosen):
            raise ValueError(f"{len(chosen)} pages are to share {len(sources)}: give as many, and each page once")
        places, physical = self._places, self._physical

        def alias() -> None:
            self._check_here(chosen)
            theirs = of._places
            found = [theirs.backing[place] if theirs.numbers[place] >= 0 else None for place in sources]
            if None in found:
                raise ValueError(f"its_pages: page {sources[found.index(None)]} of {of!r} is not committed")
            pairs = {place: page for place, page in zip(chosen, found, strict=True) if page is not None}
            wanted = {place: page for place, page in pairs.items() if page.number != places.numbers[place]}
            taken = [place for place in wanted if places.numbers[place] >= 0]
            if taken:
                raise ValueError(f"page {taken[0]} of {self!r} is committed: release it before it shares memory")
            physical.add_users(wanted.values())
            places.exchange(wanted)

        self._change(chosen, after, alias)
        physical.notify_watchers()

    def make_private(self, pages: Pages, stream: StreamLike | None = None, after: After = ()) -> int:
        """Give each of these pages that shares its memory a copy of its own. Returns the number of copied pages.

        The host waits for the copies. Call this method before the first write to a page that was aliased (copy on
        write).

        Parameters
        ----------
        pages
            An index, a range or an array of indices. Uncommitted and unshared pages are skipped.
        stream
            Stream of the copies, ordered after the work that wrote the pages; default: the space's.
        after
            Further events or streams whose work may still use these pages, as for :meth:`commit`.

        Raises
        ------
        OutOfMemoryError, InUseError, ClosedError, CudaError, TypeError, ValueError
            As for :meth:`commit`. Or ``stream`` is not an open stream of this driver. No page is changed.
        CaptureError
            ``stream``, or a stream of ``after``, is being captured.
        """
        chosen = self._unique(pages)
        ordered = copying_stream(stream, self)
        places, physical = self._places, self._physical

        old: dict[int, Page] = {}
        new: dict[int, Page] = {}

        def take() -> None:
            found = {place: places.backing[place] for place in chosen if places.numbers[place] >= 0}
            shared = {place: page for place, page in found.items() if page is not None and page.users > 1}
            places.announce(shared)
            new.update(zip(shared, physical.take(len(shared)), strict=True))
            physical.add_users(shared.values())
            old.update(shared)

        def still(pages: Mapping[int, Page]) -> list[int]:
            # Another thread may have released a page meanwhile.
            return [place for place, page in pages.items() if places.numbers[place] == page.number]

        def exchange() -> dict[int, Page]:
            mine = {place: new.pop(place) for place in still(old)}
            places.exchange(mine)
            return mine

        def put_back() -> None:
            before = {place: old[place] for place in still(mine)}
            physical.add_users(before.values())
            places.exchange(before)

        try:
            physical.allocations.work()  # Pages that were released and whose work is done share no memory any more.
            self._change((), after, take)
            if old:
                self._copy([*old.values()], [*new.values()], ordered)
            mine = places.locked(exchange)
            with undoing(lambda: places.locked(put_back)):
                physical.notify_watchers()
        finally:
            physical.drop(new.values())
            physical.drop(old.values())
        return len(mine)

    def _copy(self, sources: Sequence[Page], targets: Sequence[Page], stream: Stream) -> None:
        """Copy the physical pages ``sources`` to ``targets`` on ``stream``, at temporary addresses, which no other
        thread can unmap. Blocks the host. Raises CudaError.
        """
        nbytes = len(sources) * self.page_size
        with mapped_apart(self._physical, [*sources, *targets], stream) as address:
            ordinal = self.device.ordinal
            source, target = (CopySide(at, nbytes, ordinal, self) for at in (address, address + nbytes))
            copy_bytes(target, source, stream)


def _ends_or_all(after: After, device: Device) -> Iterable[Event | Stream]:
    """Return the events and streams that ``after`` names. For None, return an event after all work of the device
    (:func:`~streamalloc.core.fence.all_work`). Errors as for :func:`~streamalloc.vmm.access.ends_of`, and CudaError.
    """
    return all_work(device) if after is None else ends_of(after, session_of(device))
