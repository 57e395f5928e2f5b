"""Towers of vision-language models: images and words to tokens, and layers over both."""
