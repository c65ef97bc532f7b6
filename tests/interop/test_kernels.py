"""Facts that only real kernels show: they run on GPUs, against the libraries themselves."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import interop, vmm
from tests.support import KEEP, MiB, in_threads, library

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("watchdog"),
    pytest.mark.leaves("current context", "finalisers of libraries' arrays make their own context current"),
]

SLOW = r"""
extern "C" __global__ void slow(unsigned* words, long long count, unsigned value, long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
    long long step = (long long)blockDim.x * gridDim.x;
    for (long long i = threadIdx.x + blockIdx.x * (long long)blockDim.x; i < count; i += step) words[i] = value;
}
"""


@pytest.fixture
def cupy(on_cuda: bool, device: sa.Device) -> Iterator[Any]:
    if not on_cuda:
        pytest.skip("kernels run on GPUs only")
    with device.current():  # CuPy launches its kernels in the context that is current
        yield library("cupy")


@pytest.mark.parametrize("source", ["pool", "cache"])
def test_cupy_on_two_streams(cupy: Any, device: sa.Device, pool: sa.MemoryPool, source: str) -> None:
    """An array with a slow kernel in it is dropped on another thread; another stream gets memory at once."""
    slow = cupy.RawKernel(SLOW, "slow")
    count = 4 * MiB // 4
    cache = sa.CachingAllocator(pool)
    with interop.cupy.use(pool if source == "pool" else cache, callbacks=True):
        one, two = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        for _ in range(20):
            with one:
                box = [cupy.empty(count, cupy.uint32)]
                slow((8,), (256,), (box[0], count, 1, 1_000_000))
            in_threads(box.clear)
            with two:
                other = cupy.empty(count, cupy.uint32)
                other.fill(7)
                first = bool((other == 7).all())
                one.synchronize()
                assert first and bool((other == 7).all())
            del other
    cache.close()
    device.synchronize()
    assert pool.statistics().used == 0


def test_pytorch_trains(torch: Any, device: sa.Device) -> None:
    """Backward passes allocate on threads of their own, which are not routed."""
    checked = sd.checked(device.driver)
    with sa.MemoryPool(sa.Device(0, driver=checked), release_threshold=KEEP) as pool:
        bridge = interop.torch.use(pool)
        model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        inputs = torch.randn(512, 256, device="cuda")
        targets = inputs.sum(1, keepdim=True)
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0] and pool.statistics().used >= 2 * MiB
        del model, optimizer, inputs, targets, loss
        torch._C._cuda_clearCublasWorkspaces()
        gc.collect()
        bridge.close()
        device.synchronize()
        assert pool.statistics().used == 0


def test_a_model_sleeps_and_its_graph_stays_valid(torch: Any, device: sa.Device) -> None:
    group = vmm.SleepGroup(device)
    with interop.torch.use(group.tagged("weights")) as weights:
        model = torch.nn.Linear(1024, 1024, device="cuda").requires_grad_(False)
    with interop.torch.use(group.tagged("cache")) as caches:
        cache = torch.zeros(16 * MiB, dtype=torch.uint8, device="cuda")
    inputs = torch.randn(8, 1024, device="cuda")
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        model(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = model(inputs)
    graph.replay()
    expected = outputs.clone()
    addresses = [one.data_ptr() for one in model.parameters()]
    torch.cuda.synchronize()
    for _ in range(3):
        assert group.sleep(keep={"weights"}) >= 20 * MiB and group.mapped_bytes == 0
        group.wake("weights")
        outputs.zero_()
        graph.replay()
        assert torch.equal(outputs, expected)
        group.wake()
    assert [one.data_ptr() for one in model.parameters()] == addresses
    cache.fill_(1)
    torch.cuda.synchronize()
    del model, cache, graph, outputs
    gc.collect()
    weights.close()
    caches.close()
    device.synchronize()
    assert not group.buffers


def test_pytorch_and_cupy_take_turns_on_a_stream(torch: Any, cupy: Any, pool: sa.MemoryPool) -> None:
    """One's array in the other's hands, without a copy and without the host waiting."""
    stream = sa.Device(0).create_stream()
    memory = pool.allocate(4 * MiB, stream).view_as("<f4", (1024, -1))
    ours = torch.cuda.Stream()
    with torch.cuda.stream(ours):
        tensor = interop.torch.tensor(memory)
        tensor.fill_(2)
        tensor.mul_(3)
    del tensor
    gc.collect()
    pool.statistics()  # the loan ends: our stream waits for PyTorch's
    with cupy.cuda.Stream(non_blocking=True):
        array = interop.cupy.array(memory)
        assert float(array.sum()) == 6 * 1024 * 1024
        del array
    gc.collect()
    stream.synchronize()
