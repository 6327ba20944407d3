"""Mixture-of-students distillation (staged).

What it does: distils a trained mixture of experts back into a dense model. The student starts as the mixture with each
group of experts replaced by their mean; in a first stage it also learns the teacher's probabilities, and after that
the data alone.

Helps: serving: a dense model, with the memory and speed of one, that keeps most of what the experts learned.
Does not help: where the mixture can be served as it is.
Limits: the teacher stays in memory beside the student and runs forward for every batch of the first stage. The run's
model is the mixture (a Mixtral, or one that thrifty saved); or it is any student, and `teacher` names the mixture.
Source: Rajbhandari et al., "DeepSpeed-MoE: Advancing Mixture-of-Experts Inference and Training to Power
Next-Generation AI Scale", ICML 2022.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralForCausalLM

from thrifty import _hf
from thrifty.errors import InputError
from thrifty.method import Method, NotApplicable, Paper, register
from thrifty.methods.moe._convert import Dense, moe_layers, set_dense_weights
from thrifty.methods.moe._mixtral import plan_mixtral


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float, valid: Tensor | None = None) -> Tensor:
    """T^2 KL(teacher || student) at temperature T, averaged over the valid rows: logits (..., classes), valid (...)."""
    log_p = (teacher.float() / temperature).log_softmax(-1)
    log_q = (student.float() / temperature).log_softmax(-1)
    rows = (log_p.exp() * (log_p - log_q)).sum(-1) * temperature**2
    if valid is None:
        return rows.mean()
    weight = valid.to(rows.dtype)
    return (rows * weight).sum() / weight.sum().clamp_min(1)


def _mean_mixtral(model: Any) -> nn.Module:
    keys = LlamaConfig().to_dict()
    known = {key: value for key, value in model.config.to_dict().items() if key in keys}
    for key in ("model_type", "architectures", "transformers_version"):
        known.pop(key, None)
    config = LlamaConfig(**known)
    config._attn_implementation = model.config._attn_implementation
    weight = model.get_input_embeddings().weight
    with weight.device:
        student: Any = LlamaForCausalLM(config).to(weight.dtype)
    student.load_state_dict({n: t for n, t in model.state_dict().items() if ".mlp." not in n}, strict=False)
    for source, target in zip(model.model.layers, student.model.layers, strict=True):
        experts = source.mlp.experts
        dense = Dense(experts.gate_up_proj.detach().mean(0), None, experts.down_proj.detach().mean(0), None)
        set_dense_weights(target, "gated", dense)
    student.tie_weights()
    return student


def _mean_ours(model: Any) -> nn.Module:
    base = next(c for c in type(model).__mro__ if getattr(transformers, c.__name__, None) is c)
    config_class: Any = base.config_class  # type: ignore[attr-defined]
    settings = moe_layers(model)[0].s
    if settings["residual"]:
        raise NotApplicable(
            "moe-distill: a residual mixture has a dense layer beside its experts, whose mean says little",
            key="methods.moe-distill.teacher",
            fix="name it as `teacher`, and start from a dense student",
        )
    config = config_class(**{k: v for k, v in model.config.to_dict().items() if k not in ("model_type", "auto_map")})
    config._attn_implementation = model.config._attn_implementation
    weight = next(model.parameters())
    with weight.device:
        student: Any = base(config).to(weight.dtype)
    student.load_state_dict(model.state_dict(), strict=False)
    blocks = student.get_submodule(settings["blocks"])
    for index, layer in zip(settings["sparse"], moe_layers(model), strict=True):
        means = [None if p is None else p.detach().mean(0) for p in (layer.w_in, layer.b_in, layer.w_out, layer.b_out)]
        set_dense_weights(blocks[index], settings["layout"], Dense(*means))  # type: ignore[arg-type]
    student.tie_weights()
    return student


@torch.no_grad()
def mean_student(model: nn.Module) -> nn.Module:
    """The dense model whose feed-forward layers are the means of a mixture's experts.

    Raises:
        NotApplicable: The model is no mixture of a known form, or has layers that only mixtures have.
    """
    if isinstance(model, MixtralForCausalLM):
        return _mean_mixtral(model)
    if not moe_layers(model):
        raise NotApplicable(
            f"moe-distill: {type(model).__name__} is no mixture of experts that can be averaged",
            key="methods.moe-distill.teacher",
            fix="name the trained mixture as `teacher`, or start from a Mixtral or a mixture that thrifty saved",
        )
    return _mean_ours(model)


class _Held:
    """Keeps the teacher at its student's side, out of its modules and its copies."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model

    def __deepcopy__(self, memo: dict[int, Any]) -> _Held:
        return self


@register(
    "moe-distill",
    title="Mixture-of-students distillation",
    section="moe",
    sources=[Paper("Rajbhandari et al.", 2022, "arXiv:2201.05596")],
    exact=False,
    claims=("feed-forward",),
    conflicts_with={
        "section:peft": "adapters would be added to the mixture, and its student has none",
        "section:growth": "a student that changes its layers in mid-run is not the mean of its teacher",
        "section:initialization": "the student starts from its teacher, a new initialisation discards that",
        "section:sparsity": "masks are chosen for the layers of the mixture, which its student does not have",
        "chunked-cross-entropy": "it compares the student's logits, which would never be made",
        "unpadding": "the student would see joined samples, and its teacher padded ones",
    },
)
@dataclass(kw_only=True)
class MoeDistill(Method):
    """Distils a mixture of experts into a dense model."""

    teacher: str | None = None
    """Folder of the trained mixture (its modelling file is run); null: the run's model is the mixture."""
    stage: float = 0.5
    """Share of the run in which the student learns from the teacher; after it from the data alone."""
    weight: float = 0.5
    """Weight of the teacher's probabilities; the data's loss gets the rest."""
    temperature: float = 1.0
    """Softens the probabilities of both."""

    _shifted: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.stage <= 1:
            raise ValueError(f"stage must be above 0 and at most 1, got {self.stage}")
        if not 0 < self.weight <= 1:
            raise ValueError(f"weight must be above 0 and at most 1, got {self.weight}")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature}")

    def prepare_model(self, model: nn.Module, ctx: Any) -> nn.Module:
        from thrifty import tasks

        task = ctx.task or tasks.infer(model)
        self._shifted = task.name == "causal-lm"
        if self.teacher is None:
            teacher, student = model, mean_student(model)
        else:
            teacher, student = load_teacher(self.teacher, task.auto_name, ctx.planning), model
        if ctx.planning:
            plan_layers(teacher)
        # On the student, since a dry run prepares several and comes back to earlier ones.
        vars(student)["moe_teacher"] = _Held(teacher.eval().requires_grad_(False))
        return student

    def wrap_loss(self, compute_loss: Callable[..., Any], ctx: Any) -> Callable[..., Any]:
        def with_teacher(model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
            if ctx.step >= self.stage * ctx.total_steps:
                return compute_loss(model, inputs, num_items_in_batch)
            student: Any = _hf.unwrap_container(model)
            teacher = student.moe_teacher.model
            seen: dict[str, Tensor] = {}
            handle = student.register_forward_hook(lambda m, i, output: seen.update(logits=output["logits"]))
            try:
                loss = compute_loss(model, inputs, num_items_in_batch)
            finally:
                handle.remove()
            autocast = ctx.trainer.compute_loss_context_manager() if ctx.trainer else contextlib.nullcontext()
            teacher.to(seen["logits"].device)
            with torch.no_grad(), autocast:
                expected = teacher(**{k: v for k, v in inputs.items() if k not in ("labels", "sample_id")}).logits
            soft = self._soft_loss(seen["logits"], expected, inputs, num_items_in_batch, ctx)
            return (1 - self.weight) * loss + self.weight * soft

        return with_teacher

    def _soft_loss(self, logits: Tensor, expected: Tensor, inputs: Any, num_items: Any, ctx: Any) -> Tensor:
        labels, valid = inputs.get("labels"), None
        if labels is not None and logits.ndim == 3:
            if self._shifted:
                logits, expected, labels = logits[:, :-1], expected[:, :-1], labels[:, 1:]
            valid = labels != -100
        soft = distillation_loss(logits, expected, self.temperature, valid)
        trainer = ctx.trainer
        if valid is None or num_items is None or trainer is None or not trainer.model_accepts_loss_kwargs:
            return soft
        # As the data's loss: added up over the micro-batches of a step, and divided by all its tokens.
        across = ctx.world_size if trainer.args.average_tokens_across_devices else 1
        return soft * valid.sum() * across / num_items


def load_teacher(folder: str, auto_name: str, planning: bool = False) -> nn.Module:
    """Loads the trained mixture in a folder; in a dry run its shapes only.

    Raises:
        InputError: There is no such folder.
    """
    if not os.path.isdir(folder):
        raise InputError("there is no such folder", key="methods.moe-distill.teacher", value=folder)
    auto: Any = getattr(transformers, auto_name)
    if planning:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
        with torch.device("meta"):
            return auto.from_config(config, trust_remote_code=True)
    return auto.from_pretrained(folder, trust_remote_code=True)


def plan_layers(model: nn.Module) -> None:
    """Gives the experts of a mixture a form that can run without data."""
    if isinstance(model, MixtralForCausalLM):
        plan_mixtral(model)
    for layer in moe_layers(model):
        layer.planned = True
