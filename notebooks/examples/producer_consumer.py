"""Two processes on one buffer: ``python producer_consumer.py``, or with ``--simulated`` on a machine without a GPU.

The producer starts the consumer, sends it memory before the fill has run, and frees the memory at once. The consumer's
stream waits for the fill, and the free for the consumer.
"""

import argparse
import os
import subprocess
import sys

import numpy as np

import streamalloc as sa
from streamalloc import ipc

NBYTES = 1 << 20


def produce() -> int:
    """Send a megabyte of sevens; the consumer's exit status."""
    device = sa.Device(0)
    ours, theirs = ipc.Channel.pair()
    with theirs:
        command = [sys.executable, __file__, "--channel", str(theirs.fileno())]
        consumer = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    posix = sa.MemHandleType.POSIX_FILE_DESCRIPTOR
    with ours, device.create_stream(name="produce") as stream, sa.MemoryPool(device, handle_types=posix) as pool:
        buffer = pool.allocate(NBYTES, stream)
        buffer.fill(7)
        ipc.send(ours, buffer, hold=True)  # kept until the consumer has opened it, or is gone
        buffer.free()  # deferred: after the consumer has closed it, or has ended
        return consumer.wait()


def consume(descriptor: int) -> None:
    """Copy what comes to the host, and check it."""
    device = sa.Device(0)
    found = np.empty(NBYTES, np.uint8)
    with ipc.Channel.from_fd(descriptor) as channel, device.create_stream(name="consume") as stream:
        with ipc.receive(channel, stream=stream, kind=ipc.ImportedBuffer) as buffer:
            buffer.copy_to(found, stream)
        stream.synchronize()
    print("the consumer read", set(found.tolist()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulated", action="store_true", help="without a GPU")
    parser.add_argument("--channel", type=int, help="for the consumer, which the producer starts")
    given = parser.parse_args()
    if given.simulated:
        os.environ["STREAMALLOC_DRIVER"] = "simulated"  # also for the consumer
    if given.channel is None:
        sys.exit(produce())
    consume(given.channel)
