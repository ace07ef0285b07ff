import re
from dataclasses import replace
from io import StringIO

from alphaapollo.observability.terminal import Terminal
from alphaapollo.planning.memory_plan import MemoryPlan
from alphaapollo.planning.model_memory import Usage
from alphaapollo.planning.plan_table import describe_checkpoint_schedule, make_memory_table, summarize_memory


def test_memory_by_role_at_each_moment():
    gib = 2**30
    moments = {
        "update of the policy": Usage({"weights": gib, "optimizer": 2 * gib, "logits": gib // 2}),
        "generate": Usage({"weights": gib, "kv cache": 4 * gib}),
    }
    out = StringIO()
    memory = summarize_memory(MemoryPlan(moments, 80 * gib, "a GPU of 80 GiB"))
    assert memory is not None
    Terminal(file=out, width=80).print(make_memory_table(memory))
    title, *rows = out.getvalue().splitlines()
    assert title.rstrip() == "GiB on a GPU of 80 GiB"
    assert [re.split("  +", row.rstrip()) for row in rows] == [
        ["update of the policy", "3.5", "weights 1.0, optimizer 2.0, logits 0.5"],
        ["generate", "5.0", "weights 1.0, kv cache 4.0"],
    ]


def test_checkpoint_schedule():
    gib = 2**30
    plan = MemoryPlan({"generate": Usage()}, 80 * gib, "a GPU of 80 GiB", checkpoint_copy_bytes=3 * gib)
    for background, fact in ((True, "while the next one runs"), (False, "before the next one begins")):
        text = describe_checkpoint_schedule(5, "steps", replace(plan, saves_in_background=background))
        assert text.startswith("every 5 steps, and at the end; ") and fact in text and "(3.0 GiB)" in text
    assert describe_checkpoint_schedule(-1, "steps", plan) == "never"
    assert describe_checkpoint_schedule("auto", "steps", None).startswith("every 10 minutes and at the end; written")
    best = describe_checkpoint_schedule("auto", "steps", plan, "val/loss")
    assert best.startswith("every 10 minutes, with each validation and at the end; the best val/loss is kept; ")
