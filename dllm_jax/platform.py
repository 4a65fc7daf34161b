"""For which devices a program is, and whether it may hold kernels."""

import jax


def target() -> tuple[str, str]:
    """Platform and kind of the devices that the program is for.

    A mesh that is set decides, so that programs for a TPU can be compiled without one.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return device.platform, device.device_kind
    return jax.default_backend(), jax.devices()[0].device_kind


def refuse_kernels() -> None:
    """Raises NotImplementedError, with the reason, where Pallas TPU kernels cannot be."""
    platform, _ = target()
    if platform != "tpu":
        raise NotImplementedError(f"the Pallas kernel does not run on {platform}")
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size > 1 and mesh.manual_axes != mesh.axis_names:
        raise NotImplementedError("XLA cannot divide a kernel: use it inside shard_map")
