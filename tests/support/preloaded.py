"""Imported once, by the process that ranks of tests are forked from: what takes long, and what most of them import."""

import importlib

import functorch.compile  # noqa: F401  torch.compile imports it at its first use
import peft  # noqa: F401
import pytest  # noqa: F401, the main module of the process that ranks belong to
import torch._dynamo  # noqa: F401

import maxmoe.optim
import maxmoe.parallel
import maxmoe.pipelining
import maxmoe.testing  # noqa: F401
from maxmoe.ranks.rank_processes import PRELOADED
from maxmoe.sharding import LogicalRules
from maxmoe.sharding.rules import PRESETS
from parallel import trainings  # noqa: F401
from support import adapted_decoders, dispatched_layer, replaced_models, run_ranks, staged_decoder  # noqa: F401
from support.small_models import import_models

for module in PRELOADED:
    importlib.import_module(module)
import_models("gpt_oss", "mixtral", "qwen3_moe")
for preset in PRESETS.glob("*.yaml"):
    LogicalRules.load(preset.stem)  # keeps the rules: parsed once
