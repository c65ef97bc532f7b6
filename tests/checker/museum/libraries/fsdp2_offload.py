"""The same in PyTorch: a gradient of one stream is copied to the host on another, and dropped."""

import sys

import torch

FIXED = "fixed" in sys.argv[1:]
COUNT = 1 << 22

reduce_scatter, all_reduce = torch.cuda.Stream(), torch.cuda.Stream()
on_host = [torch.zeros(COUNT, pin_memory=True) for _ in range(2)]
kept = []
for layer in range(2):
    with torch.cuda.stream(reduce_scatter):
        output = torch.full((COUNT,), layer + 1.0, device="cuda")
    all_reduce.wait_stream(reduce_scatter)
    with torch.cuda.stream(all_reduce):
        torch.cuda._sleep(50_000_000)
        on_host[layer].copy_(output, non_blocking=True)  # used
    if FIXED:
        kept.append(output)
    del output  # this call: free racing a use

torch.cuda.synchronize()
print("right bytes" if (on_host[0] == 1).all() and (on_host[1] == 2).all() else "wrong bytes")
