"""Secrets of a run: what is one, by its name, and how it is kept out of all that is shown and stored.

Two nets, because either has holes. `masked` knows secrets by their names, so it needs no values: settings, commands and
URLs are shown and stored through it. `clean` knows values that `hide` was told, so it finds them in text that somebody
else wrote: a server's refusal, an exception's words. Everything that `stage.log` prints goes through it.
"""
from __future__ import annotations

import json
import re
import shlex
import urllib.parse

MASK = "***"
SHORTEST = 6  # shorter values are placeholders ("EMPTY", "test"): to replace them would garble every text
SECRET = {"token", "password", "passwd", "passphrase", "secret", "apikey", "credential", "credentials", "pat"}
KEYS = {"api", "access", "secret", "private", "encryption", "account"}  # a `key` of these is one
VOCABULARY = {"stop", "bos", "eos", "pad", "unk", "mask", "special", "start", "end", "begin"}  # a `token` of these
NO_SECRET = {"file", "path", "dir", "env", "map", "id", "ids", "name", "type"}  # where it lies, or which of them
URL_LOGIN = re.compile(r"(\b[a-z][a-z0-9+.-]*://)([^/?#\s@'\"]+(?:@[^/?#\s@'\"]+)*)@", re.I)
AUTHORISATION = re.compile(r"\b(bearer|basic)(\s+)([^\s'\"]+)", re.I)
ASSIGNMENT = re.compile(r"(-{0,2}[A-Za-z_][\w-]*)(=)(.+)", re.S)
_hidden: set[str] = set()


def is_secret(name: object) -> bool:
    """Whether the flag, key or environment variable of this name holds a secret.

    api-key, HF_TOKEN and AWS_SECRET_ACCESS_KEY do; max-total-tokens, stop-token, speculative-token-map and
    TOKENIZERS_PARALLELISM do not.
    """
    words = [word for word in re.split(r"[-_.\s]+", str(name).lower()) if word and not word.isdigit()]
    if not words or words[-1] in NO_SECRET or len(words) > 1 and words[-2] in VOCABULARY:
        return False
    return words[-1] in SECRET or "secret" in words or words[-1] == "key" and (len(words) == 1 or words[-2] in KEYS)


# ---- by name ----
def masked(value):
    """`value` (of a run file, a command, a URL) with each secret in it replaced by MASK."""
    return _walk(value, set())


def secrets_in(value) -> set[str]:
    """The secrets that `masked` would replace."""
    found: set[str] = set()
    _walk(value, found)
    return found


def _walk(value, found: set[str]):
    if isinstance(value, dict):
        return {key: _taken(item, found) if is_secret(key) else _walk(item, found) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        words, after = [], False  # after: the word before was a flag whose value is a secret
        for word in value:
            words.append(_taken(word, found) if after else _walk(word, found))
            after = isinstance(word, str) and word.startswith("-") and "=" not in word and is_secret(word)
        return words
    return _in_text(value, found) if isinstance(value, str) else value


def _taken(value, found: set[str]):
    """A whole value that is a secret. Nothing, yes and no are none."""
    if value is None or isinstance(value, bool) or value == "":
        return value
    if isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            _taken(item, found)
    else:
        found.add(str(value))
    return MASK


def _in_text(text: str, found: set[str]) -> str:
    """A word or a line: NAME=secret, scheme://user:secret@host, Bearer secret."""
    whole = ASSIGNMENT.fullmatch(text)
    if whole and is_secret(whole[1]):
        found.add(whole[3])
        return f"{whole[1]}={MASK}"

    def login(match: re.Match) -> str:
        found.update({match[2], *match[2].split(":", 1)[1:]})
        return f"{match[1]}{MASK}@"

    def header(match: re.Match) -> str:
        found.add(match[3])
        return f"{match[1]}{match[2]}{MASK}"

    return AUTHORISATION.sub(header, URL_LOGIN.sub(login, text))


# ---- by value ----
def hide(*secrets: str) -> None:
    """Let `clean` replace these from now on, in every spelling in which a log or a file may hold them."""
    for secret in secrets:
        if len(secret) >= SHORTEST and secret != MASK:
            quoted = json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], repr(secret)[1:-1]
            _hidden.update({secret, *quoted, shlex.quote(secret), urllib.parse.quote(secret, safe=""),
                            urllib.parse.unquote(secret)})


def hidden() -> list[str]:
    """What `clean` replaces; the longest first, as one may be a part of another."""
    return sorted(_hidden, key=len, reverse=True)


def clean(text: str) -> str:
    for secret in hidden():
        text = text.replace(secret, MASK)
    return text


def cleaned(value):
    """`clean` of every text in a value that is to be stored as JSON; its keys are our own and stay."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {key: cleaned(item) for key, item in value.items()}
    if isinstance(value, list) and value and not isinstance(value[0], (int, float)):  # of numbers: as it is
        return [cleaned(item) for item in value]
    return value
