"""A side stream draws the noise for the next token, while the sampler still divides by the present noise."""

import sys

import torch

FIXED = "fixed" in sys.argv[1:]
SIZE = 1 << 22

draws = torch.cuda.Stream()
noise = torch.ones(SIZE, device="cuda")
chances = torch.ones(SIZE, device="cuda")
scores = torch.zeros(SIZE, device="cuda")
torch.cuda.synchronize()
torch.cuda._sleep(50_000_000)
torch.div(chances, noise, out=scores)  # used
if FIXED:
    draws.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(draws):
    noise.exponential_()  # this call: race

torch.cuda.synchronize()
print("right bytes" if (scores == 1).all() else "wrong bytes")
