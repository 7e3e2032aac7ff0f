"""TensorWatch: what tensors operators had while it was on, backward's and collectives' too. CPU only."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorWatch(TorchDispatchMode):
    """Dispatch mode that records column counts of non-flat tensors, the largest storage, and operator namespaces.

    ``elements`` is the largest number of elements of a storage, ``columns`` the sizes of the last dim, and
    ``owners`` the operators' namespaces, such as ``c10d``.
    """

    def __init__(self):
        super().__init__()
        self.elements, self.columns, self.owners = 0, set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        self.owners.add(func.namespace)
        # inputs too: a tensor may be made outside of dispatch
        for leaf in tree_leaves((args, kwargs, results)):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.itemsize)
                self.columns |= set(leaf.shape[-1:]) if leaf.dim() > 1 else set()
        return results
