"""What a run's processes read from its store: JSON under a secret of the run, checked before it is believed.

The store is a table that whoever reaches its port can write: another user of the host, or another host. So each text
carries a mark that only the secret gives (HMAC), over the text and the name that it stands under; what it holds is
checked like a file's.

`assigner run`, `assigner profile` and the lab draw a secret and hand it to their ranks in ASSIGNER_SECRET. Other
launchers pass on the one that is set where they are started; hosts that are started one by one need the same one.
Without a secret anyone's text counts, if it has the right form.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from typing import TYPE_CHECKING, Any, TypeVar

from assigner.errors import FormatError, WorkerError
from assigner.formats.document import decode, encode
from assigner.formatting import STEERING

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

SECRET = "ASSIGNER_SECRET"  # noqa: S105 - a variable's name

T = TypeVar("T")


def secret() -> dict[str, str]:
    """The variable of the run's secret: what is set already, or a new one."""
    return {SECRET: os.environ.get(SECRET) or secrets.token_hex(32)}


def seal(name: str, value: Any) -> str:
    """A value as it stands in the store under a name: its mark, and its JSON; a lone surrogate is a question mark."""
    text = json.dumps(encode(value), ensure_ascii=False).encode(errors="replace").decode()
    return f"{_mark(name, text)} {text}"


def unseal(kind: type[T], name: str, found: bytes | str) -> T:
    """The value that stands under a name.

    Raises:
        WorkerError: it was not written by this run, or not by this release.
    """
    try:
        mark, _, text = (found if isinstance(found, str) else found.decode()).partition(" ")
        if hmac.compare_digest(mark.encode(), _mark(name, text).encode()):
            return decode(kind, json.loads(text))  # type: ignore[no-any-return]
        why = "it does not carry the run's secret"
    except (ValueError, RecursionError) as error:  # of the encoding, of JSON, of a number in it, or of its depth
        why = f"it is not what a rank writes ({type(error).__name__})"
    except FormatError as error:
        why = error.message
    raise WorkerError(
        f"something foreign stands in the run's store, under {name!r}: {why}",
        hint=f"all hosts run one release, with the same {SECRET}; else somebody else writes to the store",
    )


def write(store: Store, name: str, value: Any) -> None:
    """Have a value stand under a name."""
    store.set(name, seal(name, value))


def read(store: Store, kind: type[T], name: str) -> T | None:
    """What the run has written under a name; None: nothing, or a stranger has written there."""
    try:
        return unseal(kind, name, store.get(name)) if store.check([name]) else None
    except WorkerError:
        return None


def seal_first(store: Store, name: str, value: T) -> T:
    """Write a value unless the run has written one there already; return the first. What is foreign is replaced."""
    mine = seal(name, value)
    try:
        return unseal(type(value), name, store.compare_set(name, "", mine))
    except WorkerError:
        store.set(name, mine)
        return value


def clean(text: str) -> str:
    """A text that another process wrote, for a screen: without what moves a terminal's cursor or changes its state."""
    return STEERING.sub("\N{REPLACEMENT CHARACTER}", text)


def _mark(name: str, text: str) -> str:
    key = os.environ.get(SECRET, "").encode()
    return hmac.new(key, f"{name}\n{text}".encode(errors="surrogatepass"), hashlib.sha256).hexdigest()
