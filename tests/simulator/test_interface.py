"""The simulated driver as an object with the interface of the bindings, its addresses, and what it refuses."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from streamalloc.driver import simulated
from streamalloc.driver.bindings import cuda
from streamalloc.driver.internal import choice_of
from streamalloc.simulator import SimulatedDriver
from streamalloc.simulator.driver import SimulatedMachine
from tests.facts.enums import DEVICE, HOST, NO_ACCESS, READ, READWRITE
from tests.facts.support import PAGE, UNRESERVED, MiB, Rig, value
from tests.facts.support import value as ok
from tests.facts.test_graph_nodes import with_edges
from tests.simulator.support import grant, mapped, new_rig
from tests.support import KEEP, bytecodes, in_a_thread

pytestmark = pytest.mark.simulated_only("tests of the simulated driver itself")

MODELLED = sorted(name for name in vars(SimulatedDriver) if name.startswith("cu"))


def test_calls_take_the_arguments_of_the_bindings() -> None:
    def parameters(of: Any) -> list[tuple[str, bool]]:
        return [(one.name, one.default is one.empty) for one in inspect.signature(of).parameters.values()]

    driver = simulated()
    different = [name for name in MODELLED if parameters(getattr(driver, name)) != parameters(getattr(cuda, name))]
    assert MODELLED and different == []


def test_no_area_hides_a_name_of_another() -> None:
    seen: dict[str, type] = {}
    for area in SimulatedMachine.__mro__[1:-1]:
        for name, found in vars(area).items():
            if inspect.isfunction(found) and "super" not in found.__code__.co_names:
                assert name not in seen, f"{area.__name__}.{name} is also in {seen[name].__name__}"
                seen[name] = area


def test_other_names_are_those_of_the_bindings() -> None:
    driver: Any = simulated()
    assert driver.CUmemPoolProps is cuda.CUmemPoolProps
    assert driver.CUresult is cuda.CUresult
    assert set(dir(cuda)) <= set(dir(driver))
    with pytest.raises(AttributeError):
        driver.cuNoSuchCall  # noqa: B018


def test_a_driver_says_what_it_is() -> None:
    driver: Any = simulated(devices=2, memory=64 << 30, seed=3, name="bench")
    assert driver.is_simulated
    assert repr(driver) == "<SimulatedDriver 'bench': 2 x NVIDIA H200, 64 GiB each, seeded>"


@pytest.mark.parametrize(
    "wrong",
    [
        *({"devices": 0}, {"memory": 0}, {"memory": "0 MiB"}, {"memory": "64 apples"}, {"profile": "abacus"}),
        # A child process would get other settings.
        *({"name": "a,b"}, {"host": "a,devices=3"}, {"profile": "a,b.json"}),
    ],
    ids=lambda wrong: str(*wrong.values()),
)
def test_impossible_machines_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        simulated(**wrong)


@pytest.mark.parametrize(("name", "value"), [("devices", "2"), ("memory", 1.5), ("multicast_slots", "3")])
def test_numbers_are_integers(name: str, value: object) -> None:
    given: Any = {name: value}
    with pytest.raises(TypeError, match=f"{name} must be an integer, not {type(value).__name__}"):
        simulated(**given)


def test_a_size_as_text_makes_the_machine_of_its_bytes() -> None:
    text, number = simulated(memory="64MiB"), simulated(memory=64 << 20)
    assert repr(text) == repr(number)
    assert choice_of(text) == choice_of(number) == "simulated:memory=67108864"


def test_handles_of_another_machine_are_refused() -> None:
    one, other = new_rig(), new_rig()
    stream, pool = one.stream(), one.pool(KEEP)
    assert other.raw.cuStreamQuery(stream)[0] == other.raw.CUresult.CUDA_ERROR_INVALID_CONTEXT
    assert other.raw.cuMemPoolTrimTo(pool, 0)[0] == other.raw.CUresult.CUDA_ERROR_INVALID_VALUE


@pytest.mark.parametrize("policies", ["000", "111"])
@in_a_thread
def test_a_pair_stays_fast_among_many_allocations(policies: str) -> None:
    rig = new_rig()
    d, stream, other, pool = rig.raw, rig.stream(), rig.stream(), rig.pool(KEEP, policies)
    live = [rig.allocate(pool, 4096, stream) for _ in range(10_000)]
    for number, address in enumerate(live[::2]):
        rig.free(address, other if number % 2 else stream)

    def pair() -> None:
        _, memory = d.cuMemAllocFromPoolAsync(4096, pool, stream)
        d.cuMemFreeAsync(memory, stream)

    pair()
    assert bytecodes(pair) < 3_000
    ok(d.cuStreamSynchronize(stream))
    assert rig.reserved(pool) == 64 * MiB


PROGRAM = """
import sys
from tests.simulator.support import new_rig
from tests.facts.enums import HOST
from tests.facts.support import value

rig = new_rig(devices=1)
stream, pools = rig.stream(), {}
for word in sys.argv[1].split():
    what, _, more = word.partition(":")
    if what == "device":
        pools[more] = rig.pool()
    elif what == "host":
        pools[more] = rig.pool(location=HOST, max_size=32 << 20)
    elif what == "at":
        address = rig.allocate(pools[more], 1, stream)
        rig.free(address, stream)
        print(hex(address))
    elif what == "destroy":
        rig.raw.cuMemPoolDestroy(rig.disown(pools.pop(more)))
    elif what == "reserve":
        print(hex(rig.reserve(*(int(number) << 20 for number in more.split("/")))))
    elif what == "graph":
        node = rig.raw.CUDA_MEM_ALLOC_NODE_PARAMS()
        node.poolProps, node.bytesize = rig.pool_props(), 1
        value(rig.raw.cuGraphAddMemAllocNode(value(rig.raw.cuGraphCreate(0)), None, 0, node))
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "device:a device:b device:c device:d host:e at:a at:b at:c at:d at:e destroy:a host:f at:f",
            "0x302000000 0x48ea000000 0x8ed2000000 0x10004000000 0xd4ba000000 0x302000000",
        ),
        (
            "reserve:64/64 device:a at:a device:b at:b reserve:32 device:c at:c",
            "0x304000000 0x308000000 0x48f0000000 0x302000000 0x8ed8000000",
        ),
        ("host:a host:b graph destroy:a host:c at:c graph host:d at:d", "0x302000000 0x48f2000000"),
    ],
    ids=["pools", "ranges", "graphs"],
)
def test_addresses_are_those_of_a_fresh_process_with_an_h200(words: str, expected: str) -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM, words], capture_output=True, text=True, check=True)
    assert run.stdout.split() == expected.split()


# -- the simulated driver guesses nothing of streams, contexts, graphs and virtual memory: it refuses -----------------


GiB = 1 << 30


def _word_of_nothing(rig: Rig) -> None:
    stream = rig.stream()
    rig.begin_capture(stream)
    rig.raw.cuStreamWriteValue32(stream, UNRESERVED, 1, 0)


def _allocation_node(rig: Rig, device: int = 0) -> object:
    params = rig.raw.CUDA_MEM_ALLOC_NODE_PARAMS()
    params.poolProps, params.bytesize = rig.pool_props(), 64
    if device:
        params.accessDescs, params.accessDescCount = [rig.access(DEVICE, device, READWRITE)], 1
    graph = value(rig.raw.cuGraphCreate(0))
    value(rig.raw.cuGraphAddMemAllocNode(graph, [], 0, params))
    return graph


def _captured_with_access_of_another_device(rig: Rig) -> None:
    pool, stream = rig.pool(), rig.stream()
    assert rig.grant(pool, (DEVICE, 1, READWRITE)) == "SUCCESS"
    rig.begin_capture(stream)
    rig.raw.cuMemAllocFromPoolAsync(64, pool, stream)


def _child_that_moves(rig: Rig) -> None:
    params = rig.raw.CUgraphNodeParams()
    params.type = rig.raw.CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH
    params.graph.graph = _allocation_node(rig)
    params.graph.ownership = rig.raw.CUgraphChildGraphNodeOwnership.CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE
    with_edges(rig.raw.cuGraphAddNode, value(rig.raw.cuGraphCreate(0)), [], None, 0, params)


def _update_with_memory(rig: Rig) -> None:
    instance = rig.instantiate(_allocation_node(rig))
    value(rig.raw.cuGraphLaunch(instance, rig.stream()))
    rig.raw.cuGraphExecUpdate(instance, _allocation_node(rig))


def _rows_behind_a_pool(rig: Rig) -> None:
    copy, stream, pool = rig.raw.CUDA_MEMCPY2D(), rig.stream(), rig.pool()
    copy.dstMemoryType = copy.srcMemoryType = rig.raw.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.dstDevice, copy.srcDevice = rig.allocate(pool, 4096, stream), rig.plain(4096)
    copy.WidthInBytes, copy.Height, copy.srcPitch, copy.dstPitch, copy.dstY = 8, 2, 8, 8, 1 << 40
    rig.raw.cuMemcpy2DAsync(copy, stream)


def _beyond_the_end(rig: Rig) -> None:
    hole = rig.reserve(4 * PAGE)
    value(rig.raw.cuMemAddressFree(hole, 4 * PAGE))
    rig.raw.cuMemMap(rig.reserve(PAGE, hint=hole), 2 * PAGE, 0, rig.memory(2 * PAGE), 0)


def _released(rig: Rig) -> None:
    memory = rig.memory()
    assert [rig.release(memory), rig.release(memory)] == ["SUCCESS", "INVALID_VALUE"]
    rig.raw.cuMemGetAllocationPropertiesFromHandle(memory)


def _of_the_host(rig: Rig, *access: int) -> int:
    """Host memory with access for device 0 and the host, in this order."""
    address = mapped(rig, location=HOST)
    for kind, flags in zip((DEVICE, HOST), access, strict=False):
        grant(rig, address, flags=flags, location=kind)
    return address


def _access_of_queued_work(rig: Rig) -> None:
    stream, word, address = rig.stream(), rig.word(), mapped(rig)
    rig.hold(stream, word)
    value(rig.raw.cuMemsetD8Async(address, 1, PAGE, stream))
    grant(rig, address)  # which takes nothing away
    try:
        rig.set_access(address, PAGE, (DEVICE, 0, READ))
    finally:
        word.value = 1


def _pools_have_it(rig: Rig) -> None:
    stream, pool = rig.stream(), rig.pool(KEEP)
    rig.free(rig.allocate(pool, 100 * GiB, stream), stream)
    value(rig.raw.cuStreamSynchronize(stream))
    rig.memory(100 * GiB)


def _stacks(rig: Rig, size: int) -> Any:
    return rig.raw.cuCtxSetLimit(rig.raw.CUlimit.CU_LIMIT_STACK_SIZE, size)


def _handle_of_a_pool(rig: Rig) -> Any:
    kind = rig.raw.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    address = rig.allocate(rig.pool(), MiB, rig.stream())
    return rig.raw.cuMemGetHandleForAddressRange(address, 64 * MiB, kind, 0)


REFUSED: dict[str, tuple[Callable[[Rig], object], str]] = {
    "a word of nothing": (_word_of_nothing, "a word that is not there"),
    "no value of an attribute": (
        lambda rig: rig.raw.cuStreamSetAttribute(rig.stream(), rig.raw.CUstreamAttrID(8), None),
        "the real driver crashes",
    ),
    "no callback": (lambda rig: rig.raw.cuStreamAddCallback(rig.stream(), None, 0, 0), "the real driver crashes"),
    "large stacks": (lambda rig: _stacks(rig, 200_000), "a stack of 200000 bytes"),
    "stacks beyond the memory": (lambda _: _stacks(new_rig(memory=64 << 20), 4096), "more memory than there is"),
    "access of another device": (lambda rig: _allocation_node(rig, 1), "access for another device"),
    "the same in a capture": (
        _captured_with_access_of_another_device,
        "a pool that further devices have access to",
    ),
    "a child that moves": (_child_that_moves, "a child graph that moves into its parent"),
    "an update with memory": (_update_with_memory, "what a launch has left is not freed"),
    "rows behind a pool": (_rows_behind_a_pool, "rows that lie behind"),
    "a mapping beyond the end": (_beyond_the_end, "beyond the end of a reservation"),
    "a released handle": (_released, "handle that does not exist"),
    "a tile pool": (lambda rig: rig.map(rig.reserve(PAGE), rig.memory(usage=1)), "memory for tiles"),
    "a hole": (lambda rig: rig.raw.cuMemcpy(rig.reserve(PAGE), mapped(rig), 4), "where nothing lies"),
    "behind the end": (
        lambda rig: rig.raw.cuMemcpy(int(rig.plain(512)) + 512, rig.plain(3 * MiB), 4),
        "where nothing lies",
    ),
    "read-only for the host": (
        lambda rig: rig.raw.cuMemcpyHtoD(_of_the_host(rig, READWRITE, READ), bytes(4), 4),
        "memory that it may only read",
    ),
    "no access at all": (
        lambda rig: rig.raw.cuMemcpyDtoH(bytearray(4), _of_the_host(rig, NO_ACCESS), 4),
        "mapped host memory",
    ),
    "access of queued work": (_access_of_queued_work, "work on the memory is queued"),
    "more of a pool than has memory": (_handle_of_a_pool, "the real driver crashes"),
    "what pools have": (_pools_have_it, "pools hold in reserve"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_not_guessed(name: str) -> None:
    attempt, message = REFUSED[name]
    with pytest.raises(NotImplementedError, match=f"not modelled: .*{message}"):
        attempt(new_rig(devices=2))


@pytest.mark.parametrize(("domains", "answer"), [((0, 3), 0), ((0, 4), 1), ((200, 0), 1)])
def test_a_memory_sync_domain_that_there_is_not(rig: Rig, domains: tuple[int, int], answer: int) -> None:
    value = cuda.CUstreamAttrValue()
    value.memSyncDomainMap.default_, value.memSyncDomainMap.remote = domains
    attribute = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP
    assert rig.raw.cuStreamSetAttribute(rig.stream(), attribute, value)[0] == answer
