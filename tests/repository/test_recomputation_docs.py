"""docs/recomputation.md has the table that the code makes."""

import pytest

from support.docs_module import DOCS, docs_module


@pytest.mark.filterwarnings("ignore:the rules shard sequences")
def test_the_table_of_what_is_kept_is_up_to_date() -> None:
    tables, text = docs_module("recomputation_tables"), (DOCS / "recomputation.md").read_text()
    assert f"\n{tables.kept()}\n" in text
    assert all(f"\n| {tables.label(policy)} | " in text for policy in tables.POLICIES)
