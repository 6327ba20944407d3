"""Two living gloo processes."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

TIMEOUT = 150.0
"""Seconds for a job."""
STARTUP = 600.0
"""Seconds until both processes have found each other: on a busy machine their imports take minutes."""


class Pair:
    """Two living processes; a job costs no start-up. When one dies, the next job finds two new ones."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.logs = []
        self.ranks: list[subprocess.Popen] = []

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.logs = [open(self.log / f"rank{rank}.log", "w+") for rank in range(2)]  # noqa: SIM115
        for rank in range(2):
            env = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, str(Path(__file__).parent / "contract" / "pair_worker.py")]
            self.ranks.append(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.logs[rank], text=True, env=env
                )
            )
        self._answers("READY", STARTUP)

    def _answers(self, word: str, timeout: float) -> list[str]:
        """What each process writes behind `word`; both are ended where one is silent for too long."""
        # Two that wait for each other would wait for half an hour; a SIGTERM they would answer at a step boundary.
        watchdog = threading.Timer(timeout, lambda: [process.kill() for process in self.ranks])
        watchdog.start()
        found = []
        try:
            for rank, process in enumerate(self.ranks):
                for line in process.stdout:
                    if line.startswith(word):
                        found.append(line.removeprefix(word).strip())
                        break
                else:
                    told = Path(self.logs[rank].name).read_text()[-3000:]
                    self.close()
                    pytest.fail(f"rank {rank} died: {told}")
        finally:
            watchdog.cancel()
        return found

    def run(self, **job) -> dict:
        if not self.ranks:
            self._start()
        for process in self.ranks:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        answers = [json.loads(text) for text in self._answers("ANSWER", TIMEOUT)]
        errors = [answer["error"] for answer in answers if "error" in answer]
        assert not errors, errors[0]
        assert all(answer["world"] == 2 for answer in answers)
        assert all(answer["agreed"] for answer in answers), "the two processes hold different weights"
        return answers[0]

    def close(self) -> None:
        for process in self.ranks:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self.ranks:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for log in self.logs:
            log.close()
        self.ranks, self.logs = [], []
