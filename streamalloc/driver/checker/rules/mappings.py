"""Physical memory, its mappings, and multicast objects."""

from __future__ import annotations

from streamalloc.driver.bindings import cuda
from streamalloc.driver.checker.ranges import Binding, Range
from streamalloc.driver.checker.rules.memory import granted
from streamalloc.driver.checker.rules.rule import Answer, Arguments, rules
from streamalloc.driver.checker.stacks import here
from streamalloc.driver.checker.state import Physical, State
from streamalloc.driver.checker.streams import number_of
from streamalloc.driver.checker.uses import Finish

_DEVICE = int(cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE)


def _reserves(state: State, name: str, args: Arguments, answer: Answer) -> None:
    state.reserved.add(Range(int(answer[1]), int(args[0]), "reserved addresses", stack=here()))


def _ends_reservation(state: State, name: str, args: Arguments, answer: Answer) -> None:
    start, size = number_of(args[0]), int(args[1])
    state.reserved.remove(start)
    state.addresses.vacate(lambda one: start <= one.base < start + size)


def _creates(state: State, name: str, args: Arguments, answer: Answer) -> None:
    location = args[1].location
    device = int(location.id) if int(location.type) == _DEVICE else None
    made = state.physical[int(answer[1])] = Physical(int(args[0]), here(), device)
    made.bytes.fresh = ((0, made.size),)


def _releases(state: State, name: str, args: Arguments, answer: Answer) -> None:
    if not state.account.may_end(name, number_of(args[0])):
        state.physical.pop(number_of(args[0]), None)


def _retains(state: State, name: str, args: Arguments, answer: Answer) -> None:
    found = state.addresses.find(number_of(args[0]))
    if found is None:
        return
    for memory in state.physical.values():
        if found in memory.mappings:
            state.physical[int(answer[1])] = memory
            return
    # The handle was released; the mapping keeps the memory.
    memory = Physical(found.size, found.stack, None)
    memory.bytes, memory.bindings = found.bytes, found.bindings
    state.physical[int(answer[1])] = memory


def _maps(state: State, name: str, args: Arguments, answer: Answer) -> None:
    memory = state.physical.get(number_of(args[3]))
    if memory is None:
        memory = state.physical[number_of(args[3])] = Physical(int(args[1]), (), None)
    state.map(number_of(args[0]), int(args[1]), int(args[2]), memory, here())


def _unmaps(state: State, name: str, args: Arguments) -> Finish:
    return state.end(state.mappings(number_of(args[0]), int(args[1])), name, here(), "unmap")


def _grants(state: State, name: str, args: Arguments) -> Finish:
    rights = granted(args[2])
    mappings = state.mappings(number_of(args[0]), int(args[1]))
    for one in mappings:
        state.revoke((one,), one.grants or {}, rights, name, here())

    def finish(answer: Answer) -> None:
        for one in () if answer[0] else mappings:
            if one.grants is not None:
                one.grants.update(rights)

    return finish


# -- multicast objects ---------------------------------------------------------------------------------------


def _creates_multicast(state: State, name: str, args: Arguments, answer: Answer) -> None:
    state.physical[int(answer[1])] = Physical(int(args[0].size), here(), None, multicast=True)


def _binds(state: State, name: str, args: Arguments, answer: Answer) -> None:
    # The device comes before the other arguments of the second version.
    shift = int(name.endswith("_v2"))
    target = state.physical.get(number_of(args[0]))
    if target is None or target.bindings is None:
        return
    device = number_of(args[1]) if shift else None
    if "BindMem" in name:
        memory = state.physical.get(number_of(args[2 + shift]))
        start, size = int(args[3 + shift]), int(args[4 + shift])
        parts = [] if memory is None else [(memory.bytes, start, start + size)]
        if device is None and memory is not None:
            device = memory.device
    else:
        address, size = number_of(args[2 + shift]), int(args[3 + shift])
        pieces = state.addresses.pieces(address, size)
        parts = [part for one, low, high in pieces for part in one.physical(low, high)]
    at = int(args[1 + shift])
    for behind, first, last in parts:
        target.bindings.append(Binding(at, last - first, behind, first, device))
        at += last - first


def _unbinds(state: State, name: str, args: Arguments) -> Finish:
    target = state.physical.get(number_of(args[0]))
    if target is None or target.bindings is None:
        return lambda answer: None
    bindings = target.bindings
    device, start, size = number_of(args[1]), int(args[2]), int(args[3])
    # Uses through the object must have ended; the mappings themselves stay.
    state.end(target.mappings, name, here(), "unmap")((1,))

    def finish(answer: Answer) -> None:
        if answer[0]:
            return
        # The mappings share the list.
        bindings[:] = [
            one for one in bindings if one.device not in (None, device) or not (start <= one.offset < start + size)
        ]

    return finish


RULES = rules(
    after={
        "cuMemAddressReserve": _reserves,
        "cuMemAddressFree": _ends_reservation,
        "cuMemCreate": _creates,
        "cuMemRelease": _releases,
        "cuMemRetainAllocationHandle": _retains,
        "cuMemMap": _maps,
        "cuMulticastCreate": _creates_multicast,
        "cuMulticastBindMem cuMulticastBindAddr cuMulticastBindMem_v2 cuMulticastBindAddr_v2": _binds,
    },
    before={"cuMemUnmap": _unmaps, "cuMemSetAccess": _grants, "cuMulticastUnbind": _unbinds},
)
