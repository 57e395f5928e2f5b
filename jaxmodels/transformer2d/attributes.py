"""What callers of diffusers read off a model."""

from jaxmodels.transformer2d.config import Transformer2DConfig


class Attributes:
    """The public attributes of diffusers' `Transformer2DModel`, all of which the config says."""

    config: Transformer2DConfig

    @property
    def inner_dim(self) -> int:
        """Width of the tokens."""
        return self.config.inner_dim

    @property
    def in_channels(self) -> int | None:
        return self.config.in_channels

    @property
    def out_channels(self) -> int | None:
        return self.config.outputs

    @property
    def height(self) -> int | None:
        """Side of the square that positions were made for, in pixels."""
        return self.config.sample_size

    @property
    def width(self) -> int | None:
        return self.config.sample_size

    @property
    def num_latent_pixels(self) -> int | None:
        """Most latent pixels a discrete input may have."""
        return (self.config.sample_size or 0) ** 2 if self.config.kind == "discrete" else None

    @property
    def patch_size(self) -> int | None:
        return self.config.patch_size

    @property
    def num_vector_embeds(self) -> int | None:
        """Classes of a discrete input, the masked one (the last) included."""
        return self.config.num_vector_embeds

    @property
    def is_input_continuous(self) -> bool:
        return self.config.kind == "continuous"

    @property
    def is_input_vectorized(self) -> bool:
        return self.config.kind == "discrete"

    @property
    def is_input_patches(self) -> bool:
        return self.config.kind == "patches"
