"""What a measurement's rows say: acceptance, speed and its intervals, and where answers differ. Rows in, numbers out.

A `record` is one request of raw.jsonl (load.stream_answer), a `unit` all prompts once, of one variant at one level:
{"variant", "level", "repeat", "wall_s", "watts", "requests": [record, ...]}; raw.jsonl's other keys may be missing.
"""
from __future__ import annotations

import math
from collections import Counter
from typing import Callable, Iterable

import numpy as np

BOOTSTRAP = 2000  # resamples of the prompts
RUN_DRAWS = 10  # draws of the difference between runs for each of them
FEWEST_PROMPTS, FEWEST_RUNS = 5, 2  # below which there is no interval, and no verdict
Z = 1.96  # of the normal distribution, two-sided 95 %
HELD = 0.9  # of a level's streams in flight on average: below that it was not measured at that level
CONTEXT_BUCKETS = {f"<= {2 ** power}": 2 ** power for power in range(7, 19)} | {f"> {2 ** 18}": float("inf")}


def count(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


def answered(units: list[dict]) -> list[dict]:
    """The requests of `units` that ended in an answer."""
    return [record for unit in units for record in unit["requests"] if "error" not in record]


# ---- acceptance ----
def beyond_answer(record: dict) -> int:
    """Correct drafts of one answer that lay behind its end.

    SGLang counts the last verify step before it looks for the end, so `1 + correct + verify - completion` tokens fell
    off; all but the bonus token were counted as correct drafts. (0.5.10's first worker cuts before it counts: 0.)
    """
    spec = record["spec"]
    return max(0, spec["correct_drafts"] + spec["verify_steps"] - record["completion_tokens"])


def acceptance(records: list[dict], steps: int = 0) -> dict | None:
    """Counts summed over requests, then divided; None when no request carries them.

    `accept_by_position[j]`: share of verify steps in which drafts 0..j were all right; of `steps` drafts.
    """
    counted = [record for record in records if record.get("spec")]
    verify = sum(record["spec"]["verify_steps"] for record in counted)
    if not verify:
        return None
    correct = sum(record["spec"]["correct_drafts"] for record in counted)
    beyond = sum(map(beyond_answer, counted))
    histograms = [record["spec"]["histogram"] for record in counted if record["spec"]["histogram"]]
    total = []  # verify steps with 0, 1, ... correct drafts
    if histograms:  # SGLang's list ends at the most correct drafts it saw; `steps` drafts were tried
        total = [sum(h[k] for h in histograms if k < len(h)) for k in range(max(steps + 1, *map(len, histograms)))]
    by_position = [sum(total[k:]) / verify for k in range(1, len(total))] if total else None
    return {"requests": len(counted), "verify_steps": verify, "correct_drafts": correct, "beyond_answer": beyond,
            "accept_length": 1 + correct / verify, "accept_length_in_answer": 1 + (correct - beyond) / verify,
            "histogram": total or None, "accept_by_position": by_position}


def context_bucket(record: dict) -> str:
    """The bucket of the context at the end of an answer."""
    length = record["prompt_tokens"] + record["completion_tokens"]
    return next(name for name, edge in CONTEXT_BUCKETS.items() if length <= edge)


def grouped(records: list[dict], key: Callable[[dict], str], steps: int) -> dict[str, dict]:
    """{group: acceptance}; groups without counts are left out."""
    groups = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    found = {name: acceptance(members, steps) for name, members in groups.items()}
    return {name: accept for name, accept in found.items() if accept}


# ---- time ----
def percentiles(values: list[float]) -> dict | None:
    return {f"p{q}": float(np.percentile(values, q)) for q in (50, 95, 99)} if values else None


def gaps_of(record: dict) -> list[float]:
    """Seconds per token after the first: n tokens that arrive together have n equal gaps, as in SGLang's benchmark."""
    gaps, times, counts = [], record["times_s"], record["counts"]
    for index in range(1, len(times)):
        new = counts[index] - counts[index - 1]
        gaps += [(times[index] - times[index - 1]) / new] * new if new else []
    return gaps


def seconds_of(record: dict) -> float:
    """How long a request was in flight, answered or failed."""
    return record.get("latency_s", record.get("spent_s", 0.0))


def in_flight(units: list[dict]) -> float:
    """Requests in flight, the mean over time."""
    busy = sum(seconds_of(record) for unit in units for record in unit["requests"])
    return busy / sum(unit["wall_s"] for unit in units)


def level_figures(units: list[dict], steps: int = 0) -> dict:
    """Figures of one variant at one level over its repeats; steps: drafts in a row.

    `tok_s_spread`: how far the fastest run lies above the slowest, as a share of their mean. `held`: whether the
    level's streams were in flight on average, but for a tenth; None of a rate. `cached_share`: of the prompts' tokens,
    those that the server had from before.
    """
    records, answers = [record for unit in units for record in unit["requests"]], answered(units)
    wall, tokens = sum(unit["wall_s"] for unit in units), sum(record["completion_tokens"] for record in answers)
    watts = [unit["watts"] for unit in units]
    joule = sum(w * unit["wall_s"] for w, unit in zip(watts, units)) if all(watts) else None
    spoken = [record for record in answers if record["completion_tokens"]]  # an empty answer has no first token
    decode = sum(record["latency_s"] - record["times_s"][0] for record in spoken)
    accept = acceptance(answers, steps)
    forward = accept["verify_steps"] if accept else sum(record["completion_tokens"] - 1 for record in spoken)
    level, flying = units[0]["level"], in_flight(units)
    runs = [sum(record["completion_tokens"] for record in answered([unit])) / unit["wall_s"] for unit in units]
    return {
        "requests": len(records), "failed": count(record["error"] for record in records if "error" in record),
        "finish": count(record["finish"] for record in answers), "empty": len(answers) - len(spoken),
        "output_tokens": tokens, "wall_s": wall, "tok_s": tokens / wall if tokens else None,
        "tok_s_repeats": runs, "tok_s_spread": (max(runs) - min(runs)) / np.mean(runs) if tokens and runs[1:] else None,
        "in_flight": flying, "held": flying >= HELD * level if isinstance(level, int) else None,
        "cached_share": sum(record.get("cached_tokens") or 0 for record in answers)
        / max(1, sum(record.get("prompt_tokens", 0) for record in answers)),
        "retracted": sum(record.get("retracted", 0) for record in answers),
        "ttft_s": percentiles([record["times_s"][0] for record in spoken]),
        "itl_s": percentiles([gap for record in spoken for gap in gaps_of(record)]),
        "latency_s": percentiles([record["latency_s"] for record in answers]),
        "decode_step_s": decode / forward if forward else None, "accept": accept,
        "watts": float(np.mean(watts)) if all(w is not None for w in watts) else None,
        "joule_per_token": joule / tokens if tokens and joule is not None else None}


def pooled(units: list[dict], contexts: list[str | None]) -> list[dict]:
    """Units of the same prompts at several contexts as one unit: the mix of all of them.

    Where one is missing yet (a run goes on) there is no such mix.
    """
    if contexts == [None]:
        return units
    groups = {}
    for unit in units:
        groups.setdefault((unit["variant"], unit["level"], unit["repeat"]), {})[unit.get("context")] = unit
    found = []
    for parts in (list(group.values()) for group in groups.values() if set(group) >= set(contexts)):
        wall = sum(unit["wall_s"] for unit in parts)
        watts = sum(u["watts"] * u["wall_s"] for u in parts) / wall if all(u["watts"] for u in parts) else None
        found.append({**parts[0], "context": None, "wall_s": wall, "watts": watts,
                      "requests": [record for unit in parts for record in unit["requests"]]})
    return found


# ---- two variants beside each other ----
def paired(one: list[dict], other: list[dict]) -> list[tuple[dict, dict]]:
    """Answers to the same prompt in the same repeat, of two variants at one level.

    The context of a later turn holds the variant's own answer before: there it is another prompt where that differs.
    """
    answers = {(unit["repeat"], record["id"]): record for unit in other for record in answered([unit])}
    return [(record, answers[unit["repeat"], record["id"]]) for unit in one for record in answered([unit])
            if (unit["repeat"], record["id"]) in answers
            and record.get("prompt_ids") == answers[unit["repeat"], record["id"]].get("prompt_ids")]


def too_narrow(prompts: int) -> float:
    """By how much a bootstrap over so few prompts scatters too little about its middle.

    It takes the scatter about the prompts' own mean, and the normal distribution for Student's: its 95 % of five
    prompts hold the truth in 83 %. Hesterberg 2015, What Teachers Should Know About the Bootstrap ("expanded").
    """
    freedom = prompts - 1
    student = Z + (Z**3 + Z) / (4 * freedom) + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * freedom**2)
    return student / Z * (prompts / freedom) ** 0.5


def resamples(values: np.ndarray, statistic: Callable) -> np.ndarray | None:
    """statistic(column sums) of BOOTSTRAP resamples of the rows of `values` (N prompts, K); None for few prompts."""
    if len(values) < FEWEST_PROMPTS:
        return None
    draw, N = np.random.default_rng(0), len(values)
    sums, rows = np.empty((BOOTSTRAP, values.shape[1])), max(1, 1_000_000 // N)  # so many resamples at once
    for at in range(0, BOOTSTRAP, rows):
        here = min(rows, BOOTSTRAP - at)
        drawn = draw.integers(0, N, (here, N)) + np.arange(here)[:, None] * N
        sums[at:at + here] = np.bincount(drawn.ravel(), minlength=here * N).reshape(here, N) @ values
    with np.errstate(divide="ignore", invalid="ignore"):
        return statistic(sums.T)


def deviations(values: np.ndarray, statistic: Callable) -> np.ndarray:
    """By how much `resamples` (of enough prompts) lie off the statistic of `values`, as wide as few prompts ask for."""
    return too_narrow(len(values)) * (resamples(values, statistic) - statistic(values.sum(0)))


def resampled(values: np.ndarray, statistic: Callable) -> list[float] | None:
    """95 % bootstrap interval over prompts, of `resamples`."""
    found = resamples(values, statistic)
    if found is None:
        return None
    tail = 50 * math.erfc(Z * too_narrow(len(values)) / 2**0.5)  # per cent; 2.5 of many prompts
    return [float(value) for value in np.nanpercentile(found, [tail, 100 - tail])]


def spread_of_runs(plain: list[float], variant: list[float]) -> tuple[float, int]:
    """(standard error of the difference of two means, degrees of freedom) from the scatter of few runs of each.

    One scatter for both: two or three runs do not tell two apart.
    """
    freedom = len(plain) + len(variant) - 2
    squares = sum(float(np.var(runs)) * len(runs) for runs in (plain, variant))
    return float(np.sqrt(squares / freedom * (1 / len(plain) + 1 / len(variant)))), freedom


def prompt_of(record: dict) -> str:
    """The prompt that a request is of: its turns, modes of thinking and contexts are drawn together in a resample."""
    whole = record["id"].rpartition("#")[0] if "prompt_ids" in record else record["id"]
    return record.get("question", whole)


def tokens_and_seconds(units: list[dict]) -> dict[str, np.ndarray]:
    """{prompt: (tokens, seconds)} of its answers, the mean over the runs in which it has one."""
    found = {}
    for unit in units:
        here = {}
        for record in answered([unit]):
            tokens, seconds = here.get(prompt_of(record), (0, 0.0))
            here[prompt_of(record)] = tokens + record["completion_tokens"], seconds + record["latency_s"]
        for name, row in here.items():
            found.setdefault(name, []).append(row)
    return {name: np.mean(rows, 0) for name, rows in found.items()}


def interval_over(values: np.ndarray, statistic: Callable, runs: list[list[float]]) -> list[float]:
    """95 % interval of statistic(column sums) of `values` (N prompts, K), for new prompts in new runs.

    runs: what the statistic is the difference of, once for each run of the one and of the other. On each resample of
    the prompts falls a difference between runs, from Student's t over the scatter of the runs there are: so few would,
    drawn from themselves, tell too narrow an interval.
    """
    error, freedom = spread_of_runs(*runs)
    prompts = statistic(values.sum(0)) + deviations(values, statistic)
    between = error * np.random.default_rng(1).standard_t(freedom, (RUN_DRAWS, len(prompts)))
    return [float(bound) for bound in np.nanpercentile(prompts + between, [2.5, 97.5])]


def too_few(values: np.ndarray, runs: list[list]) -> str | None:
    """Why these prompts and runs give no interval."""
    if len(values) < FEWEST_PROMPTS:
        return f"{len(values)} prompt{'s' * (len(values) != 1)} with an answer of both, {FEWEST_PROMPTS} are needed"
    if min(map(len, runs)) < FEWEST_RUNS:
        return "measured once, so how far two runs of the same differ is not known: use --repeats 2 or more"
    if not all(map(all, runs)) or not values.sum(0).all():
        return "a run without a token"
    return None


def speed_up(plain: list[dict], variant: list[dict]) -> dict:
    """Ratio of tok/s of two variants at one level, from one unit a run: {"speed_up", "interval", "no_interval"}.

    The interval (95 %) says where the ratio of new prompts, in new runs, would lie. Prompts are drawn with
    replacement, the same ones for both variants; in a resample the sum of latencies stands for the wall time.
    no_interval: why there is none.
    """
    runs = [[level_figures([unit])["tok_s"] for unit in units] for units in (plain, variant)]
    figures = [level_figures(units)["tok_s"] for units in (plain, variant)]
    if not all(figures):
        return {"speed_up": None, "interval": None, "no_interval": "no token came back"}
    ratio, (a, b) = figures[1] / figures[0], map(tokens_and_seconds, (plain, variant))
    values = np.array([[*a[name], *b[name]] for name in a if name in b]).reshape(-1, 4)
    if why := too_few(values, runs):
        return {"speed_up": ratio, "interval": None, "no_interval": why}

    def log_ratio(s):
        return np.log(s[2] / s[3]) - np.log(s[0] / s[1])

    bounds = interval_over(values, log_ratio, [list(np.log(of)) for of in runs])
    shift = np.log(ratio) - log_ratio(values.sum(0))
    return {"speed_up": ratio, "interval": [float(np.exp(bound + shift)) for bound in bounds], "no_interval": None}


def tok_s_interval(units: list[dict], runs: list[float], row: list[list[float]]) -> list[float] | None:
    """95 % interval of one variant's tok/s, for new prompts in new runs, as `speed_up` has it; None of too few.

    runs: its tok/s in each run; row: those of all variants at the level, this one's too. One scatter between runs for
    all of them: each has too few to tell its own.
    """
    values = np.array(list(tokens_and_seconds(units).values()), float).reshape(-1, 2)
    if too_few(values, [runs, *row]):
        return None

    def log_speed(s):
        return np.log(s[0] / s[1])

    freedom = sum(len(of) - 1 for of in row)
    error = np.sqrt(sum(float(np.var(np.log(of))) * len(of) for of in row) / freedom / len(runs))
    prompts = deviations(values, log_speed)
    between = error * np.random.default_rng(1).standard_t(freedom, (RUN_DRAWS, len(prompts)))
    speed = level_figures(units)["tok_s"]
    return [float(speed * np.exp(bound)) for bound in np.nanpercentile(prompts + between, [2.5, 97.5])]


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Index of the first token in which two answers differ; None if they are equal.

    The shorter one's length if the other begins with it.
    """
    if a == b:
        return None
    return next((index for index, pair in enumerate(zip(a, b)) if pair[0] != pair[1]), min(len(a), len(b)))


def same_text(plain: list[dict], variant: list[dict]) -> dict:
    """Share of answers with the same token ids, and where the others part.

    other_context: later turns that are not compared, as the answers before them differ.
    """
    pairs, differences = paired(plain, variant), []
    common = {(u["repeat"], r["id"]) for u in plain for r in answered([u])} & {
        (u["repeat"], r["id"]) for u in variant for r in answered([u])}
    for a, b in pairs:
        at = first_difference(a["output_ids"], b["output_ids"])
        if at is not None:
            tokens = [x["output_ids"][at] if at < len(x["output_ids"]) else None for x in (a, b)]
            differences.append({"id": a["id"], "position": at, "tokens": tokens})
    equal = len(pairs) - len(differences)
    return {"compared": len(pairs), "equal": equal, "other_context": len(common) - len(pairs),
            "share": 1 - len(differences) / len(pairs) if pairs else None,
            "differences": differences}


def difference_key(difference: dict) -> str:
    """Names a difference of `same_text` in raw.jsonl, where what was found out about it stands."""
    return f"{difference['id']}:{difference['position']}:{difference['tokens']}"


# ---- training's prediction beside what was served ----
def prediction_check(prediction: dict | None, records: list[dict], server: dict, temperature: float) -> dict | None:
    """Training's predicted accept_length and the served one, on the validation samples among `records`, else on all.

    None where the two are different things: the prediction is for greedy answers and one chain of so many drafts.
    """
    prediction = prediction or {}
    predicted, known = prediction.get("accept_length"), prediction.get("samples") or {}
    counted = [record for record in records if record.get("spec")]
    same = [record for record in counted if record["id"] in known]
    served = acceptance(same or counted)
    chain = prediction.get("num_steps"), 1
    served_chain = server.get("speculative_num_steps"), server.get("speculative_eagle_topk")
    if not predicted or not served or temperature or chain != served_chain:
        return None
    # served and predicted counts of one sample stay together in a resample: what the samples differ by is no gap
    sums, equal, as_long = {}, 0, 0
    for record in same or counted:
        verify, correct = known[record["id"]] if same else (0, 0)
        here = record["spec"]["verify_steps"], record["spec"]["correct_drafts"] - beyond_answer(record)
        equal += here == (verify, correct)
        # the last step may emit one token less than it counts
        as_long += record["completion_tokens"] - verify - correct in (0, 1)
        sums[record["id"]] = sums.get(record["id"], 0) + np.array([*here, verify, correct], float)
    values = np.stack(list(sums.values()))
    if same:
        predicted = 1 + values[:, 3].sum() / max(1, values[:, 2].sum())
    value = served["accept_length_in_answer"]
    interval = resampled(values, lambda s: (1 + s[1] / s[0]) / (1 + s[3] / s[2] if same else predicted))
    return {"predicted": predicted, "served": value, "ratio": value / predicted, "answers": len(same or counted),
            "of_validation": bool(same), "interval": interval,  # of the ratio
            "equal_answers": equal, "as_long_answers": as_long,
            "predicted_by_position": prediction.get("accept_by_position"),
            "served_by_position": served["accept_by_position"]}
