"""Symmetric memory of processes that a program starts itself: ``python symmetric_multiprocessing.py``."""

import multiprocessing
import sys

from all_gather import all_gather, options

from streamalloc.ipc import ProcessCommunicator

if __name__ == "__main__":
    chosen = options()
    # Never a fork: CUDA does not survive one.
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=all_gather, args=(group, chosen)) for group in ProcessCommunicator.create(2, timeout=60)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))
