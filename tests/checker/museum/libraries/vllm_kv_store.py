"""The same in PyTorch: a copy stream does not wait for the stream that writes the blocks."""

import sys

import torch

FIXED = "fixed" in sys.argv[1:]
COUNT = 1 << 22

store = torch.cuda.Stream()
blocks = torch.zeros(COUNT, device="cuda")
on_host = torch.zeros(COUNT, pin_memory=True)
torch.cuda.synchronize()
torch.cuda._sleep(50_000_000)
blocks.fill_(1)  # used
if FIXED:
    store.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(store):
    on_host.copy_(blocks, non_blocking=True)  # this call: race

torch.cuda.synchronize()
print("right bytes" if (on_host == 1).all() else "wrong bytes")
