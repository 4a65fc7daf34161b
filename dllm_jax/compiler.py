"""Options of the TPU compiler that a forward pass of few tokens needs."""

# 128 MiB of VMEM a core; the others have too little to give half of it away.
_LARGE_VMEM = ("TPU v5 lite", "TPU v6 lite")


def compiler_options(device_kind: str) -> dict[str, str]:
    """Options for `Lowered.compile` on a `device_kind` such as "TPU v5 lite".

    With so few tokens a matrix product is one stream of its weights, and XLA cuts the
    stream into larger windows if it may use more VMEM than its default.
    """
    if device_kind in _LARGE_VMEM:
        return {"xla_tpu_scoped_vmem_limit_kib": str(64 * 1024)}
    return {}
