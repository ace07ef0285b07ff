import re
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from alphaapollo.algorithms import preference_losses
from alphaapollo.algorithms.preference_losses import AnswerBatch, get_preference_loss, preference_loss_names
from alphaapollo.config.check import describe_ineffective_keys
from alphaapollo.config.schema import DpoConfig, Preference, RmConfig
from alphaapollo.finetuning import dpo
from alphaapollo.utils.user_module import load_user_module

PAGE = Path(__file__).resolve().parents[3] / "docs" / "preferences.md"


@pytest.mark.parametrize(
    ("keys", "facts"),
    [
        ({"loss": "dpo"}, ["'dpo'"]),
        ({"loss": "robust", "label_smoothing": 0.5}, ["label_smoothing=0.5", "below 0.5"]),
        ({"loss": "exo_pair", "label_smoothing": 0}, ["label_smoothing=0.0", "above 0 and below 1"]),
    ],
)
def test_invalid_settings_are_refused(keys, facts):
    (problem,) = dpo.list_loss_errors(DpoConfig(preference=keys))
    assert all(fact in problem for fact in ["preference.loss: ", *facts])
    assert not list(dpo.list_loss_errors(DpoConfig(preference={"loss": "exo_pair"})))


def test_truncated_responses_and_adapter_only_export_cannot_be_configured():
    with pytest.raises(ValidationError, match="truncation"):
        DpoConfig(data={"truncation": "left"})
    with pytest.raises(ValidationError, match="export_lora"):
        RmConfig(trainer={"export_lora": "adapter"})


def test_keys_without_effect_are_reported():
    given = {"loss": "simpo", "label_smoothing": 0.1, "simpo_gamma": 0.5}
    config = DpoConfig(preference=given, data={"label_key": "good"})
    notices = describe_ineffective_keys(config, dpo.list_ineffective_keys(config))
    assert all("preference.loss=simpo" in notice for notice in notices)
    ineffective = ["preference.label_smoothing=0.1", "data.label_key=good"]
    assert [notice.split(" has no effect")[0] for notice in notices] == ineffective


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The page's, in a file; what it registers goes."""
    monkeypatch.setattr(preference_losses._losses, "_entries", {**preference_losses._losses._entries})
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "own_loss.py").write_text(code)
    return str(tmp_path / "own_loss.py")


def test_user_defined_loss(example: str, tmp_path: Path):
    given = {"loss": "margin_to", "custom_module": example, "simpo_gamma": 0.5}
    load_user_module(example, "preference.custom_module")
    config = DpoConfig(preference=given)
    assert not list(dpo.list_loss_errors(config))
    (notice,) = describe_ineffective_keys(config, dpo.list_ineffective_keys(config))
    assert notice.startswith("preference.simpo_gamma=0.5 has no effect: preference.loss=margin_to ")
    loss = get_preference_loss("margin_to")
    answers = AnswerBatch(torch.tensor([-2.0, -6.0]), torch.tensor([2.0, 2.0]), torch.tensor([True, False]))
    assert loss(answers, config.preference).losses.tolist() == [9.0]  # (-1 + 3 - 5)^2


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("answers.logp.sum()", "shape (2,), but got"),
        ("chosen(answers.mean_logp).detach()", "has no gradient"),
        ("answers.margni", "failed: AttributeError"),
    ],
)
def test_faulty_user_loss_is_refused_before_the_start(example: str, body: str, says: str):
    code = re.sub(r"return .*", f"return {body}", Path(example).read_text())
    Path(example).write_text(code.replace("margin_to", "wrong"))
    given = {"loss": "wrong", "custom_module": example}
    load_user_module(example, "preference.custom_module")
    (problem,) = dpo.list_loss_errors(DpoConfig(preference=given))
    assert says in problem and "own_loss.py: the preference loss 'wrong'" in problem


def test_docs_page_lists_every_loss():
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
    read = {key for name in preference_loss_names() for key in get_preference_loss(name).reads}
    assert read == {*Preference.model_fields} - {"loss", "reference", "custom_module"}
