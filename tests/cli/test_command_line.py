"""All commands: the choice of driver, exit codes, pipes, colours; the tour, profiles, and figures of replays."""

import contextlib
import inspect
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.cli import info, main, tour
from streamalloc.cli.machine import choose
from streamalloc.cli.terminal import Terminal
from streamalloc.cli.worker import Worker, WorkerError
from streamalloc.traces import Event, Trace
from tests.cli.conftest import Complete, Run, complete, documented, keys, without
from tests.support import Replaced

_SECONDS = "must be a number of seconds from 0.01 to 86400"


class TestArguments:
    def test_none_prints_help(self, run: Run) -> None:
        text = run()
        for command in ("tour", "info", "bench", "replay"):
            assert f"\n    {command} " in text

    @pytest.mark.parametrize("command", ["tour", "info", "bench", "replay", ""])
    def test_help_and_version(self, command: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as exit:
            main([command, "--help"] if command else ["--version"])
        assert exit.value.code == 0
        told = capsys.readouterr().out
        assert f"streamalloc {command}" in told if command else told == f"streamalloc {sa.__version__}\n"

    def test_a_command_that_is_nearly_one(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main(["bnech"])
        assert capsys.readouterr().err.endswith("; did you mean bench?\n")

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["profile", "mine.json"], "streamalloc profile: error: unrecognized arguments: mine.json"),
            (
                ["profile", "--drvier=cuda"],
                "streamalloc profile: error: unrecognized arguments: --drvier=cuda; did you mean --driver?",
            ),
            (["bench", "-k"], "streamalloc bench: error: argument -k/--rows: expected one argument"),
            (["replay", "absent.csv"], "streamalloc replay: absent.csv: No such file or directory"),
            *(
                (
                    ["memory", f"--live={text}", "x.py"],
                    f"streamalloc memory: error: argument --live: {text!r}: {_SECONDS}",
                )
                for text in ("-1", "0", "nan", "inf", "1e30", "soon")
            ),
            *(
                (
                    ["memory", option, __file__],
                    f"streamalloc memory: error: argument {option}: {__file__!r} is a program, and no value: "
                    f"write {option} -- {__file__}",
                )
                for option in ("--json", "--live")
            ),
        ],
    )
    def test_wrong_arguments_of_a_command(
        self, words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sys.argv", ["streamalloc"])
        try:
            assert main(["--driver=simulated", *words]) == 2
        except SystemExit as end:
            assert end.code == 2
        assert capsys.readouterr().err.splitlines()[-1] == message


class TestChoiceOfDriver:
    @pytest.mark.parametrize("command", ["tour", "info"])
    @pytest.mark.usefixtures("no_driver")
    def test_simulated_where_there_is_none(self, run: Run, command: str) -> None:
        text = run(*command.split())
        assert text.startswith("no CUDA driver found: running on the simulated driver (2 devices")

    @pytest.mark.usefixtures("no_driver")
    def test_not_where_the_real_one_is_asked_for(self, monkeypatch: pytest.MonkeyPatch, refused: Run) -> None:
        monkeypatch.setenv("STREAMALLOC_DRIVER", "cuda")
        assert refused("tour") == "streamalloc: no CUDA driver: nothing there\n"

    @pytest.fixture
    def headline(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
        """Runs ``info``, which prints its first line alone."""
        monkeypatch.setattr(info, "run", lambda chosen, *_: print(chosen.headline) or 0)
        return run

    @pytest.mark.parametrize("words", ["--driver simulated:3 info", "info --driver=simulated --devices=3",
                                       "--driver=simulated:2 info --devices=3"])  # fmt: skip
    def test_named_in_the_command(self, headline: Run, words: str) -> None:
        assert headline(*words.split()).startswith("running on the simulated driver (3 devices")

    @pytest.mark.usefixtures("no_driver")
    def test_devices_where_there_is_no_gpu(self, headline: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        one = "running on the simulated driver (1 device "
        assert headline("info", "--devices=1").startswith(f"no CUDA driver found: {one}")
        monkeypatch.setenv("STREAMALLOC_DRIVER", "simulated:4")
        assert headline("info", "--devices=1").startswith(one)

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--driver=abacus"], "--driver='abacus': allowed are cuda, simulated"),
            (["--driver=simulated:colour=red"], "'colour=red' is no setting"),
            (["--driver=cuda", "--devices=2"], "--devices=2: only a simulated machine"),
            (["--driver=simulated", "--devices=0"], "devices must be at least 1"),
        ],
    )
    def test_wrong_choices(self, refused: Run, words: list[str], message: str) -> None:
        assert message in refused(*words, "info")

    def test_devices_of_a_real_machine(self, monkeypatch: pytest.MonkeyPatch, refused: Run) -> None:
        monkeypatch.delenv("STREAMALLOC_DRIVER", raising=False)
        with sd.use(sd.simulated()):  # stands for one that was found
            assert "--devices=2: only a simulated machine" in refused("info", "--devices=2")

    def test_unknown_name(self, monkeypatch: pytest.MonkeyPatch, refused: Run) -> None:
        monkeypatch.setenv("STREAMALLOC_DRIVER", "abacus")
        assert "STREAMALLOC_DRIVER='abacus'" in refused("info")


class TestPipe:
    def test_reader_that_left(self, on_cuda: bool) -> None:
        environment = {**os.environ, "STREAMALLOC_DRIVER": "cuda" if on_cuda else "simulated"}
        command = [sys.executable, "-m", "streamalloc", "tour"]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            errors = process.stderr.read()
            code = process.wait(timeout=60)
        assert errors == b""
        # What a shell reports of a program that ended because its reader left.
        assert code == 141

    @pytest.mark.parametrize("words", ["info", "info --json", "profile"])
    def test_output_that_cannot_be_written(
        self, machine: Any, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with open("/dev/full", "w") as full:  # to close it would fail if the lines were still to be written
            monkeypatch.setattr(sys, "stdout", full)
            assert main(words.split()) == 2
        assert capsys.readouterr().err.endswith("cannot write the output: No space left on device\n")

    @pytest.mark.parametrize("words", ["info", "info --json", "replay mixed --on pool"])
    def test_closed_output(self, machine: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, None)  # as the interpreter does for a closed descriptor
        assert main(words.split()) == 0

    def test_encoding_without_the_letters(self, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def name(length: int, device: Any) -> Any:
            return machine.cuDeviceGetName(length, device)[0], "Gerät".encode()

        out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr(sys, "stdout", out)
        with sd.use(Replaced(machine, cuDeviceGetName=name)):
            assert main(["info"]) == 0
        out.seek(0)
        assert "Device 0: Ger?t" in out.read()


class Screen:
    """A terminal of 60 columns, from :meth:`show` on."""

    def __init__(self, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.patch, self.capsys = patch, capsys
        for name, value in (("COLUMNS", "60"), ("TERM", "xterm")):
            patch.setenv(name, value)
        patch.delenv("NO_COLOR", raising=False)

    def show(self) -> Terminal:
        # Not before the test itself runs: the captured output is another one in fixtures.
        self.patch.setattr(sys.stdout, "isatty", lambda: True)
        return Terminal()

    @property
    def text(self) -> str:
        return self.capsys.readouterr().out


@pytest.fixture
def screen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Screen:
    return Screen(monkeypatch, capsys)


class TestTerminal:
    def test_colours_in_a_terminal_only(self, screen: Screen) -> None:
        assert Terminal().good("ok") == "ok"
        assert screen.show().good("ok") == "\x1b[32mok\x1b[0m"
        screen.patch.setenv("NO_COLOR", "1")
        assert screen.show().good("ok") == "ok"

    def test_columns_of_words_are_folded(self, screen: Screen) -> None:
        out = screen.show()
        out.table(
            [(out.good("one two three four " * 2 + "end"), "12345678", "word " * 10 + "end")],
            ("a", "count of it", "b"),
            "lrl",
        )
        text = screen.text
        lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
        # 60 columns, less three gaps and the figure's title, are 43 for two columns of words.
        assert max(map(len, lines)) <= 60 and text.count("\x1b[32m") == 3
        assert [line[2:24].strip() for line in lines[1:]] == ["one two three four", "one two three four", "end"]
        assert "12345678" in lines[1]

    def test_cells_that_do_not_fit_beside_each_other_follow(self, screen: Screen) -> None:
        out, many = screen.show(), ["123456789"] * 6
        out.table([["name", *many], ["other", *many[1:], ""]], ["", *"abcdef"], "l" + "r" * 6)
        rest = [f"      {title} 123456789" for title in "abcdef"]
        assert screen.text.splitlines() == ["  name", *rest, "  other", *rest[:-1]]
        out.table([("n" * 24, "x" * 24, "some words that have no room\nand more")])
        assert screen.text.splitlines() == [
            f"  {'n' * 24}", f"      {'x' * 24}", "      some words that have no room", "      and more",
        ]  # fmt: skip


def lines_sent(patch: pytest.MonkeyPatch, *, terminal_there: bool = True) -> list[str]:
    """The parts that the error output is sent, from now on."""
    # Not in a fixture: pytest sets another error output for the test itself.
    patch.setattr(sys, "stderr", err := io.StringIO())
    patch.setattr(err, "isatty", lambda: terminal_there)
    sent: list[str] = []
    patch.setattr(err, "write", lambda text: sent.append(text))
    return sent


ERASE = "\r\x1b[K"


class TestProgress:
    def test_estimate(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        times = iter((100.0, 140.0, 260.0))
        monkeypatch.setattr(time, "monotonic", lambda: next(times))
        out, sent = Terminal(), lines_sent(monkeypatch)
        with out.progress(4) as note:
            note("first", 0)
            note("second", 1)
            out.line("a result")
            note("third", 4)
        shown = ("0%: first", "25%, about 2 min left: second", "", "100%, about 1 s left: third", "")
        assert [text for text in sent if text] == [f"{ERASE}{text}" for text in shown]
        assert capsys.readouterr().out == "a result\n"

    def test_nothing_in_a_pipe(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sent = lines_sent(monkeypatch, terminal_there=False)
        with Terminal().progress() as note:
            note("step", 0.5)
        assert sent == []


@pytest.mark.leaves("release threshold of the default pool of device *", "cuda.core raises it at its first use")
@pytest.mark.parametrize("words", ["info", "tour", "replay mixed --on pool --on cached", "bench --quick -k pair"])
def test_no_line_is_wider_than_a_narrow_terminal(screen: Screen, machine: Any, words: str) -> None:
    screen.show()
    assert main(words.split()) == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", screen.text).splitlines()
    assert len(lines) > 5 and [line for line in lines if len(line) > 60] == []


# -- tour: it shows the code that runs, and a result that is not as expected makes it fail -----------------------------


PERMISSION = "STREAMALLOC_TEST_MULTICAST"


@pytest.fixture(scope="module")
def whole(on_cuda: bool, primary_contexts: None) -> Complete:
    """The whole tour as users see it."""
    return complete(on_cuda, "tour")


def test_every_check_holds(whole: Complete, machine: Any, on_cuda: bool) -> None:
    first, *_ = lines = whole.text.splitlines()
    assert whole.code == 0 and "FAILED" not in whole.text, whole.text
    assert sa.Device(0, driver=machine).name in first and ("simulated" in first) == (not on_cuda)
    assert all(f"{part.__doc__}" in lines for part in tour.PARTS)
    assert lines.count("") == 2 + len(tour.PARTS) and lines[-4].startswith("All ")
    assert re.search(r"opened by process \d+\n", whole.text) and f"process {os.getpid()}\n" not in whole.text


def test_it_leaves_nothing_behind(whole: Complete) -> None:
    assert whole.left == {}


def test_it_is_short_and_shows_the_code_that_runs(run: Run) -> None:
    lines = run("tour").splitlines()
    assert len(lines) <= 50
    assert [line.split("  ")[1] for line in lines[-3:]] == [
        f"python -m streamalloc {words}" for words in ("check program.py", "info", "bench --quick")
    ]
    source = "".join(map(inspect.getsource, tour.PARTS))
    steps = [line[:70].strip() for line in lines if re.search("  ok  ", line)]
    assert len(steps) >= 15 and all(step in source for step in steps[:-1])


@pytest.mark.gpus(2)
def test_a_wrong_result_is_found(machine: Any, run: Run) -> None:
    """In each part, each fill writes one more."""
    fill = machine.cuMemsetD8Async
    with sd.use(Replaced(machine, cuMemsetD8Async=lambda at, value, *rest: fill(at, value + 1, *rest))):
        text = run("tour", code=1)
    for wrong in ("[90], found [91]", "[1, 2], found [2, 3]", "[17], found [18]", "[7], found [8]"):
        assert f"expected {wrong}" in text
    assert "FAILED" in text and " failed" in text.splitlines()[-1]


@pytest.mark.gpus(2)
@pytest.mark.parametrize(
    "call", ["cuMemAllocFromPoolAsync", "cuMemCreate", "cuMemPoolExportPointer", "cuStreamWriteValue32"]
)
def test_a_refused_call_fails_its_part_and_the_tour_goes_on(machine: Any, run: Run, call: str) -> None:
    with sd.use(sd.faulty(machine, call, result="CUDA_ERROR_UNKNOWN")):
        text = run("tour", code=1)
    assert f"FAILED  CudaError: {call} answered CUDA_ERROR_UNKNOWN" in text
    assert "driver.assert_nothing_left()" in text


def test_a_process_that_is_killed_fails_its_parts(machine: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Worker.ask

    def kill_and_ask(self: Worker, *arguments: Any, **options: Any) -> Any:
        self.process.kill()
        return ask(self, *arguments, **options)

    monkeypatch.setattr(Worker, "ask", kill_and_ask)
    text = run("tour", code=1)
    assert "FAILED  WorkerError: the other process has ended" in text


def test_a_late_answer_is_not_that_of_the_next_call(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamalloc.cli.worker.SECONDS", 0.5)
    with contextlib.closing(Worker(machine)) as worker:
        with pytest.raises(TimeoutError, match="has not answered"):
            worker.ask(time.sleep, 0.8)
        time.sleep(0.8)
        with pytest.raises(WorkerError, match="an earlier call"):
            worker.ask(os.getpid)


@pytest.mark.parametrize(
    ("lacks", "reason"),
    [
        ("MEMPOOL_SUPPORTED_HANDLE_TYPES", "this device's pools cannot be shared with other processes"),
        ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "this device does not support virtual memory management"),
    ],
)
@pytest.mark.gpus(2)
def test_a_part_that_a_device_cannot_run_is_skipped(machine: Any, run: Run, lacks: str, reason: str) -> None:
    with sd.use(without(machine, lacks)):
        text = run("tour")
    assert text.count(f"skipped  {reason}") == 1
    assert "checks held, 1 part skipped" in text


def test_a_device_without_pools(machine: Any, run: Run) -> None:
    with sd.use(without(machine, "MEMORY_POOLS_SUPPORTED")):
        text = run("tour", code=1)
    assert "no stream-ordered memory pools" in text


@pytest.mark.gpus(2)
def test_gpus_make_no_multicast_object_unless_asked(traced: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PERMISSION, raising=False)
    with sd.use(Replaced(traced, is_simulated=False)):
        text = run("tour")
    # Symmetric memory is shown all the same.
    assert "skipped" not in text
    assert not [call for call in traced.calls if call.name.startswith("cuMulticast")]


@pytest.mark.simulated_only("the machine of the tour is simulated")
def test_one_device(run: Run) -> None:
    with sd.use(sd.simulated(devices=1)):
        text = run("tour")
    assert "skipped  this machine has one GPU" in text


@pytest.mark.gpus(2)
def test_devices_that_do_not_reach_each_other(machine: Any, run: Run) -> None:
    success = machine.CUresult.CUDA_SUCCESS
    with sd.use(Replaced(machine, cuDeviceCanAccessPeer=lambda here, there: (success, 0))):
        assert "skipped  no other GPU of this machine has access to the memory of GPU 0" in run("tour")


# -- profile: the file it writes makes a machine like this one ---------------------------------------------------------


def test_file_makes_the_machine(machine: Any, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    text = run("profile", "-o", str(path))
    count = sa.Device.count()
    chosen = text.splitlines()[-1].removeprefix("STREAMALLOC_DRIVER=")
    assert chosen == f"simulated:{f'devices={count},' if count > 1 else ''}profile={path}"
    with sd.use(choose(chosen).driver):
        assert sa.Device.count() == count
        again = sa.Device(0)
    assert (again.name, again.total_memory) == (sa.Device(0).name, sa.Device(0).total_memory)
    assert again.supports == sa.Device(0).supports


def test_standard_output(machine: Any, run: Run) -> None:
    assert json.loads(run("profile"))["name"] == sa.Device(0).name


@pytest.mark.usefixtures("no_driver")
def test_no_profile_of_a_machine_that_is_not_there(refused: Run, tmp_path: Path) -> None:
    assert "no CUDA driver: nothing there" in refused("profile", "-o", str(tmp_path / "mine.json"))
    assert not list(tmp_path.iterdir())


def test_file_that_cannot_be_written(machine: Any, refused: Run, tmp_path: Path) -> None:
    assert f"cannot write {tmp_path}" in refused("profile", "-o", str(tmp_path))


# -- replay: which figures there are. What they are is worked out in tests/traces --------------------------------------


SMALL = Trace((Event("allocate", 0, 4096, 0, 0, 0), Event("free", 0, 4096, 0, 0, 1)), "by hand", {"lost things": 3})


@pytest.fixture
def small(tmp_path: Path) -> Path:
    SMALL.save(tmp_path / "small.jsonl")
    return tmp_path / "small.jsonl"


def test_table_and_json(on_cuda: bool, small: Path, tmp_path: Path, primary_contexts: None) -> None:
    arguments = ("replay", str(small), "--on", "pool", "--on", "raw", "--json", str(tmp_path / "found.json"))
    done: Complete = complete(on_cuda, *arguments)
    assert (done.code, done.left) == (0, {})
    assert "small.jsonl: 1 allocation and 1 free on 1 stream, by 1 thread; at most 0.0 MiB at once" in done.text
    assert "left out: 3 lost things" in done.text
    report = json.loads((tmp_path / "found.json").read_text())
    assert keys(report) == documented("headline")
    assert report["trace"] == {"events": 2, "source": "by hand", "peak": 4096, "streams": 1}
    pool, raw = report["rows"]
    assert (pool["name"], raw["name"]) == ("streamalloc MemoryPool", "raw calls on a pool, results checked")
    assert (pool["driver_calls"], pool["peak_used"], pool["failures"]) == (2, 4096, 0)
    assert pool["reserved_over_used"] == pool["peak_reserved"] / 4096
    assert all(row["name"] in done.text for row in report["rows"])


def test_json_alone_on_the_output(machine: Any, run: Run, small: Path) -> None:
    text = run("replay", str(small), "--on", "pool", "--json")
    assert json.loads(text)["rows"][0]["failures"] == 0


def test_json_in_a_folder(machine: Any, capsys: pytest.CaptureFixture[str], small: Path, tmp_path: Path) -> None:
    assert main(["replay", str(small), "--on", "pool", "--json", str(tmp_path)]) == 2
    assert f"cannot write {tmp_path}: Is a directory" in capsys.readouterr().err


@pytest.mark.simulated_only("other libraries run where there is a GPU")
def test_other_library_without_a_gpu(machine: Any, run: Run, small: Path) -> None:
    text = run("replay", str(small), "--on", "cupy", code=1)
    assert "CuPy MemoryPool: not replayed (it needs a GPU)" in text


@pytest.mark.parametrize(
    ("arguments", "why"), [(["nowhere"], "nowhere: No such file"), ([__file__], "neither a streamalloc trace")]
)
def test_bad_arguments(machine: Any, refused: Run, arguments: list[str], why: str) -> None:
    assert why in refused("replay", *arguments)
