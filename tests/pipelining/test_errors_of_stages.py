"""An error in the forward or backward of a stage is raised unchanged, with its cause."""

from typing import Any

import pytest
import torch
from torch import Tensor

from maxmoe.sharding import Mesh
from support.run_ranks import run_ranks
from support.staged_decoder import batch, config, staged

DEEPSEEK = config("deepseek_v3")


class Failing(torch.autograd.Function):
    """Raises an error with a cause in the backward."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ValueError("no such token") from KeyError("token")


@pytest.mark.parametrize("schedule", ["gpipe", "zbv"])
def test_errors_keep_their_causes(schedule: str) -> None:
    def check() -> None:
        run = staged(DEEPSEEK, Mesh({"stage": 1}), "default", schedule)
        norm, weight = run.model.blocks[2].attention_norm, run.model.blocks[2].feed_forward.router.weight.detach()
        handle = norm.register_forward_hook(lambda _module, _inputs, output: Failing.apply(output))
        with pytest.raises(ValueError, match=r"^no such token$") as error:
            run.step(*batch())
        assert isinstance(error.value.__cause__, KeyError)
        handle.remove()
        whole = weight.clone()
        weight.fill_(float("nan"))
        with pytest.raises(ValueError, match=r"blocks\.2\.feed_forward\.router: .* got NaN for token") as error:
            run.step(*batch())
        assert isinstance(error.value.__cause__, ValueError)
        weight.copy_(whole)
        assert run.step(*batch()).loss.equal(run.evaluate(*batch()).loss)

    run_ranks(check, 1)
