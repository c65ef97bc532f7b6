"""The same in PyTorch: an operation runs on another stream, its result is read on the current one."""

import contextlib
import sys

import torch

FIXED = "fixed" in sys.argv[1:]
COUNT = 1 << 22

of_pool = torch.cuda.Stream()
quantised = torch.zeros(COUNT, device="cuda")
torch.cuda.synchronize()
with contextlib.nullcontext() if FIXED else torch.cuda.stream(of_pool):
    torch.cuda._sleep(50_000_000)
    quantised.fill_(1)  # used
product = quantised * 1  # this call: race

torch.cuda.synchronize()
print("right bytes" if (product == 1).all() else "wrong bytes")
