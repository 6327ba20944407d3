from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from thrifty.safety.signals import Interrupted, SignalGuard

LOOP = """
import sys, time
from thrifty.safety.signals import Interrupted, SignalGuard
try:
    with SignalGuard() as guard:
        print("ready", flush=True)
        for step in range(1000):
            time.sleep(0.02)
            if guard.received is not None:
                print("saved", step, flush=True)
                raise Interrupted(guard.received, f"checkpoint-{step}")
except Interrupted as error:
    print(error, flush=True)
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGUSR1", 143)])
def test_a_real_signal_ends_the_loop_at_its_boundary(name: str, code: int) -> None:
    with subprocess.Popen([sys.executable, "-c", LOOP], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.Signals[name])
        rest = child.stdout.read()
    assert child.returncode == code
    assert "saved" in rest
    assert f"ended by {name}: saved checkpoint-" in rest
    assert "--resume" in rest


def test_old_handlers_come_back_also_after_an_error() -> None:
    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    with pytest.raises(ZeroDivisionError), SignalGuard():
        _ = 1 / int(signal.getsignal(signal.SIGTERM) == before[0])
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before


def test_a_second_interrupt_does_not_wait() -> None:
    with SignalGuard() as guard:
        os.kill(os.getpid(), signal.SIGINT)
        assert guard.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_listener_for_usr1_is_left_alone() -> None:
    heard: list[int] = []
    old = signal.signal(signal.SIGUSR1, lambda s, f: heard.append(s))
    try:
        with SignalGuard() as guard:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert heard == [signal.SIGUSR1]
            assert guard.received is None
    finally:
        signal.signal(signal.SIGUSR1, old)


def test_other_threads_are_passive() -> None:
    seen: list[object] = []

    def work() -> None:
        with SignalGuard() as guard:
            seen.append(guard.received)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None]


def test_exit_codes() -> None:
    assert Interrupted(signal.SIGINT).exit_code == 130
    assert Interrupted(signal.SIGTERM).exit_code == 143
    assert "nothing was saved" in str(Interrupted(signal.SIGTERM))


GANG = """
import sys, torch.distributed as dist
from thrifty.safety.signals import SharedFlag
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
flag, stopped = SharedFlag(), None
for step in range(10):
    agreed = flag.boundary(15 if rank == 1 and step >= 4 else None)
    if agreed:
        stopped = (step, agreed)
        break
print(stopped)
dist.barrier()
dist.destroy_process_group()
"""


def test_two_processes_stop_at_the_same_boundary(tmp_path) -> None:
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", GANG, str(rank), str(tmp_path / "rendezvous")], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    answers = [run.communicate(timeout=60)[0].strip() for run in runs]
    assert answers == ["(5, 15)", "(5, 15)"]
