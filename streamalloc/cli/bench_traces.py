"""Benchmark rows about whole programs: generated traces, replayed on every installed allocator."""

from __future__ import annotations

import functools

from streamalloc import traces
from streamalloc.cli.measuring import Bench, Measured, Row, Setup, Target

OURS = traces.ALLOCATORS["cached"].title
OTHERS = tuple(traces.ALLOCATORS[name].title for name in ("pytorch", "cupy"))


def _on(name: str, trace: str) -> Setup:
    """Return the milliseconds of a replay, with the figures of the first one."""

    def setup(bench: Bench) -> Measured:
        made = _made(trace)
        figures = traces.figures(made, name, bench.device)
        found = {**figures._asdict(), "reserved_over_used": figures.reserved_over_used}
        replay = bench.resources.enter_context(traces.prepare(made, name, bench.device))
        extra = {name: value for name, value in found.items() if value is not None}
        return Measured(lambda number: replay.run() * 1e3, extra)

    return setup


@functools.cache
def _made(name: str) -> traces.Trace:
    return traces.WORKLOADS[name]()


ROWS = tuple(
    Row(
        f"replay_{trace}",
        f"Replay of a trace: {trace}",
        {entry.title: _on(name, trace) for name, entry in traces.ALLOCATORS.items()},
        tuple(Target(OURS, 1.0, other, figure) for other in OTHERS for figure in ("", "reserved_over_used")),
        1,
        "ms",
        "replays",
    )
    for trace in traces.WORKLOADS
)
