"""The servers of --break-even: a random drafter, served with so many steps and so much simulated acceptance."""
from __future__ import annotations

import argparse
import random
from pathlib import Path

from eagle3 import random_drafter
from eagle3.bench_prompts import contexts_of
from eagle3.break_even import POINT, name_of, points_of
from eagle3.drafter_files import weights_sha256
from eagle3.figures import level_figures
from eagle3.servers import flag_value, server_command
from eagle3.spec_releases import simulating
from eagle3.stage import UserError, log
from eagle3.variants import DraftFolder, drafter_variants

FOLDER, RANDOM, TRAINED = "break_even", "random", "trained"
FEWEST_PROMPTS, WAVES = 8, 4  # of a unit: so many for each stream
GOLDEN = (5 ** 0.5 - 1) / 2
OFF = 0.1  # a simulated accept_length that is further from the one asked for is none


def prompts_needed(level: int) -> int:
    """Of a unit: the first and the last wave weigh little among these."""
    return max(FEWEST_PROMPTS, WAVES * level)


def some(prompts: list[dict], level: int, max_tokens: int) -> list[dict]:
    """Of each context as many as the highest level needs, in an order that mixes all sources.

    Their answers have half to all of max_tokens: a simulated batch accepts alike, so equal ones would end together, and
    prefills would come in waves that no traffic has.
    """
    found = []
    for context in contexts_of(prompts):
        mixed = [prompt for prompt in prompts if prompt.get("context") == context]
        random.Random(0).shuffle(mixed)
        found += [{**prompt, "max_tokens": tokens_of(number, max_tokens)}
                  for number, prompt in enumerate(mixed[:prompts_needed(level)])]
    return found


def tokens_of(number: int, most: int) -> int:
    """From half of `most` to all, evenly however many prompts there are."""
    return max(1, round(most * (0.5 + 0.5 * (number * GOLDEN % 1))))


def set_up(args: argparse.Namespace, document: dict) -> dict[str, DraftFolder]:
    """Writes the random drafter, and sets the flags that hang on it. {name: drafter}: it, and those of --draft-path.

    document: the run file; where it has no role `speculative` yet it gets one. Raises UserError.
    """
    servers = document.get("servers") or {}
    target = Path(flag_value(server_command(servers, "plain")[0], "--model-path", ""))
    if not (target / "config.json").is_file():
        raise UserError(f"--break-even: servers.plain serves {target}, where no config.json lies: it says which "
                        "drafter fits. Name the target's folder with model-path.")
    servers.setdefault("speculative", {"extends": "plain", "flags": {
        "speculative-algorithm": "EAGLE3", "speculative-draft-model-quantization": "unquant",
        "speculative-num-steps": 3, "speculative-eagle-topk": 1, "speculative-num-draft-tokens": 4}})
    there = [folder for folder in args.draft_path if folder.exists()]  # a run file names what is yet to be trained
    for folder in args.draft_path:
        if folder not in there:
            log(f"note: no drafter in {folder} yet, so none is measured beside")
    trained = drafter_variants(there) if there else {}
    args.output_dir /= FOLDER
    args.fixed_length, args.ids = True, None  # every unit emits as much; nothing is accepted in earnest
    folder = args.output_dir / "drafter"
    random_drafter.make(folder, document, args.config, target, there[0] if there else None)
    # One trained further is another variant: what was timed stays
    named = {f"{TRAINED}-{weights_sha256(drafter.folder)[:8]}": drafter for drafter in trained.values()}
    return {RANDOM: DraftFolder(folder), **named}


def bound(drafters: dict[str, DraftFolder]) -> dict[str, DraftFolder]:
    """Those that a report folder holds to: trained ones come later."""
    return {RANDOM: drafters[RANDOM]}


def variants(args: argparse.Namespace, drafters: dict[str, DraftFolder]) -> dict[str, dict]:
    """{variant: its server's flags}: each number of steps at each acceptance, then the drafters of --draft-path."""
    found = {name_of(steps, a): {"speculative-num-steps": steps, "speculative-eagle-topk": 1,
                                 "speculative-num-draft-tokens": steps + 1,
                                 "speculative-draft-model-path": str(drafters[RANDOM].folder.resolve())}
             for steps in args.steps for a in points_of(steps, args.accept_points)}
    return found | {name: {"speculative-draft-model-path": str(drafter.folder.resolve())}
                    for name, drafter in drafters.items() if name != RANDOM}


def environments(names: list[str]) -> dict[str, dict[str, str]]:
    """{variant: what its server's environment has besides}."""
    return {name: simulating(float(point[2])) for name in names if (point := POINT.fullmatch(name))}


def check(unit: dict, where: object) -> None:
    """That a unit of a simulated server was simulated. Raises UserError; where: the server."""
    point = POINT.fullmatch(unit["variant"])
    accept = level_figures([unit])["accept"] if point else None
    if accept and abs(accept["accept_length"] / float(point[2]) - 1) > OFF:
        raise UserError(f"{where}: accept_length {accept['accept_length']:.2f}, though {point[2]} was to be simulated: "
                        "this server does not heed SGLANG_SIMULATE_ACC_LEN. Use a release of SGLang that does.")
