"""The same in PyTorch: one stream writes for the next step what another still reads for this one."""

import sys

import torch

FIXED = "fixed" in sys.argv[1:]
COUNT = 1 << 22

schedule, forward = torch.cuda.Stream(), torch.cuda.Stream()
mapping = torch.zeros(COUNT, device="cuda")
outputs = [torch.zeros(COUNT, device="cuda") for _ in range(2)]
torch.cuda.synchronize()
for step, output in enumerate(outputs):
    if FIXED:
        schedule.wait_stream(forward)
    with torch.cuda.stream(schedule):
        mapping.fill_(step + 1)  # this call: race
    forward.wait_stream(schedule)
    with torch.cuda.stream(forward):
        torch.cuda._sleep(50_000_000)
        output.copy_(mapping)  # used

torch.cuda.synchronize()
print("right bytes" if (outputs[0] == 1).all() and (outputs[1] == 2).all() else "wrong bytes")
