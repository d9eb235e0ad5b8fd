"""What pip is configured with, read as pip reads it: a user's own index, proxy and certificates serve here too."""

from __future__ import annotations

import configparser
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from edgeinfer.errors import DownloadError


def pip_settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Option name ("index-url") -> value, of pip's `[global]` section and PIP_ variables; the later of them win.

    Raises DownloadError where a configuration file cannot be parsed.
    """
    settings: dict[str, str] = {}
    for path in _files(environment):
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError) as error:
            raise DownloadError(str(path), f"pip's configuration file is malformed ({error})") from error
        if parser.has_section("global"):
            settings.update((_option(key), value) for key, value in parser.items("global"))
    settings.update((_option(key[4:]), value) for key, value in environment.items() if key.startswith("PIP_") and value)
    return settings


def _option(key: str) -> str:
    return key.lower().replace("_", "-").removeprefix("--")


def _files(environment: Mapping[str, str]) -> list[Path]:
    """pip's configuration files, the weakest first: system, user, this environment, PIP_CONFIG_FILE."""
    chosen = environment.get("PIP_CONFIG_FILE")
    if chosen == os.devnull:
        return []
    home = Path.home()
    if sys.platform == "win32":
        name = "pip.ini"
        folders = [
            Path(environment.get("PROGRAMDATA", "C:\\ProgramData"), "pip"),
            home / "pip",
            Path(environment.get("APPDATA", home), "pip"),
        ]
    else:
        name = "pip.conf"
        system = [Path(folder, "pip") for folder in environment.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":") if folder]
        user = Path(environment.get("XDG_CONFIG_HOME") or home / ".config", "pip")
        if sys.platform == "darwin":
            system.append(Path("/Library/Application Support/pip"))
            apple = home / "Library/Application Support/pip"
            user = apple if apple.is_dir() else user
        folders = [*system, Path("/etc"), home / ".pip", user]
    return [folder / name for folder in [*folders, Path(sys.prefix)]] + ([Path(chosen)] if chosen else [])
