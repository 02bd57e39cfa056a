# SPDX-License-Identifier: Apache-2.0
"""Keys of the HTTP API, and the salts that keep what the holders of other keys have asked apart."""

from __future__ import annotations

import argparse
import hashlib
import os
import pathlib
import secrets
from collections.abc import Iterable

from . import commands
from .openai_api import OWN_SALTS

KEY = "KVJAX_API_KEY"  # a variable of the environment: other users can read a command line


def salt_of(key: str, cache_salt: str | None = None) -> str:
    """The salt under which a server caches and publishes the prompts of a key, as a router has to look them up.

    The salt shows a hash of the key, whose length is fixed. So no `cache_salt` leads to the salt of another key.

    Args:
      key: the API key of the request.
      cache_salt: the field of the request.

    Example:
      >>> from models.tenants import salt_of
      >>> salt_of("a secret")
      'kvjax-tenant:5fb1147ae2db0ae3d14b8654800d6f70'
      >>> salt_of("a secret", "project 1") == salt_of("a secret") + ":project 1"
      True
    """
    own = hashlib.blake2b(key.encode(), digest_size=16, person=b"kvjax-tenant").hexdigest()
    return f"{OWN_SALTS}tenant:{own}{'' if cache_salt is None else f':{cache_salt}'}"


class Keys:
    """The keys that a server takes, whose holders are tenants of their own unless they share prefixes.

    A server without keys takes every request, and all its clients are one tenant.
    """

    def __init__(self, keys: Iterable[str] = (), *, shares_prefixes: bool = False):
        self._salts, self._shares_prefixes = [salt_of(key) for key in keys], shares_prefixes

    def __bool__(self) -> bool:
        return bool(self._salts)

    def accepts(self, key: str) -> bool:
        """Whether a key is one of these; the time that it takes tells nothing about them."""
        given = salt_of(key)
        return sum([secrets.compare_digest(given, own) for own in self._salts]) > 0

    def salt(self, key: str | None, cache_salt: str | None) -> str | None:
        """The salt of a request, by its key, which a server without keys does not look at, and its `cache_salt`."""
        is_one_tenant = not self._salts or self._shares_prefixes
        return cache_salt if is_one_tenant else salt_of(key or "", cache_salt)


def add_keys(parser: argparse.ArgumentParser) -> None:
    """The options that `keys_of` reads."""
    parser.add_argument(
        "--api-key", metavar="KEY", action="append", default=[],
        help=f"that requests must have; may be given several times (default: ${KEY}, or none)",
    )  # fmt: skip
    parser.add_argument("--api-keys", metavar="FILE", type=pathlib.Path, help="with a key on each line, or a # comment")
    parser.add_argument(
        "--share-prefixes", action="store_true", help="clients find what those with other keys have cached"
    )


def keys_of(parser: commands.Parser, args: argparse.Namespace) -> Keys:
    """The keys that the options and the environment name."""
    keys = list(args.api_key)
    if args.api_keys is not None:
        try:
            lines = [line.strip() for line in args.api_keys.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as error:
            parser.error(f"--api-keys: {commands.reason(error, args.api_keys)}")
        lines = [line for line in lines if line and not line.startswith("#")]
        if not lines:
            parser.error(f"--api-keys: {args.api_keys} has no key")
        keys += lines
    keys = keys or list(filter(None, [os.environ.get(KEY)]))
    if not all(key and key.isascii() and key.isprintable() for key in keys):
        parser.error("--api-key: got one that no header can have, wanted ASCII letters, digits and signs")
    return Keys(keys, shares_prefixes=args.share_prefixes)
