"""The interfaces of the layer to dispatchers and to experts."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from maxmoe.nn import Dispatched, ExpertRunner, Future, LocalDispatcher, LocalExperts, TopK
from maxmoe.ops import RaggedPlan
from support.moe_layers import Options, each_compute, make, tokens

each_weights = pytest.mark.parametrize("weights_to", ["output", "input"])


@each_weights
@each_compute
def test_hooks_on_the_experts(compute: Options, weights_to: str) -> None:
    """They fire once for each window of rows, can change the output, and see the gradient."""
    layer = make(apply_weights_to=weights_to, **compute)
    x, begun, calls, seen = tokens(layer).requires_grad_(), [], [], []
    whole = layer(x).hidden_states

    def double(_module: torch.nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        calls.append(arguments)
        return 2 * output

    layer.experts.register_forward_pre_hook(lambda *_: begun.append(True))
    layer.experts.register_forward_hook(double)
    layer.experts.register_full_backward_hook(lambda _module, _inputs, outputs: seen.append(outputs[0]))
    hidden_states = layer(x).hidden_states
    torch.testing.assert_close(hidden_states, 2 * whole, rtol=1e-13, atol=0)
    (rows, _weights, plan), *others = calls
    assert len(others) == (2 if "overflow" in compute else 0)
    assert isinstance(plan, RaggedPlan) and rows.shape[1] == 7
    hidden_states.sum().backward()
    assert len(seen) == len(others) + 1
    assert len(begun) == len(seen) * (2 if "overflow" in compute else 1)  # windows are computed again
    assert all(gradient.isfinite().all() and gradient.abs().sum() > 0 for gradient in seen)


def test_the_next_chunk_is_on_its_way_while_experts_compute() -> None:
    order: list[str] = []

    class Recorded(LocalDispatcher):
        def exchange_counts(self, chunks: Sequence[TopK], *sizes: Any) -> Any:
            order.append(f"exchange {len(chunks)}")
            return super().exchange_counts(chunks, *sizes)

        def dispatch(self, x: Tensor, top_k: TopK, counts: Any) -> Future[Dispatched]:
            order.append("send")
            arrived = super().dispatch(x, top_k, counts)
            return lambda: order.append("receive") or arrived()

        def combine(self, outputs: Tensor, dispatched: Dispatched) -> Future[Tensor]:
            order.append("send back")
            return super().combine(outputs, dispatched)

    layer, x = make(), torch.randn(5, 7, dtype=torch.float64)
    whole = layer(x).hidden_states
    layer.runner = ExpertRunner(Recorded(LocalExperts.all_of(layer.config), scales_input=False), num_chunks=2)
    layer.experts.register_forward_pre_hook(lambda *_: order.append("compute"))
    torch.testing.assert_close(layer(x).hidden_states, whole, rtol=1e-13, atol=1e-15)
    first = ["exchange 2", "send", "receive", "send", "compute", "send back"]
    assert order == [*first, "receive", "compute", "send back"]
