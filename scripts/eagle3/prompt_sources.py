"""Where 01_generate's prompts come from: rows of JSONL files and of data sets, by number, and the columns read of them.

Only offsets are held in memory. All rows are looked at before anything is paid, so that a bad line, an id that stands
twice or a column that no row has ends the run at its start.
"""
from __future__ import annotations

import array
import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from eagle3.responses import row_at
from eagle3.stage import UserError, sha256_file

COLUMN_KEYS = ("id", "messages", "prompt", "input", "system", "tools")  # of NAME,key=value: each names a column
KEYS = ("split", "config", "revision", "weight", *COLUMN_KEYS)
COLUMNS = {"messages": ("messages", "conversations", "conversation"), "prompt": ("prompt", "question", "instruction")}
FILE_KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass
class Source:
    """Rows of one file or data set by number. rows: byte offsets of a JSONL, or a map-style data set."""
    name: str  # rows without an id are called name-number
    path: Path | None
    rows: object
    options: dict  # the key=value pairs behind its name
    digest: str  # changes when the rows do
    columns: Counter = field(default_factory=Counter)  # column -> rows that hold something there
    older_digest: str | None = None  # what a folder may have noted that was begun before digests were of bytes

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict:
        """A row. Raises UserError: the file was changed while it was read."""
        if self.path is None:
            return without_none(self.rows[number])
        try:
            row = row_at(self.path, self.rows[number])
            if isinstance(row, dict):
                return row
        except (OSError, ValueError):
            pass
        raise UserError(f"{self.path}: was changed while it was read (row {number}). Leave it as it is during the run.")

    @property
    def weight(self) -> float | None:
        """Its share of the mix, where one was given."""
        return float(self.options["weight"]) if "weight" in self.options else None

    def rows_until(self, digest: str) -> int | None:
        """The rows of a file up to the line end at which its bytes have this sha256; None where they never have it."""
        seen, count = hashlib.sha256(), 0
        if seen.hexdigest() == digest:
            return 0
        with open(self.path, "rb") as file:
            for line in file:
                text = line.rstrip(b"\r\n")  # the line end may have come with the next row
                count += bool(text.strip())
                for piece in (text, line[len(text):]):
                    seen.update(piece)
                    if seen.hexdigest() == digest:
                        return count
        return None

    def id_of(self, number: int, row: dict) -> str:
        return prompt_id(self.name, number, row.get(self.options.get("id", "id")))

    def columns_read(self) -> dict[str, str]:
        """{what for: the column it is read from}, of those that some row has."""
        read = {}
        for what in COLUMN_KEYS:
            names = (self.options[what],) if what in self.options else COLUMNS.get(what, (what,))
            read |= {what if what == name else f"{what} ({name})": name for name in names if self.columns[name]}
        if "input" in read and "input" not in self.options and "instruction" not in read.values():
            del read["input"]
        return read

    def check_columns(self, spec: str) -> None:
        """Raises UserError when a column was named that no row has."""
        for what in COLUMN_KEYS:
            name = self.options.get(what)
            if name is not None and not self.columns[name] and (what, name) != ("id", "none"):
                raise UserError(f"{spec}: no row has a column {name!r} ({what}={name}). "
                                f"There are {', '.join(sorted(self.columns)) or 'none'}.")


def without_none(value):
    """The same value without the keys that Arrow filled with None because another row has them."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value


def filled(value: object) -> bool:
    """Does a cell hold anything? NaN is what pandas writes where nothing was."""
    return value is not None and value == value


class Names:
    """The ids that all sources have used so far."""

    def __init__(self):
        self.ids: set[str] = set()
        self.numbered: set[str] = set()  # sources with a row that was called by its number

    def source(self, name: str, options: dict) -> str:
        """The source's name, or another where rows called by it are there already: a second p.jsonl is p-2."""
        if name not in self.numbered:
            return name
        others = [f"{name}-{safe_id(options['split'])}"] if "split" in options else []
        others += [f"{name}-{number}" for number in range(2, len(self.numbered) + 3)]
        return next(other for other in others if other not in self.numbered)

    def claim(self, source: str, number: int, given: object) -> None:
        """Raises UserError when the row's id stands elsewhere."""
        name = prompt_id(source, number, given)
        if name in self.ids:
            raise UserError(f"the id {name} appears twice. Make ids unique, leave them out, "
                            "map another column with ,id=COLUMN, or number the rows with ,id=none.")
        self.ids.add(name)
        if not filled(given) or given == "":
            self.numbered.add(source)


def open_sources(files: list[str], datasets: list[str]) -> list[Source]:
    """The sources of --prompts and --dataset, no id twice in all of them. Raises UserError."""
    names = Names()
    return [open_jsonl(spec, names) for spec in files] + [open_dataset(spec, names) for spec in datasets]


def open_jsonl(spec: str, names: Names) -> Source:
    """Offsets, columns and hash of a JSONL file in one pass; every line is parsed. Raises UserError."""
    path, options = split_spec(spec)
    path, digest, offset, number = Path(path), hashlib.sha256(), 0, 0
    if useless := options.keys() & {"split", "config", "revision"}:
        raise UserError(f"--prompts {spec}: a JSONL file has no {', '.join(sorted(useless))}. Leave it out.")
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: not a regular file, and rows are read twice. Write them into a file first.")
    refuse_packed(path)
    source = Source(names.source(path.stem, options), path, array.array("q"), options, "")
    id_column = options.get("id", "id")
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError("not an object")
                    prompt_column(row, options)
                    names.claim(source.name, len(source.rows), row.get(id_column))
                    source.columns.update(column for column, value in row.items() if filled(value))
                    source.rows.append(offset)
                digest.update(line)
                offset += len(line)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}. Name an existing JSONL file with --prompts.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}:{number}: not a prompt row: {error}") from None
    except UserError as error:
        raise UserError(f"{path}:{number}: {error}") from None
    source.digest = digest.hexdigest()
    source.check_columns(f"--prompts {spec}")
    return source


def open_dataset(spec: str, names: Names) -> Source:
    """A data set on disk (save_to_disk, json(l), parquet, csv, a folder of those) or on the hub. Raises UserError."""
    name, options = split_spec(spec)
    data, path, split = load(spec, name, options), Path(name), options.get("split", "train")
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", path.stem if path.exists() else name)
    source = Source(names.source(name, options), None, data, options, "")
    try:
        prompt_column(dict.fromkeys(data.column_names, ""), options)
        id_column = options.get("id", "id")
        ids = data[id_column] if id_column in data.column_names else [None] * len(data)
        for number, given in enumerate(ids):
            names.claim(source.name, number, given)
    except UserError as error:
        raise UserError(f"--dataset {spec}: {error}") from None
    for column in data.column_names:  # behind a selection of rows the table still holds them all
        empty = data.data.column(column).null_count if data._indices is None else 0
        source.columns[column] = len(data) - empty
    source.check_columns(f"--dataset {spec}")
    source.digest = data._fingerprint  # of a file or a folder of files it changes with their modification times
    if path.is_file():
        source.digest = f"{sha256_file(path)} {split}"
    elif path.is_dir() and not saved_by_datasets(path):
        files = sorted(file for file in path.rglob("*") if file.is_file())
        listed = "".join(f"{file.relative_to(path)} {sha256_file(file)}\n" for file in files)
        source.digest = f"{hashlib.sha256(listed.encode()).hexdigest()} {options.get('config')} {split}"
        source.older_digest = data._fingerprint
    return source


def refuse_packed(path: Path) -> None:
    """Raises UserError: rows are read by their place in the file, which a .gz has not."""
    if path.is_file() and path.suffix == ".gz":
        raise UserError(f"{path}: is compressed. Unpack it first: gunzip -k {path}")


def saved_by_datasets(path: Path) -> bool:
    """By its save_to_disk(), whose fingerprint is a file of its own."""
    return (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists()


def load(spec: str, name: str, options: dict):
    """The map-style data set behind a name of --dataset. Raises UserError."""
    import datasets  # slow to import, and most runs have a JSONL
    datasets.disable_progress_bars()
    split, path = options.get("split", "train"), Path(name)
    on_disk = saved_by_datasets(path)
    refuse_packed(path)
    if (on_disk or path.is_file()) and (useless := options.keys() & {"config", "revision"}):
        raise UserError(f"--dataset {spec}: no {', '.join(sorted(useless))} of what lies on the disk. Leave it out.")
    try:
        if on_disk:
            data = datasets.load_from_disk(name)
            return data[split] if isinstance(data, datasets.DatasetDict) else data
        if path.is_file() and path.suffix in FILE_KINDS:
            return datasets.load_dataset(FILE_KINDS[path.suffix], data_files=name, split=split)
        return datasets.load_dataset(name, options.get("config"), split=split, revision=options.get("revision"))
    except Exception as error:  # the library raises dozens of types here; every one means: this name cannot be read
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"--dataset {spec}: {reason}. Check name, split and network.") from None


def split_spec(spec: str) -> tuple[str, dict]:
    """(name, {key: value}) of NAME,key=value,... Raises UserError."""
    name, *pairs = spec.split(",")
    options = dict(pair.partition("=")[::2] for pair in pairs)
    unknown = set(options) - set(KEYS)
    if unknown:
        raise UserError(f"{spec}: unknown key {sorted(unknown)}. Known: {', '.join(KEYS)}.")
    if len(options) < len(pairs):
        raise UserError(f"{spec}: a key is given twice.")
    try:
        if "weight" in options and not 0 < float(options["weight"]) < float("inf"):
            raise ValueError
    except ValueError:
        raise UserError(f"{spec}: the weight must be a number above 0.") from None
    if empty := [key for key, value in options.items() if not value]:
        raise UserError(f"{spec}: {empty[0]}= names nothing. Give a value, or leave the key out.")
    if {"input", "messages"} <= options.keys():
        raise UserError(f"{spec}: input= belongs to prompt=; a column of messages has no input.")
    return name, options


def prompt_column(row: dict, options: dict) -> tuple[str, str]:
    """("messages" or "prompt", its column) of a row; a mapped column wins, and one that holds something.

    Raises UserError when there is none.
    """
    mapped = {kind: (options[kind],) for kind in COLUMNS if kind in options}
    there = [(kind, column) for kind, names in (mapped or COLUMNS).items() for column in names if column in row]
    if not there:
        named = "".join(f" ({kind}={column} is not there)" for kind, (column, *_) in mapped.items())
        raise UserError(f"no prompt among the columns {sorted(row)}{named}. "
                        "Map one with ,messages=COLUMN or ,prompt=COLUMN.")
    return next((found for found in there if filled(row[found[1]])), there[0])


# ---- ids ----
def prompt_id(source: str, number: int, given: object) -> str:
    return safe_id(str(given) if filled(given) and given != "" else f"{source}-{number}")


def safe_id(name: str) -> str:
    """The name itself if it can be a file name with `-t<turn>` behind it, else a slug + 12 hex digits of its sha256."""
    if re.fullmatch(r"[A-Za-z0-9._-]{1,110}", name):
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:80] + "-" + digest[:12]
