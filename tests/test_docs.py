"""The pages in docs say what the code does."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_the_table_of_fields_is_that_of_the_rules() -> None:
    spec = importlib.util.spec_from_file_location("make_tables", DOCS / "make_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (DOCS / "checkpoints.md").read_text()
    assert module.with_table(page) == page, "run: python docs/make_tables.py"
    assert "| `precision` |" in page
