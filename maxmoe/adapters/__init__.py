"""Adapters of experts: low-rank factors that a library such as PEFT keeps around a module.

A wrapper of PEFT hands its factors to the module that it wraps, for the time of a call. The module gives them to
`maxmoe.ops.expert_ffn` or `gmm`, so that W + scale * a b is not formed. PEFT's code and the user's are unchanged.
"""

from maxmoe.adapters.factors import factors_of, hand_over
from maxmoe.adapters.peft import connect, connect_if_imported, takes_factors, without_adapters
from maxmoe.adapters.stacked import factor_names, packed_as_by_peft, with_stacked_factors, wrappers_of

__all__ = [
    "connect",
    "connect_if_imported",
    "factor_names",
    "factors_of",
    "hand_over",
    "packed_as_by_peft",
    "takes_factors",
    "with_stacked_factors",
    "without_adapters",
    "wrappers_of",
]
