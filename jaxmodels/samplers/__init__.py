"""Samplers: functions of a model's predictions and a key that return samples, each one compiled program.

A sampler takes ``predict(x, t)`` and a shape. With a prepared transformer::

    def predict(model, context, x, t, modulations):
        return model(x, conditioning=Conditioning(context, modulations)).sample

    context = model.prepare_context(text)                                                # once
    each_step = jax.jit(jax.vmap(model.prepare_modulations))(schedule.timesteps(steps))  # for all steps at once
    ddim(Partial(predict, model, context), shape, key, schedule, steps=steps, extras=each_step)
"""

from jaxmodels.samplers.diffusion import NoiseSchedule, ddim, ddim_step, ddpm, ddpm_step
from jaxmodels.samplers.flow import FlowSchedule, euler_step, flow_euler, flow_heun
from jaxmodels.samplers.maskgit import MaskedTokens, MaskSchedule, maskgit, maskgit_step
from jaxmodels.samplers.real_time_chunking import (
    Example,
    begin_with,
    continuing,
    draw_delays,
    example,
    given,
    pull,
    soft_mask,
)
from jaxmodels.samplers.sampling import combine, guide

__all__ = [
    "Example",
    "FlowSchedule",
    "MaskSchedule",
    "MaskedTokens",
    "NoiseSchedule",
    "begin_with",
    "combine",
    "continuing",
    "ddim",
    "ddim_step",
    "ddpm",
    "ddpm_step",
    "draw_delays",
    "euler_step",
    "example",
    "flow_euler",
    "flow_heun",
    "given",
    "guide",
    "maskgit",
    "maskgit_step",
    "pull",
    "soft_mask",
]
