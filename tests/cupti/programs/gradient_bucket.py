"""A bucket of gradients is reduced on a side stream, which does not wait for the backward pass."""

import sys

import torch

FIXED = "fixed" in sys.argv[1:]
SIZE = 1024

reduction = torch.cuda.Stream()
model = torch.nn.Sequential(*(torch.nn.Linear(SIZE, SIZE, bias=False, device="cuda") for _ in range(2)))
bucket = torch.zeros(2, SIZE, SIZE, device="cuda")
for part, parameter in zip(bucket, reversed(list(model.parameters())), strict=True):
    torch.nn.init.ones_(parameter)
    parameter.grad = part
inputs = torch.ones(SIZE, SIZE, device="cuda")
torch.cuda.synchronize()
torch.cuda._sleep(50_000_000)
model(inputs).sum().backward()  # used
if FIXED:
    reduction.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(reduction):
    bucket.div_(SIZE * SIZE)  # this call: race

torch.cuda.synchronize()
print("right bytes" if (bucket == 1).all() else "wrong bytes")
