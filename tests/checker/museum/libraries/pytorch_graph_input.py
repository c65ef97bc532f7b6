"""The same in PyTorch: the input of a graph is dropped, and its block given to another tensor."""

import sys

import torch

FIXED = "fixed" in sys.argv[1:]
COUNT = 1 << 22

given = torch.ones(COUNT, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    result = given * 1
if not FIXED:
    del given  # freed
following = torch.full((COUNT,), 2.0, device="cuda")
graph.replay()  # this call: use after free

torch.cuda.synchronize()
print("right bytes" if (result == 1).all() else "wrong bytes")
