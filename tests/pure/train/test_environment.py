"""Who a process is in a launch, from its environment."""

from __future__ import annotations

import pytest

from triptych.errors import JobError
from triptych.train.environment import first_host, place, wants_strict_comm

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "1234",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


def test_a_process_on_its_own_has_no_place() -> None:
    assert place({}) is None
    assert place({"RANK": "0"}) is None


def test_torchrun_says_all() -> None:
    found = place(TORCHRUN)
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (5, 8, 1, 4)
    assert (found.address, found.port, found.launcher) == ("node0", 1234, "torchrun")


def test_slurm_says_all() -> None:
    found = place(SLURM)
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (3, 4, 1, 2)
    assert (found.address, found.port, found.launcher) == ("gpu07", 20_077, "slurm")


def test_a_slurm_batch_script_itself_is_not_a_rank() -> None:
    assert place({k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}) is None


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu[07-09,12],cpu1", "gpu07"),
        ("node3", "node3"),
        ("a1,a2", "a1"),
        ("rack2-[1,3]", "rack2-1"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_node_list_is_read(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    "change", [{"RANK": "eight"}, {"WORLD_SIZE": ""}, {"RANK": "8"}, {"RANK": "-1"}]
)
def test_a_variable_that_cannot_be_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(JobError):
        place(TORCHRUN | change)


def test_strict_communication_is_asked_for_by_name_and_a_bad_value_is_refused() -> None:
    assert not wants_strict_comm({})
    assert wants_strict_comm({"TRIPTYCH_STRICT_COMM": "1"})
    with pytest.raises(JobError, match="TRIPTYCH_STRICT_COMM"):
        wants_strict_comm({"TRIPTYCH_STRICT_COMM": "yes"})
