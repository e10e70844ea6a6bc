"""What every test starts from."""

from __future__ import annotations

import lightning.pytorch.callbacks as lightning_callbacks

# Weight averaging by a callback is newer than the oldest Lightning the package runs with.
collect_ignore: list[str] = []
if not hasattr(lightning_callbacks, "EMAWeightAveraging"):
    collect_ignore = [
        "contracts/ecosystem/test_averaging.py",
        "distributed/test_verdict_over_ranks.py",
        "integration/test_averaging.py",
        "regress/test_lerobot_pr_4652.py",
    ]
