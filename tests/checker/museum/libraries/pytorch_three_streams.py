"""The same in PyTorch, without NCCL: the stream that owns the memory waits for neither of the two that use it."""

import sys

import torch

FIXED = "fixed" in sys.argv[1:]
COUNT = 1 << 22

default = torch.cuda.current_stream()
custom, nccl = torch.cuda.Stream(), torch.cuda.Stream()
tensor = torch.ones(COUNT, device="cuda")
custom.wait_stream(default)
nccl.wait_stream(custom)
with torch.cuda.stream(nccl):
    torch.cuda._sleep(50_000_000)
    tensor.mul_(8)  # used
custom.wait_stream(nccl)
if FIXED:
    default.wait_stream(custom)
del tensor  # this call: free racing a use
following = torch.full((COUNT,), 2.0, device="cuda")

torch.cuda.synchronize()
print("right bytes" if (following == 2).all() else "wrong bytes")
