"""How the paired-attention kernel cuts its operands, by TPU generation."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Upper limits of a kernel step's blocks; the kernel lowers them to what a case needs.

    Raises:
      ValueError: for a size that is no positive multiple of what the tiles demand.
    """

    rows: int = 256  # packed query rows (query heads of one key head x tokens)
    slots: int = 512  # cached keys
    tokens: int = 512  # fresh keys
    heads: int = 8  # key heads; a step takes the largest divisor of K up to this
    vmem_limit_bytes: int = 32 * 2**20  # scoped VMEM that the compiler may use

    def __post_init__(self):
        multiples = {"rows": 32, "slots": 128, "tokens": 128, "heads": 1}
        for name, multiple in multiples.items():
            value = getattr(self, name)
            if value < 1 or value % multiple:
                raise ValueError(
                    f"{name}={value} must be a positive multiple of {multiple}."
                )

    @classmethod
    def for_device(cls, device_kind: str) -> "BlockSizes":
        """Defaults for a `device_kind` such as "TPU v5 lite".

        A step's block of K or V should be about 1 MiB: small enough that the first fetch
        of a row, which nothing hides, is short; big enough that the step's fixed cost
        hides behind the next fetch. Only v4, with 16 MiB of VMEM, needs smaller ones.
        """
        if device_kind == "TPU v4":
            return cls(rows=128, slots=256, tokens=256, vmem_limit_bytes=14 * 2**20)
        return cls()
