"""Who holds a run up: the judgement, on reports made up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from alphaapollo.controller.health.stall_detector import Finding, Look, Seen, judge, moved
from alphaapollo.utils.heartbeat import Doing, Process, Report

HERE, THERE = "node a", "node b"
UPDATE = [Doing("update", "", 1, 63, None), *(Doing("update", f"policy {rank}", 1, 62, None) for rank in (0, 1))]
PLAY = [Doing("generate", "", 1, 63, None), *(Doing("play", f"rollout {rank}", 4, 62, None) for rank in (0, 1))]


def process(
    pid: int, state: str = "S", cpu: float = 1.0, name: str = "", needed: bool = True, disk: int = 0
) -> Process:
    return Process(pid, name or f"process {pid}", state, cpu, disk, needed)


def answers(
    key: str, pid: int, *more: Process, doing: Sequence[Doing] = (), beats: int = 7, cpu: float = 1.0, node: str = HERE
) -> Seen:
    report = Report(beats, tuple(doing), (process(pid, cpu=cpu), *more))
    return Seen(key, f"the {key} (pid {pid})", report, None, node == HERE, node, pid)


def silent(key: str, pid: int, known: Process | None = None, node: str = HERE) -> Seen:
    return Seen(key, f"the {key} (pid {pid})", None, known, node == HERE, node, pid)


def look(*workers: Seen, doing: Sequence[Doing] = (), at: float = 0.0, beats: int = 3, cpu: float = 1.0) -> Look:
    return Look(at, answers("controller", 1, doing=doing, beats=beats, cpu=cpu), {one.key: one for one in workers})


def finding(before: Look, now: Look, device: str = "cpu") -> Finding:
    assert not moved(before, now)
    return judge(before, now, device)  # type: ignore[arg-type]


def test_of_a_collective_who_is_stopped_is_to_blame_and_not_who_waits() -> None:
    def seen(at: float) -> Look:
        return look(
            answers("policy 0", 10, doing=[Doing("call", "", 1, 62, None)], cpu=at),  # it spins: that proves nothing
            silent("policy 1", 11, process(11, "T")),
            doing=UPDATE,
            at=at,
        )

    found = finding(seen(0), seen(6))
    assert found.stuck and [one.key for one in found.culprits] == ["policy 1"]
    assert found.verdict == "the policy 1 (pid 11) is stopped (SIGSTOP; kill -CONT lets it go on)"
    assert found.waiting == "the controller is in update and waits for update of policy 0, policy 1 (62 s)"


def test_a_stopped_engine_core_is_named_as_what_it_is() -> None:
    core = process(21, "T", name="the engine core of rollout worker 1")
    waits = [Doing("episode", "", 4, 62, None), Doing("generate", "", 4, 61, None)]
    one = look(answers("rollout 0", 10), answers("rollout 1", 20, core, doing=waits), doing=PLAY)
    found = finding(one, one)
    assert found.stuck and found.culprits == (one.workers["rollout 1"],)
    assert found.verdict.startswith("the engine core of rollout worker 1 (pid 21) is stopped")


def test_who_computes_on_a_cpu_is_slow_and_on_a_gpu_only_counts_tell() -> None:
    def seen(at: float, cpu: float) -> Look:
        return look(answers("policy 0", 10, cpu=cpu), answers("policy 1", 11), doing=UPDATE, at=at)

    before, now = seen(0, 5.0), seen(6, 5.6)  # a tenth of a core: the machine is busy
    found = finding(before, now)
    assert not found.stuck and found.verdict == "the policy 0 (pid 10) computes"
    assert finding(before, now, "cuda").stuck
    assert finding(before, seen(6, 5.1)).stuck  # who waits wakes up now and then


def test_a_child_that_computes_counts() -> None:
    def seen(at: float) -> Look:
        grader = process(12, cpu=at, name="grader", needed=False)
        return look(answers("rollout 0", 10, grader), doing=PLAY, at=at)

    for device in ("cpu", "cuda"):  # it waits for no GPU
        found = finding(seen(0), seen(6), device)
        assert not found.stuck and found.verdict == "grader (pid 12) of the rollout 0 (pid 10) computes"


def test_counts_and_disks_are_movement() -> None:
    before = look(answers("rollout 0", 10, beats=100), doing=PLAY)
    assert moved(before, look(answers("rollout 0", 10, beats=101), doing=PLAY))  # one token of a long answer
    assert moved(before, look(answers("rollout 0", 10, beats=100), doing=PLAY, beats=4))
    saves = [look(answers("policy 0", 10, process(11, disk=size))) for size in (5_000, 9_000, 9_000_000)]
    assert not moved(saves[0], saves[1]) and moved(saves[1], saves[2])
    assert not moved(look(silent("policy 0", 10)), look(answers("policy 0", 10)))  # nothing to compare with


def test_who_does_not_answer_is_named_unless_it_is_seen_to_compute() -> None:
    away = look(answers("policy 0", 10), silent("policy 1", 11, node=THERE), doing=UPDATE)
    found = finding(away, away)
    assert found.stuck and found.verdict == "the policy 1 (pid 11) does not answer"
    holds_the_gil = [look(silent("policy 1", 11, process(11, "R", cpu)), doing=UPDATE, at=cpu) for cpu in (1.0, 4.0)]
    assert not finding(*holds_the_gil).stuck


def test_a_function_that_sleeps_has_its_own_limit() -> None:
    sleeps = [Doing("episode", "", 4, 70, None), Doing("environment.step", "", 2, 65, 600.0)]
    one = look(answers("rollout 0", 10, doing=sleeps), doing=PLAY)
    found = finding(one, one)
    assert found.stuck and found.limit == 600.0
    assert found.verdict == "the rollout 0 (pid 10) waits, in 4 x episode (70 s), 2 x environment.step (65 s)"


def test_a_stopped_grader_is_replaced_by_others_and_has_its_limit() -> None:
    grader = process(12, "T", name="grader", needed=False)
    one = look(answers("rollout 0", 10, grader, doing=[Doing("grade", "", 1, 65, 120.0)]), doing=PLAY)
    found = finding(one, one)
    assert found.limit == 120.0 and found.verdict == "grader (pid 12) of the rollout 0 (pid 10) is stopped"
    elsewhere = look(answers("rollout 0", 10, grader), silent("policy 0", 20, process(20, "T")), doing=PLAY)
    assert "policy 0" in finding(elsewhere, elsewhere).verdict  # who is needed comes first


def test_when_all_wait_the_last_call_counts_and_of_its_ranks_the_one_behind() -> None:
    update = [Doing("play", "rollout 0", 4, 90, None), *UPDATE]
    one = look(
        answers("rollout 0", 10), answers("policy 0", 20, beats=31), answers("policy 1", 21, beats=30), doing=update
    )
    found = finding(one, one)
    assert [each.key for each in found.culprits] == ["policy 1"]
    assert found.verdict == "the policy 1 (pid 21) waits, in update (62 s)"


def test_where_nobody_is_waited_for_it_is_the_controller() -> None:
    idle = look(answers("policy 0", 10), doing=[Doing("advantage", "", 1, 61, None)])
    found = finding(idle, idle)
    assert found.verdict == "the controller (pid 1) waits, in advantage (61 s)"
    assert found.waiting == "the controller is in advantage"
    computing = finding(idle, look(answers("policy 0", 10), at=6, cpu=4), "cuda")
    assert not computing.stuck and computing.verdict == "the controller (pid 1) computes"
    assert finding(look(), look()).verdict == "the controller (pid 1) waits, in nothing that is known"


def test_a_process_of_rays_that_is_stopped_is_named_rather_than_who_waits_for_it() -> None:
    raylet = process(71, "T", name="Ray's raylet")
    one = look(answers("policy 0", 10), doing=UPDATE)
    one = replace(one, controller=answers("controller", 1, raylet, doing=UPDATE))
    found = finding(one, one)
    assert found.verdict == "Ray's raylet (pid 71) is stopped (SIGSTOP; kill -CONT lets it go on)"


def test_with_one_process_a_stopped_grader_is_named_as_the_controllers() -> None:
    grader = process(31, "T", name="grader", needed=False)
    one = replace(look(doing=UPDATE[:1]), controller=answers("controller", 1, grader, doing=UPDATE[:1]))
    assert finding(one, one).verdict == "grader (pid 31) of the controller (pid 1) is stopped"
