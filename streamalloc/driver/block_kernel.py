"""The package's kernel: it copies blocks of bytes between scattered addresses, so it both gathers and scatters.

The addresses of the blocks are part of the parameters of a launch. So they need no memory of their own, and a checker
or the simulated driver can read from the launch which memory the kernel reads and writes. The module has the kernel in
two versions: with 4 KiB of parameters, which every supported driver accepts, and with 32 KiB, which drivers accept
since CUDA 12.1. One launch with 32 KiB takes longer than one with 4 KiB, but less time than eight of those.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from streamalloc.formats.lazy_numpy import np

if TYPE_CHECKING:
    import numpy.typing as npt

COPY_KERNEL, COPY_MANY = "streamalloc_copy_blocks", "streamalloc_copy_many_blocks"
"""Names of the kernel in its module: the version with 4 KiB of parameters, and the version with 32 KiB."""
COPY_MOST = {COPY_KERNEL: 504, COPY_MANY: 4032}
"""Largest number of blocks of a launch, by name of the kernel. The offsets of this many blocks fit in its
parameters.
"""
COPY_UNIT = 16
"""Bytes that a thread copies by one instruction. Addresses and sizes of blocks must be multiples of this number."""
_THREADS = 256  # Threads of a thread block.
_SHIFT = COPY_UNIT.bit_length() - 1
_SPAN = 32 + _SHIFT  # Bits of an offset in bytes: the kernel gets 32 bits, in units.
_PART = 2048  # Bytes that a warp of threads copies as one piece of a block.


class BlockCopies(ctypes.Structure):
    """Parameters of a launch: addresses and number of its blocks, and the size of a block in bytes.

    An address is a base address (of all targets, or of all sources) plus an offset of the block in units of
    :data:`COPY_UNIT`. The driver reads only as many bytes of this struct as the kernel has parameters.
    """

    _fields_ = (
        ("target", ctypes.c_uint64),
        ("source", ctypes.c_uint64),
        ("count", ctypes.c_uint32),
        ("nbytes", ctypes.c_uint32),
        ("offsets", ctypes.c_uint32 * (2 * COPY_MOST[COPY_MANY])),
    )

    def shape(self, most: int) -> tuple[int, ...]:
        """Return the sizes of the grid (three numbers) and of a thread block (three numbers).

        The grid has at most ``most`` thread blocks.
        """
        warps = self.count * -(-self.nbytes // _PART)
        return min(-(-warps * 32 // _THREADS), most), 1, 1, _THREADS, 1, 1

    def addresses(self) -> tuple[list[int], list[int]]:
        """Return a list of the addresses of the targets and a list of the addresses of the sources, one for each
        block.
        """
        offsets = np.frombuffer(self.offsets, np.uint32)[: 2 * self.count].astype(np.int64) * COPY_UNIT
        return (offsets[::2] + self.target).tolist(), (offsets[1::2] + self.source).tolist()


def block_copies(
    targets: npt.NDArray[np.int64], sources: npt.NDArray[np.int64], nbytes: int, most: int
) -> Iterable[BlockCopies]:
    """Yield the parameters of launches that together copy blocks of ``nbytes`` bytes.

    ``targets`` and ``sources`` have the device addresses of the blocks: arrays of equal length, with at least one
    element. ``most`` is the largest number of blocks of a launch, at most the kernel's value in :data:`COPY_MOST`.
    Nothing is yielded if an address or ``nbytes`` is not a multiple of :data:`COPY_UNIT`.
    """
    bases = [int(side[0]) >> _SPAN << _SPAN for side in (targets, sources)]
    target, source = targets - bases[0], sources - bases[1]
    bits = int(np.bitwise_or.reduce(target | source))
    if (bits | nbytes) % COPY_UNIT:
        return ()
    if not bits >> _SPAN:
        return _launches(bases, target, source, nbytes, most)
    # An offset has 32 bits and counts units of 16 bytes, so one launch covers 64 GiB from each base. Blocks in other
    # ranges of 64 GiB get separate launches.
    windows = target >> _SPAN, source >> _SPAN
    order = np.lexsort(windows)
    apart = np.bitwise_or(*(np.diff(window[order]) for window in windows))
    parts = np.split(order, np.flatnonzero(apart) + 1)
    return itertools.chain.from_iterable(block_copies(targets[one], sources[one], nbytes, most) for one in parts)


def _launches(
    bases: list[int], target: npt.NDArray[np.int64], source: npt.NDArray[np.int64], nbytes: int, most: int
) -> Iterator[BlockCopies]:
    for at in range(0, len(target), most):
        made = BlockCopies(*bases, min(len(target) - at, most), nbytes)
        end = at + made.count
        # One word of 64 bits holds both offsets of a block: the offset of the target in the lower half, the offset of
        # the source in the upper half. The source's offset is still in bytes here, so a shift by 32 - _SHIFT bits also
        # divides it by the unit.
        offsets = np.frombuffer(made.offsets, np.int64, made.count)
        np.left_shift(source[at:end], 32 - _SHIFT, out=offsets)
        offsets |= target[at:end] >> _SHIFT
        yield made


def parameters_of(params: Any) -> BlockCopies | None:
    """Return the :class:`BlockCopies` in ``params``, the argument ``kernelParams`` of a launch; None for another
    kernel.
    """
    values: Any = params[0] if isinstance(params, tuple) and len(params) == 2 else ()
    return values[0] if len(values) == 1 and isinstance(values[0], BlockCopies) else None


def copy_ptx(names: Collection[str]) -> str:
    """Return the PTX text of a module with the kernels of these names, made from the file ``block_kernel.ptx``."""
    head = f".version {'8.1' if COPY_MANY in names else '7.0'}\n.target sm_70\n.address_size 64"
    same = {"last": _PART - 1, "bits": _PART.bit_length() - 1, "unit": COPY_UNIT}
    sizes = {name: BlockCopies.offsets.offset + 8 * COPY_MOST[name] for name in names}
    kernel = Template(Path(__file__).with_suffix(".ptx").read_text("ascii"))
    return "\n".join((head, *(kernel.substitute(same, name=name, nbytes=nbytes) for name, nbytes in sizes.items())))
