"""The same in PyTorch: the storage of an activation is released while a side stream copies it to the host."""

import sys

import torch

FIXED = "fixed" in sys.argv[1:]
COUNT = 1 << 22

side = torch.cuda.Stream()
stash = torch.zeros(COUNT, pin_memory=True)
activation = torch.ones(COUNT, device="cuda")
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    torch.cuda._sleep(50_000_000)
    stash.copy_(activation, non_blocking=True)  # used
if FIXED:
    activation.record_stream(side)
activation.untyped_storage().resize_(0)  # this call: free racing a use
following = torch.full((COUNT,), 2.0, device="cuda")

torch.cuda.synchronize()
print("right bytes" if (stash == 1).all() else "wrong bytes")
