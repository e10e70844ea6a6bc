"""Checkpoints of one epoch in every precision, for tests that read them; those that change one make a copy first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.refusals import PRECISIONS, plugin_for, save_run


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By precision; the paths do not name it, so that a message that does has it from elsewhere."""
    return {p: save_run(tmp_path_factory.mktemp("saved") / "run.ckpt", plugin_for(p)) for p in PRECISIONS}


@pytest.fixture(scope="session")
def fp16(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["16-mixed"]


@pytest.fixture(scope="session")
def bf16(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["bf16-mixed"]
