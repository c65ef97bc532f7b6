"""A non-blocking copy fills the batch on its own stream, and the stream of the model does not wait for that stream."""

import sys

import torch

FIXED = "fixed" in sys.argv[1:]
SIZE = 1024

copies = torch.cuda.Stream()
on_host = torch.ones(SIZE, SIZE).pin_memory()
weight = torch.full((SIZE, SIZE), 1 / SIZE, device="cuda")
batch = torch.zeros(SIZE, SIZE, device="cuda")
torch.cuda.synchronize()
with torch.cuda.stream(copies):
    torch.cuda._sleep(50_000_000)
    batch.copy_(on_host, non_blocking=True)  # used
if FIXED:
    torch.cuda.current_stream().wait_stream(copies)
result = batch @ weight  # this call: race

torch.cuda.synchronize()
print("right bytes" if (result == 1).all() else "wrong bytes")
