"""Bundles: what has to be on one machine, and what is said of a cluster."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tables import every_row

from torchtune_ext.cluster.driver import launch
from torchtune_ext.cluster.placement import Machine, Request, there_is


def cluster(*totals):
    return [Machine(f"node{i}", f"10.0.0.{i + 1}", total) for i, total in enumerate(totals)]


@every_row(
    "asked, largest, bundles",
    [
        (Request("gpus", 4, 4), 8, [4, 1, 1, 1, 1]),
        (Request("gpus", 8, 2, each=4), 8, [8, 4, 4]),
        (Request("gpus", 16, 2, each=4), 8, [8, 8, 4, 4]),
        # As few machines as hold it, and equally many ranks on each: 6 on 4 + 4 are 3 + 3, and 7 is a prime number.
        (Request("gpus", 6, 1), 4, [3, 3, 1]),
        (Request("gpus", 7, 1), 4, [1] * 8),
        (Request("cpus", 2, 1), 1, [1, 1, 1]),
        # No machine has any, so one has to come that holds it.
        (Request("gpus", 8, 1), 0, [8, 1]),
    ],
)
def test_bundles(asked, largest, bundles):
    assert asked.bundles(asked.machines(largest)) == bundles


@settings(max_examples=100)
@given(ranks=st.integers(1, 64), largest=st.integers(1, 16))
def test_a_trainer_is_parted_no_more_than_its_largest_machine_asks_for(ranks, largest):
    machines = Request("gpus", ranks, 1).machines(largest)
    assert ranks % machines == 0 and ranks // machines <= largest
    assert all(ranks % fewer or ranks // fewer > largest for fewer in range(1, machines))


def test_what_there_is():
    asked = Request("gpus", 1, 1)
    assert there_is(asked, cluster(0, 4, 8)) == "12 GPUs on 2 machines (10.0.0.3: 8, 10.0.0.2: 4)"
    assert there_is(asked, cluster(0)) == "0 GPUs on 0 machines"
    assert Request("gpus", 8, 2, each=4).words() == "--train-gpus 8 --engine-gpus 8"


def test_the_trainer_is_started_as_by_hand():
    assert launch(1, 1, 0, "") == []
    assert launch(8, 1, 0, "") == ["--nproc_per_node", "8"]
    words = "--nnodes 2 --node_rank 1 --nproc_per_node 8 --rdzv_backend static --rdzv_endpoint 10.0.0.1:4000"
    assert launch(16, 2, 1, "10.0.0.1:4000") == words.split()
