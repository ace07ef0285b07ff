"""Combinations of keys: with errors, without effect, and valid ones.

Words are separated by spaces. `actor.`, `rollout.`, `ref.` and `model.` of main_ppo are below `actor_rollout_ref.`;
gpus=N and cores=N describe a node (default: no GPU, 8 cores).
"""

TEACHERS = "teacher.models.math.path=a teacher.models.code.base_url=http://h/v1 teacher.models.code.name=b"
SERVED = "teacher.divergence=sampled teacher.model.base_url=x teacher.model.name=y"
ON_KL = "actor.use_kl_loss=true"
CORRECTION = "algorithm.rollout_correction"
CARRY, SEPARATE = (f"trainer.async_mode={mode} {CORRECTION}.method=tis" for mode in ("carry", "separate"))
OWN_GPUS = "gpus=8 rollout.colocate=false trainer.n_gpus_per_node=4"
TWO_NODES = "trainer.nnodes=2 trainer.n_gpus_per_node=6"  # 12 ranks
NODES_FOR_ENGINES = "gpus=4 trainer.n_gpus_per_node=4 rollout.nnodes=2 rollout.tensor_model_parallel_size=2"
FREE_GPUS = f"{TWO_NODES} rollout.tensor_model_parallel_size=4 rollout.colocate=false rollout.num_engines=1"
AGENT = "env.env_name=informal_math"
FEEDBACK = "teacher.self_teacher.context=feedback"
ADAPTER = "model.lora_rank=16 rollout.lora=adapter"
ROUTER = "rollout.router_replay=true"
TP = "rollout.tensor_model_parallel_size"
REQUIRED = {
    **dict.fromkeys(("ppo", "sft", "dpo", "rm"), "model.path=some/model data.train_files=train.jsonl"),
    "generation": "model.path=some/model data.path=train.jsonl",
}
# Words that are an error, and what the error contains: the keys, their values, and values that work.
ERRORS = {
    "ppo": {
        "algorithm.filter_groups.enable=true": "algorithm.filter_groups.enable=true env.rollout.n=8",
        "algorithm.filtration.method=best": "algorithm.filtration.method=best env.rollout.n=8",
        "algorithm.filtration.method=max_variance algorithm.filtration.size=9 env.rollout.n=8": (
            "algorithm.filtration.method=max_variance size=9 env.rollout.n=8 2 to 8."
        ),
        "actor.optim.name=trpo actor.optim.delta=0": "actor.optim.delta 0.",
        "actor.optim.name=trpo model.dtype=bfloat16": "actor.optim.name=trpo model.dtype=bfloat16 model.dtype=float32",
        "actor.clip_ratio_c=1.0": "actor.clip_ratio_c 1.0.",
        "actor.optim.betas=[0.9,1.0]": "actor.optim.betas 2: [0.9, 1.0]",
        "rollout.top_p=0": "rollout.top_p 0.",
        "actor.ulysses_sequence_parallel_size=2": "actor.ulysses_sequence_parallel_size=2 trainer.nnodes=1",
        "actor.fsdp_config.fsdp_size=2": "actor.fsdp_config.fsdp_size=2 n_gpus_per_node=1 nnodes=1",
        "trainer.n_gpus_per_node=4 critic.fsdp_config.fsdp_size=2 critic.fsdp_config.ep_size=4": (
            "critic.fsdp_config.ep_size=4 fsdp_size=2 2 1, 2."
        ),
        f"{TWO_NODES} actor.fsdp_config.fsdp_size=4": "actor.fsdp_config.fsdp_size=4 1, 2, 3, 6, 12, -1",
        f"{TP}=4 rollout.expert_parallel_size=2": "rollout.expert_parallel_size=2 tensor_model_parallel_size=4",
        "algorithm.reference_reset.every=5": "algorithm.reference_reset actor.use_kl_loss=true",
        f"{ON_KL} algorithm.reference_reset.patience=3": "reference_reset.patience=3 data.val_files trainer.test_freq",
        f"{CORRECTION}.method=tis {CORRECTION}.bypass=true": f"{CORRECTION}.method=tis bypass=true bypass=false",
        f"{CORRECTION}.method=mask {CORRECTION}.low=2.0": f"{CORRECTION}.low=2 high=2",
        f"{CORRECTION}.method=tis {CORRECTION}.high=null": f"{CORRECTION}.method=tis high=2.0",
        f"{ON_KL} algorithm.use_kl_in_reward=true": "actor.use_kl_loss=true algorithm.use_kl_in_reward=true",
        f"teacher.divergence=reverse {ON_KL} actor.kl_loss_type=full": "teacher.divergence=reverse kl_loss_type=full",
        "trainer.val_suites=[lm-eval:gsm8k] rollout.name=hf": "trainer.val_suites rollout.name=vllm hf.",
        f"teacher.divergence=sampled {FEEDBACK}": "context=feedback divergence=sampled",
        f"teacher.divergence=jsd {FEEDBACK} env.context=memory": f"{FEEDBACK} env.context=memory",
        f"teacher.divergence=jsd {FEEDBACK} reward_model.enable=true": f"{FEEDBACK} reward_model.enable=false",
        "teacher.divergence=sampled teacher.model.base_url=x": "teacher.model.name base_url",
        f"{TEACHERS} teacher.divergence=sampled": "teacher.models by_source by_source={*:",
        "teacher.models.a={} teacher.by_source.a=a teacher.divergence=sampled": "teacher.models.a.path is required",
        f"{TEACHERS} teacher.by_source.a/*=maths": "teacher.by_source 'a/*' 'maths' (math, code)",
        f"{TEACHERS} teacher.by_source.a.math=0.5 teacher.by_source.a.code=0.4": "teacher.by_source 'a' 0.9.",
        f"{TEACHERS} teacher.by_source.a=math teacher.divergence=jsd": (
            "teacher.top_k teacher.models.code top_k=20 divergence=sampled"
        ),
        f"{TEACHERS} teacher.by_source.a=math teacher.divergence=sampled rollout.temperature=0.7": (
            "rollout.temperature=0.7 teacher.models.code"
        ),
        "env.env_name=agent rollout.name=hf": "env.env_name=agent rollout.name=vllm rollout.name=hf.",
        "trainer.controller=local trainer.nnodes=2": "trainer.controller=local trainer.nnodes=1 nnodes=2",
        "data.train_batch_size=12 env.rollout.n=8 actor.ppo_mini_batch_size=64": (
            "ppo_mini_batch_size=64 96 train_batch_size=12 n=8 48"
        ),
        "env.rollout.n=8 rollout.n=4": "env.rollout.n=8 rollout.n=4",
        "model.lora_alpha=32": "model.lora_alpha lora_rank=0 lora_rank=16",
        "model.lora_rank=16 model.router_aux_loss_coef=0.01": "router_aux_loss_coef=0.01 lora_rank=16",
        "trainer.export_lora=adapter": "trainer.export_lora=adapter model.lora_rank=0",
        "rollout.lora=adapter": "rollout.lora=adapter model.lora_rank=0. 512.",
        "model.lora_rank=513 rollout.lora=adapter": "rollout.lora=adapter model.lora_rank=513. 512.",
        f"{ADAPTER} rollout.name=hf": "rollout.lora=adapter name=vllm name=hf lora=merged",
        f"{ADAPTER} {TP}=2": "rollout.lora=adapter tensor_model_parallel_size=2 lora=merged",
        f"model.lora_rank=16 {ON_KL} algorithm.reference_reset.every=5": "algorithm.reference_reset model.lora_rank=16",
        f"{ROUTER} rollout.name=hf": f"{ROUTER} name=vllm name=hf",
        f"{ROUTER} rollout.enable_prefix_caching=false": f"{ROUTER} enable_prefix_caching=true",
        f"{ROUTER} {ADAPTER}": f"{ROUTER} lora=adapter lora=merged",
        # asynchronous training, and a reference that works while engines generate
        f"{SEPARATE} gpus=8": "trainer.async_mode=separate rollout.colocate=false",
        f"{CARRY} {ROUTER}": f"{ROUTER} max_staleness=0 max_staleness=1",
        f"{CARRY} trainer.max_staleness=-1": "trainer.max_staleness -1.",
        # files and folders
        "data.val_files=[val.jsonl,gone.jsonl]": "data.val_files: file: gone.jsonl",
        "model.path=.": "model.path: config.json",
        "reward_model.enable=true": "reward_model.model.path is required reward_model.model.path=...",
        "teacher.divergence=reverse": "teacher.model.path is required teacher.model.path=...",
        "custom_reward_function.path=gone.py": "custom_reward_function.path: file: gone.py",
        f"data.train_files={'x' * 300}": "data.train_files: file: xxx",  # longer than names may be
        "trainer.resume_mode=resume_path trainer.resume_from_path=gone": "resume_from_path: folder: gone",
        # the machine
        "trainer.device=cuda": "trainer.device=cuda GPU",
        f"{TP}=9": "tensor_model_parallel_size=9 8 cores",
        "trainer.n_gpus_per_node=8 gpus=4": "trainer.n_gpus_per_node=8 4 GPUs",
        f"trainer.n_gpus_per_node=4 {TP}=3 gpus=4": "=3 trainer.n_gpus_per_node=4",
        # 4 divides 12, not 6
        f"{TWO_NODES} {TP}=4 gpus=6": "=4 trainer.n_gpus_per_node=6 1, 2, 3, 6.",
        f"{TP}=8 rollout.colocate=false gpus=4": "8 GPUs, 3 GPUs not used",
        "rollout.colocate=false rollout.num_engines=4 gpus=4": "4 GPUs, 3 GPUs not used",
        f"{FREE_GPUS} gpus=8": "2 GPUs each 2 nodes not used",  # 4 are free, 2 on each node
        f"{NODES_FOR_ENGINES} rollout.num_engines=5": "10 GPUs, 4 GPUs each 2 nodes engines",
    },
    "sft": {
        "trainer.controller=local trainer.nnodes=2": "trainer.controller=local trainer.nnodes=1 nnodes=2",
        "ulysses_sequence_parallel_size=2": "ulysses_sequence_parallel_size=2 trainer.n_gpus_per_node=1",
        "data.train_files=a.jsonl data.source_weights=[1,2]": "data.source_weights 2 train_files 1",
        "fsdp_config.param_offload=true": "fsdp_config.param_offload true verl fsdp_config.offload_policy",
        "data.val_prompts=no.jsonl": "data.val_prompts: file: no.jsonl",
        "trainer.device=cuda": "trainer.device=cuda GPU",
        "trainer.n_gpus_per_node=8 gpus=4": "trainer.n_gpus_per_node=8 4 GPUs",
    },
    "dpo": {"data.truncation=left": 'data.truncation: error drop "left".'},
    "rm": {
        "data.truncation=right": 'data.truncation: error drop "right".',
        "trainer.export_lora=adapter": 'trainer.export_lora: merged "adapter".',
    },
    "generation": {
        "trainer.device=cuda": "trainer.device=cuda GPU",
        f"{TWO_NODES} {TP}=4 gpus=8": "2 trainer.n_gpus_per_node=6 trainer.nnodes=2",
    },
}
# Words, of which the first has no effect, and facts of the reason.
INEFFECTIVE = {
    "ppo": {
        "actor.fsdp_config.param_offload=true": "GPU",
        "actor.fsdp_config.offload_policy=true": "GPU",
        "actor.fsdp_config.param_offload=true actor.fsdp_config.offload_policy=true gpus=1": "offload_policy true.",
        "rollout.kv_cache_gib=2.0 gpus=1": "GPUs",
        'rollout.engine_kwargs.vllm={"a":1} rollout.name=hf': "rollout.name hf.",
        "critic.optim.lr_warmup_steps_ratio=0.1 critic.optim.lr_warmup_steps=3": "critic.optim.lr_warmup_steps 3.",
        "reward_model.model.path=some/model": "reward_model.enable false.",
        f"teacher.model.path=some/model {SERVED}": "teacher.model.base_url x.",
        "actor.kl_loss_coef=0.1": "actor.use_kl_loss false.",
        "actor.clip_ratio=0.3 actor.clip_ratio_low=0.2 actor.clip_ratio_high=0.28": "clip_ratio_low clip_ratio_high",
        "actor.loss_scale_factor=100.0": "actor.loss_agg_mode token-mean.",
        "algorithm.overlong_penalty.cache=64": "algorithm.overlong_penalty.enable false.",
        "algorithm.length_budget.coef=0.1": "algorithm.length_budget.mode null.",
        f"env.history_length=3 {AGENT}": "env.context append.",
        "env.agent.max_requests=7": "env.env_name single_turn.",
        f"env.informal_math.python_code_timeout=3.0 {AGENT} env.informal_math.enable_python_code=false": (
            "env.informal_math.enable_python_code false."
        ),
        "custom_reward_function.name=mine": "custom_reward_function.path empty.",
        "trainer.max_staleness=4": "trainer.async_mode null.",
        "trainer.export_lora=adapter model.lora_rank=16 trainer.export_hf=false": "trainer.export_hf false.",
        "ref.fsdp_config.param_offload=true model.lora_rank=16 gpus=1": "LoRA",
    },
    "generation": {
        "env.agent.max_requests=7": "env.env_name single_turn.",
        "model.lora_rank=8": "training.",
        "rollout.val_kwargs.n=8": "training.",
        "env.rollout.n=8": "data.n_samples",
    },
    "sft": {
        "rollout.val_kwargs.n=4": "data.val_prompts empty.",
        "data.val_prompts=train.jsonl": "trainer.test_freq -1.",
        "env.max_steps=3 data.val_prompts=train.jsonl trainer.test_freq=5": "env.env_name single_turn.",
        "env.rollout.n=2 data.val_prompts=train.jsonl trainer.test_freq=5": "rollout.val_kwargs.n",
        "fsdp_config.optimizer_offload=true": "GPU.",
    },
}
# Words of main_ppo that work, but are a likely mistake, and facts of the warning.
WARNINGS = {
    "rollout.top_p=0.9": "rollout.top_p=0.9 gradients",
    "rollout.top_k=20": "rollout.top_k=20 gradients",
    f"{ON_KL} actor.kl_loss_type=k1": "actor.kl_loss_type=k1 gradient zero +, k2",
    "actor.optim.lr=1e-2": "actor.optim.lr=0.01 0.001",
}
# Words without an error or a warning.
WORKS = {
    **{command: ["", "gpus=8"] for command in REQUIRED},
    "ppo": [
        "",
        "gpus=8",
        "actor.fsdp_config.offload_policy=true gpus=1",
        'rollout.engine_kwargs.vllm={"a":1}',
        "env.agent.max_requests=7 env.env_name=own env.custom_module=own.py",  # may read every section
        # keys that request nothing
        "actor.kl_loss_coef=0",
        f"{ON_KL} actor.kl_loss_coef=0",  # only measures the KL
        "algorithm.use_kl_in_reward=true algorithm.kl_ctrl.type=dual algorithm.kl_ctrl.kl_coef=0",  # dual ascent from 0
        *(f"data.train_batch_size=12 env.rollout.n=8 actor.ppo_mini_batch_size={n}" for n in (1, 48, 96, 97, 256)),
        *(f"{TWO_NODES} actor.fsdp_config.fsdp_size={size} gpus=6" for size in (1, 2, 3, 6, 12, -1)),
        *(f"{ON_KL} actor.kl_loss_type={kind}" for kind in ("low_var_kl+", "k1+", "k2", "mse", "full")),
        f"{CORRECTION}.method=mask {CORRECTION}.level=geometric {CORRECTION}.high=1.01",
        "rollout.val_kwargs.top_p=0.9",
        # engines that fit
        f"trainer.n_gpus_per_node=4 {TP}=2 gpus=4",
        f"trainer.nnodes=2 trainer.n_gpus_per_node=2 {TP}=4 rollout.colocate=false gpus=6",
        "rollout.colocate=false rollout.num_engines=3 gpus=4",
        NODES_FOR_ENGINES,
        f"{FREE_GPUS} gpus=10",
        # asynchronous training
        f"{CARRY} cores=1",
        f"{CARRY} gpus=8",
        f"{SEPARATE} cores=2",
        f"{SEPARATE} {OWN_GPUS}",
        "trainer.async_mode=carry trainer.max_staleness=0 cores=1",  # nothing is stale
    ],
    "generation": [
        "",
        "gpus=8",
        f"{TWO_NODES} {TP}=4 rollout.num_engines=2 gpus=8",
        "rollout.top_p=0.9",
        "rollout.top_k=20",
    ],
}
