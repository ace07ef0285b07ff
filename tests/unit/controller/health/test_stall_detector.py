"""Stall detection on synthetic reports."""

from __future__ import annotations

from collections.abc import Sequence

from alphaapollo.controller.health.stall_detector import (
    RunSnapshot,
    StallFinding,
    WorkerSnapshot,
    find_stall,
    has_progress,
)
from alphaapollo.utils.heartbeat import ActiveCall, ProcessStatus, ProcessTreeReport

HERE, THERE = "", "node b"
UPDATE = [
    ActiveCall("update", "", 1, 63, None),
    *(ActiveCall("update", f"policy {rank}", 1, 62, None) for rank in (0, 1)),
]
PLAY = [
    ActiveCall("generate", "", 1, 63, None),
    *(ActiveCall("play", f"rollout {rank}", 4, 62, None) for rank in (0, 1)),
]


def process(
    pid: int, state: str = "sleeping", cpu: float = 1.0, name: str = "", is_required: bool = True, disk: int = 0
) -> ProcessStatus:
    return ProcessStatus(pid, name or f"process {pid}", state, cpu, disk, is_required)


def answers(
    key: str,
    pid: int,
    *more: ProcessStatus,
    calls: Sequence[ActiveCall] = (),
    ticks: int = 7,
    cpu: float = 1.0,
    node: str = HERE,
) -> WorkerSnapshot:
    report = ProcessTreeReport(ticks, tuple(calls), (process(pid, cpu=cpu), *more))
    return WorkerSnapshot(key, f"the {key} (pid {pid})", report, node, pid)


def silent(key: str, pid: int, known: ProcessStatus | None = None, node: str = HERE) -> WorkerSnapshot:
    report = ProcessTreeReport(None, processes=(known,) if known else ())
    return WorkerSnapshot(key, f"the {key} (pid {pid})", report, node, pid)


def snapshot(
    *workers: WorkerSnapshot, calls: Sequence[ActiveCall] = (), at: float = 0.0, ticks: int = 3, cpu: float = 1.0
) -> RunSnapshot:
    return RunSnapshot(at, [answers("controller", 1, calls=calls, ticks=ticks, cpu=cpu), *workers])


def finding(before: RunSnapshot, now: RunSnapshot, device: str = "cpu") -> StallFinding:
    assert not has_progress(before, now)
    return find_stall(before, now, device)  # type: ignore[arg-type]


def test_a_stopped_rank_of_a_collective_is_named() -> None:
    def snapshots_at(at: float) -> RunSnapshot:
        return snapshot(
            answers("policy 0", 10, calls=[ActiveCall("call", "", 1, 62, None)], cpu=at),  # spinning is no progress
            silent("policy 1", 11, process(11, "stopped")),
            calls=UPDATE,
            at=at,
        )

    found = finding(snapshots_at(0), snapshots_at(6))
    assert found.is_hung and [one.role_and_rank for one in found.culprits] == ["policy 1"]
    assert found.verdict.startswith("the policy 1 (pid 11) is stopped") and "-CONT" in found.verdict
    for fact in ("in update", "update of policy 0, update of policy 1 (62 s)"):
        assert fact in found.verdict


def test_a_stopped_engine_core_is_named() -> None:
    core = process(21, "stopped", name="the engine core of rollout worker 1")
    waits = [ActiveCall("episode", "", 4, 62, None), ActiveCall("generate", "", 4, 61, None)]
    one = snapshot(answers("rollout 0", 10), answers("rollout 1", 20, core, calls=waits), calls=PLAY)
    found = finding(one, one)
    assert found.is_hung and found.culprits == (one.workers[2],)
    assert found.verdict.startswith("the engine core of rollout worker 1 (pid 21) is stopped")


def test_cpu_time_is_progress_only_without_gpus() -> None:
    def snapshots_at(at: float, cpu: float) -> RunSnapshot:
        return snapshot(answers("policy 0", 10, cpu=cpu), answers("policy 1", 11), calls=UPDATE, at=at)

    before, now = snapshots_at(0, 5.0), snapshots_at(6, 5.6)  # a tenth of a core: the machine is busy
    found = finding(before, now)
    assert not found.is_hung and found.verdict.startswith("the policy 0 (pid 10) computes")
    assert finding(before, now, "cuda").is_hung
    assert finding(before, snapshots_at(6, 5.1)).is_hung  # waiting processes wake up now and then


def test_a_child_that_computes_is_progress() -> None:
    def snapshots_at(at: float) -> RunSnapshot:
        grader = process(12, cpu=at, name="grader", is_required=False)
        return snapshot(answers("rollout 0", 10, grader), calls=PLAY, at=at)

    for device in ("cpu", "cuda"):  # it does not wait for a GPU
        found = finding(snapshots_at(0), snapshots_at(6), device)
        assert not found.is_hung and "grader (pid 12)" in found.verdict and "computes" in found.verdict


def test_counts_and_disk_traffic_are_progress() -> None:
    before = snapshot(answers("rollout 0", 10, ticks=100), calls=PLAY)
    assert has_progress(before, snapshot(answers("rollout 0", 10, ticks=101), calls=PLAY))  # one token of a long answer
    assert has_progress(before, snapshot(answers("rollout 0", 10, ticks=100), calls=PLAY, ticks=4))
    saves = [snapshot(answers("policy 0", 10, process(11, disk=size))) for size in (5_000, 9_000, 9_000_000)]
    assert not has_progress(saves[0], saves[1]) and has_progress(saves[1], saves[2])
    assert not has_progress(snapshot(silent("policy 0", 10)), snapshot(answers("policy 0", 10)))  # nothing to compare


def test_a_silent_worker_is_named_unless_it_computes() -> None:
    away = snapshot(answers("policy 0", 10), silent("policy 1", 11, node=THERE), calls=UPDATE)
    found = finding(away, away)
    assert found.is_hung and found.verdict.startswith("the policy 1 (pid 11) does not answer")
    holds_the_gil = [
        snapshot(silent("policy 1", 11, process(11, "running", cpu)), calls=UPDATE, at=cpu) for cpu in (1.0, 4.0)
    ]
    assert not finding(*holds_the_gil).is_hung


def test_a_call_has_its_own_timeout() -> None:
    sleeps = [ActiveCall("episode", "", 4, 70, None), ActiveCall("environment.step", "", 2, 65, 600.0)]
    one = snapshot(answers("rollout 0", 10, calls=sleeps), calls=PLAY)
    found = finding(one, one)
    assert found.is_hung and found.call_timeout == 600.0
    for fact in ("the rollout 0 (pid 10) waits", "4 x episode (70 s), 2 x environment.step (65 s)"):
        assert fact in found.verdict


def test_a_stopped_grader_is_named_after_required_processes() -> None:
    grader = process(12, "stopped", name="grader", is_required=False)
    one = snapshot(answers("rollout 0", 10, grader, calls=[ActiveCall("grade", "", 1, 65, 120.0)]), calls=PLAY)
    found = finding(one, one)
    assert found.call_timeout == 120.0 and "grader (pid 12) of the rollout 0" in found.verdict
    elsewhere = snapshot(answers("rollout 0", 10, grader), silent("policy 0", 20, process(20, "stopped")), calls=PLAY)
    assert "policy 0" in finding(elsewhere, elsewhere).verdict  # required processes come first


def test_if_all_wait_the_rank_with_the_fewest_counts_is_named() -> None:
    update = [ActiveCall("play", "rollout 0", 4, 90, None), *UPDATE]
    one = snapshot(
        answers("rollout 0", 10), answers("policy 0", 20, ticks=31), answers("policy 1", 21, ticks=30), calls=update
    )
    found = finding(one, one)
    assert [each.role_and_rank for each in found.culprits] == ["policy 1"]
    assert found.verdict.startswith("the policy 1 (pid 21) waits, in update (62 s)")


def test_without_awaited_workers_the_controller_is_named() -> None:
    idle = snapshot(answers("policy 0", 10), calls=[ActiveCall("advantage", "", 1, 61, None)])
    found = finding(idle, idle)
    assert found.verdict.startswith("the controller (pid 1) waits") and "advantage (61 s)" in found.verdict
    computing = finding(idle, snapshot(answers("policy 0", 10), at=6, cpu=4), "cuda")
    assert not computing.is_hung and computing.verdict.startswith("the controller (pid 1) computes")
    assert "the controller (pid 1) waits" in finding(snapshot(), snapshot()).verdict


def test_a_stopped_child_of_the_controller_is_named() -> None:
    for child, calls in (
        (process(71, "stopped", name="Ray's raylet"), UPDATE),
        (process(31, "stopped", name="grader", is_required=False), UPDATE[:1]),
    ):
        one = RunSnapshot(0.0, [answers("controller", 1, child, calls=calls)])
        assert f"{child.name} (pid {child.pid})" in (verdict := finding(one, one).verdict) and "stopped" in verdict
