"""How buckets travel between the ranks: in which type, and by which way.

`options` says what a user may ask for and `route` what comes of it on given nodes; both are pure. `codecs` turn numbers
into bytes and back, `feedback` keeps what that loses, and `exchange` sends the bytes, in the background by `worker`.
"""

from __future__ import annotations

__all__: list[str] = []
