"""Imported once, by the process that ranks of tests are forked from: what most of them import."""

import importlib

import pytest  # noqa: F401, the main module of the process that ranks belong to
import torch._dynamo  # noqa: F401
import transformers  # noqa: F401

import maxmoe.parallel
import maxmoe.pipelining  # noqa: F401
from maxmoe.ranks.rank_processes import PRELOADED
from maxmoe.sharding import LogicalRules
from maxmoe.sharding.rules import PRESETS
from support import run_ranks  # noqa: F401

for module in PRELOADED:
    importlib.import_module(module)
for preset in PRESETS.glob("*.yaml"):
    LogicalRules.load(preset.stem)  # keeps the rules: parsed once
