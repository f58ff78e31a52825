"""04's flags: what they are, and which values cannot be."""
from __future__ import annotations

import argparse
import math
from pathlib import Path

from eagle3.stage import UserError
from eagle3.target import RULES


def build_parser(description: str) -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=formatter, allow_abbrev=False)
    add = parser.add_argument
    add("--verifier-path", type=Path, help="the target's folder")
    add("--data-dir", type=Path, action="append",
        help="hidden_states/ of 03_extract; may be given several times: each sample is used once, by id and tokens")
    add("--data-weight", type=float, nargs="+", metavar="W",
        help="one a --data-dir: how often its samples are seen in an epoch (2.25: twice, a quarter of them thrice)")
    add("--vocab-mapping-dir", type=Path, help="vocab_mapping/ of 02_build_vocab")
    add("--output-dir", type=Path)
    add("--finetune-from", type=Path, metavar="DIR", help="start from this drafter (a best/ or checkpoint folder)")
    add("--evaluate", type=Path, nargs="+", metavar="DIR",
        help="train nothing: accept_length of these drafters on --data-dir, by position and source, with 95 %% "
             "intervals over the samples and the paired difference to the first; --output-dir gets evaluate.json")
    add("--ids", type=Path, metavar="FILE", help="--evaluate: only these samples (a run's val_ids.json, or one a line)")
    add("--responses", type=Path, action="append", metavar="DIR",
        help="--evaluate: 01's responses/, whose rows say each sample's source (default: its id up to the first -)")
    add_schedule_flags(add)
    add_loss_flags(add)
    add_drafter_flags(add)
    add("--dtype", choices=("bfloat16", "float32", "float64"), help="of the products (default: bfloat16 on a GPU)")
    add("--export-dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one; CUDA_VISIBLE_DEVICES says which")
    add("--save-every", type=int, default=0, metavar="STEPS", help="evaluate and save so often; always at epochs' ends")
    add("--eval-every", type=int, default=0, metavar="STEPS",
        help="also evaluate so often, without a checkpoint; best/ is the best one among the checkpoints")
    add("--keep-checkpoints", type=int, default=2, help="the latest checkpoints kept; best/ stays besides")
    add("--num-workers", type=int, default=4, help="threads that read samples ahead")
    add("--log-every", type=int, default=20, metavar="STEPS")
    add("--tensorboard", action="store_true", help="also write TensorBoard events to output-dir/tensorboard")
    return parser


def add_schedule_flags(add) -> None:
    add("--epochs", type=int, default=5)
    add("--order", choices=("shuffle", "plan"), default="shuffle", help="plan: that of 03, and of --follow")
    add("--follow", action="store_true",
        help="train on samples as 03_extract lands them: one pass (--epochs 1) in its order, validation at the end: "
             "every batch is new to the drafter, so each step's figures are held-out ones")
    add("--release-share", type=float, default=0.25, metavar="F",
        help="--follow, bounded: save a checkpoint and release what it has behind it whenever that is this share of "
             "03's bound (less validation). Smaller: 03 waits less, more checkpoints")
    add("--max-steps", type=int, help="stop after this many optimizer steps (the schedule ends there)")
    add("--lr", type=float, help="peak learning rate (default: by width, optimizer and tokens a step)")
    add("--scheduler", choices=("cosine", "linear", "constant", "wsd"), default="cosine",
        help="of the learning rate after the warm-up; wsd: stable, then down as 1 - sqrt over --decay-ratio")
    add("--min-lr-ratio", type=float, default=0.0, metavar="F", help="cosine, linear and wsd end at this times --lr")
    add("--decay-ratio", type=float, default=0.2, metavar="F", help="share of all steps in which wsd goes down")
    add("--warmup-ratio", type=float, default=0.01)
    add("--optimizer", choices=("adamw", "muon"), 
        help="muon: for the matrices, AdamW for lm_head and norms (default: muon; with --lr alone adamw)")
    add("--weight-decay", type=float, default=0.0)
    add("--beta1", type=float, default=0.9)
    add("--beta2", type=float, default=0.95)
    add("--max-grad-norm", type=float, default=1.0)
    add("--max-seq-len", type=int, default=2048, help="tokens of a sample used; the rest is cut off and counted")
    add("--batch-tokens", type=int, default=8192, help="tokens packed into a micro-batch of one GPU")
    add("--grad-accum", type=int, default=1, help="micro-batches of a GPU in an optimizer step")
    add("--val-ratio", type=float, default=0.1,
        help="share of the samples held out to validate on; 0: none, then best/ is the last checkpoint")
    add("--val-data-dir", type=Path, metavar="DIR",
        help="validate on all samples of this folder of 03_extract instead; none of them is trained on")
    add("--seed", type=int, default=0)


def add_loss_flags(add) -> None:
    add("--ttt-steps", type=int, default=3, help="training-time-test steps; serving with N steps needs at least N")
    add("--step-decay", type=float, default=0.8, help="TTT step k weighs this to the k in the loss")
    add("--step-weights", type=float, nargs="+", metavar="W", help="one a TTT step, instead of --step-decay")
    add("--num-draft-steps", type=int, help="speculative steps of the predicted accept_length (default: --ttt-steps)")
    add("--temperature", type=float, nargs="+", metavar="F",
        help="also predict the accept_length of serving sampled answers at these temperatures, best where the held-out "
             "answers were sampled so, too (always predicted: greedy serving)")
    add("--top-p", type=float, default=1.0, metavar="F", help="of --temperature")
    add("--loss", choices=("ce", "kl", "lk"), default="ce",
        help="soft cross-entropy, KL, or -log of the acceptance probability")
    add("--loss-on", choices=("response", "all"), default="response",
        help="all: the prompts' tokens carry loss, too, as does then every figure of a step's line; not those of a "
             "validation line")
    add("--noise-std", type=float, default=0.0, help="EAGLE's uniform noise on the target's states")
    add("--ema", type=float, default=0.0, metavar="DECAY",
        help="evaluate and export an average of the weights; its decay grows up to this as the steps go on")


def add_drafter_flags(add) -> None:
    add("--architecture", choices=("llama", "mla"),
        help="mla: latent attention of the target's sizes, for a small KV cache (SGLang >= 0.5.12; its norms 0.5.13; "
             "default: llama, or as --finetune-from is)")
    add("--num-heads", type=int, help="attention heads (default: the target's)")
    add("--num-kv-heads", type=int,
        help="default: the target's; of a target with MLA 8, or all heads where 8 does not divide them")
    add("--head-dim", type=int, help="default: the target's v_head_dim, else head_dim, else hidden / heads")
    add("--intermediate-size", type=int, help="default: the target's")
    add("--rope-theta", type=float, help="default: the target's")
    add("--max-position-embeddings", type=int, help="at least the served context (default: the target's)")
    add("--draft-layers", type=int, help="1 or 2; a second layer needs SGLang 0.5.12 to serve")
    add("--fc-norm", action=argparse.BooleanOptionalAction, help="norm each aux state before fc (SGLang >= 0.5.12)")
    add("--norm-before-fc", action=argparse.BooleanOptionalAction, help="norm them together (SGLang >= 0.5.17)")
    add("--norm-output", action=argparse.BooleanOptionalAction,
        help="a draft step is fed the normed hidden state of the step before (SGLang >= 0.5.12)")
    add("--serve-sglang-version", help="that of the server: decides the layer ids (default: the one that captured)")
    add("--layer-id-rule", choices=list(RULES),
        help="what that server does with layer ids (default: as its sources say; needed for targets not known here)")


LIMITS = (  # what, whether a value fits, the flags it is said of
    ("at least 1", lambda x: x >= 1,
     "epochs max-steps max-seq-len batch-tokens grad-accum ttt-steps num-draft-steps log-every keep-checkpoints "
     "num-heads num-kv-heads head-dim intermediate-size max-position-embeddings draft-layers"),
    ("at least 0", lambda x: 0 <= x < math.inf,
     "lr weight-decay step-decay noise-std num-workers save-every eval-every"),
    ("above 0", lambda x: 0 < x < math.inf, "max-grad-norm rope-theta"),
    ("from 0 to 1", lambda x: 0 <= x <= 1, "warmup-ratio min-lr-ratio decay-ratio"),
    ("at least 0 and below 1", lambda x: 0 <= x < 1, "beta1 beta2 ema val-ratio"))


# Flags that came later, and the value that a folder begun without them has: it is not written into a config, so that
# such a folder goes on
UNSAID = {"min-lr-ratio": 0.0, "decay-ratio": 0.2, "data-weight": None, "evaluate": None, "ids": None,
          "responses": None, "temperature": None, "top-p": 1.0}


def as_config(args) -> dict:
    """The flags as they stand in a config: {"epochs": 5, ...}."""
    config = {key.replace("_", "-"): str(value) if isinstance(value, Path) else value
              for key, value in vars(args).items()}
    folders = [str(folder) for folder in config.pop("data-dirs")]
    config["data-dir"] = folders if len(folders) > 1 else folders[0]
    return {key: value for key, value in config.items() if key not in UNSAID or value != UNSAID[key]}


def check_args(args) -> None:
    """Refuses what cannot be; fills in what hangs on other flags. Raises UserError."""
    needed = ("verifier-path", "data-dir", *(() if args.evaluate else ("vocab-mapping-dir", "output-dir")))
    missing = [f"--{name}" for name in needed if getattr(args, name.replace("-", "_")) is None]
    if missing:
        raise UserError(f"{', '.join(missing)} not given. See --help.")
    for limits, fits, flags in LIMITS:
        for flag in flags.split():
            value = getattr(args, flag.replace("-", "_"))
            if value is not None and not fits(value):
                raise UserError(f"--{flag} {value} cannot be: it must be {limits}.")
    check_sampling(args)
    args.batch_tokens = max(args.batch_tokens, args.max_seq_len)
    if args.evaluate:
        args.data_dirs = args.data_dir
        args.ttt_steps = args.num_draft_steps = args.num_draft_steps or args.ttt_steps
        return
    if args.ids or args.responses:
        raise UserError("--ids and --responses are of --evaluate. Training holds out --val-ratio or --val-data-dir.")
    args.num_draft_steps = args.num_draft_steps or args.ttt_steps
    check_folders(args)
    if args.follow and (args.epochs != 1 or args.max_steps or not 0 < args.release_share <= 1):
        raise UserError("--follow is one pass: it needs --epochs 1, no --max-steps (cut with 03's --limit), and a "
                        "--release-share above 0, at most 1.")
    weights = args.step_weights
    if weights and (len(weights) != args.ttt_steps or not all(0 <= weight < math.inf for weight in weights)):
        raise UserError(f"--step-weights {weights}: --ttt-steps {args.ttt_steps} needs as many, none below 0.")
    if args.num_draft_steps > args.ttt_steps:
        raise UserError(f"--num-draft-steps {args.num_draft_steps} needs --ttt-steps of at least as many, "
                        f"not {args.ttt_steps}.")


def check_sampling(args) -> None:
    """Raises UserError."""
    temperatures = args.temperature or []
    if not all(0 < temperature < math.inf for temperature in temperatures):
        raise UserError(f"--temperature {' '.join(f'{t:g}' for t in temperatures)} cannot be: each must be above 0 "
                        "(greedy serving, temperature 0, is always predicted).")
    if len(set(temperatures)) < len(temperatures):
        raise UserError(f"--temperature: a value stands twice in {' '.join(f'{t:g}' for t in temperatures)}.")
    if not 0 < args.top_p <= 1 or args.top_p < 1 and not temperatures:
        raise UserError(f"--top-p {args.top_p:g}: above 0, at most 1, and only with --temperature.")


def check_folders(args) -> None:
    """Of --data-dir: `data_dir` becomes the first one, `data_dirs` all. Raises UserError."""
    args.data_dirs, args.data_dir = args.data_dir, args.data_dir[0]
    if args.follow:
        args.order = "plan"
    if len({folder.resolve() for folder in args.data_dirs}) < len(args.data_dirs):
        raise UserError("--data-dir: the same folder is named twice. --data-weight says how often its samples are "
                        "seen.")
    if args.order == "plan" and (len(args.data_dirs) > 1 or args.data_weight):
        raise UserError("--order plan and --follow go through one --data-dir as 03 planned it, without --data-weight.")
    weights = args.data_weight
    if weights and (len(weights) != len(args.data_dirs) or not all(0 < weight <= 1000 for weight in weights)):
        raise UserError(f"--data-weight {weights}: one above 0, at most 1000, for each of {len(args.data_dirs)} "
                        "--data-dir.")
    if args.eval_every and not args.val_data_dir and (args.follow or not args.val_ratio):
        why = "with --follow they are there at the end only" if args.follow else "--val-ratio is 0"
        raise UserError(f"--eval-every needs validation samples, and {why}. Name some with --val-data-dir, or leave it "
                        "out.")
