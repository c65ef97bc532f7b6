"""The same in PyTorch: a pinned tensor is filled again before the copy of its first contents."""

import sys

import torch

FIXED = "fixed" in sys.argv[1:]
COUNT = 1 << 22

offsets = torch.zeros(COUNT, pin_memory=True)
steps = [torch.empty(COUNT, device="cuda") for _ in range(2)]
torch.cuda._sleep(50_000_000)
for number, on_device in enumerate(steps):
    host = torch.empty(COUNT, pin_memory=True) if FIXED else offsets
    host.fill_(number + 1)
    on_device.copy_(host, non_blocking=True)  # used; this call: race

torch.cuda.synchronize()
print("right bytes" if (steps[0] == 1).all() and (steps[1] == 2).all() else "wrong bytes")
