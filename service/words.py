"""Words of strangers, before they get into logs, records, answers and pages."""

LONGEST = 200


def printable(words: str, longest: int = LONGEST) -> str:
    """One short line. An unpaired surrogate, which JSON may hold, would break every encoding after this one."""
    return "".join(character if character.isprintable() else " " for character in words).strip()[:longest]
