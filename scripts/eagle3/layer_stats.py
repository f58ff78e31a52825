"""What each captured layer looks like, sample by sample, against the folder's own: layers zeroed, swapped, shifted.

A checksum says that a file is what was written; only its values say whether the right thing was. Three measures a layer
of some rows of a sample, each told apart from those of the other samples:

    size     the median length of a row: the residual stream grows with depth
    profile  the mean direction of the rows, folded to PROFILE numbers: each depth has its own
    link     how well a row resembles the same position's row of the next captured layer (of the final state, for the
             last), and how well the rows before and after: what one position says runs through all layers

Limits are the folder's own: a value counts as foreign only where the samples agree with each other far better than it
does with them (and, in a folder of few samples, not at all).

Shapes: N rows of a sample, H hidden, A captured layers; a "stream" is one of these or, as the last, the final state.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from eagle3.states import StateFile

BLOCK, BLOCKS = 64, 4  # rows in a row, and how often, that are looked at
LEAST_ROWS = 16        # of different tokens before their link says anything: of one token again and again all rows are
                       # nearly the same, and only rounding tells them apart
LEAST_SAMPLES = 12     # of a folder before it says anything of one of them
PROFILE = 128
LEAST_PROFILE_ROWS = BLOCK  # before a mean direction is the layer's: of a few rows it is that of their tokens
COPIED = 0.999         # cosine of two layers' profiles of one sample, if one is a copy of the other
SIZE_FACTOR = 2.0      # of a row's length, that samples may differ by
SPREADS = 8.0          # robust standard deviations that are usual


@dataclass
class Measures:
    """Of one sample; NaN where too few rows are there.

    rows looked at, sizes (A + 1,), profiles (A + 1, PROFILE), links (A, 3): with the position before, the same, the
    one after.
    """
    rows: int
    sizes: np.ndarray
    profiles: np.ndarray
    links: np.ndarray


@functools.cache
def folding(width: int):
    """(H,) bucket and (H,) sign of each channel in a profile; the same in every process."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return (torch.randint(PROFILE, (width,), generator=generator),
            torch.randint(2, (width,), generator=generator) * 2.0 - 1.0)


def link(first, second) -> list[float]:
    """Mean cosine of the rows of `first` (N, H) with those of `second` one position before, at the same, one after.

    Each channel is standardised over the rows: else the few that are huge everywhere would be all that counted.
    """
    first, second = ((rows - rows.mean(0)) / (rows.std(0) + 1e-6 * rows.abs().max() + 1e-30)
                     for rows in (first, second))
    first, second = (rows / (rows.norm(dim=1, keepdim=True) + 1e-30) for rows in (first, second))
    pairs = (first[1:], second[:-1]), (first, second), (first[:-1], second[1:])
    return [float((a * b).sum(1).mean()) for a, b in pairs]


def measure(file: StateFile) -> Measures:
    """Of an open sample, from up to BLOCKS blocks of BLOCK rows. Raises ValueError: a row of a layer is all zero."""
    import torch

    T, width = file.header["last_hidden_states"]["shape"]
    layers = file.header["aux_hidden_states"]["shape"][1] // width
    starts = sorted({round(start) for start in np.linspace(0, max(0, T - BLOCK), BLOCKS)} if T > BLOCK else {0})
    (bucket, sign), ids = folding(width), file.input_ids()
    sizes, profile, links = [], torch.zeros(layers + 1, PROFILE), []
    for start in starts:
        rows = min(BLOCK, T - start)
        aux, last = (file.numbers(name, start, rows) for name in ("aux_hidden_states", "last_hidden_states"))
        streams = torch.cat([aux, last], 1).view(rows, layers + 1, width)
        lengths = streams.norm(dim=2)  # (N, A + 1)
        if not lengths.all():
            row, layer = (lengths == 0).nonzero()[0].tolist()
            what = f"captured layer {layer + 1} of {layers}" if layer < layers else "the final state"
            raise ValueError(f"{what} is all zero at position {start + row}")
        sizes.append(lengths)
        directions = (streams / lengths[:, :, None]).mean(0) * sign  # (A + 1, H)
        profile.index_add_(1, bucket, directions)
        if len(np.unique(ids[start:start + rows])) >= max(LEAST_ROWS, rows // 4):
            links.append([link(streams[:, layer], streams[:, layer + 1]) for layer in range(layers)])
    lengths, profile = torch.cat(sizes), profile / profile.norm(dim=1, keepdim=True)
    return Measures(len(lengths), lengths.median(0).values.numpy(), profile.numpy(),
                    np.mean(links, 0) if links else np.full((layers, 3), np.nan))


# ---- the folder's own ----
def spread(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(median, robust standard deviation) along the samples, NaN left out."""
    middle = np.nanmedian(values, 0)
    return middle, 1.4826 * np.nanmedian(np.abs(values - middle), 0)


def margins(sizes: np.ndarray, profiles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How much nearer a stream is to the folder's own of its layer than to that of the nearest other layer; which.

    Both (samples, A + 1). sizes (samples, A + 1): their logarithms. Near: the angle between profiles, and how many
    times one is larger.
    """
    middle, own = np.median(sizes, 0), np.mean(profiles, 0)
    own = own / np.linalg.norm(own, axis=1, keepdims=True)
    apart = 1 - np.einsum("slp,mp->slm", profiles, own) + np.abs(sizes[:, :, None] - middle)  # (samples, A + 1, A + 1)
    mine = np.diagonal(apart, axis1=1, axis2=2).copy()
    diagonal = np.arange(apart.shape[1])
    apart[:, diagonal, diagonal] = np.inf
    return apart.min(2) - mine, apart.argmin(2)


def misplaced(margin: np.ndarray, other: np.ndarray, profiles: np.ndarray) -> np.ndarray:
    """(samples, A + 1) bool: a stream that is another layer's: swapped with it, or copied from it.

    Nearer to another layer alone is a sample of unusual tokens: a few in a thousand are, at a layer between two others.
    """
    middle, sigma = spread(margin)
    swapped = np.take_along_axis(margin, other, 1) < 0  # the other one is not where it belongs, either
    theirs = np.take_along_axis(profiles, other[:, :, None], 1)
    copied = (profiles * theirs).sum(2) > COPIED
    return (margin < -0.5 * middle) & (middle > 4 * sigma) & (swapped | copied)


def judge(found: dict[str, Measures], layers: list[int]) -> tuple[dict[str, str], dict]:
    """({sample: what is foreign about it}, what verify.json says of the layers). layers: the captured ones."""
    ids = sorted(found)
    sizes = np.log(np.stack([found[name].sizes for name in ids]))  # (samples, A + 1)
    links = np.stack([found[name].links for name in ids])  # (samples, A, 3)
    long = links[~np.isnan(links[:, 0, 0])]  # of samples that are long enough
    usual = np.median(long, 0) if len(long) else None  # (A, 3)
    report = {str(layer): {"size": round(float(np.exp(np.median(sizes[:, at]))), 4),
                           "link": None if usual is None else [round(float(value), 4) for value in usual[at]]}
              for at, layer in enumerate(layers)}
    if len(ids) < LEAST_SAMPLES:
        return {}, report
    names = [f"layer {layer}" for layer in layers] + ["the final state"]
    problems: dict[str, str] = {}

    def foreign(which: np.ndarray, words) -> None:
        """which (samples, layers): bool."""
        for sample, at in zip(*np.nonzero(which)):
            problems.setdefault(ids[sample], f"{names[at]} {words(sample, at)}")

    profiles = np.stack([found[name].profiles for name in ids])
    margin, other = margins(sizes, profiles)
    enough = np.array([[found[name].rows >= LEAST_PROFILE_ROWS] for name in ids])
    foreign(enough & misplaced(margin, other, profiles), lambda s, at: f"looks like {names[other[s, at]]}")
    if len(long) < LEAST_SAMPLES:
        links = np.zeros_like(links)  # of which nothing follows
    lead = links[:, :, 1] - np.maximum(links[:, :, 0], links[:, :, 2])  # of the same position over its neighbours
    middle, sigma = spread(lead)
    foreign((lead < -0.5 * middle) & (middle > 4 * sigma),
            lambda s, at: f"resembles the next one's rows of another position: {shifted(links[s, at])}")
    middle, sigma = spread(links[:, :, 1])
    foreign((links[:, :, 1] < 0.3 * middle) & (middle > 4 * sigma),
            lambda s, at: f"has rows that do not go with the next one's (link {links[s, at, 1]:.2f}, usual "
                          f"{middle[at]:.2f})")
    middle, sigma = spread(sizes)
    foreign(np.abs(sizes - middle) > np.maximum(np.log(SIZE_FACTOR), SPREADS * sigma),
            lambda s, at: f"has rows of size {np.exp(sizes[s, at]):.3g}, usual {np.exp(middle[at]):.3g}")
    return problems, report


def shifted(links: np.ndarray) -> str:
    before, same, after = links
    side = "before" if before > after else "after"
    return f"link {max(before, after):.2f} with the one {side}, {same:.2f} with its own"


def wrong_as_a_whole(report: dict) -> str | None:
    """Where most samples agree that a layer's rows belong to other positions: a capture that is wrong everywhere."""
    for layer, said in report.items():
        if said["link"] and said["link"][1] < max(said["link"][0], said["link"][2]) - 0.05:
            return (f"the rows of layer {layer} resemble those of another position in the next layer: "
                    f"{shifted(np.array(said['link']))}")
    return None
