"""Which module has which command. One is imported when its command is asked for, and the others are not.

An agent has no use for what the broker is made of, nor the broker for netlink: 20 MB and a third of a second.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, MutableMapping
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

# In the order of the help.
_MODULES = {
    "agent": ("agent", "disable", "enable"),
    "tree": ("plan", "apply", "status", "uninstall"),
    "top": ("top",),
    "balance": ("balance",),
    "gateway": ("render-haproxy",),
    "verify": ("verify",),
    "probe": ("probe",),
    "bench": ("bench",),
    "event_broker": ("event-broker",),
    "event_bus": ("event-bus",),
    "man": ("man",),
    "tenants": ("tenants",),
    "lab": ("lab",),
}


class Commands(MutableMapping[str, Any]):
    """Commands by name; each is made when it is looked up."""

    def __init__(self) -> None:
        self._module_of = {name: module for module, names in _MODULES.items() for name in names}
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made |= _commands_of(self._module_of[name])
        return self._made[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._module_of[name], self._made[name] = "", command

    def __delitem__(self, name: str) -> None:
        del self._module_of[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._module_of)

    def __len__(self) -> int:
        return len(self._module_of)


class LazyGroup(TyperGroup):
    """The root of the command line."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = Commands()


def _commands_of(name: str) -> MutableMapping[str, Any]:
    module, made = importlib.import_module(f"kura_shaper.cli.{name}"), typer.Typer()
    if hasattr(module, "register"):
        module.register(made)
    else:
        made.add_typer(module.app, name=name)
    return get_group(made).commands
