import re
from pathlib import Path

import pytest
import torch

from alphaapollo.algorithms import preference_losses
from alphaapollo.algorithms.preference_losses import Answers, get_preference_loss, preference_loss_names
from alphaapollo.config.notices import void_lines
from alphaapollo.config.schema import DpoConfig, Preference, RmConfig
from alphaapollo.finetuning import dpo, rm

PAGE = Path(__file__).resolve().parents[3] / "docs" / "preferences.md"


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"loss": "dpo"}, "preference.loss: unknown preference loss 'dpo'"),
        (
            {"loss": "robust", "label_smoothing": 0.5},
            "preference.loss: robust DPO needs label_smoothing in [0, 0.5), got 0.5",
        ),
        (
            {"loss": "exo_pair", "label_smoothing": 0},
            "preference.loss: EXO needs label_smoothing in (0, 1), got 0",
        ),
    ],
)
def test_what_cannot_work_is_told(keys, says):
    (problem,) = dpo.problems(DpoConfig(preference=keys))
    assert problem.startswith(says)
    assert not list(dpo.problems(DpoConfig(preference={"loss": "exo_pair"})))


def test_cut_answers_and_a_lone_adapter_are_refused():
    assert len(list(dpo.problems(DpoConfig(data={"truncation": "left"})))) == 1
    assert len(list(rm.problems(RmConfig(data={"truncation": "right"}, trainer={"export_lora": "adapter"})))) == 2


def test_keys_that_a_loss_does_not_read_are_told():
    given = {"loss": "simpo", "label_smoothing": 0.1, "reference": "live", "simpo_gamma": 0.5}
    config = DpoConfig(preference=given, data={"label_key": "good"})
    assert void_lines(config, dpo.void_keys(config)) == [
        "preference.label_smoothing=0.1 has no effect: preference.loss=simpo does not read it.",
        "preference.reference=live has no effect: preference.loss=simpo has no reference.",
        "data.label_key=good has no effect: preference.loss=simpo is of pairs.",
    ]


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The page's, in a file; what it registers goes."""
    monkeypatch.setattr(preference_losses._losses, "_entries", {**preference_losses._losses._entries})
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "own_loss.py").write_text(code)
    return str(tmp_path / "own_loss.py")


def test_a_loss_of_the_users_own(example: str, tmp_path: Path):
    given = {"loss": "margin_to", "custom_module": example, "simpo_gamma": 0.5}
    dpo.load_losses(Preference(**given))
    config = DpoConfig(preference=given)
    assert not list(dpo.problems(config))
    assert void_lines(config, dpo.void_keys(config)) == [
        "preference.simpo_gamma=0.5 has no effect: preference.loss=margin_to does not read it."
    ]
    loss = get_preference_loss("margin_to")
    answers = Answers(torch.tensor([-2.0, -6.0]), torch.tensor([2.0, 2.0]), torch.tensor([True, False]))
    assert loss(answers, config.preference).losses.tolist() == [9.0]  # (-1 + 3 - 5)^2


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("answers.logp.sum()", "must have the shape (2,), and has ()"),
        ("chosen(answers.mean).detach()", "has no gradient"),
        ("answers.margni", "raised AttributeError"),
    ],
)
def test_a_wrong_loss_is_told_before_the_start(example: str, body: str, says: str):
    code = re.sub(r"return .*", f"return {body}", Path(example).read_text())
    Path(example).write_text(code.replace("margin_to", "wrong"))
    given = {"loss": "wrong", "custom_module": example}
    dpo.load_losses(Preference(**given))
    (problem,) = dpo.problems(DpoConfig(preference=given))
    assert says in problem and "own_loss.py: wrong (the preference loss 'wrong'), called on toy inputs" in problem


def test_the_page_has_every_loss_as_it_is_declared():
    rows = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0].startswith("`"):
            for name in re.findall(r"`(\w+)`", cells[0]):
                rows[name] = cells
    assert sorted(name for name in rows if name != "preference") == preference_loss_names()
    for name in preference_loss_names():
        loss, (_, _, reference, beta, keys) = get_preference_loss(name), rows[name]
        assert (reference == "yes") == loss.needs_reference
        assert (float(beta) if beta else None) == (loss.beta if "beta" in loss.reads else None)
        assert {*re.findall(r"`(\w+)`", keys)} == {*loss.reads} - {"beta", "sft_coef"}
    assert {key for name in preference_loss_names() for key in get_preference_loss(name).reads} == {
        *Preference.model_fields
    } - {"loss", "reference", "custom_module"}
