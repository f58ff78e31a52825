"""How requests leave this machine: proxies, certificates, redirects, keys and open files.

Whatever is wrong with them is said in one line before the first request. The variables are read here and not by
httpx, which stops with a traceback at an IPv6 network in NO_PROXY, a SOCKS proxy without its package, or a
certificate file that is not there.
"""
from __future__ import annotations

import importlib.util
import ipaddress
import os
import resource
import ssl
import urllib.request

import httpx

from eagle3.masking import hide, masked
from eagle3.stage import UserError, log

SPARE_FILES = 64  # beside the connections: rows, libraries, the log


# ---- addresses ----
def parsed(url: str, what: str) -> httpx.URL:
    """An http(s) URL with a host. what: the flag or variable it came from. Raises UserError."""
    try:
        found = httpx.URL(url)
        good = found.scheme in ("http", "https") and found.host and (found.port is None or 0 < found.port < 65536)
        found.raw_host.decode()
    except (httpx.InvalidURL, ValueError, TypeError):  # ValueError: a name that cannot be a host (IDNA)
        good = False
    if not good:
        raise UserError(f"{what} {masked(url)}: not an http(s) URL.")
    return found


def cause_of(error: BaseException) -> str:
    """What an error says, or what is behind it: httpx wraps causes, some of them wordless."""
    while not str(error) and (error.__cause__ or error.__context__):
        error = error.__cause__ or error.__context__
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


# ---- proxies ----
def proxy_for(url: httpx.URL) -> str | None:
    """The proxy that the environment names for this address: http(s)_proxy, all_proxy, less no_proxy.

    Raises UserError.
    """
    proxies = urllib.request.getproxies_environment()
    kind = next((kind for kind in (url.scheme, "all") if proxies.get(kind)), None)
    if kind is None or not_proxied(url.host, url.port or {"http": 80, "https": 443}[url.scheme], proxies.get("no", "")):
        return None
    proxy, variable = proxies[kind].strip(), f"{kind.upper()}_PROXY"
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    remedy = f"Unset it, or add {url.host} to NO_PROXY."
    scheme = proxy.partition("://")[0].lower()
    if scheme.startswith("socks"):
        if importlib.util.find_spec("socksio") is None:
            raise UserError(f"{variable} names the SOCKS proxy {masked(proxy)}: this needs a package "
                            f"(pip install 'httpx[socks]'). {remedy}")
        if scheme not in ("socks5", "socks5h"):
            raise UserError(f"{variable} {masked(proxy)}: of SOCKS proxies only socks5 and socks5h are known. {remedy}")
        return proxy
    try:
        return str(parsed(proxy, variable))
    except UserError as error:
        raise UserError(f"{error} {remedy}") from None


def not_proxied(host: str, port: int, no_proxy: str) -> bool:
    """Does NO_PROXY name this host? Entries: *, name, .name, *.name, address, network/bits; each may carry a port."""
    host = host.rstrip(".").lower()
    address = as_address(host)
    for entry in no_proxy.replace(",", " ").lower().split():
        if entry == "*":
            return True
        entry = entry.partition("://")[2] or entry
        name, its_port = split_port(entry)
        if its_port not in (None, str(port)):
            continue
        name = name.removeprefix("*").strip(".")
        try:
            if address is not None and address in ipaddress.ip_network(name, strict=False):
                return True
        except ValueError:  # a name
            pass
        if name and (host == name or address is None and host.endswith(f".{name}")):
            return True
    return False


def split_port(entry: str) -> tuple[str, str | None]:
    """host or host:port; an IPv6 address with a port stands in brackets."""
    if entry.startswith("["):
        name, _, rest = entry[1:].partition("]")
        return name, rest.removeprefix(":") or None
    if entry.count(":") == 1:
        name, _, port = entry.partition(":")
        return name, port
    return entry, None


def as_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


# ---- certificates ----
def tls_context() -> ssl.SSLContext:
    """The authorities of SSL_CERT_FILE and SSL_CERT_DIR, else the system's and certifi's. Raises UserError."""
    file, folder = os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")
    if folder and not any(map(os.path.isdir, folder.split(os.pathsep))):
        raise UserError(f"SSL_CERT_DIR {folder}: no such folder. Name one with certificates, or unset it.")
    try:
        if file or folder:
            return ssl.create_default_context(cafile=file or None, capath=folder or None)
        context = httpx.create_ssl_context(trust_env=False)  # certifi's
        context.load_default_certs()  # and the system's
    except (OSError, ssl.SSLError) as error:
        name = f"SSL_CERT_FILE {file}" if file else "the usual authorities"
        raise UserError(f"{name}: no readable certificates ({error.strerror or error}). "
                        "Name a PEM file that is there, or unset it.") from None
    return context


# ---- clients ----
def client_for(url: str, tls: ssl.SSLContext, timeout: httpx.Timeout, **more) -> httpx.AsyncClient:
    """A client for one server: its proxy, and redirects that keep what was asked. Raises UserError."""
    where = parsed(url, "--base-url")

    async def look_at_redirect(response: httpx.Response) -> None:
        if not response.has_redirect_location or response.request.method == "GET":
            return
        target = masked(str(response.headers["location"]))
        if response.status_code not in (307, 308):  # the others turn the question into a GET
            raise UserError(f"{masked(url)} has moved to {target} ({response.status_code}). Name that as --base-url.")
        there = where.join(response.headers["location"])
        if there.host != where.host and response.request.headers.get("authorization"):
            raise UserError(f"{masked(url)} sends on to {target} ({response.status_code}), where the key is not sent. "
                            "Name that as --base-url.")

    return httpx.AsyncClient(verify=tls, timeout=timeout, proxy=proxy_for(where), trust_env=False,
                             follow_redirects=True,
                             max_redirects=5, event_hooks={"response": [look_at_redirect]}, **more)


def read_key(variable: str | None) -> str | None:
    """The key in an environment variable, white space around it taken off. Raises UserError; never shows the key."""
    if not variable:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(f"--api-key-env {variable}: this variable is empty. Export the key in it.")
    odd = next((place for place, letter in enumerate(key) if not " " <= letter <= "~"), None)
    if odd is not None:
        what = "a line break" if key[odd] in "\r\n" else "a control character" if key[odd] < " " else \
            "a character outside of ASCII"
        raise UserError(f"--api-key-env {variable}: holds {what} at place {odd + 1} of {len(key)}, which no request "
                        "can carry. Export the key again.")
    hide(key)  # some servers repeat a key that they refuse
    return key


def ensure_open_files(concurrency: int, servers: int) -> None:
    """Room for so many connections to each server.

    Raises the soft limit as far as the hard one lets it, or UserError.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = concurrency * servers + SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard == resource.RLIM_INFINITY or hard >= needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        log(f"open files: the limit of this process is now {needed:,} (it was {soft:,})")
        return
    most = (hard - SPARE_FILES) // max(1, servers)
    raise UserError(f"--concurrency {concurrency}: needs {needed:,} open files, this process may have {hard:,}. "
                    + (f"Lower it to {most:,}, or raise" if most > 0 else "Raise") + " the limit (ulimit -n).")
