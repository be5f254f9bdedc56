"""The module in which a forward goes wrong."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from testing.compared_models import (
    WIDTH,
    Case,
    Dense,
    SumOfParts,
    build,
    compare,
    dense_loss,
    same_batch,
    split_features,
)


class RowParallel(Dense):
    """`down` computes its rows of the weight; the model sums the outputs of the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return self.head(SumOfParts.apply(y) if dist.is_initialized() else y)


def right(model: Any) -> Any:
    split_features(model).down.register_forward_hook(lambda layer, _, y: y - layer.bias * dist.get_rank())
    return model


def wrong_head(model: Any) -> nn.Module:
    right(model).head[1].register_forward_hook(lambda _layer, _x, y: 2 * y)
    return model


def wrong_model(model: Any) -> nn.Module:
    right(model).head[0].register_forward_hook(lambda _layer, _x, y: 2 * y)
    model.head[1].register_forward_pre_hook(lambda _layer, x: x[0] / 2)
    model.register_forward_hook(lambda _layer, _x, y: 2 * y)
    return model


def test_the_module_in_which_a_forward_goes_wrong() -> None:
    """A row-parallel layer adds its bias on every rank. Summands, and what a right module does within, are right."""
    case = Case(right, 2, loss=dense_loss, build=partial(build, RowParallel), make_batch=same_batch)
    assert compare(case, dtype=torch.float64).first_wrong_module == ""
    for parallelize, module in ((split_features, "down"), (wrong_head, "head.1"), (wrong_model, "")):
        found = compare(case._replace(parallelize=parallelize), dtype=torch.float64)
        assert found.first_wrong_module == module, found
        named = f", first in the output of {module}." if module else ": output differs."
        assert str(found).splitlines()[1] == f"The mistake is in the forward pass{named}"
