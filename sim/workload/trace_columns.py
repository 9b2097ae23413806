"""Says what the name of a column of a trace means: which role it has, and in which unit its times are."""

from __future__ import annotations

import re

ARRIVAL, PROMPT, OUTPUT, SESSION = ROLES = ("arrival", "prompt", "output", "session")

_ARRIVALS = {
    "arrival",
    "arrivaltime",
    "arrivaltimestamp",
    "arrivaldate",
    "arrivedat",
    "arrived",
    "arrivedtime",
    "timestamp",
    "time",
    "ts",
    "t",
    "datetime",
    "start",
    "starttime",
    "starttimestamp",
    "startedat",
    "requesttime",
    "requesttimestamp",
    "requeststarttime",
    "requestarrivaltime",
    "requestarrival",
    "created",
    "createdat",
    "createdtime",
    "createtime",
    "received",
    "receivedat",
    "receivedtime",
    "sentat",
    "senttime",
    "sendtime",
    "submittime",
    "submittedat",
    "submissiontime",
    "relativetime",
}
_SESSIONS = {"session", "sessionid", "conversation", "conversationid", "dialogueid", "threadid"}
_QUANTITIES = {
    "tokens",
    "token",
    "len",
    "length",
    "lens",
    "size",
    "count",
    "num",
    "n",
    "number",
    "of",
    "sequence",
    "seq",
}
_LENGTHS = {  # by role, the words of a name without those of a quantity; in the second set only beside one of these
    PROMPT: ({"prompt", "input", "isl", "prefill", "context"}, {"request", "in", "query"}),
    OUTPUT: (
        {"output", "osl", "decode", "completion", "generated", "generation"},
        {"response", "out", "answer", "reply", "gen"},
    ),
}
UNIT_WORDS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), "s"),
    **dict.fromkeys(("ms", "msec", "millis", "millisecond", "milliseconds"), "ms"),
    **dict.fromkeys(("us", "µs", "usec", "micros", "microsecond", "microseconds"), "us"),
    **dict.fromkeys(("ns", "nsec", "nanos", "nanosecond", "nanoseconds"), "ns"),
}


def role_of(column: str) -> str | None:
    """Return what a column of this name has."""
    words, _ = words_of(column)
    joined = "".join(words)
    if joined in _ARRIVALS:
        return ARRIVAL
    if joined in _SESSIONS:
        return SESSION
    rest = [word for word in words if word not in _QUANTITIES]
    for role, (names, names_beside) in _LENGTHS.items():
        if len(rest) == 1 and (rest[0] in names or (rest[0] in names_beside and len(words) > 1)):
            return role
    return None


def words_of(column: str) -> tuple[list[str], str | None]:
    """Return the words of a name, and the unit at its end."""
    parts = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", column.strip()).lower()
    words = re.findall(r"[^\W_\d]+", parts)
    unit = UNIT_WORDS.get(words[-1]) if len(words) > 1 else None
    return (words[:-1], unit) if unit is not None else (words, None)
