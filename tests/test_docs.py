"""The pages in docs say what the code does."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_amp_plus.fp8.coverage.report import REASONS

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_the_table_of_fields_is_that_of_the_rules() -> None:
    spec = importlib.util.spec_from_file_location("make_tables", DOCS / "make_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (DOCS / "checkpoints.md").read_text()
    assert module.with_table(page) == page, "run: python docs/make_tables.py"
    assert "| `precision` |" in page


PAGES = sorted(page.name for page in DOCS.glob("*.md") if "```python" in page.read_text())


# What the page says of its example.
SHOWN = {
    "fp8_coverage.md": (
        r"^layer\.0 .* e4m3 \(emulated\) ",
        r"^layer\.2 .* bf16 .* shape$",
        r"^layer\.0 +grad_output +current ",
        r" rowwise\? ",
    )
}


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs_as_it_stands_and_shows_what_it_says(page: str, tmp_path: Path) -> None:
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.DOTALL | re.MULTILINE))
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stderr[-3000:]
    for pattern in SHOWN.get(page, ()):
        assert re.search(pattern, run.stdout, flags=re.MULTILINE), pattern


def test_every_reason_not_to_be_in_fp8_is_on_the_page() -> None:
    page = (DOCS / "fp8_coverage.md").read_text()
    table = page.partition("| reason | means |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE) == list(REASONS)
