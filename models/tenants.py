# SPDX-License-Identifier: Apache-2.0
"""API keys, and the salts that separate the cached prompts of their holders."""

from __future__ import annotations

import argparse
import hashlib
import os
import pathlib
import secrets
from collections.abc import Iterable

from . import commands
from .openai_api import OWN_SALTS

KEY = "KVJAX_API_KEY"  # in the environment, since other users can read a command line


def salt_of(key: str, cache_salt: str | None = None) -> str:
    """Returns the salt under which a server caches and publishes the prompts of a key.

    A router looks prompts up under this salt. It contains a hash of the key, with a fixed length, so no `cache_salt`
    can produce the salt of another key.

    Args:
      key: the request's API key.
      cache_salt: the request's field; None if it has none.

    Example:
      >>> from models.tenants import salt_of
      >>> salt_of("a secret")
      'kvjax-tenant:5fb1147ae2db0ae3d14b8654800d6f70'
      >>> salt_of("a secret", "project 1") == salt_of("a secret") + ":project 1"
      True
    """
    key_hash = hashlib.blake2b(key.encode(), digest_size=16, person=b"kvjax-tenant").hexdigest()
    return f"{OWN_SALTS}tenant:{key_hash}{'' if cache_salt is None else f':{cache_salt}'}"


class Keys:
    """The API keys of a server. The holder of a key is a tenant, whose prompts no other tenant finds in the cache.

    With `shares_prefixes`, or without keys, all clients are the same tenant. Without keys the server accepts every
    request.
    """

    def __init__(self, keys: Iterable[str] = (), *, shares_prefixes: bool = False):
        self._salts = [salt_of(key) for key in keys]
        self._shares_prefixes = shares_prefixes

    def __bool__(self) -> bool:
        return bool(self._salts)

    def accepts(self, key: str) -> bool:
        """Whether a key is among the server's. The time of the check reveals nothing about them."""
        given_salt = salt_of(key)
        return sum([secrets.compare_digest(given_salt, salt) for salt in self._salts]) > 0

    def salt(self, key: str | None, cache_salt: str | None) -> str | None:
        """Returns the salt of a request from its `cache_salt`, and from its key if each key is a tenant."""
        is_one_tenant = not self._salts or self._shares_prefixes
        return cache_salt if is_one_tenant else salt_of(key or "", cache_salt)


def add_keys(parser: argparse.ArgumentParser) -> None:
    """Adds the options for `keys_of`."""
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        action="append",
        default=[],
        help=f"key that a request needs; may be given several times (default: ${KEY}, or none)",
    )
    parser.add_argument(
        "--api-keys", metavar="FILE", type=pathlib.Path, help="file with a key or a # comment on each line"
    )
    parser.add_argument(
        "--share-prefixes", action="store_true", help="clients with different keys find each other's cached prompts"
    )


def keys_of(parser: commands.Parser, args: argparse.Namespace) -> Keys:
    """Returns the keys of the options, or of the environment without any."""
    return Keys(read_keys(parser, args), shares_prefixes=args.share_prefixes)


def read_keys(parser: commands.Parser, args: argparse.Namespace) -> list[str]:
    """Reads the keys of the options, or of the environment without any."""
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
        parser.error("--api-key: got a key that no header can have, wanted ASCII letters, digits and signs")
    return keys
