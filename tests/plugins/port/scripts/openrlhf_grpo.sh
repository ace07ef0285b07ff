set -x
WORK=/data/openrlhf
read -r -d '' command <<EOF
openrlhf.cli.train_ppo_ray \
   --actor.num_nodes 1 --actor.num_gpus_per_node 8 --ref.num_nodes 1 --ref.num_gpus_per_node 8 \
   --vllm.num_engines 4 --vllm.tensor_parallel_size 2 --train.colocate_all --vllm.enable_sleep \
   --actor.model_name_or_path Qwen/Qwen3-4B --reward.remote_url $WORK/reward.py \
   --data.prompt_dataset $WORK/train.jsonl --data.input_key prompt --data.label_key answer --data.apply_chat_template \
   --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --train.batch_size 512 --rollout.max_new_tokens 4096 \
   --algo.advantage.estimator group_norm --algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.init_coef 1e-3 \
   --actor.eps_clip_low_high 0.2 0.28 --actor.adam.lr 1e-6 --algo.dynamic_filtering_enable \
   --algo.dynamic_filtering_range 0.01 0.99 --ds.zero_stage 3 --ds.param_dtype bf16 --ds.packing_samples \
   --algo.advantage.is_correction_level token --ckpt.output_dir $WORK/out --logger.wandb.key true
EOF
if [[ ${1} != "slurm" ]]; then
    ray job submit --address=http://127.0.0.1:8265 -- python3 -m $command
fi
