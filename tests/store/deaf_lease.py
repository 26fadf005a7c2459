from __future__ import annotations


class DeafLease:
    """A lease whose holder never learns that it was lost: the worst case that HEAD must withstand."""

    def __init__(self, generation: int) -> None:
        self.generation = generation

    def check(self) -> None:
        return

    def recover(self) -> None:
        return

    def release(self) -> None:
        return
