"""Mutation tests (``make mutants``): faults planted by cosmic-ray, a seeded sample of each area.

Beside the operators of cosmic-ray there are three: a lock that is not taken, a statement that is left out, and two
statements that change their order. Mutants of annotations, which nothing runs, are left out.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import itertools
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.work_item import MutationSpec

from tests.support import LOCK

ROOT = Path(__file__).parent.parent
_ENDS = ("package/test_garbage_cycles.py", "package/test_half_made.py")
AREAS = {
    "driver": (
        "driver",
        "testing",
        "cli/test_command_line.py",
        "package/test_locks.py",
        "package/test_html.py",
        "core/test_device.py",
        "core/test_properties.py",
        "checker/test_checked.py",
        "checker/test_processes.py",
        "facts/test_stream_words.py",
        "vmm/stores/test_copies.py",
    ),
    "simulator": ("simulator", "facts", "vmm/pages/test_swap.py"),
    "checker": ("checker", "package/test_locks.py", "cupti/test_check.py", "vmm/pages/test_space.py"),
    "cupti": ("cupti", "cli/test_check.py"),
    "core": ("core", "package/test_html.py", "package/test_locks.py", "ipc/exporter/test_leases.py", *_ENDS),
    "pool": ("pool", "package/test_locks.py", "package/test_borrowed_handles.py", "ipc/test_raw_handles.py", *_ENDS),
    "vmm": ("vmm", "package/test_locks.py", "ipc/test_locks.py", *_ENDS),
    "ipc": ("ipc", *_ENDS),
    "multicast": ("multicast",),
    "observing": ("observing", "package/test_locks.py"),
    "interop": ("interop", "package/test_locks.py"),
    "testing": (
        "testing",
        "checker/test_corpus.py",
        "core/test_stream.py",
        "simulator/test_multicast.py",
        "package/test_locks.py",
    ),
}
"""Tests that are run for the mutants of an area, the first that fails ends them."""
_SECONDS = 600
"""Seconds that the tests of one mutant may take."""


class LockNotTaken(Operator):  # type: ignore[misc]
    """``with self._lock:`` takes no lock."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        for lock in self._locks(node):
            yield lock.start_pos, lock.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        lock = self._locks(node)[index]
        last = lock.get_last_leaf()
        for leaf in _leaves(lock):
            leaf.value = "__import__('contextlib').nullcontext()" if leaf is last else ""
            leaf.prefix = " " if leaf is last else ""
        return node

    @staticmethod
    def _locks(node: Any) -> list[Any]:
        # The last child is the block.
        return [one for one in node.children[:-1] if LOCK.search(one.get_code())] if node.type == "with_stmt" else []

    @classmethod
    def examples(cls) -> Iterable[Any]:
        free = "__import__('contextlib').nullcontext()"
        return (
            Example("with self._lock:\n    pass\n", f"with {free}:\n    pass\n"),
            Example("with a.lock, b():\n    pass\n", f"with {free}, b():\n    pass\n"),
        )


def _leaves(node: Any) -> Iterator[Any]:
    leaf, last = node.get_first_leaf(), node.get_last_leaf()
    while True:
        yield leaf
        if leaf is last:
            return
        leaf = leaf.get_next_leaf()


def _is_statement(node: Any) -> bool:
    """Whether a line calls or assigns something; docstrings and notes do not."""
    return node.type == "simple_stmt" and node.children[0].type in ("expr_stmt", "atom_expr", "del_stmt")


class StatementLeftOut(Operator):  # type: ignore[misc]
    """A call or an assignment becomes ``pass``."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        if _is_statement(node) and node.search_ancestor("funcdef"):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        leaves = list(_leaves(node.children[0]))
        for leaf in leaves:
            leaf.value = "pass" if leaf is leaves[0] else ""
            leaf.prefix = leaf.prefix if leaf is leaves[0] else ""
        return node

    @classmethod
    def examples(cls) -> Iterable[Any]:
        return (Example("def f():\n    g(1)\n", "def f():\n    pass\n"),)


class StatementsSwapped(Operator):  # type: ignore[misc]
    """Two statements that follow each other change their order."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        if node.type == "suite" and node.search_ancestor("funcdef"):
            for one, two in self._pairs(node):
                yield one.start_pos, two.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        one, two = list(self._pairs(node))[index]
        here, there = node.children.index(one), node.children.index(two)
        node.children[here], node.children[there] = two, one
        first, second = one.get_first_leaf(), two.get_first_leaf()
        first.prefix, second.prefix = second.prefix, first.prefix
        return node

    @staticmethod
    def _pairs(node: Any) -> list[tuple[Any, Any]]:
        pairs = zip(node.children, node.children[1:], strict=False)
        return [(one, two) for one, two in pairs if _is_statement(one) and _is_statement(two)]

    @classmethod
    def examples(cls) -> Iterable[Any]:
        return (Example("def f():\n    g()\n    h()\n", "def f():\n    h()\n    g()\n"),)


class Provider:
    """The operators of this file for cosmic-ray."""

    operators: ClassVar[dict[str, type[Operator]]] = {
        one.__name__: one for one in (LockNotTaken, StatementLeftOut, StatementsSwapped)
    }

    def __iter__(self) -> Iterator[str]:
        return iter(self.operators)

    def __getitem__(self, name: str) -> type[Operator]:
        return self.operators[name]


def _not_run(path: Path) -> set[int]:
    """Lines that nothing runs: annotations and imports for type checkers."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        spans: list[ast.AST | None] = []
        if isinstance(node, ast.AnnAssign) and node.value is None:
            spans = [node]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = node.args
            spans = [node.returns, *(one.annotation for one in (*arguments.args, *arguments.kwonlyargs))]
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            spans = [node]
        for span in spans:
            if span is not None:
                lines.update(range(span.lineno, (span.end_lineno or span.lineno) + 1))  # type: ignore[attr-defined]
    return lines


def mutants(area: str) -> Iterator[MutationSpec]:
    """All mutants of an area."""
    for path in sorted((ROOT / "streamalloc" / area).rglob("*.py")):
        tree, skipped = get_ast_from_path(path), _not_run(path)
        for name in plugins.operator_names():
            operator_class = plugins.get_operator(name)
            if operator_class.arguments() or name == "core/NoOp":
                continue
            operator = operator_class()
            places = (place for node in ast_nodes(tree) for place in operator.mutation_positions(node))
            for occurrence, (start, end) in enumerate(places):
                if start[0] not in skipped:
                    yield MutationSpec(path.relative_to(ROOT), name, occurrence, start, end)


def sampled(area: str, count: int, seed: int) -> list[MutationSpec]:
    """Each lock of an area, and a sample of its other mutants: the same number of each kind of operator."""
    by_kind: dict[str, list[MutationSpec]] = {}
    for mutant in mutants(area):
        by_kind.setdefault(mutant.operator_name.split("_")[0], []).append(mutant)
    locks, others = by_kind.pop("ours/LockNotTaken", []), list[MutationSpec]()
    choice, kinds = random.Random(seed), list(by_kind.values())
    for kind in kinds:
        choice.shuffle(kind)
    while len(others) < count and any(kinds):
        choice.shuffle(kinds)
        others += [kind.pop() for kind in kinds if kind]
    return [*locks, *others[:count]]


class Tree:
    """A copy of the project in which mutants are planted; the project itself is never changed."""

    def __init__(self, folder: Path) -> None:
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "build")
        self.path = Path(shutil.copytree(ROOT, folder, ignore=ignored))
        self._times = itertools.count(int(time.time()))

    def write(self, path: Path, source: str) -> None:
        """Replace a module, at a time that no other version of it has: bytecode is found by time and size."""
        path.write_text(source)
        os.utime(path, (now := next(self._times), now))

    def test(self, tests: list[Path]) -> tuple[bool, str]:
        """Whether the tests pass in time, and their output."""
        environment = dict(os.environ, PYTHONPATH=str(self.path), PYTHONDONTWRITEBYTECODE="")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--driver=simulated"]
        with subprocess.Popen(
            [*command, *map(str, tests)],
            cwd=self.path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        ) as process:  # fmt: skip
            try:
                output, _ = process.communicate(timeout=_SECONDS)
            except subprocess.TimeoutExpired:
                output = "it took too long"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what a test has started
        return process.returncode == 0, output

    def judge(self, mutant: MutationSpec, area: str) -> tuple[str, str]:
        """``killed``, ``survived`` or ``equal``, and the change."""
        path = self.path / mutant.module_path
        source = path.read_text()
        try:
            mutated = mutate_code(source, plugins.get_operator(mutant.operator_name)(), mutant.occurrence)
        except AttributeError:  # cosmic-ray replaces no exception with a dotted name
            return "equal", f"{mutant.operator_name} changes nothing there\n"
        change = "".join(difflib.unified_diff(source.splitlines(True), mutated.splitlines(True), n=2))
        try:
            if ast.dump(ast.parse(source)) == ast.dump(ast.parse(mutated)):
                return "equal", change
            self.write(path, mutated)
            about = "locks" if mutant.operator_name == "ours/LockNotTaken" else ""
            passed, _ = self.test(tests_of(area, str(mutant.module_path), about))
        except SyntaxError:
            passed = False
        finally:
            self.write(path, source)
        return "survived" if passed else "killed", change


def tests_of(area: str, *names: str) -> list[Path]:
    """Test modules of an area, those first that are named like a module, or like what it is about."""
    words = set(re.split(r"[/_.]", "_".join(names))) - {"streamalloc", "py", area}
    found: list[Path] = []
    for path in (ROOT / "tests" / name for name in AREAS[area]):
        found += [path] if path.suffix else sorted(path.rglob("test_*.py"))
    return [path.relative_to(ROOT) for path in sorted(found, key=lambda one: -len(words & {*one.stem.split("_")}))]


def run(area: str, chosen: list[MutationSpec], trees: list[Tree], out: Path | None) -> Counter[str]:
    """Verdicts on the mutants of an area, by their number; those of locks twice."""
    print(f"{area}: {len(chosen)} mutants", flush=True)
    free: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    passed, output = trees[0].test(tests_of(area))
    if not passed:
        raise SystemExit(f"{area}: the tests fail without a mutant\n{output}")
    for tree in trees:
        free.put(tree)

    def judge(mutant: MutationSpec) -> tuple[str, str]:
        tree = free.get()
        try:
            return tree.judge(mutant, area)
        finally:
            free.put(tree)

    counts: Counter[str] = Counter()
    with ThreadPoolExecutor(len(trees)) as threads:
        for mutant, (verdict, change) in zip(chosen, threads.map(judge, chosen), strict=True):
            counts[verdict] += 1
            counts[f"locks {verdict}"] += mutant.operator_name == "ours/LockNotTaken"
            if verdict != "killed":
                place = f"{mutant.module_path}:{mutant.start_pos[0]}"
                print(f"{verdict}: {place} {mutant.operator_name}\n{change}", flush=True)
            if out is not None:
                told = {"file": str(mutant.module_path), "verdict": verdict, "diff": change}
                with out.open("a") as file:
                    file.write(json.dumps(told) + "\n")
    print(f"{area}: {_counted(counts)}", flush=True)
    return counts


def _counted(counts: Counter[str]) -> str:
    return f"{counts['killed']} killed, {counts['survived']} survived, {counts['equal']} equal; " + (
        f"{counts['locks survived']} of the locks survived"
    )


def main() -> int:
    """Run the sample: 0 where the tests caught enough and every lock, 1 where they did not."""
    plugins.OPERATOR_PROVIDERS["ours"] = Provider()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"of {', '.join(AREAS)} (default: all)")
    parser.add_argument("--count", type=int, default=20, help="mutants of each area, beside all locks")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default: 2)")
    parser.add_argument("--least", type=float, default=0.92, help="share that the tests have to catch (default: 0.92)")
    parser.add_argument("--list", action="store_true", help="print the sample and run nothing")
    parser.add_argument("--out", type=Path, help="file for the verdicts, as JSON lines")
    asked = parser.parse_args()
    samples = {area: sampled(area, asked.count, asked.seed) for area in asked.areas or AREAS}
    if asked.list:
        for one in itertools.chain.from_iterable(samples.values()):
            print(f"{one.module_path}:{one.start_pos[0]} {one.operator_name}")
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = [Tree(Path(folder) / str(number)) for number in range(asked.jobs)]
        total = sum((run(area, chosen, trees, asked.out) for area, chosen in samples.items()), Counter[str]())
    print(f"seed {asked.seed}: {_counted(total)}")
    caught, survived = total["killed"], total["survived"]
    return int(caught < asked.least * (caught + survived) or total["locks survived"] > 0)


if __name__ == "__main__":
    sys.exit(main())
