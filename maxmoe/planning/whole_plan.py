"""Plan of a module for planning."""

import warnings

from torch import nn

from maxmoe.parallel.dispatch_plan import Dispatch
from maxmoe.parallel.parallelize import check_plan
from maxmoe.parallel.plan import Plan
from maxmoe.parallel.planner import make_plan
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.rules import LogicalRules


def plan_without_warnings(
    module: nn.Module, mesh: Mesh, rules: LogicalRules, dispatch: Dispatch, num_chunks: int, allow_unused: bool
) -> Plan:
    """Make a plan without warnings, which `Explanation.warnings` lists."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = make_plan(module, mesh, rules, allow_unused=allow_unused, dispatch=dispatch)
        check_plan(plan, num_chunks)
    return plan
