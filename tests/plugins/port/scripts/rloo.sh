batch=1024
folder=/data/gsm8k
function common() {
    echo "unused"
}
train() {
    python3 -m verl.trainer.main_ppo \
        algorithm.adv_estimator=rloo_vectorized \
        algorithm.use_kl_in_reward=True \
        algorithm.kl_penalty=kl \
        data.train_files="$folder/train.parquet" \
        data.val_files="$folder/test.parquet" \
        data.train_batch_size=$batch \
        actor_rollout_ref.model.path=${MODEL_PATH:?give a model} \
        actor_rollout_ref.actor.ppo_mini_batch_size=$(($batch / 4)) \
        actor_rollout_ref.rollout.n=5 \
        actor_rollout_ref.rollout.val_kwargs.do_sample=False \
        trainer.val_before_train=False
}
train
