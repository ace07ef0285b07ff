set -x
# PPO with a critic, in one long line; the answers of a program that does not exist here decide nothing.
[ -d cache ] || mkdir cache
gsm8k=$HOME/data/gsm8k
export HYDRA_FULL_ERROR=1
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae \
 data.train_files=$gsm8k/train.parquet data.val_files=$gsm8k/test.parquet \
 data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=512 \
 actor_rollout_ref.model.path=deepseek-ai/deepseek-llm-7b-chat \
 actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=256 \
 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
 actor_rollout_ref.actor.fsdp_config.param_offload=False \
 actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.rollout.name=vllm \
 critic.optim.lr=1e-5 critic.model.path=deepseek-ai/deepseek-llm-7b-chat \
 critic.fsdp.param_offload=True critic.model.fsdp_config.optimizer_offload=True \
 algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.001 algorithm.kl_ctrl.type=adaptive \
 algorithm.kl_ctrl.target_kl=0.1 \
 trainer.critic_warmup=0 trainer.logger=['console','tensorboard'] \
 trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=-1 trainer.total_epochs=15 $@ 2>&1 | tee ppo.log
