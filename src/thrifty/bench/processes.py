"""A fresh process for every measurement, without the seconds that importing torch and transformers takes each time."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from thrifty.bench import clock
from thrifty.bench.clock import TURN
from thrifty.bench.measure import Job, Outcome, measure

StartMethod = Literal["forkserver", "spawn", "fork"]


def start_method() -> StartMethod:
    """How fresh processes begin here.

    `forkserver`: one process has imported everything, computes nothing, and forks a child for each measurement. CUDA
    cannot be used in a fork of a process that has touched it, and importing libraries may touch it: there each process
    starts from nothing (`spawn`).
    """
    import torch

    if torch.cuda.is_available() or not hasattr(os, "fork"):
        return "spawn"
    return "forkserver"


class FreshProcesses:
    """Runs jobs one after the other, each in a process of its own.

    Args:
        method: How a process begins; None chooses for this machine. `fork` copies this process as it is, which must
            not have trained anything: the threads of autograd do not come along.
        run: What a process does with its job.
    """

    def __init__(self, method: StartMethod | None = None, run: Callable[[Job], Outcome] = measure) -> None:
        self.method: StartMethod = method or start_method()
        self.run_job = run
        self._context: Any = multiprocessing.get_context(self.method)
        self.server_seconds = 0.0
        """What the start of a server took."""
        if self.method == "forkserver":
            self._context.set_forkserver_preload(["thrifty.bench.preload"])
            self._serve()

    def renew(self) -> None:
        """Replaces the process that all others are forks of by a new one, for what comes after.

        Its forks inherit its addresses and its order of hashing: the same code then runs some per cent faster or slower
        in all of them, another code path by another amount, and repeats do not show it. With a server for each
        round they do.
        """
        if self.method == "forkserver":
            forkserver._forkserver._stop()  # type: ignore[attr-defined]
            self._serve()

    def _serve(self) -> None:
        begin = time.perf_counter()
        with _no_stderr():  # the server keeps what it starts with; its imports have much to say
            forkserver.ensure_running()
        ready = self._context.Process(target=_nothing)
        ready.start()
        ready.join()
        self.server_seconds = time.perf_counter() - begin

    def run(self, job: Job) -> Outcome:
        """Runs one job and waits for it.

        Returns:
            Its outcome; a process that ended without one gives an outcome with the reason, marked as crashed.

        Raises:
            KeyboardInterrupt: The child is ended first.
        """
        receiver, sender = self._context.Pipe(duplex=False)
        with tempfile.TemporaryDirectory(prefix="thrifty-bench-log-") as folder:
            log = Path(folder) / "log.txt"
            process = self._context.Process(target=_child, args=(sender, self.run_job, job, str(log)))
            process.start()
            sender.close()
            try:
                found = _receive(receiver, process, log)
            finally:
                _end(receiver, process)
        assert found is not None
        return found

    def run_together(self, jobs: Sequence[Job], steps: int) -> list[Outcome]:
        """Runs jobs at once, which take turns of some steps each: at any moment one of them runs, and the others wait.

        What slows the machine down for some seconds then slows all of them alike.

        Args:
            jobs: Each gets a process of its own.
            steps: Of a turn.

        Raises:
            KeyboardInterrupt: The children are ended first.
        """
        found: dict[int, Outcome] = {}
        running: list[tuple[int, Any, Any, Path]] = []
        with tempfile.TemporaryDirectory(prefix="thrifty-bench-log-") as folder:
            try:
                for number, job in enumerate(jobs):
                    ours, theirs = self._context.Pipe()
                    log = Path(folder) / f"log-{number}.txt"
                    process = self._context.Process(target=_child, args=(theirs, self.run_job, job, str(log), steps))
                    process.start()
                    theirs.close()
                    running.append((number, ours, process, log))
                    if (outcome := _receive(ours, process, log)) is not None:
                        found[number] = outcome
                while len(found) < len(jobs):
                    for number, ours, process, log in running:
                        if number not in found:
                            with contextlib.suppress(OSError):  # it has ended meanwhile: what follows says how
                                ours.send(TURN)
                            if (outcome := _receive(ours, process, log)) is not None:
                                found[number] = outcome
            finally:
                for _, ours, process, _ in running:
                    _end(ours, process)
        return [found[number] for number in range(len(jobs))]


def _nothing() -> None:
    """What a process does that only waits for its server."""


def _end(receiver: Connection, process: Any) -> None:
    receiver.close()
    if process.is_alive():
        process.kill()
    process.join()


@contextlib.contextmanager
def _no_stderr() -> Iterator[None]:
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _receive(receiver: Connection, process: Any, log: Path) -> Outcome | None:
    """The process's outcome, or None where it has only ended its turn."""
    try:
        received = receiver.recv()
    except EOFError:
        process.join()
        code = process.exitcode
        said = _tail(log)
        how = f"was ended by signal {-code} ({_signal(-code)})" if code and code < 0 else f"ended with exit code {code}"
        hint = "; perhaps the machine ran out of memory" if code == -signal.SIGKILL else ""
        return Outcome(reason=f"the process {how}{hint}{said}", crashed=True)
    return None if received == TURN else Outcome.from_dict(received)


def _child(sender: Any, run: Callable[[Job], Outcome], job: Job, log: str, turn_steps: int | None = None) -> None:
    # The terminal's Ctrl-C goes to the whole group; the bench decides what becomes of a measurement.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # every trainer collects garbage; what was inherited need not be searched
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    # A fork may have inherited streams of a notebook or a test that lead elsewhere.
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
    clock.turns = clock.Turns(sender, turn_steps) if turn_steps else None
    try:
        outcome = run(job)
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        text = " ".join(str(error).split())
        outcome = Outcome(reason=f"{type(error).__name__}: {text[:300]}", crashed=not _is_out_of_memory(error))
    sender.send(outcome.to_dict())
    sender.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what libraries do at exit costs time and concerns nobody


def _is_out_of_memory(error: BaseException) -> bool:
    from thrifty.safety.oom import is_oom

    return bool(is_oom(error))


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    return f"; its last words: {lines[-1][:200]}" if lines else ""
