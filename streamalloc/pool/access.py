"""Access of devices and of the host to the memory of pools."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from streamalloc.core.errors import ClosedError, PeerAccessError, refused
from streamalloc.core.internal import Allocator, Device, known_location
from streamalloc.core.properties import MemAccess, MemAccessDesc, MemLocation, MemLocationType, checked_type
from streamalloc.pool.ending import PoolEnd

T = TypeVar("T")


class GrantsAccess(Allocator):
    """Base class with the methods of :class:`MemoryPool` that read and set which devices have access to its memory."""

    __slots__ = ("_end", "closed")

    _end: PoolEnd | None
    """Queue item that destroys the pool; None if this object does not own the pool."""
    closed: bool
    """Whether the pool was closed: new allocations raise ClosedError. Its buffers stay valid until they are freed."""

    def checked_raw(self) -> Any:
        """Return the ``CUmemoryPool``. Raises :class:`ClosedError` if the pool was closed."""
        if self.closed:
            raise ClosedError(f"{self!r} was closed")
        return self._raw

    def _call(self, name: str, *args: Any, hint: str = "") -> Any:
        """Call driver function ``name`` with this pool as its first argument, and return its results. Raises
        ClosedError, CudaError with ``hint``.
        """
        return self._counted(lambda: self._session.call(name, self.checked_raw(), *args, hint=hint))

    def _counted(self, act: Callable[[], T]) -> T:
        """Call ``act``, which checks that the pool is open and then calls the driver with the pool's handle, and return
        its result. Meanwhile the pool is not destroyed, even if another thread closes it: the driver may crash on the
        handle of a destroyed pool.
        """
        end = self._end
        if end is None:
            return act()
        # With the GIL, threads switch only at calls and jumps. So no increment of another thread is lost here, and the
        # pool is not destroyed during `act`.
        end.readers += 1
        try:
            return act()
        finally:
            end.readers -= 1

    @property
    def peers(self) -> frozenset[Device]:
        """Devices with access to the pool's memory, without the device that the memory is on (``cuMemPoolGetAccess``).
        Raises ClosedError if the pool was closed.

        Assign devices or ordinals to grant access to exactly these devices, and to revoke the access of all other
        devices (``cuMemPoolSetAccess``). The errors of an assignment are those of :meth:`set_access`.
        """
        others = (one for one in Device.all(self._session.driver) if one.location != self.location)
        return frozenset(one for one in others if self.access(one) is not MemAccess.NONE)

    @peers.setter
    def peers(self, devices: Iterable[Device | int]) -> None:
        before, driver = self.peers, self._session.driver
        wanted = {Device(one, driver=driver) if isinstance(one, int) else one for one in devices}
        wanted = {one for one in wanted if self._location_of(one, check_peer=False) != self.location}
        for several, access in ((wanted - before, MemAccess.READWRITE), (before - wanted, MemAccess.NONE)):
            if several:
                self.set_access(several, access)

    def set_access(
        self, who: Device | MemLocation | int | Iterable[Device | MemLocation | int], access: MemAccess
    ) -> None:
        """Grant or revoke access of devices to all allocations of the pool, past and future (``cuMemPoolSetAccess``).

        Grant access once and keep it as long as the pool exists, because NVIDIA advises against frequent changes.

        Parameters
        ----------
        who
            One or several devices, their ordinals, or locations. If the pool is in device memory,
            ``cuDeviceCanAccessPeer`` is called first for each device.
        access
            READWRITE or NONE. Drivers refuse READ for pools.

        Raises
        ------
        PeerAccessError
            A device cannot access the memory of the pool's device.
        NotSupportedError
            The driver does not grant this access: READ, or the host on device memory.
        InvalidDeviceError
            NONE was given for the device that the memory is on, whose access cannot be revoked.
        TypeError, ValueError
            ``who`` names no location of the driver, or ``access`` is not a :class:`MemAccess`.
        ClosedError
            The pool was closed.
        """
        self.checked_raw()
        checked_type("access", access, MemAccess)
        several = [who] if isinstance(who, (Device, MemLocation, int)) else list(who)
        descriptors = [MemAccessDesc(self._location_of(one), access).to_driver() for one in several]
        why = "pools grant READWRITE or NONE, to the host in host memory only, and the owner's access stays"
        self._call("cuMemPoolSetAccess", descriptors, len(descriptors), hint=f"access={access.name}: {why}")

    def access(self, who: Device | MemLocation | int) -> MemAccess:
        """Return the permission of ``who``, a device or the host, to use the pool's memory (``cuMemPoolGetAccess``).
        Raises ClosedError if the pool was closed, and TypeError or ValueError if ``who`` is no location of the driver.
        """
        self.checked_raw()
        location = self._location_of(who, check_peer=False)
        return MemAccess(int(self._call("cuMemPoolGetAccess", location.to_driver())))

    def reachable_from(self, device: Device) -> bool:
        if self.managed or self.location == device.location:
            return True
        # Not `checked_raw`: the handle of a closed pool stays valid while the pool has buffers.
        with self._session.relaxed():
            flags = self._session.call("cuMemPoolGetAccess", self._raw, device.location.to_driver())
        return MemAccess(int(flags)) is not MemAccess.NONE

    def _location_of(self, who: Device | MemLocation | int, *, check_peer: bool = True) -> MemLocation:
        """Return the location of ``who``. With ``check_peer``, raise :class:`PeerAccessError` if this location is a
        device that cannot access the memory of the pool's device.
        """
        session, own = self._session, self.location
        location = known_location(session, "who", who)
        if check_peer and location.type is own.type is MemLocationType.DEVICE:
            peer = Device(location.id, driver=session.driver)
            if not peer.can_access(Device(own.id, driver=session.driver)):
                why = f"device {location.id} cannot reach the memory of device {own.id}"
                raise refused(PeerAccessError, "cuMemPoolSetAccess", f"{why} (cuDeviceCanAccessPeer)")
        return location
