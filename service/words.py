"""Words of strangers, before they get into logs, records, answers and pages."""

LONGEST = 200


def printable(words: str, longest: int = LONGEST) -> str:
    """One short line. An unpaired surrogate, which JSON may hold, would break every encoding after this one."""
    # Looked at letter by letter: of 4 MB, which a message may have, that is 0.3 s for the 200 that are kept.
    words = words.lstrip()[: 4 * longest]
    return "".join(character if character.isprintable() else " " for character in words).strip()[:longest]
