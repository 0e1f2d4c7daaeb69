"""Fetch images from http(s) URLs without reaching the server's own network.

Every address of a host must be public. The connection goes to the address that was checked, so that a second DNS answer
changes nothing, and each redirect is checked like the first URL. Proxy settings of the environment are not used.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
import urllib.parse
from typing import Any

from foveakv.serving.errors import ApiError

MAX_REDIRECTS = 3
_PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def fetch(url: str, *, most: int, seconds: float, allow_private: bool = False) -> bytes:
    """Fetch one URL.

    Args:
        url: an http or https URL.
        most: the largest content, in bytes.
        seconds: time for all of it, redirects included.
        allow_private: also addresses that are not public, and ports other than 80 and 443.

    Raises:
        ApiError: the URL is not allowed, the server cannot be reached or is too slow, or the content is too large.
    """
    deadline = time.monotonic() + seconds
    for _ in range(MAX_REDIRECTS + 1):
        content, target = _request(url, most, deadline, allow_private)
        if target is None:
            return content
        url = urllib.parse.urljoin(url, target)
    raise _refused("the image URL redirects too often")


def _request(url: str, most: int, deadline: float, allow_private: bool) -> tuple[bytes, str | None]:
    """The content, or the target of a redirect."""
    scheme, host, port, path = _parts(url, allow_private)
    address = public_address(host, port, allow_private)
    connection = _Pinned(scheme, host, port, address, _left(deadline))
    try:
        connection.request("GET", path, headers={"User-Agent": "foveakv", "Accept": "image/*"})
        response = connection.getresponse()
        if response.status in (301, 302, 303, 307, 308):
            target = response.headers.get("Location")
            if not target:
                raise _refused("the image URL redirects to nowhere")
            return b"", target
        if response.status != 200:
            raise _refused(f"the image URL answers with status {response.status}")
        if (response.length or 0) > most:
            raise _too_large(most)
        return _read(response, connection, most, deadline), None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _refused(f"the image URL cannot be fetched ({type(error).__name__})") from None
    finally:
        connection.close()


def _read(response: Any, connection: _Pinned, most: int, deadline: float) -> bytes:
    content = bytearray()
    while True:
        if connection.sock is not None:
            connection.sock.settimeout(_left(deadline))
        _left(deadline)
        piece = response.read1(65536)
        if not piece:
            return bytes(content)
        content += piece
        if len(content) > most:
            raise _too_large(most)


def _parts(url: str, allow_private: bool) -> tuple[str, str, int, str]:
    """Scheme, host, port, and path with query."""
    if any(ord(letter) <= 32 or ord(letter) == 127 for letter in url):
        raise _refused("the image URL contains spaces or control characters")
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")
    except (ValueError, UnicodeError):
        raise _refused("the image URL is not valid") from None
    if parts.scheme not in _PORTS:
        raise _refused("the image URL must begin with https:// or http://")
    if not host or parts.username is not None or parts.password is not None:
        raise _refused("the image URL must have a host and no user name")
    port = port or _PORTS[parts.scheme]
    if port not in _PORTS.values() and not allow_private:
        raise _refused("the image URL must use port 80 or 443")
    path = urllib.parse.quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    query = urllib.parse.quote(parts.query, safe="/%:@!$&'()*+,;=~-._?")
    return parts.scheme, host, port, f"{path}?{query}" if query else path


def public_address(host: str, port: int, allow_private: bool = False) -> str:
    """Resolve a host; return the first address.

    Raises:
        ApiError: the host is unknown, or one of its addresses is not public.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise _refused("the host of the image URL cannot be resolved") from None
    addresses = [str(entry[4][0]) for entry in found]
    if not addresses:
        raise _refused("the host of the image URL cannot be resolved")
    if not allow_private and not all(is_public(address) for address in addresses):
        raise _refused("the image URL leads to an address that is not public")
    return addresses[0]


def is_public(address: str) -> bool:
    """Whether an address is reachable for everyone; IPv6 addresses that hold an IPv4 address count as both."""
    try:
        found = ipaddress.ip_address(address.split("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo[1] if found.teredo else None)
        if inner is None and found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if int(found) >> 32 == 0:  # ::, ::1 and IPv4-compatible addresses
            return False
    return found.is_global and not found.is_multicast and not found.is_reserved


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise _refused("the image URL took too long")
    return left


def _refused(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_image_url")


def _too_large(most: int) -> ApiError:
    return ApiError(400, f"the image is larger than {most:,} bytes", code="image_too_large")


class _Pinned(http.client.HTTPConnection):
    """A connection to an address that is already known; TLS checks the certificate of the host's name."""

    def __init__(self, scheme: str, host: str, port: int, address: str, timeout: float) -> None:
        super().__init__(host, port, timeout=timeout)
        self._scheme, self._name, self._address = scheme, host, address
        if scheme == "https":
            self.default_port = 443  # for the Host header

    def connect(self) -> None:
        self.sock = socket.create_connection((self._address, self.port), self.timeout)
        if self._scheme == "https":
            self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self._name)
