"""MaxText's rule tables in tests/golden/sharding.json, and the specs that flax resolved.

MaxText commit e591f30c; 9056a35a for fsdp-as-dp-for-attn, which is newer.
"""

import json
from typing import NamedTuple

from maxmoe.sharding import LogicalRules, PartitionSpec
from support.golden_fixtures import FOLDER


class Table(NamedTuple):
    """The rules of one of MaxText's files, and pairs of logical names and the spec that they resolve to."""

    name: str
    rules: LogicalRules
    cases: list[tuple[tuple[str | None, ...], PartitionSpec]]


def golden_tables() -> list[Table]:
    """All eight rule tables."""
    return [
        Table(
            table["rule"],
            LogicalRules(table["rules"]),
            [(tuple(case["logical"]), PartitionSpec(*case["spec"])) for case in table["cases"]],
        )
        for table in json.loads((FOLDER / "sharding.json").read_text())
    ]
