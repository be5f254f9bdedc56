"""A plan with its predicted costs."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.planning.plan_search.step_cost import StepCost
from maxmoe.sharding.mesh import STAGE_AXIS
from maxmoe.sharding.rules import LogicalRules


@dataclass(frozen=True, kw_only=True)
class PredictedPlan:
    """A plan and its predicted costs, on the rank that takes most time or needs most memory.

    Args:
        rules: the rules, or the name of their preset or file.
        mesh: size of each axis larger than one, the outermost first.
        dispatch: strategy for experts on other ranks.
        num_chunks: number of chunks of the tokens of a MoE layer.
        recompute: names of the parts that are recomputed in the backward.
        num_micro_batches: number of micro-batches of a step; one without pipeline stages.
        memory: bytes of the rank that needs most.
        compute: seconds of products, memory traffic and the optimizer.
        hidden: seconds of communication that runs beside products.
        exposed: seconds of all other communication.
        bubble: seconds in which the rank waits for other stages.
        flops: floating-point operations of a step.
        intra_bytes: bytes that the rank sends within its node in a step.
        inter_bytes: bytes that it sends to other nodes in a step.
        uncounted: what is not counted, because the forward of the module cannot be traced; None if all is.
    """

    rules: LogicalRules | str
    mesh: dict[str, int]
    dispatch: Dispatch
    num_chunks: int
    recompute: tuple[str, ...]
    num_micro_batches: int
    memory: int
    compute: float
    hidden: float
    exposed: float
    bubble: float
    flops: float
    intra_bytes: int
    inter_bytes: int
    uncounted: str | None = None

    @classmethod
    def of(cls, cost: StepCost, memory: Tensor, index: int, **plan: Any) -> "PredictedPlan":
        """Make a plan with the costs of one of many meshes.

        Args:
            cost: costs in many meshes.
            memory: ``(N,)``, bytes in each.
            index: index of the mesh.
            **plan: the settings of the plan.

        Returns:
            The plan.
        """
        values: dict[str, Any] = {"memory": int(memory[index])}
        for name in ("compute", "hidden", "exposed", "bubble", "flops"):
            values[name] = float(getattr(cost, name)[index])
        for name in ("intra_bytes", "inter_bytes"):
            values[name] = int(getattr(cost, name)[index])
        return cls(**plan, **values)

    @property
    def seconds(self) -> float:
        """Predicted time of a step."""
        return self.compute + self.exposed + self.bubble

    @property
    def has_stages(self) -> bool:
        """Whether the plan cuts the model into pipeline stages."""
        return STAGE_AXIS in self.mesh

    def is_same(self, other: "PredictedPlan") -> bool:
        """Return whether another plan differs from this one in the name of its rules only.

        Args:
            other: another plan.

        Returns:
            Whether all else is equal, costs included.
        """
        return replace(self, rules=other.rules) == other

    @property
    def call(self) -> str:
        """Python code that runs a `model` with the plan."""
        rules = repr(self.rules) if isinstance(self.rules, str) else "rules"
        options = [f"Mesh({self.mesh or {'data': 1}})", rules, f"dispatch={self.dispatch!r}"]
        if self.num_chunks > 1:
            options.append(f"num_chunks={self.num_chunks}")
        options.append(f"recompute={self.recompute!r}")
        if not self.has_stages:
            return f"model = maxmoe.parallelize(model, {', '.join(options)})"
        options.append(f'schedule="1f1b", num_micro_batches={self.num_micro_batches}')
        return f"pipeline = maxmoe.pipeline(model, {', '.join(options)}, loss=loss)"
