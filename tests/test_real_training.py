"""Promise 1 on real trainings: the controller changes how fast a model trains, never what it learns."""

from __future__ import annotations

from collections import Counter

import pytest

from .training import CHANGING, UNCHANGED, Lab, Trained

LORA = ("--tuner_type", "lora", "--lora_dropout", "0")
VARIANTS = {
    "full": ("sft", "sft", ()),
    "lora": ("sft", "sft", LORA),
    "pretraining": ("pt", "pretrain", ()),
    "batches of 4, two epochs, evaluation": (
        "sft",
        "sft",
        (
            *("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "3", "--num_train_epochs", "2"),
            *("--split_dataset_ratio", "0.1", "--eval_strategy", "steps", "--eval_steps", "2"),
        ),
    ),
    "length-grouped, last batch dropped": (
        "sft",
        "sft",
        ("--group_by_length", "true", "--dataloader_drop_last", "true", "--per_device_train_batch_size", "2"),
    ),
    "no checkpointing": ("sft", "sft", ("--gradient_checkpointing", "false")),
    "stream": ("sft", "sft", ("--streaming", "true", "--max_steps", "16")),
    "dpo": ("rlhf", "dpo", ("--rlhf_type", "dpo")),
    "dpo, batches of 4": ("rlhf", "dpo", ("--rlhf_type", "dpo", "--per_device_train_batch_size", "4")),
    "kto": ("rlhf", "kto", ("--rlhf_type", "kto", "--per_device_train_batch_size", "4")),
}
#: What adds little to the others is left to a release.
RARE = {"dpo, batches of 4", "length-grouped, last batch dropped"}
each_variant = pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=pytest.mark.long if name in RARE else ()) for name in VARIANTS]
)


#: Weights follow gradients in proportion. AdamW divides by their size: where they are all but zero, it turns the last
#: bit of a sum taken in another order into a step of full length.
SGD = ("--optim", "sgd", "--learning_rate", "0.1")


def _train(lab: Lab, variant: str, cruise: dict | None, *more: str) -> Trained:
    command, data, arguments = VARIANTS[variant]
    return lab.train(command, *arguments, *more, data=data, cruise=cruise)


@each_variant
def test_unchanged_micro_batches_leave_no_trace_in_the_weights_or_the_log(lab: Lab, variant: str):
    plain, hook = _train(lab, variant, None), _train(lab, variant, UNCHANGED)
    assert hook.difference(plain) == 0.0
    assert hook.log == plain.log
    assert hook.state == plain.state


@each_variant
def test_controls_that_change_at_every_step_leave_what_is_learned_alone(lab: Lab, variant: str):
    plain, hook = _train(lab, variant, None, *SGD), _train(lab, variant, CHANGING, *SGD)
    assert hook.difference(plain) <= 1e-6
    assert [line.get("learning_rate") for line in hook.log] == [line.get("learning_rate") for line in plain.log]
    assert [line.get("epoch") for line in hook.log] == [line.get("epoch") for line in plain.log]
    for key in ("loss", "token_acc", "rewards/margins"):
        ours, theirs = ([line[key] for line in run.log if key in line] for run in (hook, plain))
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert hook.state == plain.state


def test_every_sample_is_trained_on_exactly_once_an_epoch(lab: Lab):
    hook = lab.train("sft", "--num_train_epochs", "2", cruise=CHANGING)
    assert len(hook.samples) == Lab.COUNT
    assert set(hook.samples.values()) == {2}


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
@pytest.mark.slow
def test_loader_workers_come_and_go_whatever_starts_them(lab: Lab, method: str):
    arguments = ("--dataloader_num_workers", "2", "--dataloader_multiprocessing_context", method)
    plain, hook = lab.train("sft", *arguments, *SGD), lab.train("sft", *arguments, *SGD, cruise=CHANGING)
    assert hook.difference(plain) <= 1e-6
    assert hook.samples == Counter(dict.fromkeys(hook.samples, 1))


@pytest.mark.parametrize(("first", "second"), [("hook", "hook"), ("hook", "plain"), ("plain", "hook")])
@pytest.mark.parametrize("cruise", [UNCHANGED, CHANGING], ids=["unchanged", "changing"])
def test_a_checkpoint_of_mid_epoch_resumes_with_and_without_the_hook(lab: Lab, first: str, second: str, cruise: dict):
    arguments = ("--num_train_epochs", "2", "--save_steps", "5", "--save_total_limit", "10", *SGD)
    whole = lab.train("sft", *arguments)
    begun = lab.train("sft", *arguments, cruise=cruise if first == "hook" else None)
    again = ("--resume_from_checkpoint", str(begun.checkpoint(5)))
    resumed = lab.train("sft", *arguments, *again, cruise=cruise if second == "hook" else None)
    if cruise is UNCHANGED:
        assert resumed.difference(whole) == 0.0
    assert resumed.difference(whole) <= 1e-6
    assert resumed.state["global_step"] == whole.state["global_step"]
    assert resumed.state["epoch"] == whole.state["epoch"]


@pytest.mark.parametrize("mode", ["padding_free", "packing"])
def test_collators_without_padding_are_split_by_samples_too(lab: Lab, mode: str, monkeypatch: pytest.MonkeyPatch):
    from swift.arguments import SftArguments

    # ms-swift wants flash attention for these modes; torch's own attention masks packed samples on a CPU as well.
    monkeypatch.setattr(SftArguments, "_check_padding_free", lambda self: setattr(self, "padding_free", True))
    arguments = [f"--{mode}", "true", "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "4"]
    arguments += ["--max_length", "300", "--attn_impl", "sdpa", *SGD]
    plain = lab.train("sft", *arguments)
    assert lab.train("sft", *arguments, cruise=UNCHANGED).difference(plain) == 0.0
    assert lab.train("sft", *arguments, cruise=CHANGING).difference(plain) <= 1e-6


def test_observing_changes_nothing_and_measures_all(lab: Lab):
    plain = lab.train("sft")
    watched = lab.train("sft", cruise={"observe": True, "interval_steps": 2})
    assert watched.difference(plain) == 0.0
    assert watched.log == plain.log
    assert watched.summary["samples"] == Lab.COUNT
    assert watched.summary["micro_batches"] == Lab.COUNT
    assert (watched.directory / "trace.jsonl").exists()
