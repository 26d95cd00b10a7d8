"""Bundles: what has to be on one machine, and what is said of a cluster that cannot hold them."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st
from tables import every_row

from torchtune_ext.cluster.driver import launch
from torchtune_ext.cluster.placement import Machine, Request, holds, layout, there_is, why_never


def cluster(*totals):
    return [Machine(f"node{i}", f"10.0.0.{i + 1}", total) for i, total in enumerate(totals)]


@every_row(
    "asked, totals, amounts, machines, servers",
    [
        # Beside rank 0: trainer and servers are one bundle.
        (Request("gpus", 4, 4), (8, 8), (8,), 1, [0, 0, 0, 0]),
        (Request("gpus", 4, 2, each=2), (8,), (8,), 1, [0, 0]),
        # A trainer of two machines, of which the first one has the servers, too.
        (Request("gpus", 8, 4, where="beside"), (8, 8), (8, 4), 2, [0, 0, 0, 0]),
        # But for servers alone, no trainer is parted.
        (Request("gpus", 8, 4), (8, 8), (8, 1, 1, 1, 1), 1, [1, 2, 3, 4]),
        (Request("gpus", 8, 2, each=4), (8, 8), (8, 4, 4), 1, [1, 2]),
        # A machine counts for what it can hold: the small ones hold no half of the trainer.
        (Request("gpus", 8, 1), (5, 2, 2, 4), (5, 4), 2, [0]),
        (Request("gpus", 8, 1), (4, 2, 2, 2), (3, 2, 2, 2), 4, [0]),
        # Anywhere: each server is a bundle.
        (Request("gpus", 8, 4, each=2, where="anywhere"), (8, 8), (8, 2, 2, 2, 2), 1, [1, 2, 3, 4]),
        (Request("gpus", 16, 2, each=4, where="anywhere"), (8, 8, 8), (8, 8, 4, 4), 2, [2, 3]),
        # As few machines as hold it, and equally many ranks on each: 6 on 4 + 4 are 3 + 3, and 7 find no place.
        (Request("gpus", 6, 1, where="anywhere"), (4, 4), (3, 3, 1), 2, [2]),
        (Request("cpus", 2, 1, where="anywhere"), (1, 1, 1), (1, 1, 1), 2, [2]),
        (Request("gpus", 7, 1, where="anywhere"), (4, 4), (1,) * 8, 7, [7]),
    ],
)
def test_bundles(asked, totals, amounts, machines, servers):
    made = layout(asked, cluster(*totals))
    assert (made.amounts, made.machines) == (amounts, machines)
    assert made.machines * made.ranks == asked.ranks and sum(made.amounts) == asked.ranks + asked.servers * asked.each
    assert list(made.servers) == servers


@every_row(
    "asked, totals, says",
    [
        (
            Request("gpus", 8, 8, where="beside"),
            (8, 8),
            "16 of the GPUs have to be on one machine: the trainer's 8 and beside them",
        ),
        (
            Request("gpus", 3, 5, where="beside"),
            (4, 4),
            "8 of the GPUs have to be on one machine: the trainer's 3 and beside",
        ),
        (Request("gpus", 8, 8), (8, 8), None),
        (Request("gpus", 6, 1, each=4), (4, 4, 2), "no place for parts of 3, 3, 4 GPUs"),
        (Request("gpus", 8, 4, each=2), (8, 4), "16 GPUs are asked for"),
        (Request("gpus", 8, 8), (0, 0), "16 GPUs are asked for"),
        (Request("gpus", 1, 1), (), "2 GPUs are asked for"),
        (
            Request("cpus", 7, 1, where="anywhere"),
            (4, 4),
            "no place for parts of 1, 1, 1, 1, 1, 1, 1, 1 cores: each has",
        ),
        (Request("gpus", 2, 1, each=8, where="anywhere"), (4, 4, 4), "8 of the GPUs have to be on one machine"),
        (Request("gpus", 8, 8), (8, 16), None),
        (Request("gpus", 8, 8, where="anywhere"), (8, 8), None),
    ],
)
def test_what_a_cluster_can_never_hold(asked, totals, says):
    never = why_never(asked, layout(asked, cluster(*totals)), cluster(*totals))
    assert never is None if says is None else says in never


def packed(made, totals):
    """Whether some way to give each bundle a machine exists, by trying all of them."""
    for places in product(range(len(totals)), repeat=len(made.amounts)):
        used = [sum(a for a, p in zip(made.amounts, places, strict=True) if p == i) for i in range(len(totals))]
        apart = len(set(places[: made.machines])) == made.machines
        if apart and all(u <= t for u, t in zip(used, totals, strict=True)):
            return True
    return False


@settings(max_examples=150)
@given(
    ranks=st.integers(1, 6),
    servers=st.integers(1, 3),
    each=st.sampled_from([1, 2, 4]),
    where=st.sampled_from(["auto", "beside", "anywhere"]),
    totals=st.lists(st.integers(0, 8), max_size=4),
)
def test_a_layout_is_found_where_trying_all_of_them_finds_one(ranks, servers, each, where, totals):
    asked, there = Request("gpus", ranks, servers, each, where), cluster(*totals)
    made = layout(asked, there)
    assert holds(made, there) == packed(made, totals)
    assert made.ranks * made.machines == ranks and sum(made.amounts) == ranks + servers * each
    never = why_never(asked, made, there)
    assert (never is None) == holds(made, there)
    fewer = [layout(Request("gpus", ranks, servers, each, at), there) for at in ("beside", "anywhere")]
    if where == "auto":
        assert holds(made, there) == any(holds(other, there) for other in fewer)
        assert not holds(made, there) or made.machines == min(o.machines for o in fewer if holds(o, there))
    if made.servers[0] > 0:
        assert where != "beside"


def test_what_there_is():
    asked = Request("gpus", 1, 1)
    assert there_is(asked, cluster(0, 4, 8)) == "12 GPUs on 2 machines (10.0.0.3: 8, 10.0.0.2: 4)"
    assert there_is(asked, cluster(0)) == "no GPUs on its 1 machine"
    assert there_is(asked, cluster(*[8] * 9)).endswith("10.0.0.8: 8, ...)")
    assert Request("gpus", 8, 2, each=4).words() == "--train-gpus 8 --engine-gpus 8"


def test_the_trainer_is_started_as_by_hand():
    one, eight = Request("gpus", 1, 1), Request("gpus", 8, 1)
    assert launch(layout(one, cluster(2)), 0, "") == []
    assert launch(layout(eight, cluster(9)), 0, "") == ["--nproc_per_node", "8"]
    sixteen = layout(Request("gpus", 16, 1, where="anywhere"), cluster(8, 8, 8))
    words = "--nnodes 2 --node_rank 1 --nproc_per_node 8 --rdzv_backend static --rdzv_endpoint 10.0.0.1:4000"
    assert launch(sixteen, 1, "10.0.0.1:4000") == words.split()
