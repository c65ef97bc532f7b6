"""Generators of traces for typical programs: training, checkpointing, serving, data loading, and mixed sizes.

The same seed gives the same trace on every machine. ``training().save("training.trace")`` writes a trace to a file.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

from streamalloc.traces.trace import Action, Event, Trace

_KiB = 1 << 10
_MiB = 1 << 20


class _Script:
    """Builder of a trace, with random numbers from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._events: list[Event] = []
        self._sizes: list[int] = []
        self._streams: list[int] = []

    def allocate(self, nbytes: int, stream: int = 0) -> int:
        number = len(self._sizes)
        self._sizes.append(nbytes)
        self._streams.append(stream)
        self._add("allocate", number, stream)
        return number

    def free(self, number: int, stream: int | None = None) -> None:
        self._add("free", number, self._streams[number] if stream is None else stream)

    def _add(self, action: Action, number: int, stream: int) -> None:
        # The times have no meaning, because replays ignore them: one call every 10 us.
        self._events.append(Event(action, number, self._sizes[number], stream, 0, len(self._events) * 10_000))

    def below(self, limit: int) -> int:
        """Return a random integer from 0 to ``limit - 1``.

        ``randrange`` is not used, because only ``random()`` gives the same numbers in all versions of Python.
        """
        return int(self._random.random() * limit)

    def between(self, least: int, most: int) -> int:
        """Return a random size in bytes from ``least`` to ``most``. The logarithm of the size is uniformly
        distributed.
        """
        return int(least * (most / least) ** self._random.random())

    def trace(self, source: str) -> Trace:
        return Trace(tuple(self._events), source)


def training(seed: int = 0, *, iterations: int = 6, layers: int = 24) -> Trace:
    """Return a trace that imitates the training of a transformer: by default 2 streams, about 7,000 events, 1.3 GiB.

    Parameters and optimizer state stay allocated. Each iteration allocates the activations of all layers. It frees the
    activations in reverse order while it allocates gradients, and frees the gradients after the optimizer step. Batches
    grow and have odd shapes. For every second layer, a bucket of gradients is freed on another stream, as if that
    stream sent it.

    Examples
    --------
    >>> trace = training(iterations=1, layers=4)
    >>> len({event.stream for event in trace.events})
    2
    """
    script = _Script(seed)
    hidden = 768
    weights = [4 * hidden * hidden * 4, 4 * hidden * hidden * 2, hidden * 4, hidden * 4]
    for _ in range(layers):
        for nbytes in weights:
            script.allocate(nbytes)
    states: list[int] = []
    for iteration in range(iterations):
        tokens = (4 + iteration) * (33 + 2 * script.below(24)) + script.below(7)
        inputs = script.allocate(tokens * 8)
        kept = [_forward(script, tokens, hidden) for _ in range(layers)]
        logits = script.allocate(tokens * 32_003 * 2)
        loss = script.allocate(4)
        upstream = script.allocate(tokens * 32_003 * 2)
        script.free(logits)
        gradients: list[int] = []
        for number in reversed(range(layers)):
            for activation in reversed(kept[number]):
                downstream = script.allocate(tokens * hidden * 2 * (1 + script.below(4)))
                script.free(upstream)
                script.free(activation)
                upstream = downstream
            gradients += [script.allocate(nbytes) for nbytes in weights]
            if number % 2:
                bucket = script.allocate(sum(weights), stream=0)
                script.free(bucket, stream=1)
        for one in (upstream, inputs, loss):
            script.free(one)
        if not states:
            states = [script.allocate(nbytes) for nbytes in weights * layers * 2]
        for gradient in gradients:
            update = script.allocate(script.between(4 * _KiB, 4 * _MiB))
            script.free(update)
            script.free(gradient)
    return script.trace("made up: training")


def _forward(script: _Script, tokens: int, hidden: int) -> list[int]:
    """Allocate the activations of one layer. Returns the numbers of the activations that the gradients need; other
    memory is freed.
    """
    normed = script.allocate(tokens * hidden * 2)
    projected = script.allocate(tokens * hidden * 6)
    workspace = script.allocate(script.between(512, 8 * _MiB))
    attended = script.allocate(tokens * hidden * 2)
    script.free(workspace)
    mask = script.allocate(tokens * 12)
    expanded = script.allocate(tokens * hidden * 8)
    scratch = script.allocate(tokens * hidden * 8)
    out = script.allocate(tokens * hidden * 2)
    script.free(scratch)
    return [normed, projected, attended, mask, expanded, out]


def checkpointing(seed: int = 0, *, iterations: int = 4, layers: int = 32) -> Trace:
    """Return a trace of training with activation checkpointing on 1 stream: 6.7e9 parameters of 2 bytes.

    By default it has about 16,000 events, and a peak of 25 GiB. The parameters stay allocated. Each layer keeps only
    its input, and computes its activations again for the gradients. The gradients are freed after the optimizer step.
    The number of tokens changes with each iteration.

    Examples
    --------
    >>> trace = checkpointing(iterations=1, layers=2)
    >>> len({event.stream for event in trace.events})
    1
    """
    script = _Script(seed)
    hidden, inner, words = 4096, 11008, 32000
    for _ in range(layers):
        for nbytes in [*[hidden * hidden * 2] * 4, *[hidden * inner * 2] * 3, hidden * 2, hidden * 2]:
            script.allocate(nbytes)
    embedding, head = words * hidden * 2, words * hidden * 2
    script.allocate(embedding), script.allocate(head)
    for _ in range(iterations):
        tokens = 1024 + 256 * script.below(5) + 8 * script.below(64)
        wide, narrow = tokens * inner * 2, tokens * hidden * 2
        inputs = [script.allocate(narrow)]
        for _ in range(layers):
            out, activations = _wide_layer(script, tokens, wide, narrow)
            for one in activations:
                script.free(one)
            inputs.append(out)
        upstream = script.allocate(tokens * words * 2)
        for nbytes in (tokens * words * 4, tokens * words * 4, tokens * words * 2, narrow):
            downstream = script.allocate(nbytes)
            script.free(upstream)
            upstream = downstream
        gradients = [script.allocate(head)]
        for _ in range(layers):
            script.free(inputs.pop())
            out, activations = _wide_layer(script, tokens, wide, narrow)
            script.free(out)
            for width, weights in ((wide, 1), (wide, 2), (narrow, 1), (narrow, 3)):
                downstream = script.allocate(width)
                size = hidden * inner * 2 if width == wide else hidden * hidden * 2
                gradients += [script.allocate(size) for _ in range(weights)]
                for one in (activations.pop(), activations.pop(), upstream):
                    script.free(one)
                upstream = downstream
            gradients += [script.allocate(hidden * 2) for _ in range(2)]
            for one in reversed(activations):
                script.free(one)
        script.free(upstream)
        script.free(inputs.pop())
        gradients.append(script.allocate(embedding))
        for gradient in gradients:
            script.free(script.allocate(4))
            script.free(gradient)
    return script.trace("made up: checkpointing")


def _wide_layer(script: _Script, tokens: int, wide: int, narrow: int) -> tuple[int, list[int]]:
    """Allocate the output of one layer, and the activations that the gradients need. Returns the number of the output,
    and the numbers of the activations.
    """
    activations = [script.allocate(nbytes) for nbytes in (narrow, tokens * 4, *[narrow] * 6, 32 * tokens * 4)]
    projected = script.allocate(narrow)
    activations.append(script.allocate(narrow))
    script.free(projected)
    activations += [script.allocate(nbytes) for nbytes in (narrow, tokens * 4, wide, wide, wide, wide)]
    added = script.allocate(narrow)
    out = script.allocate(narrow)
    script.free(added)
    return out, activations


def serving(seed: int = 0, *, requests: int = 280) -> Trace:
    """Return a trace that imitates the serving of a language model: by default 4 streams, about 20,000 events.

    Each request runs on one of four streams. Its prompt allocates temporary memory of many sizes, and blocks of the KV
    cache. Each generation step allocates short-lived memory, and sometimes another block. The end of the request frees
    the blocks. Some answers are freed on another stream, as if that stream sent the answer.

    Examples
    --------
    >>> trace = serving(requests=4)
    >>> len({event.stream for event in trace.events})
    4
    """
    script = _Script(seed)
    streams, block, tokens_in_block = 4, 2 * _MiB, 16
    for _ in range(48):  # weights
        script.allocate(script.between(64 * _KiB, 16 * _MiB))
    ends: list[tuple[int, int]] = []
    running: dict[int, tuple[int, list[int], int]] = {}
    for request in range(requests):
        stream = script.below(streams)
        prompt = script.between(16, 1024)
        # One request in eight is long.
        answer = script.between(64, 512) if script.below(8) == 0 else script.between(1, 48)
        inputs = script.allocate(prompt * 4, stream)
        temporary = []
        for _ in range(6):
            temporary.append(script.allocate(prompt * script.between(64, 8192), stream))
            if script.below(2) and len(temporary) > 1:
                script.free(temporary.pop(script.below(len(temporary))))
        blocks = [script.allocate(block, stream) for _ in range(-(-prompt // tokens_in_block))]
        for one in (*temporary, inputs):
            script.free(one)
        running[request] = stream, blocks, prompt
        heapq.heappush(ends, (request + 1 + answer // 16, request))
        for number in list(running):
            stream, blocks, length = running[number]
            logits = script.allocate(script.between(1 * _KiB, 256 * _KiB), stream)
            sampled = script.allocate(512 + script.below(2048), stream)
            script.free(logits)
            # One answer in 16 is freed on the stream that sends it.
            script.free(sampled, stream if script.below(16) else (stream + 1) % streams)
            if (length + tokens_in_block) // tokens_in_block > len(blocks):
                blocks.append(script.allocate(block, stream))
            running[number] = stream, blocks, length + tokens_in_block
        while ends and ends[0][0] <= request:
            for one in running.pop(heapq.heappop(ends)[1])[1]:
                script.free(one)
    return script.trace("made up: serving")


def loading(seed: int = 0, *, batches: int = 200) -> Trace:
    """Return a trace that imitates a data loader: by default 2 streams, about 4,400 events.

    One stream allocates batches of 14 to 38 MB, four steps in advance. The other stream computes with the batches and
    frees the batches.

    Examples
    --------
    >>> trace = loading(batches=4)
    >>> len({event.stream for event in trace.events})
    2
    """
    script = _Script(seed)
    waiting: list[list[int]] = []
    for _ in range(batches):
        samples = 24 + script.below(40)
        sizes = (samples * 3 * 224 * 224 * 4, samples * 8, samples * (16 + script.below(64)) * 8)
        waiting.append([script.allocate(nbytes, stream=1) for nbytes in sizes])
        if len(waiting) > 4:
            for number in waiting.pop(0):
                script.free(number, stream=0)
        activations = [script.allocate(samples * (4 << 14 - layer // 2)) for layer in range(8)]
        for number in reversed(activations):
            script.free(number)
    return script.trace("made up: loading")


def mixed(seed: int = 0, *, events: int = 4000, most: int = 256 * _MiB) -> Trace:
    """Return a trace on 1 stream with at most 24 live allocations of random size.

    Parameters
    ----------
    seed
        Seed of the random numbers.
    events
        Number of allocations and frees.
    most
        Largest size in bytes, at least 256, which is the smallest size. The logarithm of the size is uniformly
        distributed.

    Examples
    --------
    >>> len(mixed(events=100).events)
    100
    """
    script = _Script(seed)
    live: list[int] = []
    for _ in range(events):
        if len(live) >= 24 or (live and script.below(2)):
            script.free(live.pop(script.below(len(live))))
        else:
            live.append(script.allocate(script.between(256, most)))
    return script.trace("made up: mixed")


WORKLOADS: dict[str, Callable[..., Trace]] = {
    made.__name__: made for made in (training, checkpointing, serving, loading, mixed)
}
"""Generators of traces, by the name of the function."""
