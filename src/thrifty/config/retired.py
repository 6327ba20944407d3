"""Names that transformers 5 dropped or that belong to another tool, and what to write in their place.

An unknown key is an error in any case. These tables only make the answer better than "did you mean".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thrifty.errors import InputError

_TRANSFORMERS_5: dict[str, str] = {
    "warmup_ratio": "`warmup_steps` takes a share of the run too: warmup_steps: 0.1",
    "logging_dir": "remove it: trackers choose their own folder, and metrics.jsonl lies in `output_dir`",
    "overwrite_output_dir": "`overwrite: true` replaces a run, `resume: auto` continues it",
    "resume_from_checkpoint": "`resume: auto`, or `resume: path/to/checkpoint-500`",
    "group_by_length": "train_sampling_strategy: group_by_length",
    "evaluation_strategy": "`eval_strategy`",
    "save_safetensors": "remove it: weights are always saved as safetensors",
    "include_tokens_per_second": "remove it: tokens per second are always measured",
    "include_num_tokens_seen": "`include_num_input_tokens_seen`",
    "include_inputs_for_metrics": "include_for_metrics: [inputs]",
    "gradient_checkpointing": "it is a method: methods: [gradient-checkpointing]",
    "gradient_checkpointing_kwargs": "settings of the method: methods: [{gradient-checkpointing: {...}}]",
    "per_gpu_train_batch_size": "`per_device_train_batch_size`",
    "per_gpu_eval_batch_size": "`per_device_eval_batch_size`",
    "adafactor": "optim: adafactor",
    "no_cuda": "use_cpu: true",
    "use_mps_device": "remove it: MPS is used where it is there; use_cpu: true switches it off",
    "xpu_backend": "`ddp_backend`",
    "half_precision_backend": "remove it: torch's own autocast is the only one left",
    "fp16_backend": "remove it: torch's own autocast is the only one left",
    "fp16_opt_level": "remove it: apex is gone; methods: [fp16]",
    "use_ipex": "remove it: ipex is gone; torch itself has its kernels",
    "jit_mode_eval": "remove it: TorchScript is gone; methods or torch_compile: true",
    "torchdynamo": "torch_compile_backend: inductor",
    "ray_scope": "remove it: hyper-parameter search is not part of a run file",
    "fsdp_min_num_params": "fsdp_config: {min_num_params: ...}",
    "fsdp_transformer_layer_cls_to_wrap": "fsdp_config: {transformer_layer_cls_to_wrap: [...]}",
    "sharded_ddp": "`fsdp`",
    "push_to_hub_token": "`hub_token`",
    "push_to_hub_model_id": "`hub_model_id`",
    "push_to_hub_organization": "hub_model_id: organisation/name",
    "past_index": "remove it",
    "dispatch_batches": "accelerator_config: {dispatch_batches: ...}",
    "split_batches": "accelerator_config: {split_batches: ...}",
    "mp_parameters": "remove it",
    "tpu_num_cores": "start with a launcher: accelerate launch -m thrifty.cli train ...",
    "tpu_metrics_debug": "debug: tpu_metrics_debug",
    "tokenizer": "`tokenizer_name_or_path` (in Python: Trainer(processing_class=...))",
    "torch_dtype": "`dtype`",
    "use_auth_token": "`hub_token`",
    "do_train": "remove it: the verb says it, `thrifty train`",
    "do_eval": "remove it: the verb says it, `thrifty evaluate`; during training `eval_strategy: steps`",
    "do_predict": "remove it: the verb says it, `thrifty generate`",
    "local_rank": "remove it: the launcher (torchrun, accelerate launch) sets it",
    "bettertransformer": "remove it: SDPA attention is the default",
    "to_bettertransformer": "remove it: SDPA attention is the default",
    "use_bettertransformer": "remove it: SDPA attention is the default",
}
_AXOLOTL: dict[str, str] = {
    "base_model": "`model_name_or_path`",
    "base_model_config": "`model_config`",
    "tokenizer_config": "`tokenizer_name_or_path`",
    "tokenizer_type": "remove it: the class is read from the tokenizer's files",
    "model_type": "a key inside `model_config`; from `model_name_or_path` it is read from the model's files",
    "micro_batch_size": "`per_device_train_batch_size`",
    "eval_batch_size": "`per_device_eval_batch_size`",
    "batch_size": "`per_device_train_batch_size`",
    "num_epochs": "`num_train_epochs`",
    "epochs": "`num_train_epochs`",
    "sequence_len": "`max_length`",
    "max_seq_length": "`max_length`",
    "cutoff_len": "`max_length`",
    "block_size": "`max_length`",
    "sample_packing": "methods: [packing]",
    "eval_sample_packing": "methods: [packing]",
    "pad_to_sequence_len": "remove it: `packing` fills sequences",
    "packing": "methods: [packing]",
    "val_set_size": "`validation_fraction`",
    "val_size": "`validation_fraction`",
    "validation_split_percentage": "`validation_fraction`, as a share between 0 and 1",
    "datasets": "`train_file`, or `dataset_name` for a hub id",
    "dataset": "`train_file`, or `dataset_name` for a hub id",
    "test_datasets": "`validation_file`",
    "dataset_prepared_path": "remove it: prepared data is cached by content",
    "eval_file": "`validation_file`",
    "adapter": "methods: [lora]",
    "finetuning_type": "methods: [lora]",
    "peft_use_dora": "a setting of the method: methods: [{lora: {...}}]; `thrifty methods lora` lists them",
    "lora_r": "methods: [{lora: {r: ...}}]",
    "lora_rank": "methods: [{lora: {r: ...}}]",
    "lora_alpha": "methods: [{lora: {lora_alpha: ...}}]; `thrifty methods lora` lists the settings",
    "lora_dropout": "methods: [{lora: {lora_dropout: ...}}]; `thrifty methods lora` lists the settings",
    "lora_target_modules": "methods: [{lora: {target_modules: ...}}]",
    "lora_target": "methods: [{lora: {target_modules: ...}}]",
    "lora_target_linear": "methods: [{lora: {target_modules: all-linear}}]",
    "target_modules": "methods: [{lora: {target_modules: ...}}]",
    "lora_modules_to_save": "a setting of the method: `thrifty methods lora` lists them",
    "lora_model_dir": "`model_name_or_path` takes a folder with an adapter",
    "lr": "`learning_rate`",
    "lr_scheduler": "`lr_scheduler_type`",
    "max_grad_clip": "`max_grad_norm`",
    "train_on_inputs": "`train_on_prompt`",
    "flash_attention": "attn_implementation: flash_attention_2; SDPA attention is the default",
    "sdp_attention": "remove it: SDPA attention is the default",
    "xformers_attention": "remove it: SDPA attention is the default",
    "evals_per_epoch": "`eval_steps` as a share of the run: eval_steps: 0.1",
    "saves_per_epoch": "`save_steps` as a share of the run: save_steps: 0.1",
    "wandb_project": "report_to: wandb, and `project`",
    "wandb_name": "`run_name`",
    "special_tokens": "declare them in the tokenizer's folder, and name it in `tokenizer_name_or_path`",
    "chat_template": "declare it in the tokenizer's folder, and name it in `tokenizer_name_or_path`",
    "strict": "remove it: an unknown key is always an error",
    "save_dir": "`output_dir`",
    "output": "`output_dir`",
    "model": "`model_name_or_path`, or `model_config` for training from scratch",
    "model_name": "`model_name_or_path`",
    "model_id": "`model_name_or_path`",
    "train_data": "`train_file`",
    "steps": "`max_steps`",
    "stage": "`task`",
}
RETIRED_KEYS: Mapping[str, str] = {**_AXOLOTL, **_TRANSFORMERS_5}
"""Old or foreign key to what replaces it."""

RETIRED_VALUES: Mapping[str, Mapping[str, str]] = {
    "optim": {
        "adamw_hf": "transformers' own AdamW is gone; write adamw_torch_fused",
        "adamw": "write adamw_torch_fused",
        "adam": "write adamw_torch_fused (with weight_decay 0 it is Adam)",
        "adamw_apex_fused": "apex is gone; write adamw_torch_fused",
        "adamw_torch_npu": "write adamw_torch_npu_fused",
        "lion": "it is a method: optimizer: lion",
        "adamw_bnb": "write adamw_bnb_8bit",
    },
    "torch_compile_backend": {
        name: f"torch has no back end {name} any more; write inductor"
        for name in ("nvfuser", "aot_nvfuser", "aot_cudagraphs", "ofi", "fx2trt", "onnxrt", "ipex")
    },
    "eval_strategy": {"none": "write no", "step": "write steps"},
}
"""Values that are gone, by key."""


def check_retired(values: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Refuses keys and values that were replaced, with what replaced them.

    Args:
        values: The run file's content.
        known: The keys that exist; a name that exists again is not retired.

    Raises:
        InputError: `values` holds such a key or value.
    """
    for key, value in values.items():
        if key in RETIRED_KEYS and key not in known:
            raise InputError("there is no such key", key=key, value=value, fix=RETIRED_KEYS[key])
        answer = RETIRED_VALUES.get(key, {}).get(value.lower()) if isinstance(value, str) else None
        if answer is not None:
            raise InputError("this is gone", key=key, value=value, fix=answer)
