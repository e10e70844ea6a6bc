"""Runs a function on several gloo ranks, each a process of its own, and fails on a hang or an error on any rank."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class RanksFailed(AssertionError):
    """A rank raised, died or hung; the message holds every rank's output."""


def run_on_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 90.0, **kwargs: Any
) -> list[Any]:
    """Calls ``function(*args, **kwargs)`` on ``world_size`` ranks and returns what each returned, by rank.

    ``function`` must be importable (a module's top level) and its arguments and results picklable. The process group is
    set up before the call from the usual environment variables, which a Lightning Trainer with ``strategy="ddp"`` finds
    too.

    Raises:
        RanksFailed: If any rank raised, died or was still running after ``timeout`` seconds.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job.pickle")
        module = function.__module__
        if module == "__main__":  # a script's own function: the ranks load the script by its path
            module = str(Path(sys.modules["__main__"].__file__ or "").resolve())
        job.write_bytes(pickle.dumps((module, function.__qualname__, args, kwargs)))
        processes, outputs = [], []
        for rank in range(world_size):
            environment = {
                **os.environ,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "NODE_RANK": "0",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
            }
            output = Path(folder, f"output-{rank}.txt")
            outputs.append(output)
            with output.open("wb") as file:
                command = [
                    sys.executable,
                    "-u",
                    "-m",
                    "tests.support.ranks",
                    str(job),
                    str(Path(folder, f"result-{rank}")),
                ]
                processes.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        cwd=ROOT,
                        start_new_session=True,
                    )
                )
        hung = _wait(processes, timeout)
        results: list[Any] = []
        failures = []
        for rank in range(world_size):
            path = Path(folder, f"result-{rank}")
            if path.exists():  # whatever happened at teardown, the function itself came to its end
                results.append(pickle.loads(path.read_bytes()))
            else:
                state = f"hung for {timeout:g} s" if rank in hung else f"ended with {processes[rank].returncode}"
                text = outputs[rank].read_text(errors="replace")
                failures.append(f"--- rank {rank} {state}\n{text[-4000:]}")
        if failures:
            raise RanksFailed("\n".join(failures))
        return results


def _wait(processes: list[subprocess.Popen[bytes]], timeout: float) -> set[int]:
    """Waits for all; once one has failed the others get a few seconds more. Returns the ranks that had to be killed."""
    deadline = time.monotonic() + timeout
    while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
        if any(p.poll() for p in processes):
            deadline = min(deadline, time.monotonic() + 10.0)
        time.sleep(0.05)
    hung = {rank for rank, p in enumerate(processes) if p.poll() is None}
    for rank in hung:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(processes[rank].pid, signal.SIGKILL)
        processes[rank].wait()
    return hung


def _main(job: str, result: str) -> None:
    import importlib

    import torch
    import torch.distributed as dist

    module, name, args, kwargs = pickle.loads(Path(job).read_bytes())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if module.endswith(".py"):
        sys.path.insert(0, str(Path(module).parent))
        module = Path(module).stem
    function = getattr(importlib.import_module(module), name)
    value = function(*args, **kwargs)
    temporary = Path(result + ".part")
    temporary.write_bytes(pickle.dumps(value))
    # gloo aborts now and then when one process leaves while another still talks to it.
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    temporary.rename(result)


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2])
