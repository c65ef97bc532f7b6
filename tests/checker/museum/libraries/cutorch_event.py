"""The same in PyTorch: one event is recorded on two streams, then waited for once."""

import sys

import torch

FIXED = "fixed" in sys.argv[1:]
COUNT = 1 << 22

streams = [torch.cuda.Stream() for _ in range(2)]
parts = torch.zeros(2, COUNT, device="cuda")
event = torch.cuda.Event()
torch.cuda.synchronize()
for number, stream in enumerate(streams):
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000 * (1 - number))
        parts[number].fill_(1)  # used
    event.record(stream)
    if FIXED:
        event.wait()
event.wait()
whole = parts * 1  # this call: race

torch.cuda.synchronize()
print("right bytes" if (whole == 1).all() else "wrong bytes")
