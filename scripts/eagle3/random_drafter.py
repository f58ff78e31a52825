"""A drafter with random weights: what it costs to serve one, before any is trained.

How long a step takes hangs on the sizes, not on the weights. It drafts nothing right; SGLang's simulated acceptance
(spec_releases.py) stands in for that.
"""
from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from eagle3.checkpoints import replace_folder
from eagle3.drafter import Drafter, Shape, draft_config, read_shape
from eagle3.drafter_files import summary
from eagle3.inputs import find_shape
from eagle3.sglang_draft import completed
from eagle3.stage import UserError, log, raising, read_json, tokens_of
from eagle3.target import NEEDED_KEYS, text_config
from eagle3.train_flags import build_parser

DRAFT_VOCAB = 32000  # 02's default
AUX_STATES = 3
OLDEST = "0.5.10"  # whose drafters every release serves


def shape_to_train(document: dict, config: Path, target: dict) -> Shape:
    """The drafter that 04 would make with the run file `document` (in the file `config`). Raises UserError.

    target: its text config.
    """
    parser = raising(build_parser(""))
    args = parser.parse_args(tokens_of(parser, "train", document.get("train") or {}, config, []))
    args.finetune_from = args.output_dir = None
    vocab = (document.get("build_vocab") or {}).get("draft-vocab-size") or DRAFT_VOCAB
    return find_shape(args, target, min(vocab, target["vocab_size"]), AUX_STATES, args.serve_sglang_version or OLDEST,
                      None, log)


def shape_of(folder: Path) -> tuple[Shape, list[int] | None]:
    """(the shape of a trained drafter, its layer ids). Raises UserError."""
    config = completed(read_json(folder / "config.json"))
    try:
        return read_shape(config), (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    except KeyError as error:
        raise UserError(f"{folder}/config.json: no {error.args[0]}, so no drafter of its sizes can be made. Leave out "
                        "--draft-path: the run file's `train` says what would be trained.") from None


def write(folder: Path, shape: Shape, ids: list[int] | None, target: dict) -> None:
    """The drafter in `folder`, in bf16; nothing where it lies there already. The same shape gives the same bytes.

    ids: the layers that are captured; None: those that SGLang takes by itself. target: its text config. Raises
    UserError.
    """
    config = draft_config(shape, target, ids or [], "bfloat16")
    if not ids:
        del config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    if (folder / "config.json").is_file() and read_json(folder / "config.json") == config:
        return
    log(f"a random drafter | {summary(shape)}")
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(shape.draft_vocab, shape.hidden, generator=generator).mul_(shape.hidden ** -0.5)
    draft_ids = torch.arange(shape.draft_vocab) * shape.vocab // shape.draft_vocab  # from all over the vocabulary
    draft = Drafter(shape, torch.float32, torch.device("cpu"), torch.zeros(1, shape.hidden), head, draft_ids, 1)
    draft.initialise(seed=0)
    temporary = folder.with_name(folder.name + ".tmp")
    try:
        shutil.rmtree(folder.with_name(folder.name + ".old"), ignore_errors=True)  # of a kill in the middle of this
        temporary.mkdir(parents=True, exist_ok=True)
        save_file(draft.export(draft.master, torch.bfloat16), temporary / "model.safetensors", {"format": "pt"})
        (temporary / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        replace_folder(temporary, folder)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder}: could not be written ({' '.join(str(error).split())}). Make room there, or name "
                        "another --output-dir.") from None


def make(folder: Path, document: dict, config: Path, target_folder: Path, like: Path | None) -> None:
    """A random drafter for the target in `target_folder`: of the sizes of the drafter `like`, or as 04 would make it.

    Raises UserError.
    """
    target = text_config(target_folder)
    if missing := [key for key in NEEDED_KEYS if key not in target]:
        raise UserError(f"{target_folder}/config.json: no {', '.join(missing)} there. servers.plain must serve the "
                        "target's folder.")
    shape, ids = shape_of(like) if like else (shape_to_train(document, config, target), None)
    write(folder, shape, ids if shape.aux_states != AUX_STATES else None, target)
