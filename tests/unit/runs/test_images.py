import json
from dataclasses import replace
from pathlib import Path

from alphaapollo.data.prompts import load_prompts
from alphaapollo.evaluation.generation import FinishedResults, open_results_writer, read_finished_results
from alphaapollo.evaluation.metrics import convert_to_sample_result, merge_repeated_prompts
from alphaapollo.observability.terminal import get_last_message
from alphaapollo.runs.rollout_log import RolloutLog, name_image, save_image
from alphaapollo.types import Prompt, TrajectoryGroup
from tests.unit.rollout.test_images import SMALL, WIDE
from tests.unit.runs.test_rollout_log import trajectory

PROMPT = Prompt(0, "s", [{"role": "user", "content": "<image> How many?", "images": [SMALL]}], "2", {"index": 0})


def make_group(first_observation: list | None = None) -> TrajectoryGroup:
    samples = [replace(trajectory(number), prompt_id=0, first_observation=first_observation) for number in range(2)]
    for sample in samples:
        sample.turns[0].observation = [{"role": "user", "content": "<image>", "images": [WIDE]}]
        sample.turns[0].info = {"frame": WIDE}
    return TrajectoryGroup(PROMPT, samples)


def test_images_of_rollouts_are_files_and_written_once(tmp_path: Path) -> None:
    source = tmp_path / "data.png"
    source.write_bytes(SMALL)
    seen = [{"role": "user", "content": "<image> See?", "images": [str(source)]}]
    log = RolloutLog(tmp_path / "rollouts")
    log.write(1, [make_group(), make_group(seen)])
    log.write(2, [make_group()])
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "rollouts/step_000001.jsonl").read_bytes().splitlines()]
    small, wide = lines[0]["prompt"][0]["images"][0], lines[0]["turns"][0]["observation"][0]["images"][0]
    assert small == name_image(SMALL) and small.startswith("images/") and small.endswith(".png")
    assert (tmp_path / "rollouts" / small).read_bytes() == SMALL
    assert (tmp_path / "rollouts" / wide).read_bytes() == WIDE
    assert len([*(tmp_path / "rollouts/images").iterdir()]) == 2  # of three groups with two samples each
    assert lines[2]["prompt"][0]["images"] == lines[2]["row_prompt"][0]["images"] == [small]  # a path and its bytes
    assert lines[0]["turns"][0]["info"] == {"frame": f"{len(WIDE)} bytes"}
    assert PROMPT.content[0]["images"] == [SMALL]  # unchanged


def test_a_file_that_is_gone_is_logged_with_its_path(tmp_path: Path) -> None:
    assert save_image(tmp_path, "/no/such/image.png") == "/no/such/image.png" and not [*tmp_path.iterdir()]
    assert name_image(b"no image").endswith(".bin")


def test_results_with_images_are_resumed_and_are_a_data_file(tmp_path: Path) -> None:
    path = tmp_path / "run/results.jsonl"
    with open_results_writer(path, FinishedResults()) as write:
        write(make_group())
    assert read_finished_results(path, {0: PROMPT}, 2).problem_ids == {0}
    prompts = load_prompts(str(path), "prompt")
    (encoded_image,) = prompts[0].content[0]["images"]
    assert Path(encoded_image).read_bytes() == SMALL and prompts[0].ground_truth == "2"


def test_prompts_that_differ_in_their_images_are_different_problems() -> None:
    other = replace(PROMPT, id=1, content=[{**PROMPT.content[0], "images": [WIDE]}])
    repeated = replace(PROMPT, id=2)
    results = [convert_to_sample_result(one, trajectory()) for one in (PROMPT, other, repeated)]
    results = [replace(result, problem_id=number) for number, result in enumerate(results)]
    merged = merge_repeated_prompts(results, [PROMPT, other, repeated])
    assert [one.problem_id for one in merged] == [0, 1, 0]


def test_a_terminal_shows_the_names_of_images() -> None:
    assert get_last_message(PROMPT.content) == "[image] How many?"
    logged = [{**PROMPT.content[0], "images": ["images/a.png"]}]
    assert get_last_message(logged) == "[image images/a.png] How many?"
