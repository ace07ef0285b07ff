"""Workers of every role that the tests of layouts train."""

from __future__ import annotations

from tests.unit.workers.training import Case
from tests.vision.models import FAMILIES

RICH = {"entropy_coeff": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k3+"}
FULL = RICH | {"kl_loss_type": "full", "loss_agg_mode": "seq-mean-token-mean"}
JSD = {"divergence": "jsd", "beta": 0.3, "coef": 0.7}
SERVER = {"base_url": "http://127.0.0.1:9/v1", "name": "big"}
DPO = {"loss": "sigmoid", "beta": 0.3, "label_smoothing": 0.1, "sft_coef": 0.2}
TWO_TEACHERS = {"models": {"first": {"path": "llama"}, "second": {"path": "qwen2"}}, "by_source": {"*": "first"}}
IMAGES = {"images": True, "num_rows": 5, "freeze_vision": False}

ROLES = {
    "ppo": Case("qwen3", RICH),
    "full KL": Case("qwen3", FULL, needs_reference=True),
    "adapters": Case("qwen3", FULL, needs_reference=True, lora_rank=4),
    "teacher": Case("qwen3", teacher=JSD, teacher_folder="llama"),
    "teachers by row": Case("qwen3", teacher=JSD | TWO_TEACHERS, teacher_shares=((1.0, 0.0), (0.0, 1.0), (0.25, 0.75))),
    "teacher behind a server": Case("qwen3", teacher=JSD | {"top_k": 5, "model": SERVER}, server_folder="llama"),
    "self-teacher": Case("qwen3", teacher=JSD | {"top_k": 5, "self_teacher": {"context": "feedback"}}, contexts=True),
    "critic": Case("qwen3", role="critic"),
    "SFT": Case("qwen3", role="sft"),
    "DPO": Case("qwen3", role="preference", settings={"preference": DPO}),
    "KTO": Case("qwen3", role="preference", settings={"preference": {"loss": "kto"}}),
    "reward model training": Case("qwen3", role="reward", settings={"bradley_terry": {"centring_coef": 0.1}}),
    "reward model": Case("qwen3", role="reward_model"),
    **{family: Case(family, RICH, **IMAGES) for family in FAMILIES},
}
