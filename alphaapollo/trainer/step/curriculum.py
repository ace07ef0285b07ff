"""The choice of training prompts: in the order of the stream, or with a curriculum (data.sampler, data.curriculum).

choose_prompts    when groups start: draw prompts by their weights for the positions that have no prompt yet
observe           when an iteration has its groups: update pass rates, open stages and metrics
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np

from alphaapollo.config.schema import Data
from alphaapollo.data.difficulty import decay_pass_rate, difficulty_weights, draw_prompts, frontier_weights
from alphaapollo.data.mixture import make_stream
from alphaapollo.data.stream import PromptStream, WeightedFileStream
from alphaapollo.session.progress import CurriculumState, Progress
from alphaapollo.types import Prompt, TrajectoryGroup
from alphaapollo.utils.seeds import derive_seed

DECAY = 0.5  # weight of earlier groups in a prompt's pass rate
RETIRE_ABOVE = 0.95  # prompts with this pass rate or a higher one are drawn with the weight revisit_rate


class PromptSampler:
    """Choice of prompts: each once per epoch or, with a curriculum, by weights. The state of a curriculum is
    `Progress.curriculum`, with prompt ids and positions. data_start: as in PromptStream.

    Raises ValueError if a prompt belongs to no stage, or a stage or a file with a weight has no prompt.
    """

    def __init__(self, prompts: Sequence[Prompt], data: Data, data_start: int = 0):
        self._data, self._settings = data, data.curriculum
        self._metrics: dict[str, float] = {}  # of the last `observe`
        self._stream: PromptStream | WeightedFileStream | None = None  # None: there is a curriculum
        stream = make_stream(data, count_by_file(prompts, data), data.seed, data_start)
        self.epoch_size = stream.num_prompts  # prompts per epoch
        if not data.is_adaptive:
            self._stream = stream
            return
        self._ids = np.array([prompt.id for prompt in prompts])
        self._index = {prompt.id: index for index, prompt in enumerate(prompts)}
        self._stages = assign_stages(prompts, data)
        self._open_prompts = [np.flatnonzero(self._stages <= stage) for stage in range(int(self._stages.max()) + 1)]
        # Unary + removes files without prompts.
        sizes = [+count_by_file([prompts[index] for index in indices], data) for indices in self._open_prompts]
        self._streams = [
            make_stream(data, size, derive_seed(data.seed, "stage", stage)) for stage, size in enumerate(sizes)
        ]
        self._files = np.array([prompt.file for prompt in prompts])

    def choose_prompts(self, progress: Progress, positions: Sequence[int]) -> list[int]:
        """Return the index of the prompt at each position. Prompts that were already drawn, e.g. before the run
        resumed, are kept. If there are enough prompts, none is drawn twice for groups in flight."""
        if self._stream is not None:
            return [index for position in positions for index in self._stream.prompt_indices(position, 1)]
        drawn = progress.curriculum.drawn
        missing = [position for position in positions if drawn.get(position) not in self._index]
        in_flight = {self._index[prompt_id] for prompt_id in drawn.values() if prompt_id in self._index}
        if self._data.sampler == "uniform":
            chosen = self._choose_each_once(progress.curriculum, missing)
        else:
            chosen = draw_prompts(self._compute_weights(progress.curriculum), missing, self._data.seed, in_flight)
        drawn.update(zip(missing, self._ids[chosen].tolist(), strict=True))
        return [self._index[drawn[position]] for position in positions]

    def _choose_each_once(self, state: CurriculumState, positions: Sequence[int]) -> list[int]:
        """Choose prompts of the open stages, each once per epoch of these stages, in a random order."""
        stream, prompts = self._streams[state.stage], self._open_prompts[state.stage]
        drawn = (stream.prompt_indices(position - state.stage_start, 1) for position in positions)
        return [int(prompts[index]) for (index,) in drawn]

    def observe(self, progress: Progress, groups: Sequence[TrajectoryGroup]) -> None:
        """Add the results of an iteration's groups, and open the next stage if its gate is reached."""
        if self._stream is not None:
            return
        state = progress.curriculum
        self._read_rates(state)  # makes room for all prompt ids
        for group in groups:
            if (observed := measure_pass_rate(group)) is not None:
                prompt_id = group.prompt.id
                state.pass_rates[prompt_id] = decay_pass_rate(state.pass_rates[prompt_id], observed, DECAY)
        state.drawn = {position: state.drawn[position] for position in progress.unfinished if position in state.drawn}
        while state.stage < len(self._settings.stages) - 1 and self._is_gate_reached(progress):
            state.stage, state.stage_start = state.stage + 1, progress.prompts_consumed
        rates = self._read_rates(state)[self._stages <= state.stage]
        known_rates = rates[~np.isnan(rates)]
        self._metrics = {
            "curriculum/stage": float(state.stage + 1),
            "curriculum/observed": len(known_rates) / len(rates),
            "curriculum/retired": float(np.mean(rates >= RETIRE_ABOVE)),
            "curriculum/pass_rate": float(known_rates.mean()) if len(known_rates) else np.nan,
        }

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of the last `observe`."""
        return self._metrics

    def _compute_weights(self, state: CurriculumState) -> np.ndarray:
        """Return the weight of each prompt; 0 in stages that are not open. The weights of each file's prompts sum to
        its share, if it has one. float64 [N]"""
        rates, settings = self._read_rates(state), self._settings
        if self._data.sampler == "frontier":
            weights = frontier_weights(rates, settings.target, settings.revisit_rate)
        else:
            weights = difficulty_weights(rates)
        weights[rates >= RETIRE_ABOVE] = settings.revisit_rate
        weights *= self._stages <= state.stage
        if self._data.source_weights:
            sums = np.maximum(np.bincount(self._files, weights), np.finfo(float).tiny)
            weights *= (self._data.source_weights[: len(sums)] / sums)[self._files]
        return weights

    def _is_gate_reached(self, progress: Progress) -> bool:
        """Whether the newest open stage has reached its gate. A pass rate needs observations of a batch of prompts."""
        stage = self._settings.stages[progress.curriculum.stage]
        if stage.metric != "pass_rate":
            check_gate_metric(stage.metric, progress.validation)
            return progress.validation.get(stage.metric, -np.inf) >= stage.threshold
        rates = self._read_rates(progress.curriculum)[self._stages == progress.curriculum.stage]
        known = rates[~np.isnan(rates)]
        return len(known) >= min(len(rates), self._data.train_batch_size) and known.mean() >= stage.threshold

    def _read_rates(self, state: CurriculumState) -> np.ndarray:
        """Return the pass rate of each prompt, NaN if it was never sampled. [N]"""
        missing = int(self._ids.max()) + 1 - len(state.pass_rates)
        state.pass_rates.extend(array("d", [np.nan]) * missing)
        return np.array(state.pass_rates).take(self._ids)


def count_by_file(prompts: Sequence[Prompt], data: Data) -> Counter[int]:
    """Count the prompts of each of data.train_files, by index. Without source_weights, all prompts count under 0."""
    if data.source_weights is None:
        return Counter({0: len(prompts)})
    counts = Counter(dict.fromkeys(range(len(data.source_weights)), 0))
    counts.update(prompt.file for prompt in prompts)
    return counts


def check_gate_metric(metric: str, validation: Mapping[str, float]) -> None:
    """Raise ValueError if the metrics of a validation lack the metric, unless samples failed."""
    has_failed = any(name.startswith("val/") and name.endswith("failed") and validation[name] for name in validation)
    if validation and metric not in validation and not has_failed:
        raise ValueError(
            f"data.curriculum.stages wait for {metric}, which is not a metric of this run's validation. Set it to one "
            f"of {', '.join(sorted(validation))}."
        )


def measure_pass_rate(group: TrajectoryGroup) -> float | None:
    """Return the mean accuracy of the group's samples that did not fail; None if all failed.

    Raises ValueError if an accuracy is unknown, or not in [0, 1].
    """
    accuracies = [sample.accuracy for sample in group.trajectories if not sample.score.outcome.failed]
    if wrong := [value for value in accuracies if value is None or not 0 <= value <= 1]:
        raise ValueError(
            f"data.sampler and data.curriculum need accuracies from 0 to 1; row {group.prompt.id} has {wrong[0]}. "
            "Return the component `accuracy` from the reward function, or set data.sampler=uniform without stages."
        )
    return float(np.mean(np.array(accuracies, float))) if accuracies else None


def assign_stages(prompts: Sequence[Prompt], data: Data) -> np.ndarray:
    """Return the index of the first stage whose pattern matches each prompt's data source; 0 without stages. [N]

    Raises ValueError if a prompt matches no stage, or a stage has no prompt.
    """
    patterns = [stage.data_source for stage in data.curriculum.stages] or ["*"]
    sources = {prompt.data_source for prompt in prompts}
    stage_of = {
        source: next((i for i, pattern in enumerate(patterns) if fnmatchcase(source.lower(), pattern.lower())), None)
        for source in sources
    }
    if unmatched := sorted(source for source, stage in stage_of.items() if stage is None):
        raise ValueError(
            f"data.curriculum.stages={patterns}: the data source {unmatched[0]!r} of data.train_files is in no stage. "
            "Add a stage with a pattern that matches it."
        )
    if empty := sorted(set(range(len(patterns))) - set(stage_of.values())):
        raise ValueError(
            f"data.curriculum.stages[{empty[0]}].data_source={patterns[empty[0]]!r} matches none of the data sources "
            f"{sorted(sources)} that earlier stages leave. Change the pattern, or remove the stage."
        )
    return np.array([stage_of[prompt.data_source] for prompt in prompts])
