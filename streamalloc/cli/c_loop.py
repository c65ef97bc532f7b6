"""Allocate and free in a C loop: the lower bound for any library. Compiled when the benchmark runs."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from streamalloc.cli.measuring import SIZE, Bench, Measured
from streamalloc.cli.needs import need

# The driver functions come as pointers, so the source needs no CUDA header.
_SOURCE = """
#include <stddef.h>
#include <time.h>
typedef int (*allocate_t)(unsigned long long *, size_t, void *, void *);
typedef int (*free_t)(unsigned long long, void *);

double pairs(allocate_t allocate, free_t give, void *pool, void *stream, size_t size, long number)
{
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (long at = 0; at < number; at++) {
        unsigned long long pointer;
        if (allocate(&pointer, size, pool, stream) || give(pointer, stream))
            return -1.0;
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    return (end.tv_sec - start.tv_sec) * 1e6 + (end.tv_nsec - start.tv_nsec) / 1e3;
}
"""
_COMPILERS = ("cc", "gcc", "clang")


def loop(pairs: Any, *arguments: Any) -> Measured:
    """Return the microseconds to allocate and free 4 KiB in a C loop."""

    def measure(number: int) -> float:
        total = float(pairs(*arguments, SIZE, number))
        if total < 0:
            raise RuntimeError("the driver answered an error")
        return total / number

    return Measured(measure)


@functools.cache
def compiled() -> Any:
    """Compile the loop and load it with ctypes; require a C compiler."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), "")
    need(compiler, f"no C compiler: {', '.join(_COMPILERS)}")
    with tempfile.TemporaryDirectory(prefix="streamalloc-bench-") as folder:
        source, target = Path(folder, "pairs.c"), Path(folder, "pairs.so")
        source.write_text(_SOURCE, encoding="ascii")
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(target), str(source)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        pairs = ctypes.CDLL(str(target)).pairs
    pairs.restype = ctypes.c_double
    address = ctypes.c_void_p
    pairs.argtypes = [address, address, address, address, ctypes.c_size_t, ctypes.c_long]
    return pairs


def c_loop(bench: Bench) -> Measured:
    """Set up the loop on the benchmark's pool and stream."""
    pairs, cuda = compiled(), ctypes.CDLL("libcuda.so.1")
    functions = (ctypes.cast(one, ctypes.c_void_p) for one in (cuda.cuMemAllocFromPoolAsync, cuda.cuMemFreeAsync))
    return loop(pairs, *functions, int(bench.raw_pool), int(bench.raw_stream))
