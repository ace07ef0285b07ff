"""Scheduler of vLLM for sampling masks on CPUs (sampling_mask.py)."""

from __future__ import annotations

from vllm.v1.core.sched.scheduler import Scheduler


class MaskScheduler(Scheduler):
    """Scheduler that passes on the sampling masks of the V1 model runner, which vLLM's configuration refuses."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)
        self.return_sampling_mask = True
