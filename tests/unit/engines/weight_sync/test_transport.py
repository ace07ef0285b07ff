from pathlib import Path

from alphaapollo.engines.weight_sync.transport import (
    Transport,
    assign_weight_writers,
    choose_transport,
    get_weights_folder,
)
from alphaapollo.workers.builders import make_weight_sender
from alphaapollo.workers.process_group import RankPlacement


def test_transport_depends_on_where_the_engines_run():
    assert choose_transport("cpu", is_colocated=True, receives_buckets=True) == "shared_memory"
    assert choose_transport("cuda", is_colocated=True, receives_buckets=True) == "ipc"
    assert choose_transport("cuda", is_colocated=False, receives_buckets=True) == "nccl"
    assert (
        choose_transport("cuda", is_colocated=True, receives_buckets=False) == "shared_memory"
    )  # every other engine, or one process
    assert choose_transport("cuda", is_colocated=True, receives_buckets=True, serves_adapters=True) == "adapter"


def test_one_rank_of_each_node_with_engines_writes_for_them():
    assert assign_weight_writers(["a", "a", "b", "b", "c"], {"a", "b"}) == ["a", None, "b", None, None]
    assert assign_weight_writers(["a", "b", "a"], ["b", "b"]) == [None, "b", None]
    assert assign_weight_writers(["a", "b"], ["b", "c"]) == ["a", "b"]  # c copies from rank 0
    assert assign_weight_writers([], ["a"]) == []  # generation without training


def test_nodes_on_one_machine_have_separate_weight_folders(tmp_path: Path):
    transport = Transport("shared_memory", "float32", str(tmp_path), num_engine_ranks=2)
    placements = [RankPlacement(rank, 3, "", "cpu", 1, engine_node=node) for rank, node in enumerate(["a", None, "b"])]
    senders = [make_weight_sender(transport, placement) for placement in placements]
    updates = [sender.send([], version=3) for sender in senders]
    assert updates[0] == updates[2] and updates[1] is None
    assert {path.name for path in (tmp_path / "weights").iterdir() if (path / "v3").is_dir()} == {"a", "b"}
    senders[0].release_sent_weights()
    assert [Path(get_weights_folder(str(tmp_path), node)).exists() for node in "ab"] == [False, True]
