"""Symmetric memory of the processes of a torchrun job: ``torchrun --nproc-per-node 2 symmetric_torchrun.py``."""

import torch.distributed as distributed
from all_gather import all_gather, options

from streamalloc.ipc import as_communicator

if __name__ == "__main__":
    # Handles travel through the job's store, so that the backend does not matter.
    distributed.init_process_group("gloo")
    all_gather(as_communicator(), options())
    distributed.destroy_process_group()
