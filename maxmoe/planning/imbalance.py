"""Plan of a model whose routing is uneven."""

from dataclasses import replace

from maxmoe.parallel.plan.plan import Plan


def with_imbalance(plan: Plan, imbalance: float, *, has_stages: bool) -> Plan:
    """Return a plan that assumes an imbalance in every layer; 1.0 for balanced routing.

    Args:
        plan: plan of the model.
        imbalance: number of rows of the rank with the most rows over the mean, if every rank computes its experts.
        has_stages: whether the model is cut into pipeline stages, whose layers have plans of their own.

    Raises:
        ValueError: for an imbalance that is no number, below 1, or above the number of ranks that share the experts,
            for layers whose strategy does not depend on it, and with pipeline stages.
    """
    if not isinstance(imbalance, int | float):
        raise ValueError(f"imbalance must be a number, got {imbalance!r}")
    if imbalance == 1.0:
        return plan
    if has_stages:
        raise ValueError(f"imbalance must be 1.0 with pipeline stages, got {imbalance}")
    for path, (_, dispatch) in plan.layers.items():
        num_ranks = dispatch.mesh.size(*dispatch.group_axes)
        if not dispatch.strategy_class.moves_experts:
            raise ValueError(
                f"imbalance ({imbalance}) needs dispatch='least_loaded' and tokens that are sent, got "
                f"{dispatch.strategy!r} with tokens sent over {dispatch.token_axes} in {path or 'the layer'}: other "
                "strategies are planned for balanced routing"
            )
        if not 1.0 <= imbalance <= num_ranks:
            raise ValueError(
                f"imbalance must be at least 1 and at most the number of ranks that share the experts ({num_ranks}), "
                f"got {imbalance}"
            )
    modules = dict(plan)
    for path, module in plan.items():
        if module.dispatch is not None:
            modules[path] = replace(module, dispatch=replace(module.dispatch, imbalance=imbalance))
    return replace(plan, modules=modules)
