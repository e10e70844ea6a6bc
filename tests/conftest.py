"""What every test starts from."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import lightning.pytorch.callbacks as lightning_callbacks
import pytest

# Weight averaging by a callback is newer than the oldest Lightning the package runs with.
collect_ignore: list[str] = []
if not hasattr(lightning_callbacks, "EMAWeightAveraging"):
    collect_ignore = [
        "contracts/ecosystem/test_averaging.py",
        "distributed/test_verdict_over_ranks.py",
        "integration/test_averaging.py",
        "regress/test_lerobot_pr_4652.py",
    ]


@pytest.fixture(autouse=True)
def log_levels() -> Iterator[None]:
    """A test that runs an example's main in this process leaves Lightning's log as it was."""
    loggers = [logging.getLogger(name) for name in ("lightning.fabric", "lightning.pytorch")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)
