"""Devices, driver version, and names of errors."""

from __future__ import annotations

import ctypes
from typing import Any

from streamalloc.driver.bindings import cuda

from .. import arguments
from ..arguments import Device, Int, UnsignedInt
from ..errors import Fault, Result, check, need, not_modelled
from .base import Calls


def _names(enum: Any, prefix: str) -> dict[int, str]:
    """Names by the driver's numbers: some have two names in the bindings."""
    return {int(value): name.removeprefix(prefix) for name, value in enum.__members__.items()}


_DEVICE_ATTRIBUTES = _names(cuda.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_")
_PEER_ATTRIBUTES = _names(cuda.CUdevice_P2PAttribute, "CU_DEVICE_P2P_ATTRIBUTE_")


def _pci(device: Device) -> str:
    return "{PCI_DOMAIN_ID:04x}:{PCI_BUS_ID:02x}:{PCI_DEVICE_ID:02x}.0".format_map(device.attributes)


_PROPERTIES = {  # fields of a CUdevprop
    "maxThreadsPerBlock": "MAX_THREADS_PER_BLOCK",
    "sharedMemPerBlock": "MAX_SHARED_MEMORY_PER_BLOCK",
    "totalConstantMemory": "TOTAL_CONSTANT_MEMORY",
    "SIMDWidth": "WARP_SIZE",
    "memPitch": "MAX_PITCH",
    "regsPerBlock": "MAX_REGISTERS_PER_BLOCK",
    "clockRate": "CLOCK_RATE",
    "textureAlign": "TEXTURE_ALIGNMENT",
}


class DeviceCalls(Calls):
    """cuInit, cuDevice*, cuGetError*."""

    def cuInit(self, Flags: UnsignedInt) -> None:
        check(Flags == 0)
        self._machine.ready = True

    def cuDriverGetVersion(self) -> int:
        return self._machine.profile.driver_version

    def cuGetErrorName(self, error: Any) -> bytes:
        return str(self._error(error).name).encode()

    def cuGetErrorString(self, error: Any) -> bytes:
        return need(self._machine.profile.error_strings.get(str(self._error(error).name))).encode()

    @staticmethod
    def _error(error: Any) -> Any:
        try:
            return Result(int(error))
        except ValueError:
            raise Fault(Result.CUDA_ERROR_INVALID_VALUE) from None

    def cuDeviceGetCount(self) -> int:
        return len(self._machine.devices)

    def cuDeviceGet(self, ordinal: Int) -> Any:
        check(0 <= ordinal < len(self._machine.devices), Result.CUDA_ERROR_INVALID_DEVICE)
        return cuda.CUdevice(ordinal)

    def cuDeviceGetName(self, length: Int, dev: Device) -> bytes:
        check(length > 0)
        return self._machine.profile.name.encode()[: length - 1].ljust(length, b"\0")

    def cuDeviceGetUuid(self, dev: Device) -> Any:
        found, uuid = dev.uuid, cuda.CUuuid()
        ctypes.memmove(int(uuid.getPtr()), found, len(found))
        return uuid

    cuDeviceGetUuid_v2 = cuDeviceGetUuid

    def cuDeviceTotalMem(self, dev: Device) -> int:
        return dev.bank.total

    def cuDeviceGetAttribute(self, attrib: Any, dev: Device) -> int:
        number = int(attrib.value) if hasattr(attrib, "value") else arguments.signed_int(attrib)
        return need(dev.attributes.get(_DEVICE_ATTRIBUTES.get(number, "")))

    def cuDeviceGetProperties(self, dev: Device) -> Any:
        attributes, properties = dev.attributes, cuda.CUdevprop()
        for name, attribute in _PROPERTIES.items():
            setattr(properties, name, attributes[attribute])
        properties.maxThreadsDim = [attributes[f"MAX_BLOCK_DIM_{axis}"] for axis in "XYZ"]
        properties.maxGridSize = [attributes[f"MAX_GRID_DIM_{axis}"] for axis in "XYZ"]
        return properties

    def cuDeviceComputeCapability(self, dev: Device) -> tuple[int, int]:
        attributes = dev.attributes
        return attributes["COMPUTE_CAPABILITY_MAJOR"], attributes["COMPUTE_CAPABILITY_MINOR"]

    def cuDeviceGetPCIBusId(self, length: Int, dev: Device) -> bytes:
        name = _pci(dev).encode()
        check(length > len(name))
        # observed on H200 (test_device): one terminating zero, and the rest of the buffer as it was
        return (name + b"\0").ljust(length, b" ")

    def cuDeviceGetByPCIBusId(self, pciBusId: Any) -> Any:
        """By the name that cuDeviceGetPCIBusId returns. The documentation allows shorter ones, too."""
        wanted = bytes(pciBusId).partition(b"\0")[0].decode(errors="replace").lower()
        known = {_pci(device): device.ordinal for device in self._machine.devices}
        not_modelled(wanted not in known, f"the PCI bus ID {wanted!r}: known are {', '.join(known)}")
        return cuda.CUdevice(known[wanted])

    def cuDeviceCanAccessPeer(self, dev: Device, peerDev: Device) -> int:
        return int(dev is not peerDev and self._machine.has_access(dev.ordinal, peerDev.ordinal))

    def cuDeviceGetP2PAttribute(self, attrib: cuda.CUdevice_P2PAttribute, srcDevice: Device, dstDevice: Device) -> int:
        check(srcDevice is not dstDevice, Result.CUDA_ERROR_INVALID_DEVICE)
        link = self._machine.link(srcDevice.ordinal, dstDevice.ordinal)
        return need(link.attributes.get(_PEER_ATTRIBUTES.get(attrib, "")))
