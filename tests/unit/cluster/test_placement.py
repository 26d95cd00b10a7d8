"""Bundles: what has to be on one machine, and what is said of a cluster that cannot hold them."""

import pytest

from torchtune_ext.cluster.member import launch
from torchtune_ext.cluster.placement import Asked, Machine, layout, there_is, why_never


def cluster(*totals):
    return [Machine(f"node{i}", f"10.0.0.{i + 1}", total) for i, total in enumerate(totals)]


@pytest.mark.parametrize(
    ("asked", "totals", "amounts", "machines", "servers"),
    [
        # Beside rank 0: trainer and servers are one bundle.
        (Asked("gpus", 4, 4), (8, 8), (8,), 1, [0, 0, 0, 0]),
        (Asked("gpus", 4, 2, each=2), (8,), (8,), 1, [0, 0]),
        # A trainer of two machines, of which the first one has the servers, too.
        (Asked("gpus", 8, 4), (8, 8), (8, 4), 2, [0, 0, 0, 0]),
        # Anywhere: each server is a bundle.
        (Asked("gpus", 8, 4, each=2, beside=False), (8, 8), (8, 2, 2, 2, 2), 1, [1, 2, 3, 4]),
        (Asked("gpus", 16, 2, each=4, beside=False), (8, 8, 8), (8, 8, 4, 4), 2, [2, 3]),
        # As few machines as hold it, and equally many ranks on each: 6 on 4 + 4 are 3 + 3, and 7 find no place.
        (Asked("gpus", 6, 1, beside=False), (4, 4), (3, 3, 1), 2, [2]),
        (Asked("cpus", 2, 1, beside=False), (1, 1, 1), (1, 1, 1), 2, [2]),
        (Asked("gpus", 7, 1, beside=False), (4, 4), (7, 1), 1, [1]),
    ],
)
def test_bundles(asked, totals, amounts, machines, servers):
    made = layout(asked, cluster(*totals))
    assert (made.amounts, made.machines) == (amounts, machines)
    assert made.machines * made.ranks == asked.ranks and sum(made.amounts) == asked.ranks + asked.servers * asked.each
    assert [made.bundle_of_server(i) for i in range(asked.servers)] == servers


@pytest.mark.parametrize(
    ("asked", "totals", "says"),
    [
        (Asked("gpus", 8, 8), (8, 8), "16 of the GPUs have to be on one machine: the trainer's 8 and beside them"),
        (Asked("gpus", 8, 4, each=2), (8, 4), "16 GPUs are asked for"),
        (Asked("gpus", 8, 8), (0, 0), "16 GPUs are asked for"),
        (Asked("gpus", 1, 1), (), "2 GPUs are asked for"),
        (Asked("cpus", 7, 1, beside=False), (4, 4), "7 of the cores have to be on one machine"),
        (Asked("gpus", 2, 1, each=8, beside=False), (4, 4, 4), "8 of the GPUs have to be on one machine"),
        (Asked("gpus", 8, 8), (8, 16), None),
        (Asked("gpus", 8, 8, beside=False), (8, 8), None),
    ],
)
def test_what_a_cluster_can_never_hold(asked, totals, says):
    never = why_never(asked, layout(asked, cluster(*totals)), cluster(*totals))
    assert never is None if says is None else says in never


def test_what_there_is():
    asked = Asked("gpus", 1, 1)
    assert there_is(asked, cluster(0, 4, 8)) == "12 GPUs on 2 machines (10.0.0.3: 8, 10.0.0.2: 4)"
    assert there_is(asked, cluster(0)) == "no GPUs on its 1 machine"
    assert there_is(asked, cluster(*[8] * 9)).endswith("10.0.0.8: 8, ...)")
    assert Asked("gpus", 8, 2, each=4).words() == "--train-gpus 8 --engine-gpus 8"


def test_the_trainer_is_started_as_by_hand():
    one, eight = Asked("gpus", 1, 1), Asked("gpus", 8, 1)
    assert launch(layout(one, cluster(2)), 0, "") == []
    assert launch(layout(eight, cluster(9)), 0, "") == ["--nproc_per_node", "8"]
    sixteen = layout(Asked("gpus", 16, 1, beside=False), cluster(8, 8, 8))
    words = "--nnodes 2 --node_rank 1 --nproc_per_node 8 --rdzv_backend static --rdzv_endpoint 10.0.0.1:4000"
    assert launch(sixteen, 1, "10.0.0.1:4000") == words.split()
