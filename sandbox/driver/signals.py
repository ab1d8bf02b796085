"""The module `signal`, in its quick form: `signal` itself imports `enum`."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
else:
    try:
        import _signal as signal
    except ImportError:  # another Python than CPython
        import signal

__all__ = ["signal"]
