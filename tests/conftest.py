"""What all tests share: no test depends on how fast the machine is.

A test over a long list of cases is a sweep: `make test` runs every n-th of them, by the mark
`sweep(n)`; with TRIPTYCH_WHOLE=1 (`make test-whole`, `make strict`) all run.
"""

import os
from collections import Counter

import pytest
from hypothesis import settings

settings.register_profile("triptych", deadline=None)
settings.load_profile("triptych")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("TRIPTYCH_WHOLE") == "1":
        return
    seen: Counter[str] = Counter()
    left = []
    for item in items:
        mark = item.get_closest_marker("sweep")
        if mark is not None:
            test = item.nodeid.partition("[")[0]
            if seen[test] % mark.args[0]:
                left.append(item)
            seen[test] += 1
    if left:
        config.hook.pytest_deselected(items=left)
        gone = set(left)
        items[:] = [item for item in items if item not in gone]
