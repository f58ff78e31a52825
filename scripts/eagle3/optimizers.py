"""Gradients as the passes add them up, and the optimizers that turn them into weights: AdamW, and Muon for matrices.

Shapes: a matrix (m, n) with m <= n, transposed where it is taller than wide.
"""
from __future__ import annotations

import functools
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from eagle3.drafter import NamedTensors, layer_weights, sum_dtype

EPSILON = 1e-8  # AdamW's
MOMENTUM = 0.95  # Muon's
# Odd quintics a x + b x^3 + c x^5, one an iteration, that together bring [0.01, 1] into [0.73, 1.27]: the greedy
# minimax composition of Polar Express (arXiv 2505.16932, algorithm 1, started at 0.01). Five of Muon's first ones bring
# [0.003, 1] into [0.68, 1.20].
QUINTICS = ((8.093368512548258, -23.62043032882428, 17.446151749836254),
            (3.636585554259042, -2.7219267466089088, 0.5365462883273615),
            (2.6612999857771005, -1.9771545218846251, 0.4526164069964009))
LARGE = 2048  # rows from which half of a symmetric product is faster than the whole


@functools.cache
def triton_runs() -> bool:
    """Whether this GPU and this torch can run the fused kernels: flash attention needs compute capability 8.0."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        return False
    try:
        import triton  # noqa: F401  comes with torch on Linux
    except ImportError:
        return False
    return True


def on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype != torch.float64 and triton_runs()


class Gradients(NamedTensors):
    """The weights' gradients, added up in place over TTT steps and micro-batches; all-reduced as soon as complete."""

    def __init__(self, *args):
        super().__init__(*args)
        self.spans = []  # while this device had nothing to do but wait for other ranks': (begin, end)

    def begin(self, first: bool, last: bool) -> None:
        """Start a micro-batch.

        first: of its optimizer step (what lies in the buffer is old); last: all-reduce what gets done.
        """
        if first:
            self.stale, self.waiting = set(self.views), []
        self.last = last

    def add(self, name: str, d_out: torch.Tensor, x: torch.Tensor) -> None:
        """d_out (N, out), x (N, in): adds d_out.T @ x."""
        if name in self.stale:
            torch.mm(d_out.t(), x, out=self[name])
            self.stale.discard(name)
        else:
            self[name].addmm_(d_out.t(), x)

    def add_tensor(self, name: str, value: torch.Tensor) -> None:
        self[name].copy_(value) if name in self.stale else self[name].add_(value)
        self.stale.discard(name)

    def done(self, *names: str) -> None:
        """These are complete in this micro-batch. All ranks must call it with the same names in the same order."""
        if self.last and dist.is_initialized():
            for name in names:
                if name in self.stale:  # this rank had no rows
                    self[name].zero_()
                    self.stale.discard(name)
                self.waiting.append(dist.all_reduce(self[name], async_op=True))

    def wait(self) -> None:
        for name in self.stale:
            self[name].zero_()
        if not self.waiting:
            return
        begun = self.now()
        for work in self.waiting:
            work.wait()
        self.spans.append((begun, self.now()))

    def now(self) -> torch.cuda.Event | float:
        """On a GPU a moment of its own queue: the host, which runs ahead, does not wait."""
        if not self.flat.is_cuda:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def waited(self) -> float:
        """Seconds of waiting for other ranks since this was last asked. Waits for the device."""
        spans, self.spans = self.spans, []
        if not self.flat.is_cuda:
            return sum(end - begun for begun, end in spans)
        torch.cuda.current_stream().synchronize()
        return sum(begun.elapsed_time(end) for begun, end in spans) / 1e3


# ---- AdamW ----
@torch.no_grad()
def adamw_(master, weights, grads, first, second, clip, lr: float, step: int, betas: tuple[float, float],
           decay: float) -> None:
    """AdamW (arXiv 1711.05101) over flat tensors; `weights` gets the new master in its own dtype.

    clip: device scalar that scales the gradient; step counts from 1.
    """
    corrections = tuple(1 - beta ** step for beta in betas)
    if on_gpu(master):
        from eagle3 import kernels
        kernels.adamw_(master, weights, grads, first, second, clip, lr, betas, EPSILON, decay, corrections)
        return
    grads = grads.to(master.dtype) * clip
    first.lerp_(grads, 1 - betas[0])
    second.mul_(betas[1]).addcmul_(grads, grads, value=1 - betas[1])
    denominator = (second / corrections[1]).sqrt_().add_(EPSILON)
    master.mul_(1 - lr * decay).addcdiv_(first / corrections[0], denominator, value=-lr)
    if weights is not master:
        weights.copy_(master)


class AdamW:
    """AdamW for all weights of a drafter (one launch over its flat buffer), or for those in `names`."""

    def __init__(self, draft, betas: tuple[float, float], decay: float, names: list[str] | None = None):
        self.draft, self.betas, self.decay, self.names = draft, betas, decay, names
        shapes = {name: view.shape for name, view in draft.master.views.items() if names is None or name in names}
        flat = draft.master.flat
        self.first, self.second = (NamedTensors(shapes, flat.dtype, flat.device) for _ in range(2))

    def state(self) -> dict[str, torch.Tensor]:
        return {"first": self.first.flat, "second": self.second.flat}

    def update(self, grads: Gradients, clip: torch.Tensor, lr: float, step: int) -> None:
        draft = self.draft
        parts = [None] if self.names is None else self.names
        for name in parts:
            tensors = [held.flat if name is None else held[name].view(-1)
                       for held in (draft.master, draft.weights, grads, self.first, self.second)]
            adamw_(*tensors, clip, lr, step, self.betas, self.decay)


# ---- Muon ----
def symmetric_product(a, b, out=None):
    """a @ b, which is known to be symmetric; a (..., m, k), b (..., k, m).

    Of a large one, what lies above the diagonal blocks of a quarter is copied from below: 10/16 of the arithmetic.
    """
    m = a.shape[-2]
    if a.dim() > 2 or m < LARGE:
        return torch.matmul(a, b, out=out)
    out, half = a.new_empty(m, m) if out is None else out, m // 2
    symmetric_product(a[:half], b[:, :half], out[:half, :half])
    symmetric_product(a[half:], b[:, half:], out[half:, half:])
    torch.mm(a[half:], b[:, :half], out=out[half:, :half])
    out[:half, half:] = out[half:, :half].t()
    return out


def scaled(x, scale, dtype: torch.dtype) -> torch.Tensor:
    """x * scale in `dtype`; scale of one element, or of one a matrix of x (..., m, n)."""
    if on_gpu(x) and scale.numel() == 1 and x.is_contiguous():  # torch takes four times as long where it also casts
        from eagle3 import kernels
        return kernels.scaled(x, scale, dtype)
    return torch.mul(x, scale, out=torch.empty_like(x, dtype=dtype))


def orthogonal_factor(gradient: torch.Tensor) -> torch.Tensor:
    """The matrix nearest to `gradient` (..., m, n) whose singular values are near 1: U V^T of its SVD.

    By Newton-Schulz. The quintics are applied to the Gram matrix A = X X^T, which is m x m: with P = a + b A + c A^2,
    X' = P X and A' = P A P, so X is multiplied once, at the end, by the product Q of all P. All of them are
    polynomials of the first A, so they commute and their products are symmetric, nearly half of which need not be
    computed. Three iterations take 4 m^2 n + 18 m^3 operations, less what symmetry saves; five of Muon's 20 m^2 n +
    10 m^3. X is scaled by the root of A's Frobenius norm, the least bound on the largest singular value to be had
    here: the others begin nearer to 1. On a GPU all is float16: small singular values lie in the bits that bfloat16
    lacks.
    """
    tall = gradient.shape[-2] > gradient.shape[-1]
    norm = torch.linalg.vector_norm(gradient, dim=(-2, -1), keepdim=True, dtype=sum_dtype(gradient)).clamp_min(1e-30)
    rows_of_one = min(gradient.shape[-2:]) ** 0.5 / norm  # on average: float16 holds them
    x = scaled(gradient, rows_of_one, torch.float16 if gradient.is_cuda else gradient.dtype)
    turned = x.transpose(-2, -1)
    gram, product = symmetric_product(turned, x) if tall else symmetric_product(x, turned), None
    size = torch.linalg.vector_norm(gram, dim=(-2, -1), keepdim=True, dtype=sum_dtype(x)).clamp_min(1e-30)
    gram = (gram / size).to(x.dtype)
    for i, (a, b, c) in enumerate(QUINTICS):
        factor = symmetric_product(gram, gram).mul_(c).add_(gram, alpha=b)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        if i + 1 < len(QUINTICS):
            gram = symmetric_product(symmetric_product(factor, gram), factor)
        product = factor if product is None else symmetric_product(factor, product)
    x = torch.matmul(x, product) if tall else torch.matmul(product, x)  # symmetric: nothing has to be transposed
    return scaled(x, size.rsqrt(), gradient.dtype)


@torch.no_grad()
def nesterov_(momentum, gradient, clip) -> torch.Tensor:
    """Moves `momentum` towards gradient * clip and returns the Nesterov mean of the two, in the gradient's dtype."""
    if on_gpu(momentum):
        from eagle3 import kernels
        return kernels.nesterov_(momentum, gradient, clip, MOMENTUM)
    clipped = gradient.to(momentum.dtype) * clip
    momentum.lerp_(clipped, 1 - MOMENTUM)
    return clipped.lerp_(momentum, MOMENTUM).to(gradient.dtype)


@dataclass
class Matrix:
    """A matrix as SGLang has it, made up of `views` side by side; of attention, its heads are turned one by one."""
    views: list
    heads: int = 1
    side_by_side: bool = False  # heads are groups of columns (o), not of rows (q, k, v)

    @property
    def size(self) -> tuple[int, int]:
        return len(self.views[0]), sum(view.shape[1] for view in self.views)

    def work(self) -> int:
        """Multiplications of its orthogonal factor."""
        rows, columns = self.size
        m, n = sorted((rows, columns // self.heads) if self.side_by_side else (rows // self.heads, columns))
        return self.heads * (2 * m * m * n + 9 * m ** 3)

    def factor(self) -> torch.Tensor:
        """The orthogonal factor of what the views hold."""
        rows, columns = self.size
        whole = self.views[0] if len(self.views) == 1 else torch.cat(self.views, 1)
        if self.heads == 1:
            return orthogonal_factor(whole)
        if self.side_by_side:
            apart = whole.view(rows, self.heads, -1).transpose(0, 1)
            return orthogonal_factor(apart).transpose(0, 1).reshape(rows, columns)
        return orthogonal_factor(whole.view(self.heads, -1, columns)).reshape(rows, columns)


def muon_matrices(shape, tensors) -> dict[str, Matrix]:
    """What Muon turns, by name; tensors: by our names. q, k and v are [embedding half, hidden half].

    Heads one by one are MuonSplit (arXiv 2605.08933): at Kimi's width a third of the arithmetic less, and more accepted
    on the real target than whole matrices (scripts/README.md, "The recipe"). Of latent attention, what leads to the
    latent states and to the one rotated key of all heads is whole.
    """
    heads, kv, found = shape.heads, shape.kv_heads, {"fc": Matrix([tensors["fc"]])}
    keys = shape.latent.kv_lora_rank if shape.latent else shape.key_columns  # rows of kv; behind them other ones
    for layer, w in enumerate(layer_weights(shape, tensors)):
        q, both = ([w[name] for name in (f"{part}_embed", f"{part}_hidden") if name in w] for part in ("q", "kv"))
        first, last = ([half[rows] for half in both] for rows in (slice(keys), slice(keys, None)))
        gate, up = w["gate_up"].chunk(2)
        if shape.latent:
            parts = {"q_a": Matrix(q), "kv_a": Matrix(first), "k_rope": Matrix(last),
                     **{name: Matrix([w[name]], heads) for name in ("q_b", "k_b", "v_b")}}
        else:
            parts = {"q": Matrix(q, heads), "k": Matrix(first, kv), "v": Matrix(last, kv)}
        parts |= {"o": Matrix([w["o"]], shape.heads, side_by_side=True), "gate": Matrix([gate]), "up": Matrix([up]),
                 "down": Matrix([w["down"]])}
        found |= {f"{name}.{layer}": matrix for name, matrix in parts.items()}
    return found


def shared_out(matrices: dict[str, Matrix], world: int) -> dict[str, int]:
    """{matrix: the rank that turns it}, the heaviest first, each to the rank that has least to do."""
    load, owner = [0] * world, {}
    for name in sorted(matrices, key=lambda name: -matrices[name].work()):
        owner[name] = load.index(min(load))
        load[owner[name]] += matrices[name].work()
    return owner


class Muon:
    """Muon for the matrices, AdamW for lm_head and the norms.

    Source: Jordan et al., https://kellerjordan.github.io/posts/muon. The update is the orthogonal factor of the
    Nesterov momentum, times 0.2 sqrt(max(m, n)): the size of AdamW's, so that one learning rate serves both
    (Moonlight, arXiv 2502.16982). Several ranks share the matrices and send each other the results.
    """

    def __init__(self, draft, betas: tuple[float, float], decay: float):
        self.draft, self.decay, master = draft, decay, draft.master
        rest = [name for name, view in master.views.items() if view.dim() == 1 or name == "lm_head"]
        self.rest = AdamW(draft, betas, decay, rest)
        shapes = {name: view.shape for name, view in master.views.items() if name not in rest}
        self.momentum = NamedTensors(shapes, master.flat.dtype, master.flat.device)
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.masters = muon_matrices(draft.shape, master.views)
        self.weights = muon_matrices(draft.shape, draft.weights.views)
        self.owner = shared_out(self.masters, self.world)

    def state(self) -> dict[str, torch.Tensor]:
        return {"momentum": self.momentum.flat, **self.rest.state()}

    @torch.no_grad()
    def update(self, grads: Gradients, clip: torch.Tensor, lr: float, step: int) -> None:
        self.rest.update(grads, clip, lr, step)
        directions = {name: nesterov_(momentum, grads[name], clip) for name, momentum in self.momentum.views.items()}
        directions = muon_matrices(self.draft.shape, directions)
        turned = {name: directions[name].factor().contiguous()
                  for name, owner in self.owner.items() if owner == self.rank}
        for name, matrix in self.masters.items():
            update = turned.pop(name) if name in turned else grads.flat.new_empty(matrix.size)
            if self.world > 1:
                dist.broadcast(update, self.owner[name])
            parts = update.split([view.shape[1] for view in matrix.views], 1)
            for master, weight, part in zip(matrix.views, self.weights[name].views, parts):
                apply_(master, weight, part, lr * 0.2 * max(matrix.size) ** 0.5, 1 - lr * self.decay)


def apply_(master, weight, update, lr: float, keep: float) -> None:
    """master = keep * master - lr * update, and weight its rounding; update (m, n), its rows may lie apart."""
    if on_gpu(master):
        from eagle3 import kernels
        kernels.apply_(master, weight, update, lr, keep)
        return
    master.mul_(keep).add_(update, alpha=-lr)
    if weight is not master:
        weight.copy_(master)
