"""A resumed run whose model is built anew: what other methods attach to it, and what they remember, is there again."""

from __future__ import annotations

import tiny
from methods import loops


def test_other_methods_attach_themselves_and_keep_their_state(tmp_path):
    methods = [
        {"net2net": {"at": 0.3}},
        {"ema": {"decay": 0.5}},
        {"stochastic-depth": {"survival": 0.3}},
        {"lr-scaling": {"base_batch_size": 1, "warmup_steps": 6}},
    ]
    run = loops.resumes(tmp_path, methods, lambda: tiny.llama(dropout=0.1), max_steps=6, step=4)
    assert run.recipe["ema"].average.updates == 3  # of the four steps after the growth, the first begins the mean


def test_the_best_checkpoint_before_the_growth_is_loaded_as_it_was(tmp_path):
    """The small model was the best one: it is built again, and its weights are those that were saved."""
    run = tiny.trainer(tmp_path, [{"net2net": {"at": 0.5}}], max_steps=4, save_strategy="steps", save_steps=1,
                       eval_strategy="steps", eval_steps=1, load_best_model_at_end=True, learning_rate=10.0,
                       metric_for_best_model="loss", lr_scheduler_type="constant", warmup_steps=0)  # fmt: skip
    run.train()
    best = min((row["eval_loss"], row["step"]) for row in run.state.log_history if "eval_loss" in row)
    assert run.state.best_global_step == best[1]
    hidden = run.model.config.hidden_size
    assert hidden == (8 if best[1] < 2 else 16)
    assert run.evaluate()["eval_loss"] == best[0]
