"""Where an object is found by what walks over objects, as code would name it: `loss.scale['a'][0]`.

What has no object of its own has one here: some names at the top of a file, and what hangs on a function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import types

_ITEM, _ATTRIBUTE, _HOOK, _MEMBER = "{}[{!r}]", "{}.{}", "a hook of {}", "an item of {}"
DEFAULT = "{}()[{!r}]"
"""The form of a default of a function."""
SPACE = "{}."
"""The form of a dict that has the attributes of an object: its items are named as these."""
ORIGINS = MODULE, FILE, OWN, OUTER = "module", "file", "own name", "outer name"
"""Where names begin: a module; the file of a module's class; what else has a name; that, where the walk has come from
the top of a file alone, by a class, a function or another file."""


class Place(NamedTuple):
    """Where an object is found: its key in a holder, and the form in which its name is made of both.

    Without a holder the key is a name that begins here, and the form says where: one of `ORIGINS`.
    """

    form: str
    key: Any
    holder: Place | None = None

    def attribute(self, name: str) -> Place:
        """Of an attribute of what is here."""
        return Place(_ATTRIBUTE, name, self)

    def hooks(self) -> Place:
        """Of each of its hooks."""
        return Place(_HOOK, None, self)

    def member(self) -> Place:
        """Of each item of the set that is here, which has no order."""
        return Place(_MEMBER, None, self)

    def item(self, key: Any) -> Place:
        """Of an item of the dict that is here; if that has the attributes of an object, of the attribute."""
        if self.form == _HOOK:
            return self
        return Place(_ITEM, key, self) if self.form != SPACE or self.holder is None else self.holder.attribute(key)

    @property
    def origin(self) -> str:
        """Where its name begins, of `ORIGINS`: what holds it in the end."""
        place = self
        while place.holder is not None:
            place = place.holder
        return place.form

    def named(self, name: str) -> Place:
        """Of what has a name of its own, and was found from here."""
        return Place(OUTER if self.origin == OUTER else OWN, name)

    def __str__(self) -> str:
        """As code would name it: `loss.scale['a'][0]`; what a function closes over, by its own name."""
        steps, place = list[Place](), self
        while place.form not in ORIGINS and place.holder is not None:
            steps.append(place)
            place = place.holder
        name = str(place.key)
        for step in reversed(steps):
            name = step.form.format(name, step.key)
        return name


class Names(NamedTuple):
    """Some of the names at the top of a file: those that a function of it binds anew, or reads (`code`; None: any)."""

    space: dict[str, Any]
    names: tuple[str, ...]
    code: types.CodeType | None = None


class Called(NamedTuple):
    """What the script can change of a function beside its code: its defaults, and what hangs on it."""

    function: types.FunctionType
