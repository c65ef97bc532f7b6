"""A side stream reads an output after an event that was recorded before the output was written."""

import sys

import torch

FIXED = "fixed" in sys.argv[1:]
SIZE = 1024

logging = torch.cuda.Stream()
done = torch.cuda.Event()
steps = torch.ones(SIZE, SIZE, device="cuda")
positions = torch.zeros(SIZE, SIZE, device="cuda")
torch.cuda.synchronize()
torch.cuda._sleep(50_000_000)
if not FIXED:
    done.record()
torch.cumsum(steps, 1, out=positions)  # used
if FIXED:
    done.record()
logging.wait_event(done)
with torch.cuda.stream(logging):
    torch.cuda._sleep(1000)
    last = positions.max(1).values  # this call: race

torch.cuda.synchronize()
print("right bytes" if (last == SIZE).all() else "wrong bytes")
