"""A stream of batches from one process to two others: ``python ring.py``, or ``--simulated`` without a GPU.

The slots of a ring are shared once. Each batch goes to the consumer with the fewest batches in flight; where none keeps
up, the producer's ``put`` waits. The consumers' streams wait for the producer's, and its stream for theirs before it
writes into a slot again.
"""

import argparse
import multiprocessing
import os
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np

import streamalloc as sa
from streamalloc import ipc

BATCH, BATCHES, CONSUMERS = 1 << 16, 12, 2


def consume(descriptor: Any, results: Any) -> None:
    """Sum each batch that comes, until the producer closes the ring."""
    stream = sa.Device(0).create_stream()
    channel = ipc.Channel.from_fd(descriptor.detach())
    data = np.empty(BATCH, np.uint8)
    found = []
    for item in ipc.Ring.consumer(channel, stream=stream):
        with item:  # its slot goes back at the end, in the order of the stream
            item.copy_to(data, stream)
        stream.synchronize()
        found.append(int(data[0]))
    results.put(found)


def main() -> None:
    """Put batches into a ring, and print which came."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    device = sa.Device(0)
    posix = sa.MemHandleType.POSIX_FILE_DESCRIPTOR
    with device.create_stream() as stream, sa.MemoryPool(device, handle_types=posix) as pool:
        ring = ipc.Ring.producer(pool, slot_bytes=BATCH, slots=4, stream=stream)
        consumers = []
        for _ in range(CONSUMERS):
            ours, theirs = ipc.Channel.pair()
            with theirs:
                consumer = context.Process(target=consume, args=(DupFd(theirs.fileno()), results))
                consumer.start()
            consumers.append(consumer)
            ring.add(ours)
        for number in range(BATCHES):
            ring.put(np.full(BATCH, number, np.uint8))
        ring.close()
        found = sorted(number for _ in consumers for number in results.get())
        for consumer in consumers:
            consumer.join()
    print("the consumers read the batches", found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulated", action="store_true", help="without a GPU")
    if parser.parse_args().simulated:
        os.environ["STREAMALLOC_DRIVER"] = "simulated"  # also for the consumers
    main()
