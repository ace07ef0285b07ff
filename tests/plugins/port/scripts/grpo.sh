#!/usr/bin/env bash
# GRPO in the manner of verl's examples: arrays, defaults of variables, a probe for other hardware, a case.
set -xeuo pipefail

DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
ENGINE=${ENGINE:-vllm}
MODEL=${MODEL:-Qwen/Qwen3-8B}
samples=${SAMPLES:-5}
longest=$((1024 * 2))
NAME=${NAME:-${MODEL##*/}_grpo_${ENGINE}_$(date +%Y%m%d)} # isn't known before it runs

EXTRA=()
case "${DEVICE}" in
    gpu)
        parallel=2
        ;;
    npu)
        parallel=4
        EXTRA+=(actor_rollout_ref.actor.use_torch_compile=False)
        ;;
    *) exit 1 ;;
esac
if [ "${ENGINE}" = sglang ] || [ "${ENGINE}" = trtllm ]; then
    EXTRA+=(+actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3)
fi

DATA=(
    algorithm.adv_estimator=grpo
    data.train_files="['$HOME/data/gsm8k/train.parquet', '$HOME/data/math/train.parquet']"
    data.val_files="$HOME/data/gsm8k/test.parquet"
    data.train_batch_size=1024
    data.max_prompt_length=1024
    data.max_response_length=${longest}
    data.filter_overlong_prompts=True
    data.truncation='error'
)
ACTOR=(
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((longest * 8))
    actor_rollout_ref.actor.use_kl_loss=True # as in the paper
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.entropy_coeff=0
)
LAUNCH=(python3)
if [ "${USE_UV:-1}" != 0 ] && { [ "${ENGINE}" = vllm ] || [ "${ENGINE}" = sglang ]; }; then
    LAUNCH=(uv run --extra "${ENGINE}" python3)
fi
"${LAUNCH[@]}" -m verl.trainer.main_ppo \
    "${DATA[@]}" \
    "${ACTOR[@]}" \
    actor_rollout_ref.rollout.name=${ENGINE} \
    actor_rollout_ref.rollout.tensor_model_parallel_size=${parallel} \
    actor_rollout_ref.rollout.n=${samples} \
    trainer.logger='["console","swanlab"]' \
    trainer.experiment_name=${NAME} \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 \
    "${EXTRA[@]}" \
    "$@"
