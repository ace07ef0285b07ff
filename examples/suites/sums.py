"""Task of inspect-ai: inspect:examples/suites/sums.py@sums_chat"""

from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.scorer import match
from inspect_ai.solver import generate


@task
def sums_chat() -> Task:
    rows = json_dataset("sums.jsonl", FieldSpec(input="question", target="answer"))
    return Task(dataset=rows, solver=generate(), scorer=match(numeric=True))
