"""``python -m streamalloc serve`` and ``store``."""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import ipc
from streamalloc.cli import main
from streamalloc.cli import serve as serving
from tests.cli.conftest import Run
from tests.ipc.store import test_files
from tests.support import eventually, read, soon


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a store in a folder of the test's own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return "models"


@pytest.fixture
def store(machine: object, name: str) -> Iterator[ipc.Store]:
    with ipc.Store.serve(name, limit=1 << 30), ipc.Store(name) as store:
        yield store


def test_list_show_and_remove(run: Run, store: ipc.Store, device: sa.Device) -> None:
    with store.write("llama/rank0") as weights:
        weights.allocate("all", 3 << 20, np.uint8)
    text = run("store")
    assert text.endswith("llama/rank0  epoch 1  1 tensor  4 MiB\n")
    with store.open("llama/rank0"):
        for arguments in (["list"], ["list", "models"]):
            text = run("store", *arguments)
            assert "models: 1 key, 4 MiB of 1 GiB a device" in text
            assert f"llama/rank0  epoch 1  1 tensor  4 MiB  read by {os.getpid()}" in text
        entry = json.loads(run("store", "list", "--json"))["models"]["entries"][0]
        assert (entry["key"], entry["nbytes"], entry["readers"]) == ("llama/rank0", 4 << 20, [os.getpid()])
        text = run("store", "show", "models", "llama/rank0")
        assert f"device     {device.uuid.hex}" in text and "nbytes     4 MiB" in text
        assert json.loads(run("store", "show", "models", "llama/rank0", "--json"))["tensors"] == 1
        text = run("store", "remove", "models", "llama/rank0")
        assert "once 1 reader has closed it" in text
    assert eventually(lambda: store.list() == [])


def test_load(run: Run, refused: Run, store: ipc.Store, tmp_path: Path) -> None:
    """The weights outlive the command, and replace others only where that was asked for."""
    table = np.arange(12, dtype=np.float32).reshape(3, 4)
    file = str(tmp_path / "one.safetensors")
    test_files.TestFiles.file(Path(file), {"table": ("F32", table)})
    assert run("store", "load", "models", "llama/rank0", file) == "loaded llama/rank0: 1 tensor, 2 MiB\n"
    with store.open("llama/rank0") as weights:
        assert np.array_equal(read(weights["table"]).view(np.float32).reshape(3, 4), table)
        assert "the store holds epoch 1" in refused("store", "load", "models", "llama/rank0", file)
        text = run("store", "load", "models", "llama/rank0", file, "--replace", "--json")
        assert json.loads(text)["epoch"] == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["store", "show", "models"], "show needs NAME and KEY"),
        (["store", "load", "models", "x"], "load needs a FILE"),
        (["store", "show", "models", "x", "y"], "show takes no FILE"),
        (["store", "load", "models", "x", "absent.safetensors"], "store: absent.safetensors: No such file"),
        (["store", "show", "models", "x"], "holds nothing under 'x'"),
        (["store", "remove", "models", "x"], "holds nothing under 'x'"),
        (["store", "list", "other"], "nobody serves a store 'other'"),
        (["serve", "models"], "serves a store 'models' already"),
        (["serve", "a/b"], "name='a/b'"),
        (["serve", "other", "--evict"], "evict=True"),
        (["serve", "other", "--devices", "7"], "ordinal=7"),
    ],
)
def test_usage(store: ipc.Store, refused: Run, arguments: list[str], text: str) -> None:
    assert text in refused(*arguments)


def test_no_store(run: Run, name: str) -> None:
    assert run("store") == run("store", "list") == "no store is served\n"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("100GiB", 100 << 30),
        ("1.5 MiB", 3 << 19),
        ("7", 7),
        ("2TiB", 2 << 40),
        ("3KiB", 3072),
        ("1GB", 10**9),
        pytest.param("9" * 400, 10**400 - 1, id="long"),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert serving.size_of(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1G", "x"])
def test_wrong_sizes(text: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", name, f"--limit={text}"])
    assert "is no size" in capsys.readouterr().err


def test_until_a_signal(run: Run, machine: object, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: a thread writes, and ends the server as systemd does."""
    seen: list[object] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(20)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))

        def use() -> None:
            seen.append(systemd.recv(1000))
            try:
                with ipc.Store(name) as store:
                    seen.append(store.statistics().devices)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
            seen.append(systemd.recv(1000))

        before = signal.getsignal(signal.SIGTERM)
        with soon(use, 0):
            text = run("serve", name, "--devices", "0", "--limit", "1GiB")
    assert "at most 1 GiB of each device" in text and "has stopped" in text
    assert seen[0].startswith(b"READY=1") and seen[2] == b"STOPPING=1"  # type: ignore[attr-defined]
    assert len(seen[1]) == 1  # type: ignore[arg-type]
    assert signal.getsignal(signal.SIGTERM) is before
    assert not (tmp_path / "streamalloc" / "models.store").exists()


def test_what_was_lost_is_said(run: Run, machine: object, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "streamalloc"
    folder.mkdir(mode=0o700)
    (folder / "models.held").write_text(json.dumps({"pid": 5, "lost": {"key": 3}}))

    def stop() -> None:
        while not (folder / "models.store").exists():
            time.sleep(0.01)
        with ipc.Store(name) as store:
            with store.write("key"):
                pass
            assert store.list()[0].epoch == 4
        os.kill(os.getpid(), signal.SIGINT)

    with soon(stop, 0):
        text = run("serve", name)
    assert "lost: key: the server that held it, process 5, was killed" in text
