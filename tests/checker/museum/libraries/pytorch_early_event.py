"""The same in PyTorch: an event is recorded before the work that it should stand for."""

import sys

import torch

FIXED = "fixed" in sys.argv[1:]
COUNT = 1 << 22

nccl, event = torch.cuda.Stream(), torch.cuda.Event()
tensor = torch.zeros(COUNT, device="cuda")
torch.cuda.synchronize()
if not FIXED:
    event.record(nccl)
with torch.cuda.stream(nccl):
    torch.cuda._sleep(50_000_000)
    tensor.fill_(1)  # used
if FIXED:
    event.record(nccl)
event.wait()
result = tensor * 1  # this call: race

torch.cuda.synchronize()
print("right bytes" if (result == 1).all() else "wrong bytes")
