from hooks.secrets import is_valid_secret


def test_secrets_are_compared_whole() -> None:
    assert is_valid_secret("two", ["one", "two"])
    assert not is_valid_secret("tw", ["one", "two"])
    assert not is_valid_secret("", ["one"])
    assert not is_valid_secret("\udcff", ["one"])
