"""Error messages of the frameworks, as their source writes them, and what they mean."""

from meshwright.rules.messages.known_errors import KNOWN_ERRORS
from meshwright.rules.messages.matching import Match, has_code, is_error, search, search_symptoms
from meshwright.rules.messages.message import KnownError, Message
from meshwright.rules.messages.table import all_messages, messages_of

__all__ = [
    "KNOWN_ERRORS",
    "KnownError",
    "Match",
    "Message",
    "all_messages",
    "has_code",
    "is_error",
    "messages_of",
    "search",
    "search_symptoms",
]
