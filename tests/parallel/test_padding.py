"""A decoder with padding and packed documents on a mesh, against one process."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import maxmoe
from maxmoe import parallelize
from maxmoe.models import Decoder
from maxmoe.nn import LocalTokens
from maxmoe.parallel import TokenGroup, token_group
from maxmoe.sharding import LogicalRules, Mesh
from support.parallel_decoder import BLOCK, MeshRules, batch, decoder, layouts, token_spec
from support.parts import assert_same, part_by_definition
from support.run_ranks import run_ranks


def padding() -> tuple[Tensor, Tensor]:
    """A mask with a sequence of nothing but padding, and documents that begin anywhere."""
    generator = torch.Generator().manual_seed(2)
    shape = batch()[0].shape
    mask = torch.rand(shape, generator=generator) < 0.7
    mask[2] = False
    return mask, (torch.rand(shape, generator=generator) < 0.3).cumsum(1)


def loss_of(model: Decoder, group: TokenGroup, tokens: Tensor, targets: Tensor, mask: Tensor, ids: Tensor) -> Tensor:
    output = model(tokens, mask, ids)
    losses = F.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(mask)
    return maxmoe.mean_over_tokens(losses, mask, tokens=group) + output.aux_loss


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", [layout for layout in layouts(4) if "fsdp_transpose" not in layout.sizes], ids=str)
def test_loss_and_gradients_are_those_of_one_process(layout: MeshRules) -> None:
    whole, data = decoder(BLOCK), (*batch(), *padding())
    expected = loss_of(whole, LocalTokens(), *data)
    expected.backward()

    def check() -> None:
        mesh, rules = Mesh(layout.sizes), LogicalRules.load(layout.rules)
        ours = parallelize(decoder(BLOCK), mesh, rules)
        spec = token_spec(mesh, rules)
        parts = (part_by_definition(part, spec, mesh) for part in data)
        loss = loss_of(ours, token_group(mesh, rules), *parts)
        loss.backward()
        assert_same(loss, expected)
        for name, parameter in whole.named_parameters():
            gradient = ours.get_parameter(name).grad.full_tensor()
            assert_same(gradient, parameter.grad, name, scale=float(parameter.grad.abs().max()) + 1e-3)

    run_ranks(check, 4)
