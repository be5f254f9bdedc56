"""docs/optimizers.md has the table that the code makes."""

import pytest

from support.docs_module import DOCS, docs_module


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the rules shard sequences")
def test_the_table_of_planned_meshes_is_up_to_date() -> None:
    assert f"\n{docs_module('optimizer_tables').traffic()}\n" in (DOCS / "optimizers.md").read_text()
