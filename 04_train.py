"""Train an EAGLE-3 drafter on the target's own hidden states, and export it as SGLang loads it.

Reads   hidden_states/ (03_extract; several, with weights), vocab_mapping/ (02_build_vocab); of the target only
        `embed_tokens`, `lm_head` and the final norm's weight.
Writes  output/best/ and output/checkpoint-<step>/ (config.json, model.safetensors, eagle3.json; checkpoints also
        training_state/), metrics.jsonl, val_ids.json, training.png, manifest.json (last).

    python3 -u 04_train.py --verifier-path /shared/kimi-k2.5-int4 --data-dir /data/eagle3/run/hidden_states \\
      --vocab-mapping-dir /data/eagle3/run/vocab_mapping --output-dir /data/eagle3/run/output --epochs 5 --lr 3e-5
    torchrun --nproc_per_node 4 04_train.py ...        # several GPUs, or machines: the same flags
    python3 -u 04_train.py ... --follow --epochs 1     # beside 03_extract: one pass over samples as they land

    # finished drafters beside each other on held-out states, without training or a server (evaluation.py)
    python3 -u 04_train.py --evaluate /data/eagle3/run/output/best /data/eagle3/other/output/best \\
      --verifier-path /shared/kimi-k2.5-int4 --data-dir /data/eagle3/held_out/hidden_states

After a crash, a kill or SIGTERM the same command goes on from the last checkpoint, to the same bytes. Disk: 14 GB a
checkpoint at Kimi's size (17 with 64 KV heads). best/ is a copy of the checkpoint with the longest predicted
accept_length.

With --follow, steps and batches are planned from 03's plan.jsonl, so they are those of `--order plan --epochs 1` on a
complete folder. Where 03 runs with --max-disk-gb, samples are released (removed) once a checkpoint has them behind
it; nowhere else is anything removed.

What a step computes: scripts/eagle3/ttt.py. Which samples make up a step: batches.py; of which folders: sources.py.
What is released when: bounded.py. What is kept on the disk: keeper.py.

Glossary (null, in the log -, where nothing was counted):

    loss_k         mean loss of TTT step k
    full_acc_k     steps 0..k all right
    cond_acc_k     step k right, given that 0..k-1 were
    accept_length  tokens emitted per target step, bonus included: in validation lines by a walk as greedy serving
                   makes it; in step lines 1 + the sum of full_acc, which is larger, since it counts every row and
                   not only those where a verify step would begin (--loss-on all: prompts' rows, too)
    grad_norm      of the last step, before clipping

A draft is right when it is the token that the target emitted: on greedy responses that is what greedy serving checks,
on sampled ones it has the probability with which serving at that temperature accepts it. What --temperature predicts,
and from what: scripts/eagle3/sampling.py.
"""
from __future__ import annotations

import argparse
import functools
import json
import math
import platform
import sys
import time
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent / "scripts"))
from eagle3 import train_flags  # noqa: E402
from eagle3.acceptance import Sampled, evaluate, sampled_at  # noqa: E402
from eagle3.batches import each  # noqa: E402
from eagle3.bounded import Releases, read_bound  # noqa: E402
from eagle3.checkpoints import begun, repair, writing  # noqa: E402
from eagle3.evaluation import evaluate_drafters  # noqa: E402
from eagle3.follow import Follow  # noqa: E402
from eagle3.hosts import agree, on_all, opened  # noqa: E402
from eagle3.inputs import Inputs, read_inputs  # noqa: E402
from eagle3.keeper import Keeper, stop_if_not_finite  # noqa: E402
from eagle3.metrics import Window, gpu_use, step_line, step_metrics, validation_line  # noqa: E402
from eagle3.processes import (LOOP, SAVING, TERMINATED, Leaving, Process, all_ranks,  # noqa: E402
                              join_processes, leave, meet, together)
from eagle3.recipe import fill_rate, recorded  # noqa: E402
from eagle3.sampling import misfit, said, samplings  # noqa: E402
from eagle3.schedule import Plan, plan_steps, say_plan  # noqa: E402
from eagle3.sources import Sources, read_sources  # noqa: E402
from eagle3.stage import bar, duration, open_stage, parse_args, run, write_manifest  # noqa: E402
from eagle3.supply import Supply  # noqa: E402
from eagle3.trainer import HostCopy, Trainer, learning_rate, loss_weights, make_drafter  # noqa: E402
from eagle3.training_plot import plot  # noqa: E402

STAGE = "04_train"
MAY_CHANGE = {"config", "verifier-path", "data-dir", "vocab-mapping-dir", "output-dir", "num-workers", "log-every",
              "keep-checkpoints", "tensorboard", "device", "grad-accum", "release-share", "eval-every",
              "val-data-dir", "layer-id-rule"}


def build_parser() -> argparse.ArgumentParser:
    return train_flags.build_parser(__doc__)


# ---- the loop ----
class Training:
    """One run over a plan, from the last checkpoint on."""

    def __init__(self, args, process: Process, inputs: Inputs, plan: Plan, trainer: Trainer, follow: Follow | None,
                 sampled: Sampled | None):
        self.args, self.process, self.inputs = args, process, inputs
        self.plan, self.trainer, self.follow, self.sampled = plan, trainer, follow, sampled
        self.output, self.K, self.total = args.output_dir, args.ttt_steps, plan.total
        # whether the validation samples are 03's own, of which the last may land at the end
        self.lands_last = bool(follow and plan.val and not args.val_data_dir)
        self.warmup = math.ceil(args.warmup_ratio * self.total)
        self.saves = {*plan.epoch_ends, self.total, *range(0, self.total, args.save_every or self.total)}
        self.window, self.pending, self.leaving = Window(self.K), None, Leaving(process)
        self.keeper = Keeper(args, process, inputs, trainer)
        self.supply = Supply(args, process, plan, trainer.draft.shape, follow, self.window, self.keeper.left_out)
        self.done = trainer.step
        self.unended = self.keeper.take_up(self.window)  # whether what is due after that step is still to do
        if follow:
            follow.stopped = lambda: self.leaving.heard
            follow.begin(self.done, self.keeper.state.get("seen"))
        self.releases = None
        if follow and (bound := read_bound(args.data_dir)) is not None:
            self.releases = Releases(args, process, plan, inputs.facts, bound, self.done, self.keeper.damaged)
            self.saves |= self.releases.saves
            follow.waited_long = self.releases.refuse_smaller
        self.evaluations = {*self.saves, *range(0, self.total, args.eval_every or self.total)}
        ended = self.done - self.unended
        to_come = sum(ended < step <= self.total for step in self.saves)
        last_row = ended if self.done else -1
        self.best = self.keeper.open(to_come, last_row, None if self.lands_last else plan.val)

    def train(self) -> None:
        """All steps that are left."""
        process, plan, follow = self.process, self.plan, self.follow
        batches, self.started = self.supply.batches(self.done), time.monotonic()
        with self.leaving, self.keeper, bar(self.total, "step", self.done) as progress:
            if self.unended:
                self.end_step(self.done)
            if self.inputs.begin_with and not self.done and plan.val and not self.lands_last:
                self.validate(0, plan.val)  # what it serves as it came
            for step, (epoch, bins) in enumerate(plan.schedule[self.done:], self.done + 1):
                if follow:
                    self.supply.wait(step)
                    if self.leaving.agreed(at_once=True):
                        self.leave(step - 1, ended=True)
                members, counts = self.supply.members_and_counts(bins)
                sums = self.trainer.update(batches, sum(map(bool, members)), counts, self.learning_rate(step))
                self.window.add(sums, counts, sum(plan.train[i].tokens for indices in bins for i in indices))
                if self.pending:  # of the step before: the GPU is nearly done with it, and has this one to go on with
                    stop_if_not_finite(*self.pending)
                report = self.output / f"not-finite-{step}-rank{process.rank}.json"
                self.pending = step, HostCopy(sums), report, sum(members, [])
                if follow:
                    own = sum(bins[process.rank::process.world], [])
                    follow.behind(plan.planned.train_at[own].tolist())
                if self.leaving.agreed():
                    self.leave(step, ended=False)
                self.end_step(step)
                progress.update()
            self.keeper.settle()

    def learning_rate(self, step: int) -> float:
        args = self.args
        return learning_rate(step - 1, self.total, args.lr, self.warmup, args.scheduler, args.min_lr_ratio,
                             args.decay_ratio)

    def end_step(self, step: int) -> None:
        """What is due after it: a line in the log, an evaluation, a checkpoint."""
        self.keeper.check()
        if step in self.evaluations or step % self.args.log_every == 0 or step == 1:
            if self.pending:
                stop_if_not_finite(*self.pending)
            self.log_step(step, self.plan.schedule[step - 1][0], self.learning_rate(step))
            if step in self.saves:
                self.validate_and_save(step)
            elif step in self.evaluations:
                self.validate(step, self.plan.val)
            self.window.clear()

    def leave(self, step: int, ended: bool) -> NoReturn:
        """A SIGTERM was heard: save what there is after `step`, and go.

        ended: what is due after it is done, too. The run that goes on from here ends in the bytes of one that was not
        disturbed.
        """
        if self.trainer.step > self.keeper.saved:
            if self.pending:
                stop_if_not_finite(*self.pending)
            state = self.keeper.cut_short(self.window, ended)
            if self.follow:
                state["seen"] = self.follow.gather()
            self.save(None, self.follow.agreement() if self.follow else self.plan.agreement, state)
        self.keeper.settle()
        kept = f"checkpoint-{self.keeper.saved} is on the disk" if self.keeper.saved else "nothing was trained yet"
        self.process.say(f"terminated after step {step}: {kept}. The same command goes on from here")
        if self.process.world > 1:
            dist.destroy_process_group()
        sys.exit(TERMINATED)

    def log_step(self, step: int, epoch: int, lr: float) -> None:
        args, window, K = self.args, self.window, self.K
        totals = window.totals()
        if self.process.world > 1:
            dist.all_reduce(totals)
        # in one copy: the host waits once
        *totals, grad_norm = torch.cat([totals.flatten(), self.trainer.grad_norm.double()[None]]).cpu()
        metrics = step_metrics(*window.split(torch.stack(totals)))
        metrics |= {"loss": sum(weight * (metrics[f"loss_{k}"] or 0) for k, weight in enumerate(loss_weights(args))),
                    "accept_length": 1 + sum(metrics[f"full_acc_{k}"] or 0 for k in range(args.num_draft_steps)),
                    "lr": lr, "grad_norm": float(grad_norm), "epoch": epoch}
        self.keeper.record({"step": step, **metrics})
        seconds = time.monotonic() - window.begun
        left = (time.monotonic() - self.started) / max(1, step - self.done) * (self.total - step)
        gpu = gpu_use(window.flops / seconds, self.process.device)
        ranks = f" | rank wait {self.trainer.grads.waited() / seconds:.0%}" if self.process.world > 1 else ""
        self.process.say(
            f"step {step}/{self.total} | epoch {epoch + 1}/{args.epochs} | {step_line(metrics, K)} | "
            f"{window.tokens / seconds:,.0f} tok/s{gpu} | data wait {window.waited / seconds:.0%}{ranks} | "
            f"eta {duration(left)}")

    def validate_and_save(self, step: int) -> None:
        """Evaluate, write checkpoint-<step> and perhaps best/; then release.

        best/ is the checkpoint that predicts the longest accept_length so far. Evaluations between checkpoints
        (--eval-every) have no say in what is best.
        """
        val, agreement, state = self.plan.val, self.plan.agreement, {}
        if self.follow:
            val, agreement, state = self.followed(step)
        prediction = self.validate(step, val) if val else None
        if not self.plan.val:
            self.best = {"step": step, "accept_length": None}  # nothing to choose by: the last one
        if prediction and (not self.best or prediction["accept_length"] > self.best["accept_length"]):
            self.best = {"step": step, "accept_length": prediction["accept_length"]}
        self.save(prediction, agreement, state)
        if self.releases and step < self.total:
            self.keeper.settle()  # nothing is released before it is on the disk, and 03 may be waiting for the room
            self.releases.release(step)

    def followed(self, step: int) -> tuple[list, float, dict]:
        """Of --follow after `step`: the validation samples, once all have landed, the agreement, and the state."""
        val = [] if self.lands_last else self.plan.val
        if step == self.total:
            self.follow.wait_for_end()
            if self.leaving.agreed(at_once=True):
                self.leave(step, ended=False)
            self.inputs.hashes["hidden_states"] = self.follow.finish()
        if step == self.total and self.lands_last:
            val = self.follow.validation()
            self.keeper.name_validation(val)
        state = {"seen": self.follow.gather()}
        return val, self.follow.agreement(), state

    def validate(self, step: int, val: list) -> dict:
        """What serving would accept of the drafter as it is now: into the log, metrics.jsonl and training.png.

        Returns eagle3.json's `prediction`.
        """
        with self.trainer.draft.using(self.trainer.average):
            evaluation = evaluate(self.trainer.draft, val, self.args, self.process, self.sampled)
        found, prediction = evaluation.metrics, evaluation.prediction
        if not all(math.isfinite(value) for value in found.values() if value is not None):
            self.stop_after(step, "validation loss is not finite")
        self.keeper.record({"step": step, **{f"val_{key}": value for key, value in found.items()}})
        if self.process.rank == 0:
            plot(self.keeper.metrics.rows, self.output / "training.png")
        by_position = prediction["accept_by_position"]
        sampled = prediction.get("sampled", [])
        self.process.say(" | ".join([f"validation step {step}/{self.total}",
                                     validation_line(found, by_position, self.K), *map(said, sampled)]))
        for sentence in filter(None, map(misfit, sampled if step in (0, self.total) else ())):
            self.process.say(sentence)
        return prediction

    def stop_after(self, step: int, what: str) -> NoReturn:
        """The weights went wrong in this very step or since the last look, after losses that were finite."""
        self.keeper.settle()
        kept = f"checkpoint-{self.keeper.saved} is untouched" if self.keeper.saved else "there is no checkpoint yet"
        remedy = "Lower --lr in another --output-dir"
        if self.releases and self.releases.released:
            remedy = ("No sample was released since. If the same command ends here again, begin both stages in new "
                      f"folders, with a lower --lr; --finetune-from {self.output}/checkpoint-{self.keeper.saved} keeps "
                      "what it has learnt")
        self.process.say(f"{what} after step {step}: stopped, {kept}. {remedy}")
        sys.exit(1)

    def save(self, prediction: dict | None, agreement: float, state: dict) -> None:
        if spoilt := self.keeper.spoilt():
            self.stop_after(self.trainer.step, f"not finite: {', '.join(spoilt)},")
        self.keeper.save(self.best, prediction, agreement, state)

    def finish(self, config: dict, versions: dict) -> None:
        """The plot and, last, the manifest."""
        plan, follow = self.plan, self.follow
        kept, val, dropped = plan.kept, plan.val, plan.dropped
        if follow:
            self.inputs.hashes["hidden_states"] = follow.finish()
            kept, dropped = plan.without(follow.seen["problems"])
            val = [sample for sample in val if sample.id not in follow.seen["problems"]] if self.lands_last else val
        if self.releases:
            self.releases.release(self.total)
        unread = sum(self.keeper.count_unread().values())
        if self.process.rank == 0:
            plot(self.keeper.metrics.rows, self.output / "training.png")
            kept = [kept, val] if self.args.val_data_dir else [kept]
            counts = {"kept": sum(map(len, kept)), "dropped": dropped, "train": len(plan.train),
                      "validation": len(val), "truncated": int(sum(sum(each(part, "truncated")) for part in kept)),
                      "steps": self.total}
            counts |= {"unread": unread} if unread else {}
            fixed = {key: value for key, value in config.items() if key not in MAY_CHANGE}
            with writing(self.output):
                write_manifest(self.output, STAGE, config=fixed, inputs=self.inputs.hashes, counts=counts,
                               versions=versions, best=self.best)
        meet(self.process, SAVING)
        if self.process.world > 1:
            dist.destroy_process_group()
        length = self.best["accept_length"]
        self.process.say(f"best step {self.best['step']} | " + ("the last one: no validation samples" if length is None
                                                               else f"accept_length {length:.3f}"))


# ---- main ----
def resolved_config(args, inputs: Inputs, process: Process) -> dict:
    """All that the run hangs on, by flag; what is not in MAY_CHANGE must stay as it is over resumes."""
    return recorded(train_flags.as_config(args) | {
        "dtype": str(process.dtype).split(".")[1], "bins-per-step": process.world * args.grad_accum,
        "inputs": dict(inputs.hashes), "draft": inputs.shape.as_config()})


def as_begun(output: Path, config: dict, old: dict) -> dict | None:
    """The config of before as it counts now: None where no checkpoint came of it."""
    if begun(output):  # of --finetune-from the hash counts (in `inputs`), not how its path is spelled
        return old | {"finetune-from": config["finetune-from"]}
    return None


def read_all(args, process: Process) -> tuple[Inputs, Sources, list[str]]:
    """What the flags name, and why the rates are what they are. Raises UserError."""
    inputs = read_inputs(args, process.say)
    reasons = fill_rate(args, inputs.shape.hidden, process.world)
    return inputs, read_sources(args, inputs, process.say), reasons


def main(argv: list[str]) -> None:
    args = parse_args(build_parser(), "train", argv)
    train_flags.check_args(args)
    process = join_processes(args.device, args.dtype)
    with together(process):
        if args.evaluate:
            return evaluate_drafters(args, process)
        inputs, sources, reasons = on_all(process, lambda: read_all(args, process))
        config, output = resolved_config(args, inputs, process), args.output_dir
        agree(process, config, args.data_dir / "plan.jsonl" if args.follow else None)
        open_output = functools.partial(open_stage, output, config, MAY_CHANGE,
                                        functools.partial(as_begun, output, config))
        data = [*args.data_dirs, *([args.val_data_dir] if args.val_data_dir else [])]
        with opened(process, output, open_output, data) as process:
            train(args, process, inputs, sources, config, reasons)


def train(args, process: Process, inputs: Inputs, sources: Sources, config: dict, reasons: list[str]) -> None:
    """What is left to do in an output folder that is this run's. Raises UserError. reasons: of recipe.fill_rate."""
    say, output = process.say, args.output_dir
    versions = {"python": platform.python_version(), "torch": torch.__version__,
                "sglang": inputs.facts["sglang_version"]}
    gpu = torch.cuda.get_device_name(process.device) if process.device.type == "cuda" else "cpu"
    say(f"config {json.dumps(config)}")
    say(f"versions {json.dumps(versions)} | {process.world} x {gpu}")
    for reason in reasons:
        say(f"recipe {reason}")
    if all_ranks((output / "manifest.json").exists(), process)[0]:
        say("complete already")
        say(f"done: {output}")
        return
    if process.rank == 0:
        repair(output)
    meet(process, LOOP)

    head = inputs.target.tensor("head")
    plan = plan_steps(args, inputs, sources, head, process)
    follow = Follow(args, inputs, head, process, plan) if args.follow else None
    say_plan(args, plan, process)
    draft = make_drafter(args, inputs, head, process)
    sampled = sampled_at(samplings(args), head, draft)
    del head
    trainer = Trainer(draft, args)
    training = Training(args, process, inputs, plan, trainer, follow, sampled)
    slow = "" if trainer.ttt.FAST else " | pass: plain, the slow one (the fused one needs a GPU and bfloat16)"
    layers = json.dumps(inputs.config_json["eagle_config"])
    say(f"drafter {draft.master.flat.numel() / 1e6:.2f}M trained | {layers}{slow}")
    training.train()
    training.finish(config, versions)
    say(f"done: {output}")


if __name__ == "__main__":
    run(main, leave)
