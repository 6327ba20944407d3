"""Do the tools read what `thrifty plan --export` writes for them?

Plans of several kinds are exported to every tool; each tool whose package is installed loads its files, and what it
has understood is compared with what was planned.

    python benchmarks/exports.py write DIR      # with thrifty installed: exports every plan to every tool
    python benchmarks/exports.py load DIR       # in any environment: lets every tool that is installed here load them

The tools exclude each other's versions, so `load` needs nothing of thrifty and adds to the result file of earlier
calls. What no environment has loaded keeps the entry that `write` makes: its keys, types and values agree with the
documented ones, `KEYS` in `thrifty/planner/export`. Each loader below is also what the tests run where the package is
installed. Megatron-LM has no package; the dataclasses of megatron-core, which its flags fill in, stand for it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import datetime
import importlib.metadata
import importlib.util
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "exports.json"
TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256,
}  # fmt: skip
PLANS: dict[str, dict[str, Any]] = {
    "plain": {"learning_rate": 3e-4, "weight_decay": 0.1, "global_batch": 6},
    "bf16": {"methods": ["bf16"]},
    "pure-bf16": {"dtype": "bfloat16"},
    "checkpointing": {"methods": ["bf16", "gradient-checkpointing"]},
    "every-second-block": {"methods": [{"gradient-checkpointing": {"every": 2}}]},
    "lora": {"methods": ["lora"], "dtype": "bfloat16"},
    "dora": {"methods": [{"dora": {"r": 16, "alpha": 16, "target_modules": ["q_proj", "v_proj"]}}]},
    "qlora": {"methods": ["qlora", "bf16", "paged-adamw-8bit"], "dtype": "bfloat16"},
    "8bit": {"methods": ["adamw-8bit", "bf16"]},
    "lion": {"methods": [{"lion": {"betas": [0.95, 0.98]}}]},
    "packing": {"methods": ["packing", "bf16"]},
    "compile": {"methods": ["compile", "bf16"]},
    "sharded": {"methods": ["bf16"], "devices": 4},
}
SHARDINGS = ("ddp", "zero1", "zero2", "zero3")
"""Every way of dividing states, exported of the sharded plan."""
COMMON = {"device": "a100", "seq_len": 128, "processes": 1, "global_batch": 8}


def exports() -> Iterator[tuple[str, Any]]:
    """Names and plans."""
    import dataclasses

    from thrifty.planner import search
    from thrifty.planner.plan import plan

    search.MOST_CLASSES = 1  # what a search finds is measured elsewhere; here plans need only exist
    for name, options in PLANS.items():
        found = plan(TINY, **{**COMMON, **options})
        if name != "sharded":
            yield name, found
            continue
        for sharding in SHARDINGS:
            chosen = dataclasses.replace(found.require(), sharding=sharding)
            yield sharding, dataclasses.replace(found, chosen=chosen)


def facts(found: Any) -> dict[str, Any]:
    """What a tool must have understood, as far as it has words for it."""
    from thrifty.planner.export.reading import intent_of

    intent = intent_of(found)
    lora = intent.adapter is not None
    return {
        "micro_batch": intent.micro_batch, "accumulation": intent.accumulation, "devices": intent.devices,
        "global_batch": intent.global_batch, "seq_len": intent.seq_len, "learning_rate": intent.learning_rate,
        "weight_decay": intent.weight_decay, "betas": list(intent.betas), "max_grad_norm": intent.max_grad_norm,
        "checkpointing": intent.checkpointing, "zero_stage": intent.zero_stage, "compiled": intent.compiled,
        "half": intent.precision == "bf16", "rank": intent.adapter.rank if lora else None,  # type: ignore[union-attr]
        "four_bits": intent.quantization is not None, "packing": intent.packing,
    }  # fmt: skip


def write(folder: Path) -> None:
    """Exports every plan to every tool, and starts the result file."""
    from thrifty.planner.export import TOOLS

    tools: dict[str, Any] = {}
    for name, found in exports():
        expected = facts(found)
        for tool in TOOLS:
            exported = write_one(folder / tool / name, found, tool, expected)
            entry = tools.setdefault(tool, {"checked": "against the documented schema", "of": exported.source,
                                            "plans": 0, "date": today()})  # fmt: skip
            entry["plans"] += 1
    save(tools)


def write_one(target: Path, found: Any, tool: str, expected: dict[str, Any]) -> Any:
    """Exports a plan to a tool, with what the tool must understand beside it."""
    from thrifty.planner.export import export_plan

    exported = export_plan(found, tool)  # raises where a key is not a documented one
    exported.write(target)
    note = {"expected": expected, "values": dict(exported.values), "flags": exported.flags}
    (target / "expected.json").write_text(json.dumps(note, default=str))
    return exported


def load(folder: Path, only: str | None) -> int:
    """Lets every installed tool load its files; returns how many plans went wrong."""
    tools: dict[str, Any] = {}
    wrong = 0
    for tool, loader in LOADERS.items():
        module, package = PACKAGES[tool]
        if (only not in (None, tool)) or not installed(module):
            continue
        plans = sorted(path for path in (folder / tool).iterdir() if path.is_dir())
        problems = {path.name: found for path in plans if (found := differences(loader, path))}
        for name, found in problems.items():
            print(f"{tool} {name}: {found}")
        wrong += len(problems)
        tools[tool] = {
            "checked": "loaded by the package", "of": f"{package} {importlib.metadata.version(package)}",
            "how": inspect.getdoc(loader), "plans": len(plans), "problems": problems, "date": today(),
        }  # fmt: skip
        print(f"{tool}: {len(plans) - len(problems)} of {len(plans)}")
    save((json.loads(RESULT.read_text())["tools"] if RESULT.exists() else {}) | tools)
    return wrong


def differences(loader: Callable[[Path, dict[str, Any]], dict[str, Any]], folder: Path) -> list[str]:
    """What the tool has understood otherwise; its refusal where it refuses."""
    note = json.loads((folder / "expected.json").read_text())
    try:
        with contextlib.chdir(folder):
            understood = loader(folder, note)
    except Exception as error:  # whatever the tool raises is the finding
        return [f"{type(error).__name__}: {str(error)[:300]}"]
    expected = note["expected"]
    return [f"{key}: {value!r} for {expected[key]!r}" for key, value in understood.items()
            if not same(value, expected[key])]  # fmt: skip


def same(one: Any, other: Any) -> bool:
    """Equal, numbers to rounding."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) or isinstance(other, float):
        return isinstance(one, (int, float)) and isinstance(other, (int, float)) and math.isclose(one, other)
    return one == other


def installed(module: str) -> bool:
    """Whether the module is there, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def today() -> str:
    """The date."""
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()


def save(tools: dict[str, Any]) -> None:
    """Writes the result file."""
    what = "plans exported to other tools, and loaded by them or checked against their documented schema"
    RESULT.write_text(json.dumps({"what": what, "tools": dict(sorted(tools.items()))}, indent=1) + "\n")


# One loader a tool: loads the exported files with the package and returns what it has understood.


def one_process() -> None:
    """A process group of one, which some tools ask for its size while they read."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def trainer(folder: Path, note: dict[str, Any]) -> dict[str, Any]:
    """`TrainingArguments`."""
    from transformers import TrainingArguments

    values = json.loads((folder / "training_arguments.json").read_text())
    args = TrainingArguments(output_dir="out", use_cpu=True, **values)
    seen = huggingface(args)
    if note["expected"]["zero_stage"] == 3:
        seen["zero_stage"] = 3 if args.fsdp else 0
    return seen


def huggingface(args: Any) -> dict[str, Any]:
    """What a `TrainingArguments` says."""
    return {
        "micro_batch": args.per_device_train_batch_size, "accumulation": args.gradient_accumulation_steps,
        "learning_rate": args.learning_rate, "weight_decay": args.weight_decay, "max_grad_norm": args.max_grad_norm,
        "betas": [args.adam_beta1, args.adam_beta2], "compiled": bool(args.torch_compile),
    }  # fmt: skip


def accelerate(folder: Path, note: dict[str, Any]) -> dict[str, Any]:
    """`load_config_from_file`."""
    from accelerate.commands.config.config_args import load_config_from_file

    config: Any = load_config_from_file(str(folder / "accelerate.yaml"))
    kind = str(getattr(config.distributed_type, "value", config.distributed_type))
    stage = {"NO": 0, "MULTI_GPU": 0, "FSDP": 3}.get(kind)
    if stage is None:
        stage = config.deepspeed_config["zero_stage"]
    return {"devices": config.num_processes, "zero_stage": stage}


def deepspeed(folder: Path, note: dict[str, Any]) -> dict[str, Any]:
    """`DeepSpeedConfig`, told the number of devices."""
    from unittest import mock

    from deepspeed.runtime import constants
    from deepspeed.runtime.config import DeepSpeedConfig

    values = json.loads((folder / "ds_config.json").read_text())
    known = {value for value in vars(constants).values() if isinstance(value, str)} | {"zero_optimization"}
    unknown = set(values) - known
    if unknown:
        raise ValueError(f"keys that DeepSpeed does not have: {sorted(unknown)}")
    devices = note["expected"]["devices"]
    with mock.patch.multiple("deepspeed.comm", get_rank=lambda: 0, get_world_size=lambda: devices):
        config = DeepSpeedConfig(values)
    seen = {
        "micro_batch": config.train_micro_batch_size_per_gpu, "accumulation": config.gradient_accumulation_steps,
        "global_batch": config.train_batch_size, "max_grad_norm": config.gradient_clipping,
        "zero_stage": config.zero_optimization_stage,
        "half": bool(config.torch_autocast_enabled or config.bfloat16_config.enabled),
    }  # fmt: skip
    if config.optimizer_name is not None:
        params = config.optimizer_params
        seen |= {"learning_rate": params["lr"], "betas": params["betas"], "weight_decay": params["weight_decay"]}
    return seen


def axolotl(folder: Path, note: dict[str, Any]) -> dict[str, Any]:
    """`AxolotlInputConfig`, whose validators run."""
    import yaml
    from axolotl.utils.dict import DictDefault
    from axolotl.utils.schemas.config import AxolotlInputConfig

    values = yaml.safe_load((folder / "axolotl.yaml").read_text())
    unknown = set(values) - set(AxolotlInputConfig.model_fields)
    if unknown:
        raise ValueError(f"keys that Axolotl does not have: {sorted(unknown)}")
    config = AxolotlInputConfig(**DictDefault(values))
    stage = 0
    if config.deepspeed:
        stage = json.loads(Path(str(config.deepspeed)).read_text())["zero_optimization"]["stage"]
    return {
        "micro_batch": config.micro_batch_size, "accumulation": config.gradient_accumulation_steps,
        "seq_len": config.sequence_len, "learning_rate": float(config.learning_rate),
        "weight_decay": config.weight_decay, "betas": [config.adam_beta1, config.adam_beta2],
        "max_grad_norm": config.max_grad_norm, "checkpointing": bool(config.gradient_checkpointing),
        "half": bool(config.bf16 or config.bfloat16), "rank": config.lora_r, "compiled": bool(config.torch_compile),
        "four_bits": bool(config.load_in_4bit), "packing": bool(config.sample_packing),
        "zero_stage": 3 if config.fsdp_config is not None else stage,
    }  # fmt: skip


def llamafactory(folder: Path, note: dict[str, Any]) -> dict[str, Any]:
    """The parser of its command line with all its dataclasses."""
    import torch
    import yaml
    from llamafactory.hparams import parser

    values = yaml.safe_load((folder / "llamafactory.yaml").read_text()) | {"use_cpu": not torch.cuda.is_available()}
    model, data, args, finetuning, _ = parser._parse_train_args(values)
    stage = json.loads(Path(args.deepspeed).read_text())["zero_optimization"]["stage"] if args.deepspeed else 0
    return huggingface(args) | {
        # One token of a packed row is held back, and filled up again to a multiple of eight.
        "seq_len": data.cutoff_len + bool(data.packing), "checkpointing": not model.disable_gradient_checkpointing,
        "half": bool(args.bf16 or finetuning.pure_bf16), "four_bits": model.quantization_bit == 4,
        "rank": finetuning.lora_rank if finetuning.finetuning_type == "lora" else None,
        "packing": bool(data.packing), "zero_stage": stage,
    }  # fmt: skip


def torchtitan(folder: Path, note: dict[str, Any]) -> dict[str, Any]:
    """`ConfigManager`, which imports the module and validates what it returns."""
    from torchtitan.config.manager import ConfigManager

    sys.path.insert(0, str(folder))
    sys.modules.pop("torchtitan_plan", None)
    try:
        config: Any = ConfigManager().parse_args(["--module", "torchtitan_plan", "--config", "planned"])
    finally:
        sys.path.remove(str(folder))
    training, parallel = config.training, config.parallelism
    optimizer = config.optimizer.param_groups[0].optimizer_kwargs
    degree = parallel.data_parallel_replicate_degree * parallel.data_parallel_shard_degree
    return {
        "micro_batch": training.local_batch_size, "global_batch": training.global_batch_size, "devices": degree,
        "seq_len": training.seq_len, "max_grad_norm": training.max_norm, "learning_rate": optimizer["lr"],
        "betas": list(optimizer["betas"]), "weight_decay": optimizer["weight_decay"],
        "half": "bfloat16" in (training.mixed_precision_param, training.dtype),
        "checkpointing": config.activation_checkpoint is not None, "compiled": config.compile.enable,
    }  # fmt: skip


def composer(folder: Path, note: dict[str, Any]) -> dict[str, Any]:
    """`Precision`, `FSDPConfig`, optimizer and clipping built; keys as `Trainer` and LLM Foundry have them."""
    import torch
    import yaml
    from composer import Trainer
    from composer.algorithms import GradientClipping
    from composer.core import Precision
    from composer.optim import DecoupledAdamW
    from composer.utils.parallelism import FSDPConfig

    values = yaml.safe_load((folder / "composer.yaml").read_text())
    if (foundry := importlib.util.find_spec("llmfoundry")) is not None:  # its import needs a server's clients
        source = (Path(str(foundry.origin)).parent / "utils/config_utils.py").read_text()
        config = next(node for node in ast.parse(source).body if getattr(node, "name", "") == "TrainConfig")
        known = {node.target.id for node in ast.walk(config) if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]
        if unknown := set(values) - known:
            raise ValueError(f"TrainConfig has no {sorted(unknown)}")
    parameters = inspect.signature(Trainer.__init__).parameters
    for key in ("precision", "device_train_microbatch_size", "compile_config"):
        if key in values and key not in parameters:
            raise ValueError(f"Trainer has no {key}")
    Precision(values["precision"])
    fields = set(FSDPConfig.__dataclass_fields__)
    if unknown := set(values.get("fsdp_config", {})) - fields:
        raise ValueError(f"FSDPConfig has no {sorted(unknown)}")
    seen = {
        "micro_batch": values["device_train_microbatch_size"], "global_batch": values["global_train_batch_size"],
        "seq_len": values["max_seq_len"], "half": values["precision"] == "amp_bf16",
    }  # fmt: skip
    if "algorithms" in values:
        seen["max_grad_norm"] = GradientClipping(**values["algorithms"]["gradient_clipping"]).clipping_threshold
    if values.get("optimizer", {}).get("name") == "decoupled_adamw":
        options = {key: value for key, value in values["optimizer"].items() if key != "name"}
        group = DecoupledAdamW([torch.nn.Parameter(torch.zeros(2))], **options).param_groups[0]
        decay = group["weight_decay"] / group["lr"]
        seen |= {"learning_rate": group["lr"], "betas": list(group["betas"]), "weight_decay": decay}
    return seen


def colossalai(folder: Path, note: dict[str, Any]) -> dict[str, Any]:
    """The exported module run: it builds the plugin and the `Booster`, in one process."""
    one_process()
    names: dict[str, Any] = {}
    exec((folder / "colossalai_booster.py").read_text(), names)
    booster = names["make_booster"]()
    kind = type(booster.plugin).__name__
    stage = {"TorchDDPPlugin": 0, "GeminiPlugin": 3}.get(kind)
    seen = {"micro_batch": names["MICRO_BATCH"], "accumulation": names["ACCUMULATION"]}
    return seen | {"zero_stage": booster.plugin.stage if stage is None else stage}


def paddle(folder: Path, note: dict[str, Any]) -> dict[str, Any]:
    """The parser of its command line with all its dataclasses, on a CPU."""
    from paddleformers.trainer.trainer_utils import ShardingOption

    parser = importlib.import_module("paddleformers.cli.hparams.parser")
    values = json.loads((folder / "paddle.json").read_text()) | {"device": "cpu"}
    parsed = parser._parse_train_args(values)
    of = {name: value for part in parsed for name, value in vars(part).items()}
    return {
        "micro_batch": of["per_device_train_batch_size"], "accumulation": of["gradient_accumulation_steps"],
        "seq_len": of["max_seq_len"], "learning_rate": of["learning_rate"], "weight_decay": of["weight_decay"],
        "betas": [of["adam_beta1"], of["adam_beta2"]], "max_grad_norm": of["max_grad_norm"], "half": of["bf16"],
        "checkpointing": of["recompute_granularity"] == "full", "rank": of["lora_rank"] if of["lora"] else None,
        "four_bits": of["weight_quantize_algo"] is not None, "packing": of["packing"],
        # In one process Paddle itself forgets what is divided.
        "zero_stage": int(ShardingOption(values["sharding"]).value[-1]) if values["sharding"] else 0,
    }  # fmt: skip


def megatron(folder: Path, note: dict[str, Any]) -> dict[str, Any]:
    """megatron-core's `TransformerConfig`, `OptimizerConfig` and `DistributedDataParallelConfig` of the flags."""
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    flags = {key.replace("-", "_"): value for key, value in note["values"].items()}
    called = {"norm_epsilon": "layernorm_epsilon", "swiglu": "gated_linear_unit", "adam_beta1": "adam_beta1"}
    options = {called.get(key, key): value for key, value in flags.items()}
    options["add_bias_linear"] = not options.pop("disable_bias_linear", False)

    def build(cls: Any) -> Any:
        return cls(**{key: value for key, value in options.items() if key in cls.__dataclass_fields__})

    half = torch.bfloat16 if flags.get("bf16") else torch.float32
    options |= {"params_dtype": half}
    model, optimizer, parallel = (build(c) for c in (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig))
    sharded = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
    stage = sharded[parallel.data_parallel_sharding_strategy] if parallel.use_megatron_fsdp else 0
    seen = {
        "micro_batch": flags["micro_batch_size"], "global_batch": flags["global_batch_size"],
        "seq_len": flags["seq_length"], "max_grad_norm": optimizer.clip_grad, "half": optimizer.bf16,
        "checkpointing": model.recompute_granularity == "full", "learning_rate": optimizer.lr,
        "weight_decay": optimizer.weight_decay,
        "zero_stage": stage or int(parallel.use_distributed_optimizer),
    }  # fmt: skip
    if optimizer.optimizer == "adam":
        seen["betas"] = [optimizer.adam_beta1, optimizer.adam_beta2]
    return seen


LOADERS: dict[str, Callable[[Path, dict[str, Any]], dict[str, Any]]] = {
    "trainer": trainer, "accelerate": accelerate, "deepspeed": deepspeed, "axolotl": axolotl,
    "llamafactory": llamafactory, "torchtitan": torchtitan, "composer": composer, "colossalai": colossalai,
    "paddle": paddle, "megatron": megatron,
}  # fmt: skip
PACKAGES = {
    "trainer": ("transformers", "transformers"), "accelerate": ("accelerate", "accelerate"),
    "deepspeed": ("deepspeed", "deepspeed"), "axolotl": ("axolotl", "axolotl"),
    "llamafactory": ("llamafactory", "llamafactory"), "torchtitan": ("torchtitan", "torchtitan"),
    "composer": ("composer", "mosaicml"), "colossalai": ("colossalai", "colossalai"),
    "paddle": ("paddleformers", "paddleformers"), "megatron": ("megatron.core", "megatron-core"),
}  # fmt: skip
"""The module to look for, and the package whose version is told."""

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("write", "load"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tool", choices=tuple(LOADERS))
    arguments = parser.parse_args()
    if arguments.action == "write":
        write(arguments.folder.resolve())
    elif load(arguments.folder.resolve(), arguments.tool):
        raise SystemExit(1)
