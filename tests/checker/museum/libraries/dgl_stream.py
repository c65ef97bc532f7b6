"""The same with PyTorch and CuPy: one library reads on its stream what the other writes on a side stream."""

import sys

import cupy
import torch

FIXED = "fixed" in sys.argv[1:]
COUNT = 1 << 22

side = torch.cuda.Stream()
selected = torch.zeros(COUNT, device="cuda")
array = cupy.asarray(selected)
array.copy()  # compiles and allocates
torch.cuda.synchronize()
with torch.cuda.stream(side):
    torch.cuda._sleep(50_000_000)
    selected.fill_(1)  # used
with cupy.cuda.ExternalStream(side.cuda_stream) if FIXED else cupy.cuda.Stream.null:
    product = array.copy()  # this call: race

torch.cuda.synchronize()
print("right bytes" if (product == 1).all() else "wrong bytes")
