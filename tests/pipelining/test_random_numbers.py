"""Random routers in pipeline stages."""

from dataclasses import replace

import torch
from torch import Tensor

from maxmoe import record_routing
from maxmoe.sharding import Mesh
from support.parts import assert_same
from support.run_ranks import run_ranks
from support.staged_decoder import batch, config, part_of_micro_batches, staged

RANDOM = config("mixtral", num_layers=3)  # two layers in one stage
RANDOM = replace(RANDOM, num_dense_layers=0, moe=replace(RANDOM.moe, router="random"))


def test_every_layer_and_micro_batch_is_routed_by_itself_and_recomputed_alike() -> None:
    """The ids of all layers, and gradients with and without a recomputation, with one seed on all ranks."""

    def check() -> tuple[int, dict[str, list[Tensor]]]:
        mesh = Mesh({"stage": 2, "expert": 2})
        gradients, records = [], []
        for recompute in ((), ("blocks",)):
            run = staged(RANDOM, mesh, "ep-tp", "1f1b", recompute=recompute)
            torch.manual_seed(1)
            with record_routing(run.model) as record:
                run.step(*(part for part in part_of_micro_batches(batch(), mesh, "ep-tp")))
            gradients.append({name: parameter.grad for name, parameter in run.model.named_parameters()})
            records.append(record.calls)
        for name, gradient in gradients[1].items():
            assert_same(gradient.full_tensor(), gradients[0][name].full_tensor(), name)
        assert all(
            ids.equal(records[1][path][call]) for path in records[0] for call, ids in enumerate(records[0][path])
        )
        return mesh.stage, records[0]

    of_ranks = run_ranks(check, 4)
    calls: dict[str, list[Tensor]] = {path: ids for _, record in of_ranks for path, ids in record.items()}
    drawn = [ids for path in sorted(calls) for ids in calls[path]]
    assert [stage for stage, _ in of_ranks] == [0, 0, 1, 1] and len(drawn) == 3 * 2
    assert not any(one.equal(other) for place, one in enumerate(drawn) for other in drawn[:place])
    for _, record in of_ranks:  # ranks along `expert` hold the same tokens
        assert all(ids.equal(calls[path][call]) for path in record for call, ids in enumerate(record[path]))
