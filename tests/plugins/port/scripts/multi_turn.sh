# Turns with a tool: the configuration beside this file turns them on.
PROJECT_DIR="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
function now() {
    date '+%d-%H-%M'
}
python3 -m verl.trainer.main_ppo \
    --config-path="$PROJECT_DIR" \
    --config-name='multi_turn' \
    algorithm.adv_estimator=grpo \
    data.train_batch_size=256 \
    data.return_raw_chat=True \
    data.train_files=$HOME/data/gsm8k/train.parquet \
    data.val_files=$HOME/data/gsm8k/test.parquet \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.multi_turn.tool_config_path="$PROJECT_DIR/tools.yaml" \
    trainer.experiment_name="baseline_$(now)" \
    trainer.n_gpus_per_node=8 $@
