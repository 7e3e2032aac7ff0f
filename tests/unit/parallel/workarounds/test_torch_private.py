"""What torch's watchdog has noted is asked of every group."""

from types import SimpleNamespace

from torch._C._distributed_c10d import ErrorType
from torch.distributed import distributed_c10d as c10d

from raymega.parallel.workarounds.torch_private import nccl_errors


class _Group:
    def __init__(self, name, error):
        self.group_desc, self._error = name, error

    def _get_backend(self, _device):
        return SimpleNamespace(get_error=lambda: self._error)


def test_errors_of_all_groups_are_told_by_their_names(monkeypatch):
    groups = [
        _Group("default_pg", ErrorType.TIMEOUT),
        _Group("tp", ErrorType.SUCCESS),
        _Group("dp", ErrorType.COMM_ERROR),
    ]
    monkeypatch.setattr(c10d, "_world", SimpleNamespace(pg_map=dict.fromkeys(groups)))
    assert list(nccl_errors()) == [("world", "TIMEOUT"), ("dp", "COMM_ERROR")]
