"""The stand-in for PyTorch: its caching allocator with segments, blocks and a memory history, and a model of all states
that were.
"""

import sys
import types
from time import sleep, time_ns
from typing import Any

MiB = 1 << 20


class Tensor:
    """A tensor: a part of memory, perhaps with gaps, of elements of four bytes."""

    def __init__(self, address: int, count: int, step: int = 1, is_float: bool = True) -> None:
        self.address, self.shape, self._step, self.nbytes = address, (count,), step, 4 * count
        self.dtype = types.SimpleNamespace(is_floating_point=is_float, is_complex=False)

    def data_ptr(self) -> int:
        return self.address

    def numel(self) -> int:
        return self.shape[0]

    def element_size(self) -> int:
        return 4

    def stride(self) -> tuple[int]:
        return (self._step,)

    def is_contiguous(self) -> bool:
        return self._step == 1


def schema_of(text: str) -> Any:
    """A schema: the name of an operator, and its parameters, with a ``!`` behind those that it writes, and
    a ``=`` behind those that it returns.
    """
    name, *parameters = text.split()
    arguments = [
        types.SimpleNamespace(
            name=one.rstrip("!="),
            type="number" if one in ("dim", "mean") else "List[Tensor]" if "_foreach" in name else "Tensor",
            alias_info=types.SimpleNamespace(is_write=one.endswith("!")),
        )
        for one in parameters
    ]
    returned = [types.SimpleNamespace(alias_info=one) for one in parameters if one.endswith("=")]
    return types.SimpleNamespace(name=name, arguments=arguments, returns=returned)


class Torch:
    """PyTorch's module, as far as the package knows it. Blocks are given again at once, in their stream's segments."""

    def __init__(self, driver: Any = None, initialized: bool = True) -> None:
        self.driver = driver
        self.segments: dict[int, tuple[int, int, dict[int, tuple[int, Any]]]] = {}
        """Size, stream and blocks (size, frame) by address."""
        self.history: list[dict[str, Any]] = []
        self.states: list[tuple[int, int, dict[str, int]]] = []
        """Times in us, reserved bytes, and the split."""
        self.began: list[tuple[str | None, dict[str, Any]]] = []
        """Arguments of each begin of a history."""
        self.settings = [""]
        """All settings of the allocator that were given."""
        self.waiting: list[Any] = []
        """Calls for the time when CUDA is initialised."""
        self._initialized = initialized
        self.making = self.reads = 0
        """Streams that are being made; snapshots that were taken."""
        self.modes: list[Any] = []
        """Dispatch modes."""
        self.Tensor, self.nn = Tensor, types.SimpleNamespace(Parameter=Tensor)
        self.utils = types.SimpleNamespace(
            _python_dispatch=types.SimpleNamespace(
                _get_current_dispatch_mode_stack=lambda: [*self.modes],
                _push_mode=self.modes.append,
                _pop_mode=lambda: self.modes.pop(),
            )
        )
        self.cuda = types.SimpleNamespace(
            is_initialized=lambda: self._initialized,
            Stream=type("Stream", (), {"__new__": lambda cls: self._make(cls)}),
            _lazy_call=lambda call: call() if self._initialized else self.waiting.append(call),
            memory=types.SimpleNamespace(
                _snapshot=self._snapshot,
                _record_memory_history=self._record,
                _set_allocator_settings=self.settings.append,
            ),
        )
        self._C = types.SimpleNamespace(
            _accelerator_getAllocatorSettings=lambda: self.settings[-1],
            _accelerator_setAllocatorSettings=self.settings.append,
        )

    def initialize(self) -> None:
        self._initialized = True
        for call in self.waiting:
            call()

    def _make(self, kind: Any) -> Any:
        """Make a stream, which only one thread may do at a time."""
        self.making += 1
        assert self.making == 1
        sleep(0.001)
        self.making -= 1
        return object.__new__(kind)

    def _record(self, enabled: str | None, clear_history: bool = False, **more: Any) -> None:
        self.began.append((enabled, more | {"clear_history": clear_history}))
        if clear_history:
            self.history.clear()

    # -- acts ------------------------------------------------------------------------------------------------------

    def act(
        self,
        action: str,
        address: int,
        nbytes: int,
        line: int = 0,
        *,
        frame: dict[str, Any] | None = None,
        stream: int = 0,
        time: float = 0,
    ) -> None:
        """Change the state, and add to the history."""
        frame = frame or {"filename": "/model.py", "name": "forward", "line": line}
        if action.startswith("segment"):
            if action == "segment_alloc":
                self.segments[address] = nbytes, stream, {}
            else:
                del self.segments[address]
        else:
            (blocks,) = (found for at, (size, _, found) in self.segments.items() if at <= address < at + size)
            if action == "alloc":
                blocks[address] = nbytes, frame
            else:
                del blocks[address]
        time = time or 10_000 * (1 + len(self.history))
        entry = {"action": action, "addr": address, "size": nbytes, "stream": stream, "time_us": time}
        self.history.append(entry | {"frames": [frame] if action in ("alloc", "free_completed") else []})
        self.states.append((int(time), sum(size for size, *_ in self.segments.values()), self.split()))

    def empty(self, stream: int, nbytes: int = MiB, new: bool = False) -> int:
        """A block of the calling line, at the first free place of the stream, or in a segment of its own."""
        places = [
            place
            for at, (size, owner, blocks) in self.segments.items()
            for place in range(at, at + size, nbytes)
            if owner == stream and not any(place < one + blocks[one][0] and one < place + nbytes for one in blocks)
        ]
        if new or not places:
            places = [int(self.driver.cuMemAlloc(2 * nbytes)[1])]
            self._act_now("segment_alloc", places[0], 2 * nbytes, stream)
        self._act_now("alloc", places[0], nbytes, stream)
        return places[0]

    def drop(self, address: int, stream: int, nbytes: int = MiB) -> None:
        self._act_now("free_completed", address, nbytes, stream)

    def end(self) -> None:
        for segment in self.segments:
            self.driver.cuMemFree(segment)

    def _act_now(self, action: str, address: int, nbytes: int, stream: int) -> None:
        caller = sys._getframe(2)
        frame = {"filename": caller.f_code.co_filename, "name": caller.f_code.co_name, "line": caller.f_lineno}
        sleep(1e-5)  # an entry has microseconds only
        self.act(action, address, nbytes, frame=frame, stream=stream, time=time_ns() / 1000)
        sleep(1e-5)

    def run(self, schema: str, kernels: Any, *args: Any, **kwargs: Any) -> None:
        """Run an operator: a function launches its kernels, and may return a tensor."""

        def operator(*args: Any, **kwargs: Any) -> Any:
            return kernels()

        operator._schema = schema_of(schema)  # type: ignore[attr-defined]
        if self.modes:
            mode = self.modes.pop()  # it is not active in its own code
            try:
                mode.__torch_dispatch__(operator, (), args, kwargs)
            finally:
                self.modes.append(mode)
        else:
            operator()

    # -- answers ---------------------------------------------------------------------------------------------------

    def split(self) -> dict[str, int]:
        """Bytes of the free parts of segments, and of live blocks by line."""
        found = {"cached": 0, "fragments": 0}
        for size, _, blocks in self.segments.values():
            used = sum(nbytes for nbytes, _ in blocks.values())
            found["fragments" if used else "cached"] += size - used
            for nbytes, frame in blocks.values():
                found[f"line {frame['line']}"] = found.get(f"line {frame['line']}", 0) + nbytes
        return found

    def _snapshot(self) -> dict[str, Any]:
        self.reads += 1
        made = []
        for address, (size, stream, blocks) in self.segments.items():
            listed: list[dict[str, Any]] = []
            at = address
            for start, (nbytes, frame) in [*sorted(blocks.items()), (address + size, (0, None))]:
                if start > at:
                    listed.append({"size": start - at, "state": "inactive"})
                if nbytes:
                    listed.append({"size": nbytes, "state": "active_allocated", "frames": [frame]})
                at = start + nbytes
            made.append({"address": address, "total_size": size, "device": 0, "stream": stream, "blocks": listed})
        return {"segments": made, "device_traces": [list(self.history)]}
