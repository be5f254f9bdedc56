"""Every activation of experts, as arguments of `expert_ffn`: with the constants that it needs, and with limits."""

from typing import Any, get_args

from maxmoe.config.components import Activation, SiTU
from maxmoe.families.step3p7 import LimitedOutput

Arguments = dict[str, Any]

# In the range of the preactivations of tests.
NEEDED: dict[str, Arguments] = {"situ": {"gate_softcap": 1.5, "up_softcap": 0.8}}
SITU: Arguments = {"activation": "situ", **NEEDED["situ"]}
LIMITED_OUTPUT: Arguments = {"activation": "silu", "limit": 0.25, "limit_target": "output"}

EACH: list[Arguments] = [{"activation": name, **NEEDED.get(name, {})} for name in get_args(Activation)]
PLAIN: list[Arguments] = [arguments for arguments in EACH if arguments["activation"] not in ("swigluoai", "situ")]
LIMITED: list[Arguments] = [{**arguments, "limit": 0.75} for arguments in EACH if "gate_softcap" not in arguments]
LIMITED += [LIMITED_OUTPUT, {"activation": "gelu", "limit": 0.3, "limit_target": "output"}]
# The arguments that a `MoEConfig` can have.
OF_CONFIGS = [*EACH, *LIMITED[:-1]]


def name_of(arguments: Arguments) -> str:
    """The name of a test case."""
    return "-".join(map(str, arguments.values()))


def fields(arguments: Arguments) -> Arguments:
    """Return the arguments as fields of `MoEConfig`."""
    if arguments["activation"] == "situ":
        return {"activation": SiTU(**NEEDED["situ"])}
    if arguments.get("limit_target") == "output":
        return {"activation": LimitedOutput(limit=arguments["limit"])}
    renamed = {"limit": "activation_limit"}
    return {renamed.get(name, name): value for name, value in arguments.items()}
