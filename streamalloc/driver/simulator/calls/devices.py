"""Devices, and what a driver says of itself."""

from __future__ import annotations

import ctypes
from typing import Any

from streamalloc.driver.bindings import cuda

from .. import arguments
from ..errors import Fault, Result, check, need
from .base import Calls, modelled


def _names(enum: Any, prefix: str) -> dict[int, str]:
    """Names by the driver's numbers: some have two names in the bindings."""
    return {int(value): name.removeprefix(prefix) for name, value in enum.__members__.items()}


_DEVICE_ATTRIBUTES = _names(cuda.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_")
_PEER_ATTRIBUTES = _names(cuda.CUdevice_P2PAttribute, "CU_DEVICE_P2P_ATTRIBUTE_")


class DeviceCalls(Calls):
    """cuInit, cuDevice*, cuGetError*."""

    @modelled(0, before_init=True)
    def cuInit(self, Flags: Any) -> None:
        check(arguments.unsigned_int(Flags) == 0)
        self._machine.ready = True

    @modelled(1, before_init=True)
    def cuDriverGetVersion(self) -> int:
        return self._machine.profile.driver_version

    @modelled(1, before_init=True)
    def cuGetErrorName(self, error: Any) -> bytes:
        return str(self._error(error).name).encode()

    @modelled(1, before_init=True)
    def cuGetErrorString(self, error: Any) -> bytes:
        name = str(self._error(error).name)
        plain = name.removeprefix("CUDA_ERROR_").replace("_", " ").lower()
        return self._machine.profile.error_strings.get(name, plain).encode()

    @staticmethod
    def _error(error: Any) -> Any:
        try:
            return Result(int(error))
        except ValueError:
            raise Fault(Result.CUDA_ERROR_INVALID_VALUE) from None

    @modelled(1)
    def cuDeviceGetCount(self) -> int:
        return len(self._machine.devices)

    @modelled(1)
    def cuDeviceGet(self, ordinal: Any) -> Any:
        number = arguments.signed_int(ordinal)
        check(0 <= number < len(self._machine.devices), Result.CUDA_ERROR_INVALID_DEVICE)
        return cuda.CUdevice(number)

    @modelled(1)
    def cuDeviceGetName(self, length: Any, dev: Any) -> bytes:
        size = arguments.signed_int(length)
        self._device(dev)
        check(size > 0)
        return self._machine.profile.name.encode()[: size - 1].ljust(size, b"\0")

    @modelled(1)
    def cuDeviceGetUuid(self, dev: Any) -> Any:
        return self._uuid(dev)

    @modelled(1)
    def cuDeviceGetUuid_v2(self, dev: Any) -> Any:
        return self._uuid(dev)

    def _uuid(self, dev: Any) -> Any:
        found = self._device(dev).uuid
        uuid = cuda.CUuuid()
        ctypes.memmove(int(uuid.getPtr()), found, len(found))
        return uuid

    @modelled(1)
    def cuDeviceTotalMem(self, dev: Any) -> int:
        return self._device(dev).bank.total

    @modelled(1)
    def cuDeviceGetAttribute(self, attrib: Any, dev: Any) -> int:
        device = self._device(dev)
        number = int(attrib.value) if hasattr(attrib, "value") else arguments.signed_int(attrib)
        return need(device.attributes.get(_DEVICE_ATTRIBUTES.get(number, "")), Result.CUDA_ERROR_INVALID_VALUE)

    @modelled(1)
    def cuDeviceGetPCIBusId(self, length: Any, dev: Any) -> bytes:
        size = arguments.signed_int(length)
        name = self._pci(self._device(dev).attributes).encode()
        check(size > len(name))
        # observed on H200 (test_device): one terminating zero, and the rest of the buffer as it was
        return (name + b"\0").ljust(size, b" ")

    @modelled(1)
    def cuDeviceGetByPCIBusId(self, pciBusId: Any) -> Any:
        if not isinstance(pciBusId, (bytes, bytearray)):
            raise TypeError(f"expected bytes, {type(pciBusId).__name__} found")
        wanted = bytes(pciBusId).split(b"\0")[0].decode("ascii", "replace").lower()
        for device in self._machine.devices:
            if self._pci(device.attributes) in (wanted, "0000:" + wanted):
                return cuda.CUdevice(device.ordinal)
        raise Fault(Result.CUDA_ERROR_INVALID_DEVICE)

    @staticmethod
    def _pci(attributes: dict[str, int]) -> str:
        return "{PCI_DOMAIN_ID:04x}:{PCI_BUS_ID:02x}:{PCI_DEVICE_ID:02x}.0".format_map(attributes)

    @modelled(2)
    def cuDeviceGetLuid(self, dev: Any) -> Any:
        self._device(dev)
        raise Fault(Result.CUDA_ERROR_NOT_SUPPORTED)

    @modelled(1)
    def cuDeviceCanAccessPeer(self, dev: Any, peerDev: Any) -> int:
        return int(self._device(dev) is not self._device(peerDev))

    @modelled(1)
    def cuDeviceGetP2PAttribute(self, attrib: Any, srcDevice: Any, dstDevice: Any) -> int:
        number = arguments.member("attrib", attrib, cuda.CUdevice_P2PAttribute)
        check(self._device(srcDevice) is not self._device(dstDevice), Result.CUDA_ERROR_INVALID_DEVICE)
        return need(
            self._machine.profile.peer_attributes.get(_PEER_ATTRIBUTES.get(number, "")), Result.CUDA_ERROR_INVALID_VALUE
        )
