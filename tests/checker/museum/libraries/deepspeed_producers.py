"""The same in PyTorch: a stream waits for one of two streams that fill its input."""

import sys

import torch

FIXED = "fixed" in sys.argv[1:]
COUNT = 1 << 22

producers = [torch.cuda.Stream() for _ in range(2)]
reduction = torch.cuda.Stream()
bucket = torch.zeros(2, COUNT, device="cuda")
reduced = torch.zeros(2, COUNT, device="cuda")
torch.cuda.synchronize()
for number, stream in enumerate(producers):
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000 * (1 - number))
        bucket[number].fill_(1)  # used
for stream in producers if FIXED else producers[-1:]:
    reduction.wait_stream(stream)
with torch.cuda.stream(reduction):
    reduced.copy_(bucket)  # this call: race

torch.cuda.synchronize()
print("right bytes" if (reduced == 1).all() else "wrong bytes")
