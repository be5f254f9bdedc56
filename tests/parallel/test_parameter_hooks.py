"""Memory that is given back between forward and backward."""

import torch
from torch import Tensor, nn

from maxmoe.parallel import parallelize
from maxmoe.parallel.parameter_hooks import GatheredParameter, ParameterVersion
from maxmoe.sharding import Mesh
from support import parallel_decoder
from support.run_ranks import run_ranks


def test_what_autograd_saved_is_there_again_for_the_backward() -> None:
    weight, x = torch.randn(3, 5), torch.randn(2, 5, requires_grad=True)
    expected = torch.autograd.grad((x @ weight.t()).sum(), x)
    copy = weight.clone()
    output = x @ copy.t()  # autograd saves a view
    parameter = GatheredParameter(copy, lambda: weight, ParameterVersion("weight", weight))
    parameter.free()
    assert copy.untyped_storage().nbytes() == 0
    parameter.refill()
    assert torch.equal(torch.autograd.grad(output.sum(), x)[0], expected[0])


def test_what_nobody_saved_is_not_gathered_again() -> None:
    calls = []
    version = ParameterVersion("weight", torch.ones(3))
    parameter = GatheredParameter(torch.ones(3), lambda: calls.append(1) or torch.ones(3), version)
    parameter.free()
    parameter.refill()
    assert not calls


def test_memory_that_was_not_given_back_is_left_alone() -> None:
    calls, tensor = [], torch.ones(3)
    GatheredParameter(tensor, lambda: calls.append(1) or torch.ones(3), ParameterVersion("weight", tensor)).refill()
    assert not calls


def test_a_model_keeps_no_gathered_parameter() -> None:
    def kept() -> tuple[int, int]:
        mesh = Mesh({"expert": 2})
        model = parallelize(parallel_decoder.decoder(), mesh, "ep-as-dp", dispatch="gather_weights")
        tokens = torch.randint(parallel_decoder.CONFIG.vocab_size, (2, 4))
        saved: list[Tensor] = []  # not by address: what is freed makes room for others

        def keep(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = model(tokens)
        shapes = {tuple(parameter.shape) for parameter in experts(model)}
        weights = [tensor for tensor in saved if tuple(tensor.shape) in shapes]
        empty = sum(tensor.untyped_storage().nbytes() == 0 for tensor in weights)
        output.logits.sum().backward()
        filled = sum(tensor.untyped_storage().nbytes() > 0 for tensor in weights)
        return empty, filled

    for empty, filled in run_ranks(kept, 2):
        assert empty == filled > 0


def experts(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if ".experts." in name and parameter.dim() == 3]
