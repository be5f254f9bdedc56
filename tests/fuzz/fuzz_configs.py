"""Makes configs of values of every kind and size, and layers and decoders of the accepted configs.

A config is refused with a ValueError that names a field and has one line, or a layer of it computes a few tokens:
finite numbers, without much memory.
"""

import dataclasses
import math
from random import Random
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import torch

from maxmoe import ExpertNorms, MoE, MoEConfig, SiTU, StatsAccumulator, ZeroComputation, presets
from maxmoe.config import Component
from maxmoe.families.family import families
from maxmoe.families.inkling import SharedExpertScores
from maxmoe.families.muse_spark import ScaledLogits
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.nn import Selection
from support.memory import at_most

FIELDS = dataclasses.fields(MoEConfig)
WORDS = sorted({word for field in FIELDS for word in get_args(field.type) if isinstance(word, str)})
VALUES: list[Any] = [
    *(0, 1, 2, 3, 4, 7, 8, 16, -1, 2**31 - 1, 2**31, 2**63, 2**64, 10**400, True, False, None),
    *(0.0, -0.0, 0.5, 1.0, 1.25, 1e-3, 1e-300, 1e9, 1e39, 1e308, -1.0, math.inf, -math.inf, math.nan),
    *("", "7", "no", "nan", "True", "Silu", b"silu", [7], {"a": 1}, (), 1j, object, MoEConfig),
    *(np.int64(4), np.float32(0.5), np.float64(0.5), np.bool_(True)),
    *(np.array([1, 2]), torch.tensor(4), torch.tensor(0.5)),
    *(SiTU(gate_softcap=4.0, up_softcap=25.0), ZeroComputation(zero=1, copy=2, constant=1), ExpertNorms(output=True)),
    *(Selection(by="logits"), SharedExpertScores(), ScaledLogits(scale=0.5)),
]
ARRAYS = (np.ndarray, torch.Tensor)  # not in files
SMALL = 64  # sizes that are computed
BYTES = 2**28  # memory for a case, including imports


def value_for(random: Random, default: Any) -> Any:
    """A random value of the type of the default, or of any type."""
    if random.random() < 0.2:
        return random.choice(VALUES)
    if isinstance(default, bool):
        return random.random() < 0.5
    if isinstance(default, str):
        return random.choice(WORDS)
    if isinstance(default, int):
        return random.choice([1, 1, 2, 3, 4, 8])
    return random.choice([None, 0, 1, 0.0, 0.5, 1.0, 2.5])


def drawn_fields(random: Random, kind: type[Any], sizes: dict[str, int], share: float) -> dict[str, Any]:
    """Some fields of a config, the others at their default."""
    fields: dict[str, Any] = dict(sizes)
    for field in dataclasses.fields(kind):
        default = sizes.get(field.name, field.default)
        if field.name != "moe" and random.random() < share:
            fields[field.name] = value_for(random, default)
    return fields


def made(kind: type[Any], fields: dict[str, Any], names: list[str]) -> Any:
    """Make a config; None if it is refused with a good error."""
    try:
        return kind(**fields)
    except ValueError as error:
        message = str(error)
        if not any(name in message for name in names) or len(message) > 1000:
            raise AssertionError(f"{fields}: {message[:300]!r}") from error
        return None


def layer_config(random: Random) -> str:
    """A MoEConfig, and its layer on a few tokens."""
    sizes = {"hidden_size": 4, "intermediate_size": 3, "num_experts": 8, "top_k": 2}
    fields = drawn_fields(random, MoEConfig, sizes, random.choice([0.03, 0.1, 0.3]))
    settings = made(MoEConfig, fields, [field.name for field in FIELDS])
    if settings is None:
        return "layer refused"
    if max(value for value in vars(settings).values() if type(value) is int) > SMALL:
        return "layer too large to compute"
    moderate = all(abs(value) < 100 for value in vars(settings).values() if isinstance(value, int | float))
    compute(MoE(settings), torch.randn(2, 3, settings.hidden_size), moderate, settings)
    return "layer computed"


def compute(layer: MoE, x: torch.Tensor, moderate: bool, settings: Any) -> None:
    """Forward and backward."""
    if settings.load_balance_scope == "step":
        StatsAccumulator(layer)
    output = layer(x.requires_grad_())
    (output.hidden_states.sum() + output.aux_loss).backward()
    if moderate:
        assert output.hidden_states.isfinite().all() and output.aux_loss.isfinite(), f"not finite: {settings}"
        assert x.grad is not None and x.grad.isfinite().all(), f"gradient not finite: {settings}"


def decoder_config(random: Random) -> str:
    """A DecoderConfig, and its decoder on a few tokens."""
    sizes = {"vocab_size": 8, "hidden_size": 4, "num_layers": 2, "num_heads": 2, "intermediate_size": 3}
    fields = drawn_fields(random, DecoderConfig, sizes, random.choice([0.1, 0.3, 0.6]))
    moe = MoEConfig(hidden_size=4, intermediate_size=3, num_experts=4, top_k=2)
    fields["moe"] = random.choice([None, moe, moe, random.choice(VALUES)])
    settings = made(DecoderConfig, fields, [field.name for field in dataclasses.fields(DecoderConfig)])
    if settings is None:
        return "decoder refused"
    sizes = {name: value for name, value in vars(settings).items() if type(value) is int}
    if max(value for name, value in sizes.items() if name != "max_sequence_length") > SMALL:
        return "decoder too large to compute"
    length = min(3, settings.max_sequence_length)
    output = Decoder(settings)(torch.zeros(2, length, dtype=torch.int64))
    if settings.norm_eps > 1e-30 and settings.rope_theta > 1e-30:
        assert output.logits.isfinite().all(), f"not finite: {settings}"
    return "decoder computed"


def family_config(random: Random) -> str:
    """A config of transformers with some values replaced."""
    name = random.choice(list(families()))
    family = families()[name]
    places = {ours: their if isinstance(their, str) else their.attribute for ours, their in family.fields.items()}
    theirs = {their: getattr(family.preset(), ours) for ours, their in places.items()}
    theirs |= {their: 4 for their, value in theirs.items() if isinstance(value, Component)}
    known = {"norm_topk_prob": False, "router_aux_loss_coef": 0.1, "hidden_act": "silu", "num_experts_per_tok": 2}
    known["shared_expert_intermediate_size"] = theirs.get("moe_intermediate_size", 8)
    theirs |= {their: value for their, value in known.items() if their in theirs}
    theirs |= {"post_norm_eps": 1e-8} if "rms_norm_eps" in theirs else {}
    theirs |= {their: values[0] for their, values in family.required.items()}
    if family.layer_fields:
        theirs |= {"swiglu_limits": [7.0, 7.0], "swiglu_limits_shared": random.choice([None, [0.0, 0.0], [0.0, 2.0]])}
        theirs |= {"router_hidden_size": 8, "rms_norm_eps": 1e-6}
    for their in theirs:
        if random.random() < 0.1:
            theirs[their] = random.choice([value for value in VALUES if not isinstance(value, ARRAYS)] + WORDS)
    fields = {"config": SimpleNamespace(model_type=name, num_hidden_layers=2, **theirs)}
    if family.layer_fields:
        fields["layer"] = random.choice([None, 0, 1, 2])
    settings = made(presets.from_transformers, fields, [*theirs, *family.fields, *family.layer_fields, "layer"])
    return "family refused" if settings is None else "family read"


def one_case(random: Random) -> str:
    """Do one of these."""
    torch.manual_seed(random.getrandbits(60))
    with at_most(BYTES):
        return random.choice([layer_config, layer_config, decoder_config, family_config])(random)
