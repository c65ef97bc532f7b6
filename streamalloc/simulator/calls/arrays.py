"""Driver calls for arrays. Sparse arrays follow readings on an H200, other arrays follow NVIDIA's documentation."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Annotated, Any

from streamalloc.driver.bindings import cuda
from streamalloc.simulator import arguments, arrays
from streamalloc.simulator.allocations import LiveMemory
from streamalloc.simulator.arguments import Handle, Stream, UnsignedInt, found_in
from streamalloc.simulator.arrays import TAIL, WHOLE, ArrayLayout, BoxCopy, Part, Remap, Storage, Tile
from streamalloc.simulator.calls.base import call
from streamalloc.simulator.calls.copies import ARRAY, DEVICE, OF_HOST, UNIFIED, CopyCalls
from streamalloc.simulator.constants import BLOCK, READ, READ_WRITE, TILE_SIZE, Dim3, Handles, round_up
from streamalloc.simulator.contexts import Context
from streamalloc.simulator.errors import NotModelled, Result, check, need, not_modelled
from streamalloc.simulator.memory import Shape, Side
from streamalloc.simulator.physical import CreatedMemory
from streamalloc.simulator.profiles import MachineSpec

_LAYERED, _SURFACE, _GATHER, _SPARSE, _DEFERRED = 0x01, 0x02, 0x08, 0x40, 0x80  # CUDA_ARRAY3D_*
# Flags that a sparse array cannot have: surface, cube map, depth texture, deferred mapping (observed on H200:
# test_sparse_arrays).
_NEVER_SPARSE = 0x02 | 0x04 | 0x10 | 0x80
_BYTES_OF_FORMAT = {0x01: 1, 0x02: 2, 0x03: 4, 0x08: 1, 0x09: 2, 0x0A: 4, 0x10: 2, 0x20: 4}  # CUarray_format
_ONE_TAIL = 1  # CU_ARRAY_SPARSE_PROPERTIES_SINGLE_MIPTAIL
_ARRAY, _MIPMAPPED_ARRAY = 0, 1  # CUresourcetype
_LEVEL, _MIPTAIL = 0, 1  # CUarraySparseSubresourceType
_MAP, _UNMAP = 1, 2  # CUmemOperationType

_ENDS = {"A": ("Array", ARRAY), "D": ("Device", DEVICE), "H": ("Host", OF_HOST)}
"""For a letter in a function's name (``cuMemcpyAtoD``): the last part of the name of the field for this side in a
CUDA_MEMCPY3D, and the memory type.
"""


def _field(copy: Any, name: str) -> Any:
    """Return a field of a copy's struct. Structs for planes and lines lack some fields: ``Depth`` is then 1, all others
    are 0.
    """
    return getattr(copy, name, name == "Depth")


def _kinds(copy: Any) -> tuple[int, int]:
    """Return the memory types (``CUmemorytype``) of source and target of a box copy."""
    return arguments.number_in(copy, "srcMemoryType"), arguments.number_in(copy, "dstMemoryType")


Change = tuple[Storage, Tile, "tuple[CreatedMemory, int] | None"]
_array, _mipmap = Handle(cuda.CUarray), Handle(cuda.CUmipmappedArray)
_no_array = ("arrays", "using an array that does not exist")
_no_mipmap = ("mipmapped_arrays", "using a mipmapped array that does not exist")
_gone = Result.CUDA_ERROR_INVALID_HANDLE
Array = Annotated[arrays.Array, _array, found_in(*_no_array)]
MipmappedArray = Annotated[arrays.MipmappedArray, _mipmap, found_in(*_no_mipmap)]
# For calls that destroy an array. For them a null handle gives CUDA_ERROR_INVALID_HANDLE (observed on H200:
# test_modules).
EndedArray = Annotated[arrays.Array, _array, found_in(*_no_array, _gone)]
EndedMipmap = Annotated[arrays.MipmappedArray, _mipmap, found_in(*_no_mipmap, _gone)]
# Kinds of the parameters of calls that exist for arrays and for mipmapped arrays.
_EITHER = {"array": Array, "mipmap": MipmappedArray}


class ArrayCalls(CopyCalls):
    """The calls cuArray*, cuMipmappedArray* and cuMemMapArrayAsync, and the copies that can be from or to arrays:
    cuMemcpy2D*, cuMemcpy3D* without batches, cuMemcpyAto* and cuMemcpy*toA.
    """

    def __init__(self, spec: MachineSpec) -> None:
        super().__init__(spec)
        self.arrays: Handles[arrays.Array] = Handles()
        self.mipmapped_arrays: Handles[arrays.MipmappedArray] = Handles()

    # -- making and ending -----------------------------------------------------------------------------------

    def _create(self, descriptor: Any) -> Any:
        storage = self._storage(self._array_context(), self._layout(descriptor))
        return cuda.CUarray(self.arrays.add(arrays.Array(storage)).handle)

    cuArrayCreate = cuArray3DCreate = call(_create)

    def _storage(self, context: Context, layout: ArrayLayout) -> Storage:
        made = Storage(context, layout)
        if not layout.sparse and not layout.deferred:
            size, bank = round_up(layout.size, BLOCK), context.device.bank
            check(self.banks.make_room(bank, size), Result.CUDA_ERROR_OUT_OF_MEMORY)
            made.allocate()
        return made

    def cuMipmappedArrayCreate(
        self, pMipmappedArrayDesc: cuda.CUDA_ARRAY3D_DESCRIPTOR, numMipmapLevels: UnsignedInt
    ) -> Any:
        context, layout = self._array_context(), self._layout(pMipmappedArrayDesc)
        most = max(layout.extent).bit_length()
        if layout.sparse and (layout.solid or not 0 < numMipmapLevels <= most):
            raise NotModelled("mipmapped arrays of three dimensions, without levels, or with more than there can be")
        storage = self._storage(context, replace(layout, levels=min(max(numMipmapLevels, 1), most), mipmapped=True))
        return cuda.CUmipmappedArray(self.mipmapped_arrays.add(arrays.MipmappedArray(storage)).handle)

    def _array_context(self) -> Context:
        need(self.current_or_none(), "making an array without a current context")
        return self.current()

    def _largest(self, kind: str, *parts: str) -> list[int]:
        """Return the device's largest extents of a texture or surface ``kind``, one for each of ``parts``; 0 if the
        kind has no such extent.
        """
        attributes = self._array_context().device.attributes
        return [attributes.get(f"MAXIMUM_{kind}_{part}", 0) for part in parts]

    def _layout(self, descriptor: Any) -> ArrayLayout:
        """Check an array descriptor, and return the layout that it asks for. A CUDA_ARRAY_DESCRIPTOR has neither depth
        nor flags.
        """
        width, height, depth = (int(getattr(descriptor, name, 0)) for name in ("Width", "Height", "Depth"))
        # The width comes before the format, as in CUDA: if both are wrong, the first check determines the result code.
        check(width or getattr(descriptor, "Flags", 0) & _SPARSE)
        number, channels = arguments.number_in(descriptor, "Format", None), int(descriptor.NumChannels)
        flags = getattr(descriptor, "Flags", 0)
        layered, solid, sparse = bool(flags & _LAYERED), depth > 0 and not flags & _LAYERED, bool(flags & _SPARSE)
        described = (number, channels, flags)
        (self._check_sparse if sparse else self._check_ordinary)((width, height, depth), described, layered, solid)
        extent = (width, max(height, 1), depth if solid else 1)
        layers, element = depth if layered else 0, _BYTES_OF_FORMAT[number] * channels
        deferred = bool(flags & _DEFERRED)
        return ArrayLayout(
            extent, layers, solid, element, sparse=sparse, deferred=deferred, described=described, line=not height
        )

    def _check_sparse(self, sizes: Dim3, described: Dim3, layered: bool, solid: bool) -> None:
        (width, height, depth), (number, channels, flags) = sizes, described
        check(not flags & _NEVER_SPARSE and channels != 3)
        if number not in _BYTES_OF_FORMAT or channels not in (1, 2, 4) or flags & ~(_SPARSE | _LAYERED | _GATHER):
            raise NotModelled(f"a sparse array of format {number:#x}, {channels} channels and flags {flags:#x}")
        check(height or depth)  # A sparse array has two dimensions or three.
        kind, third = ("3D", "DEPTH") if solid else ("2D_LAYERED", "LAYERS") if layered else ("2D", "")
        largest = self._largest(f"TEXTURE{kind}", "WIDTH", "HEIGHT", third)
        if not (solid or layered):
            check(width <= largest[0])
        too_large = any(one > most for one, most in zip(sizes, largest, strict=True))
        if too_large or not width or not height or (layered and not depth) or (solid and flags & _GATHER):
            raise NotModelled(f"a sparse array of {width} x {height} x {depth} with flags {flags:#x}")

    def _check_ordinary(self, sizes: Dim3, described: Dim3, layered: bool, solid: bool) -> None:
        (width, height, depth), (number, channels, flags) = sizes, described
        known = number in _BYTES_OF_FORMAT and not flags & ~(_LAYERED | _SURFACE | _GATHER | _DEFERRED)
        not_modelled(not known, f"an array of format {number:#x} and flags {flags:#x}")
        check(channels in (1, 2, 4) and width and (height or layered or not depth))
        check(depth or not layered)
        check(not flags & _GATHER or (height and not depth))
        kind = "3D" if solid else "2D" if height else "1D"
        third = ("WIDTH", "HEIGHT", "DEPTH")[: int(kind[0])]
        if layered:
            kind, third = f"{kind}_LAYERED", (*third, "LAYERS")
        of = "SURFACE" if flags & _SURFACE else "TEXTURE"
        kind = f"{kind}_GATHER" if flags & _GATHER else kind
        most = self._largest(f"{of}{kind}", *third)
        check(all(size <= limit for size, limit in zip(filter(None, sizes), most, strict=True)))

    def _destroy(self, one: arrays.Array | arrays.MipmappedArray) -> None:
        """Destroy an array. If the array is mipmapped, the handles of its levels end, too. If ``one`` is a level of a
        mipmapped array, only the level's handle ends.
        """
        not_modelled(one.mipmap is None and one.storage.queued, "destroying an array while work with it is queued")
        self._forget(one)

    def _forget(self, one: arrays.Array | arrays.MipmappedArray) -> None:
        for level in [one] if isinstance(one, arrays.Array) else self._levels_of(one):
            del self.arrays[level.handle]
        self.mipmapped_arrays.pop(one.handle, None)
        if one.mipmap is None:
            one.storage.clear()

    def close_context(self, context: Context) -> None:
        super().close_context(context)
        own: list[arrays.Array | arrays.MipmappedArray] = [*self.mipmapped_arrays.values()]
        own += [one for one in self.arrays.values() if one.mipmap is None]
        for one in own:
            if one.storage.context is context:
                self._forget(one)

    cuArrayDestroy = cuMipmappedArrayDestroy = call(_destroy, hArray=EndedArray, hMipmappedArray=EndedMipmap)

    def cuMipmappedArrayGetLevel(self, hMipmappedArray: MipmappedArray, level: UnsignedInt) -> Any:
        mipmap = hMipmappedArray
        check(level < mipmap.storage.layout.levels)
        made = (one for one in self._levels_of(mipmap) if one.level == level)
        array = next(made, None) or self.arrays.add(arrays.Array(mipmap.storage, level, mipmap))
        return cuda.CUarray(array.handle)

    def _levels_of(self, mipmap: arrays.MipmappedArray) -> list[arrays.Array]:
        """Return the levels of a mipmapped array for which ``cuMipmappedArrayGetLevel`` has made handles."""
        return [one for one in self.arrays.values() if one.mipmap is mipmap]

    # -- descriptors and properties --------------------------------------------------------------------------

    def cuArrayGetDescriptor(self, hArray: Array) -> Any:
        return self._describe(hArray, cuda.CUDA_ARRAY_DESCRIPTOR())

    def cuArray3DGetDescriptor(self, hArray: Array) -> Any:
        descriptor = self._describe(hArray, cuda.CUDA_ARRAY3D_DESCRIPTOR())
        layout = hArray.storage.layout
        descriptor.Depth = layout.layers or (layout.extent_of(hArray.level)[2] if layout.solid else 0)
        descriptor.Flags = layout.described[2]
        return descriptor

    @staticmethod
    def _describe(array: arrays.Array, descriptor: Any) -> Any:
        layout = array.storage.layout
        descriptor.Width, height, _ = layout.extent_of(array.level)
        descriptor.Height = 0 if layout.line else height
        number, descriptor.NumChannels, _ = layout.described
        descriptor.Format = cuda.CUarray_format(number)
        return descriptor

    def _sparse_properties(self, one: arrays.Array | arrays.MipmappedArray) -> Any:
        layout = one.storage.layout
        check(one.mipmap is None and not layout.deferred)
        not_modelled(not layout.sparse, "sparse properties of an array that is not sparse")
        layout.check_tail()
        properties = cuda.CUDA_ARRAY_SPARSE_PROPERTIES()
        tile = properties.tileExtent
        tile.width, tile.height, tile.depth = layout.tile
        if layout.has_tail:
            properties.miptailFirstLevel, properties.miptailSize = layout.tail_first, TILE_SIZE
            properties.flags = 0 if layout.mipmapped else _ONE_TAIL
        return properties

    cuArrayGetSparseProperties = cuMipmappedArrayGetSparseProperties = call(_sparse_properties, **_EITHER)

    def _requirements(self, one: arrays.Array | arrays.MipmappedArray, device: Any) -> Any:
        storage = one.storage
        check(one.mipmap is None and storage.layout.deferred)
        not_modelled(device is not storage.context.device, "the memory that an array requires on another device")
        found = cuda.CUDA_ARRAY_MEMORY_REQUIREMENTS()
        found.size, found.alignment = storage.layout.required, TILE_SIZE
        return found

    cuArrayGetMemoryRequirements = cuMipmappedArrayGetMemoryRequirements = call(_requirements, **_EITHER)

    # -- tiles and memory ------------------------------------------------------------------------------------

    def cuMemMapArrayAsync(self, mapInfoList: Any, count: UnsignedInt, hStream: Any) -> None:
        wanted = arguments.structs("mapInfoList", mapInfoList, cuda.CUarrayMapInfo, count)
        stream: Stream = self._find(Stream, hStream)
        self._check_launch(stream, "cuMemMapArrayAsync")
        check(count)
        stream.submit(Remap([change for info in wanted for change in self._changes(info, stream)]))

    def _changes(self, info: Any, stream: Stream) -> list[Change]:
        """Return the changes that one entry of the call's list asks for, one for each tile.

        They are in the order of the tiles in the memory: x changes fastest, then y, then z.
        """
        device = stream.context.device.ordinal
        storage = self._resource(info)
        whole = storage.layout.deferred
        not_modelled(not (storage.layout.sparse or whole), "cuMemMapArrayAsync with an array that has its memory")
        operation = arguments.number_in(info, "memOperationType", None)
        check(operation in (_MAP, _UNMAP) and not info.flags and info.deviceBitMask == 1 << device)
        if whole:  # The driver ignores the part of the array that the entry names, as documented.
            tiles = [(device, WHOLE, 0, at, 0, 0) for at in range(storage.layout.required // TILE_SIZE)]
        else:
            tiles = self._tiles(info, storage.layout, device)
        # The driver checks this condition before all others (observed on H200: test_sparse_arrays).
        if operation == _UNMAP:
            return [(storage, tile, None) for tile in tiles]
        handle, offset = int(info.memHandle.memHandle), int(info.offset)
        not_modelled(not handle, "mapping tiles without memory: the real driver crashes")
        memory = self.memory(handle)
        check(memory.properties.tile_pool and memory.properties.device in (device, None))
        not_modelled(memory.properties.device is None, "host memory for tiles of arrays")
        check(offset % TILE_SIZE == 0 and offset + len(tiles) * TILE_SIZE <= memory.size)
        return [(storage, tile, (memory, offset + at * TILE_SIZE)) for at, tile in enumerate(tiles)]

    def _resource(self, info: Any) -> Storage:
        if arguments.number_in(info, "resourceType", None) == _MIPMAPPED_ARRAY:
            mipmap: MipmappedArray = self._find(MipmappedArray, info.resource.mipmap)
            return mipmap.storage
        array: Array = self._find(Array, info.resource.array)
        check(array.mipmap is None)
        return array.storage

    def _tiles(self, info: Any, layout: ArrayLayout, device: int) -> list[Tile]:
        if arguments.number_in(info, "subresourceType", None) == _MIPTAIL:
            tail = info.subresource.miptail
            check(layout.has_tail and tail.layer < max(layout.layers, 1))
            layout.check_tail()
            check(not tail.offset and tail.size == TILE_SIZE)
            self._check_small(layout)
            return [(device, TAIL, int(tail.layer), 0, 0, 0)]
        region = info.subresource.sparseLevel
        level, layer = int(region.level), int(region.layer)
        self._check_small(layout)
        check(level < min(layout.levels, layout.tail_first) and layer < max(layout.layers, 1))
        ranges = []
        for start, length, whole, tile in zip(
            (int(region.offsetX), int(region.offsetY), int(region.offsetZ)),
            (int(region.extentWidth), int(region.extentHeight), int(region.extentDepth)),
            layout.extent_of(level),
            layout.tile,
            strict=True,
        ):
            end = start + length
            check(length and start % tile == 0 and end <= whole and (length % tile == 0 or end == whole))
            ranges.append(range(start // tile, -(-end // tile)))
        columns, rows, slices = ranges
        return [(device, level, layer, x, y, z) for z in slices for y in rows for x in columns]

    @staticmethod
    def _check_small(layout: ArrayLayout) -> None:
        not_modelled(layout.has_tail and not layout.mipmapped, "memory for an array that is smaller than a tile")

    # -- copies ----------------------------------------------------------------------------------------------

    def _copy_box(self, copy: Any, hStream: int | None = None) -> None:
        """Submit a copy of a line, plane or box, with or without arrays. ``copy``: the struct of the call. ``hStream``:
        number of the stream's handle; None for a synchronous call.
        """
        kinds = _kinds(copy)
        if ARRAY not in kinds:
            self._copy_rows(copy, hStream, int(_field(copy, "Depth")))
            return
        waits = hStream is None
        stream = self.stream(hStream or 0)
        self._check_launch(stream, "cuMemcpy3DAsync")
        if not set(kinds) <= {OF_HOST, DEVICE, UNIFIED, ARRAY}:
            raise NotModelled("a copy between an array and memory of a type that does not exist")
        shape = Shape(int(copy.WidthInBytes), int(copy.Height), int(_field(copy, "Depth")))
        if kinds.count(ARRAY) == 2:
            of, to = self._part(copy, "src", shape, stream), self._part(copy, "dst", shape, stream)
            source, target = of.array, to.array
            check(source.storage.layout.element == target.storage.layout.element)
            not_modelled(source is target, "a copy within an array")
            stream.submit(BoxCopy(self.banks, stream.context, shape, to, of))
            return
        into = kinds[1] == ARRAY
        ours, theirs = ("dst", "src") if into else ("src", "dst")
        part, other = self._part(copy, ours, shape, stream), kinds[0 if into else 1]
        not_modelled(_field(copy, f"{theirs}LOD"), "cuMemcpy3D of another level of detail")
        side = self._side(copy, theirs, other, shape)
        check(side.fits)
        end = self._end_of_memory(side, shape, stream.context, into, other == DEVICE)
        if into and end is None and not self._quiet(stream, shape.size):
            # Pageable memory is read before the call returns, because the program may change it afterwards.
            side = side.read(shape)
        sides = (part, side) if into else (side, part)
        stream.submit(BoxCopy(self.banks, stream.context, shape, *sides))
        if (end is None and not into) or (waits and (end is None or end.on_host)):
            self._finish(stream)

    def _copy_between(self, copy: Any, hStream: int | None = None) -> None:
        ends = [self._find(arguments.ContextOrCurrent, one) for one in (copy.dstContext, copy.srcContext)]
        if ARRAY not in _kinds(copy):
            self._copy_rows(copy, hStream, int(copy.Depth), (ends[0], ends[1]))
            return
        here = self.stream(hStream or 0).context.device
        not_modelled(any(one.device is not here for one in ends), "a copy of an array between two devices")
        self._copy_box(copy, hStream)

    cuMemcpy3DPeer = cuMemcpy3DPeerAsync = call(_copy_between)

    def _copy_line(
        self, target: str, source: str, first: Any, second: Any, third: Any, fourth: Any = None, fifth: Any = None
    ) -> None:
        """Copy a row between one-dimensional arrays and memory.

        ``target`` and ``source``: A for an array, D for device and H for host memory. The other arguments are those of
        the driver call: target, source (an array is followed by its offset in bytes), number of bytes, and the stream
        of an asynchronous call.
        """
        given = iter((first, second, third, fourth, fifth))
        values: dict[str, Any] = {"Height": 1, "Depth": 1}
        for side, kind in (("dst", target), ("src", source)):
            values[f"{side}{_ENDS[kind][0]}"], values[f"{side}MemoryType"] = next(given), _ENDS[kind][1]
            if kind == "A":
                values[f"{side}XInBytes"] = next(given)
        values["WidthInBytes"] = size = next(given)
        if not size:
            return
        for side in ("dst", "src"):
            values[f"{side}Pitch"] = values.get(f"{side}XInBytes", 0) + size
            if f"{side}Array" in values:
                array: arrays.Array = self._find(Array, values[f"{side}Array"])
                not_modelled(not array.storage.layout.line, "a copy by offset of an array of several dimensions")
        self._copy_box(SimpleNamespace(**values), next(given, None))

    cuMemcpyAtoD = call(_copy_line, "D", "A")
    cuMemcpyDtoA = call(_copy_line, "A", "D")
    cuMemcpyAtoH = cuMemcpyAtoHAsync = call(_copy_line, "H", "A")
    cuMemcpyHtoA = cuMemcpyHtoAAsync = call(_copy_line, "A", "H")
    cuMemcpyAtoA = call(_copy_line, "A", "A")

    cuMemcpy2D = cuMemcpy2DAsync = call(_copy_box)
    cuMemcpy2DUnaligned = cuMemcpy2D
    cuMemcpy3D = cuMemcpy3DAsync = call(_copy_box)

    def _part(self, copy: Any, side: str, shape: Shape, stream: Stream) -> Part:
        array: Array = self._find(Array, getattr(copy, f"{side}Array"))
        x, y, z = (int(_field(copy, side + name)) for name in ("XInBytes", "Y", "Z"))
        if _field(copy, f"{side}LOD") or not shape.size:
            raise NotModelled("cuMemcpy3D of nothing, or of another level of detail")
        layout = array.storage.layout
        width, height, depth = layout.extent_of(array.level)
        check(x % layout.element == 0 and shape.width % layout.element == 0)
        check(x + shape.width <= width * layout.element and y + shape.height <= height)
        check(z + shape.depth <= (layout.layers or depth))
        if array.level >= layout.tail_first:
            layout.check_tail()
        bare = layout.deferred and not array.storage.tiles and not array.storage.queued
        not_modelled(bare, "a copy of an array without memory: the real driver fails, and so does its context")
        elsewhere = array.storage.context.device is not stream.context.device
        not_modelled(elsewhere, "a copy of an array in a stream of another device")
        return Part(array, x, y, z)

    def _end_of_memory(
        self, side: Side, shape: Shape, context: Context, into: bool, must_be_device: bool
    ) -> LiveMemory | None:
        address, size = side.address, side.span(shape)
        end = self._copy_end(address, size, must_be_device, context)
        lost = self._lost(address, size, end, not into)
        not_modelled(lost, lost)
        if end is not None and end.mapping is not None and end.mapping.is_multicast:
            raise NotModelled("cuMemcpy3D with a multicast object")
        self._check_mapped(address, size, end, READ if into else READ_WRITE, context)
        return end
