"""Which conversation a request belongs to, as far as `metadata.user_id` tells.

Claude Code sends JSON in it, or several ids in one text; only the id of the session is the same for one conversation
and different for others.
"""

import json
import re

_IN_TEXT = re.compile(r"_session_([0-9a-fA-F-]{8,64})\Z")
MOST_CHARACTERS = 256


def session_of(user_id: str | None) -> str:
    """A name for the group of related conversations; empty if nothing tells."""
    if not user_id:
        return ""
    if user_id.lstrip().startswith("{"):
        try:
            value = json.loads(user_id)
        except (ValueError, RecursionError):
            value = None
        session = value.get("session_id") if isinstance(value, dict) else None
        if isinstance(session, str) and session:
            return session[:MOST_CHARACTERS]
    elif found := _IN_TEXT.search(user_id):
        return found.group(1)
    return user_id[:MOST_CHARACTERS]
