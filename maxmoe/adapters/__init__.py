"""Adapters of experts: low-rank factors that a library such as PEFT keeps around a module.

A wrapper of PEFT hands its factors to the module that it wraps, for the time of a call. The module gives them to
`maxmoe.ops.expert_ffn` or `gmm`, so that W + scale * a b is not formed. PEFT's code and the user's are unchanged.
"""

from maxmoe.adapters.factors import factors_of as factors_of
from maxmoe.adapters.factors import hand_over as hand_over
from maxmoe.adapters.peft import adapted_module as adapted_module
from maxmoe.adapters.peft import adapters_around as adapters_around
from maxmoe.adapters.peft import check_adapters as check_adapters
from maxmoe.adapters.peft import connect_when_imported
from maxmoe.adapters.peft import unwrapped_name as unwrapped_name
from maxmoe.adapters.peft import without_adapters as without_adapters
from maxmoe.adapters.peft import wrappers_of as wrappers_of
from maxmoe.adapters.shared_outer import share_outer_factors as share_outer_factors
from maxmoe.adapters.stacked import adapter_state_dict as adapter_state_dict
from maxmoe.adapters.stacked import factor_names as factor_names
from maxmoe.adapters.stacked import packed_as_by_peft as packed_as_by_peft
from maxmoe.adapters.stacked import planned_copy as planned_copy
from maxmoe.adapters.stacked import stacked_factors as stacked_factors

connect_when_imported()
