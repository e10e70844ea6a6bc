"""For scripts that run once, on a machine that nobody can look into: parts that fail alone, a time limit, results kept.

Each part is a process of its own, since a CUDA error spoils whatever the process does afterwards, and a crash ends it. It
gets its share of the time that is left, and writes down what it has found after every step, so whatever ends it, that is
printed. All that was printed is also in ``$OUT/<name>.json``, where the environment variable OUT is set.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.runs import table

RIGHT = "right"
"""A column of this name holds whether a row is as it should be, or None where nobody says."""


LEAST = 5.0
"""Seconds under which a part is not begun: its process would not get through its imports."""


class OutOfTime(BaseException):
    """A part's time is up. No ``Exception``, since torch.compile takes those for a reason to go on without compiling."""


class Table:
    """Rows of plain values."""

    def __init__(self, part: Part, title: str, header: tuple[str, ...]) -> None:
        self.part, self.title, self.header = part, title, list(header)
        self.rows: list[list[Any]] = []

    def add(self, *values: Any) -> None:
        assert len(values) == len(self.header), (self.title, values)
        self.rows.append(list(values))
        self.part.save()


class Part:
    """What one part of a run finds out.

    Args:
        limit: Seconds that it has.
        result: File to write to.
    """

    def __init__(self, limit: float, result: Path) -> None:
        self.end, self.result = time.monotonic() + limit, result
        self.status = "broke off"  # until it has come to its end
        self.tables: list[Table] = []
        self.errors: dict[str, str] = {}
        self.data: dict[str, Any] = {}

    def left(self) -> float:
        """Seconds left."""
        return self.end - time.monotonic()

    def table(self, title: str, *header: str) -> Table:
        """A table that is shown when the part has ended."""
        self.tables.append(Table(self, title, header))
        return self.tables[-1]

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Prints and keeps what goes wrong inside; the part goes on behind it."""
        try:
            yield
        except Exception:
            self.errors[what] = traceback.format_exc()
            print(f"\n{what}: failed\n{self.errors[what]}", flush=True)
            self.save()

    def save(self) -> None:
        """Writes down what has been found so far."""
        tables = [{"title": t.title, "header": t.header, "rows": t.rows} for t in self.tables]
        found = {"status": self.status, "tables": tables, "errors": self.errors, **self.data}
        parts = self.result.with_suffix(".part")
        parts.write_text(json.dumps(found, default=str))
        parts.replace(self.result)


def do_part(function: Callable[[Part], None], until: float, result: Path) -> None:
    """Runs one part, in its own process, up to a point of ``time.time()``: imports have taken some of its time by now."""
    limit = max(1.0, until - time.time())
    part = Part(limit, result)
    faulthandler.dump_traceback_later(limit + 10, exit=True)  # for what no exception ends, such as a kernel that hangs

    def ring(*_: Any) -> None:
        raise OutOfTime

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        function(part)
        part.status = "ok"
    except OutOfTime:
        part.status = f"out of time after {limit:.0f} s"
        part.errors["the part"] = traceback.format_exc()
    except Exception:
        part.status = "failed"
        part.errors["the part"] = traceback.format_exc()
        print(part.errors["the part"], flush=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        part.save()
        faulthandler.cancel_dump_traceback_later()


def run_parts(
    name: str, shares: Mapping[str, float], seconds: float, command: list[str], about: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Runs parts one after the other and prints what they found.

    Args:
        name: Of the file under ``$OUT``.
        shares: Share of the time of each part, by name.
        seconds: For all together.
        command: Arguments after which ``--part NAME --until TIME --result FILE`` run one, by :func:`do_part`.
        about: What is known of the machine.

    Returns:
        What each part wrote down.
    """
    end, waiting = time.monotonic() + seconds, dict(shares)
    found: dict[str, dict[str, Any]] = {}
    _write(name, about, found)
    with tempfile.TemporaryDirectory() as folder:
        for part in shares:
            limit = (end - time.monotonic()) * waiting[part] / sum(waiting.values())
            del waiting[part]
            print(f"\n===== {part} (up to {limit:.0f} s)", flush=True)
            start, result = time.monotonic(), Path(folder, f"{part}.json")
            if limit < LEAST:
                found[part] = {"status": "left out, the time is up", "tables": [], "errors": {}}
            else:
                arguments = ["--part", part, "--until", f"{time.time() + limit:.1f}", "--result", str(result)]
                try:
                    code: Any = subprocess.run([*command, *arguments], timeout=limit + 20).returncode
                except subprocess.TimeoutExpired:
                    code = "a kill"
                found[part] = json.loads(result.read_text()) if result.exists() else {"tables": [], "errors": {}}
                if code != 0:
                    found[part]["status"] = (
                        f"{found[part].get('status', 'nothing found')}, its process ended with {code}"
                    )
            found[part]["seconds"] = time.monotonic() - start
            _show(part, found[part])
            _write(name, about, found)
    return found


def all_well(found: Mapping[str, dict[str, Any]]) -> bool:
    """Whether every part came to its end, nothing in it failed, and all its rows are as they should be."""
    return all(part["status"] == "ok" and not part["errors"] and not _wrong(part) for part in found.values())


def _wrong(part: Mapping[str, Any]) -> int:
    columns = [(t["header"].index(RIGHT), t["rows"]) for t in part["tables"] if RIGHT in t["header"]]
    return sum(row[column] is False for column, rows in columns for row in rows)


def _show(name: str, part: Mapping[str, Any]) -> None:
    for found in part["tables"]:
        table(found["title"], found["header"], [[_in_words(value) for value in row] for row in found["rows"]])
    failures = f"{len(part['errors'])} failures, {_wrong(part)} rows not right"
    print(f"\n{name}: {part['status']}, {part['seconds']:.0f} s, {failures}", flush=True)


def _in_words(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _write(name: str, about: dict[str, Any], found: Mapping[str, Any]) -> None:
    if not os.environ.get("OUT"):
        return
    path = Path(os.environ["OUT"], f"{name}.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"about": about, "parts": found}, indent=1))
    except OSError as error:  # what is printed is left
        print(f"{path} could not be written: {error}", file=sys.stderr)
