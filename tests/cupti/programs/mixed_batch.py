"""A side stream computes the next batch, and the stream of the model does not wait for the side stream."""

import sys

import torch

FIXED = "fixed" in sys.argv[1:]
SIZE = 1024

prefetch = torch.cuda.Stream()
images = torch.ones(SIZE, SIZE, device="cuda")
mix = torch.full((SIZE, SIZE), 1 / SIZE, device="cuda")
batch = torch.zeros(SIZE, SIZE, device="cuda")
torch.cuda.synchronize()
with torch.cuda.stream(prefetch):
    torch.cuda._sleep(50_000_000)
    torch.mm(images, mix, out=batch)  # used
if FIXED:
    torch.cuda.current_stream().wait_stream(prefetch)
result = batch @ mix  # this call: race

torch.cuda.synchronize()
print("right bytes" if (result == 1).all() else "wrong bytes")
