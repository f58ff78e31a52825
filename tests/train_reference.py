"""For the tests of 04_train: a slow, obvious reference of EAGLE-3's training-time test, and run folders made of random numbers."""
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Of a test file that imports it. Matrices this small are five times slower on two threads where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x, position, theta):
    """RoPE, neox style: x (heads, D) at one position."""
    half = x.shape[-1] // 2
    angle = position * theta ** -(torch.arange(half, dtype=x.dtype) / half)
    a, b = x[:, :half], x[:, half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def rotate_pairs(x, position, theta):
    """RoPE of DeepSeek's attention: columns 2i and 2i + 1 of x (heads, D) are one complex number that is turned."""
    angle = position * theta ** -(torch.arange(x.shape[-1] // 2, dtype=x.dtype) * 2 / x.shape[-1])
    turn = torch.complex(angle.cos(), angle.sin())
    return torch.view_as_real(torch.view_as_complex(x.reshape(len(x), -1, 2)) * turn).flatten(1)


def latent_heads(w, shape, x, position):
    """Query, key and value (heads, ...) of one token by multi-head latent attention, as DeepSeek's own code has it."""
    attn, sizes, theta = "midlayer.self_attn.", shape.latent, shape.rope_theta
    q = rms_norm(w[attn + "q_a_proj.weight"] @ x, w[attn + "q_a_layernorm.weight"], shape.rms_norm_eps)
    q = (w[attn + "q_b_proj.weight"] @ q).view(shape.heads, -1)
    both = w[attn + "kv_a_proj_with_mqa.weight"] @ x
    state = rms_norm(both[:sizes.kv_lora_rank], w[attn + "kv_a_layernorm.weight"], shape.rms_norm_eps)
    kv = (w[attn + "kv_b_proj.weight"] @ state).view(shape.heads, -1)
    shared = rotate_pairs(both[None, sizes.kv_lora_rank:], position, theta)
    plain = sizes.qk_nope_head_dim
    q = torch.cat([q[:, :plain], rotate_pairs(q[:, plain:], position, theta)], 1)
    return q, torch.cat([kv[:, :plain], shared.expand(shape.heads, -1)], 1), kv[:, plain:]


def step(w, shape, token_embedding, hidden, position, context):
    """One call of the draft layer for one token. context: earlier (key, value) pairs it may see. Returns h', logits, its own (key, value), trace."""
    eps, group = shape.rms_norm_eps, shape.heads // shape.kv_heads
    attn, mlp = "midlayer.self_attn.", "midlayer.mlp."
    x = torch.cat([rms_norm(token_embedding, w["midlayer.input_layernorm.weight"], eps),
                   rms_norm(hidden, w["midlayer.hidden_norm.weight"], eps)])
    if shape.latent:
        q, k, v = latent_heads(w, shape, x, position)
    else:
        q = rotate((w[attn + "q_proj.weight"] @ x).view(shape.heads, -1), position, shape.rope_theta)
        k = rotate((w[attn + "k_proj.weight"] @ x).view(shape.kv_heads, -1), position, shape.rope_theta)
        v = (w[attn + "v_proj.weight"] @ x).view(shape.kv_heads, -1)
    keys, values = (torch.stack(part).repeat_interleave(group, 1) for part in zip(*context, (k, v)))  # (n, heads, D)
    weights = ((keys * q).sum(-1) * shape.head_dim ** -0.5).softmax(0)
    out = (weights[..., None] * values).sum(0).flatten()
    h = hidden + w[attn + "o_proj.weight"] @ out
    y = rms_norm(h, w["midlayer.post_attention_layernorm.weight"], eps)
    h = h + w[mlp + "down_proj.weight"] @ (F.silu(w[mlp + "gate_proj.weight"] @ y) * (w[mlp + "up_proj.weight"] @ y))
    return h, w["lm_head.weight"] @ rms_norm(h, w["norm.weight"], eps), (k, v)


def ttt_losses(w, shape, embed, target_head, draft_ids, samples, steps, kind="ce"):
    """Loops over samples, positions and TTT steps. w: weights by SGLang's names; samples: dicts of a file's tensors.

    Returns losses {(sample, p, k): loss} of the rows that count, and right {(sample, p, k): bool} of all rows that have a next token.
    """
    losses, right = {}, {}
    for s, sample in enumerate(samples):
        ids, mask, aux, last = (sample[name]
                                for name in ("input_ids", "loss_mask", "aux_hidden_states", "last_hidden_states"))
        T, step_0 = len(ids), []
        for p in range(T - 1):
            hidden, own = w["fc.weight"] @ aux[p], []
            for k in range(steps):
                if p + 2 + k > T - 1:
                    if k == 0:
                        step_0.append(None)
                    break
                hidden, logits, kv = step(w, shape, embed[ids[p + 1 + k]], hidden, p + k, step_0 + own)
                own.append(kv)
                if k == 0:
                    step_0.append(kv)
                    own = []
                # of the whole vocabulary: what lies outside is lost
                p_target = (target_head @ last[p + 1 + k]).softmax(-1)[draft_ids]
                right[s, p, k] = bool(draft_ids[logits.argmax()] == ids[p + 2 + k])
                if mask[p + 2 + k]:
                    log_q = logits.log_softmax(-1)
                    if kind == "lk":
                        losses[s, p, k] = -torch.minimum(p_target, log_q.exp()).sum().log()
                    else:
                        losses[s, p, k] = -(p_target * log_q).sum() + (torch.special.xlogy(p_target, p_target).sum()
                                                                       if kind == "kl" else 0)
    return losses, right


def random_mask(kind: str, length: int) -> np.ndarray:
    """A response after a prompt: "all" (no prompt), "tail" (two thirds of the sample) or "end" (a fifth)."""
    mask = np.zeros(length, np.uint8)
    mask[{"all": 0, "tail": length // 3, "end": length - max(1, length // 5)}[kind]:] = 1
    return mask


def random_sample(length: int, mask: str, target_head: torch.Tensor, rng: np.random.Generator, dtype=torch.float32,
                  aux_states=3) -> dict:
    """Random states; the token after each is mostly what the target's head says, as of a greedy engine."""
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 31)))
    hidden = target_head.shape[1]
    last = torch.randn(length, hidden, generator=generator).to(dtype)
    aux = torch.randn(length, aux_states * hidden, generator=generator).to(dtype)
    greedy = (last.to(target_head.dtype) @ target_head.t()).argmax(-1)
    ids = torch.cat([torch.randint(len(target_head), (1,), generator=generator), greedy[:-1]])
    flip = torch.rand(length, generator=generator) < 0.1
    ids[flip] = torch.randint(len(target_head), (int(flip.sum()),), generator=generator)
    return {"input_ids": ids.int(), "loss_mask": torch.from_numpy(random_mask(mask, length)), "aux_hidden_states": aux,
            "last_hidden_states": last}


def learnable_samples(embed: torch.Tensor, head: torch.Tensor, count: int, seed=1, prefix="r") -> dict[str, dict]:
    """Answers in which each token decides the next, by one permutation whatever the seed: learnt in a hundred steps."""
    rng, samples, vocab = np.random.default_rng(seed), {}, len(head)
    follower = np.random.default_rng(2).permutation(vocab)
    for i in range(count):
        ids = [int(rng.integers(vocab))]
        while len(ids) < 41:
            ids.append(int(follower[ids[-1]]))
        last = head[torch.tensor(ids[1:])]
        last = last / last.square().mean(-1, keepdim=True).sqrt()  # as a final norm leaves it
        samples[f"{prefix}{i}"] = {"input_ids": torch.tensor(ids[:-1], dtype=torch.int32),
                                   "loss_mask": (torch.arange(40) >= 8).to(torch.uint8),
                                   "aux_hidden_states": torch.cat([embed[torch.tensor(ids[:-1])]] * 3, -1),
                                   "last_hidden_states": last}
    return samples


def write_target(folder: Path, vocab=97, hidden=32, heads=4, head_dim=8, intermediate=48, prefix="language_model.",
                 dtype=torch.float32, seed=0) -> Path:
    """A target of which only what 04 reads exists."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    text = {"hidden_size": hidden, "vocab_size": vocab, "num_attention_heads": heads, "v_head_dim": head_dim,
            "intermediate_size": intermediate,
            "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "max_position_embeddings": 4096, "bos_token_id": 0,
            "eos_token_id": 1}
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({f"{prefix}model.embed_tokens.weight": torch.randn(vocab, hidden, generator=generator).to(dtype),
               f"{prefix}model.norm.weight": torch.ones(hidden, dtype=dtype),
               f"{prefix}lm_head.weight": (torch.randn(vocab, hidden, generator=generator) * 0.5).to(dtype)},
               folder / "model.safetensors")
    return folder


def write_learnable_run(root: Path, folders: dict[str, dict[str, tuple[int, int]]]) -> Path:
    """A run folder with target/, vocab_mapping/ and folders of learnable samples: {folder: {prefix: (count, seed)}}."""
    tensors = load_file(write_target(root / "target") / "model.safetensors")
    embed, head = (tensors[f"language_model.{name}.weight"] for name in ("model.embed_tokens", "lm_head"))
    for folder, kinds in folders.items():
        parts = [learnable_samples(embed, head, count, seed, prefix) for prefix, (count, seed) in kinds.items()]
        write_hidden_states(root / folder, {name: sample for part in parts for name, sample in part.items()})
    write_mapping(root / "vocab_mapping", np.arange(97), 97)
    return root


def write_mapping(folder: Path, draft_ids: np.ndarray, vocab: int) -> Path:
    folder.mkdir(parents=True)
    t2d = np.zeros(vocab, bool)
    t2d[draft_ids] = True
    np.save(folder / "t2d.npy", t2d)
    np.save(folder / "d2t.npy", np.asarray(draft_ids) - np.arange(len(draft_ids)))
    (folder / "manifest.json").write_text(json.dumps({"schema": 1, "stage": "02_build_vocab"}))
    return folder


def write_sample(folder: Path, name: str, tensors: dict, target="toy", layers="2,4,6", **more: str) -> dict:
    """A file as 03_extract leaves it; `more` goes into its metadata. Returns its row of index.jsonl."""
    path = folder / hashlib.sha256(name.encode()).hexdigest()[:2] / f"{name}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"schema": "1", "id": name, "target": target, "capture_layers": layers, "sglang_version": "0.5.23",
                "prompt_len": str(int(np.argmax(tensors["loss_mask"].numpy()))), **more}
    save_file(tensors, path, metadata | {"checksum": "sha256:" + "0" * 64})
    data = path.read_bytes()
    checksum = "sha256:" + hashlib.sha256(data[8 + int.from_bytes(data[:8], "little"):]).hexdigest()
    save_file(tensors, path, metadata | {"checksum": checksum})
    return {"id": name, "tokens": len(tensors["input_ids"]), "checksum": checksum}


def write_index(folder: Path, rows: list[dict]) -> None:
    (folder / "index.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["index_sha256"] = hashlib.sha256((folder / "index.jsonl").read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def write_hidden_states(folder: Path, samples: dict[str, dict], target="toy", layers="2,4,6", **more: str) -> Path:
    """more: dtype and kind of the states, where they are others."""
    rows = [write_sample(folder, name, tensors, target, layers, **more) for name, tensors in sorted(samples.items())]
    hidden = next(iter(samples.values()))["last_hidden_states"].shape[1]
    manifest = {"schema": 1, "stage": "03_extract", "capture_layers": [int(layer) for layer in layers.split(",")],
                "hidden_size": hidden, "target": target,
                "sglang_version": "0.5.23", "dtype": "float32", "counts": {"kept": len(rows), "dropped": {}}, **more}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    write_index(folder, rows)
    return folder
