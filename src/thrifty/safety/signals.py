"""A polite end: signals set a flag, the loop saves at its next step boundary and leaves with the code the caller
expects.

with SignalGuard() as guard:
    for batch in loader:
        ...
        if guard.received is not None:
            save()
            raise Interrupted(guard.received)
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from thrifty.errors import ThriftyError

if TYPE_CHECKING:
    import torch.distributed as dist

_EXIT_CODES = {"SIGINT": 130}
"""128 + signal, as shells report it. SIGUSR1 (Slurm's `--signal=USR1@120`) announces SIGTERM and ends like it."""


class Interrupted(ThriftyError):
    """Training was asked to end, has saved, and can be resumed.

    Attributes:
        exit_code: 130 after SIGINT, 143 after SIGTERM or a preemption notice.
    """

    def __init__(self, signum: int, checkpoint: str | os.PathLike[str] | None = None) -> None:
        self.signum, self.checkpoint = signum, checkpoint
        name = signal.Signals(signum).name
        self.exit_code = _EXIT_CODES.get(name, 143)
        where = f"saved {os.fspath(checkpoint)}, go on with --resume" if checkpoint is not None else "nothing was saved"
        super().__init__(f"ended by {name}: {where}")


class SignalGuard:
    """Catches SIGTERM, SIGINT and SIGUSR1 while it is entered; puts the old handlers back.

    A second SIGINT raises KeyboardInterrupt at once, for a loop that does not reach its next boundary. Outside the main
    thread, where Python allows no handlers, it stays passive. SIGUSR1 is left alone where somebody listens to it.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._old: dict[int, Any] = {}

    def __enter__(self) -> SignalGuard:
        if threading.current_thread() is not threading.main_thread():
            return self
        wanted = [signal.SIGTERM, signal.SIGINT]
        preemption = getattr(signal, "SIGUSR1", None)  # not on Windows
        if preemption is not None and signal.getsignal(preemption) == signal.SIG_DFL:
            wanted.append(preemption)
        for signum in wanted:
            self._old[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._old.items():
            signal.signal(signum, handler if handler is not None else signal.SIG_DFL)
        self._old.clear()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        # Only a flag: saving here could run inside a half-done optimizer step.
        if signum == signal.SIGINT and self.received is not None:
            raise KeyboardInterrupt
        self.received = signum


class SharedFlag:
    """Lets all processes of a run agree on a signal at the same step boundary, without waiting for one another.

    Each boundary reads the reduction that the boundary before it started, so the exchange runs beside a whole step; the
    answer is one step old and the same everywhere. The reduction uses host memory: the accelerator is not synchronised.

    Args:
        group: A gloo group over all processes.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._pending: tuple[Any, Any] | None = None

    def boundary(self, received: int | None) -> int | None:
        """Call at every step boundary, on every process, with this process's signal; returns the agreed one, or
        None."""
        import torch
        import torch.distributed as dist

        agreed = 0
        if self._pending is not None:
            work, value = self._pending
            work.wait()
            agreed = int(value.item())
        value = torch.tensor([received or 0], dtype=torch.int64)
        work = dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = (work, value)
        return agreed or None
