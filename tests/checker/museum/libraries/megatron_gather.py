"""The same in PyTorch: memory of the gather stream is dropped while the compute stream reads it."""

import sys

import torch

FIXED = "fixed" in sys.argv[1:]
COUNT = 1 << 22

gather = torch.cuda.Stream()
with torch.cuda.stream(gather):
    bucket = torch.ones(COUNT, device="cuda")
torch.cuda.current_stream().wait_stream(gather)
torch.cuda._sleep(50_000_000)
result = bucket * 1  # used
if FIXED:
    bucket.record_stream(torch.cuda.current_stream())
del bucket  # this call: free racing a use
with torch.cuda.stream(gather):
    following = torch.full((COUNT,), 2.0, device="cuda")

torch.cuda.synchronize()
print("right bytes" if (result == 1).all() else "wrong bytes")
