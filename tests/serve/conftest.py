"""One server for the tests that do not kill it."""

import pytest

from helpers.servers import serving


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("serve"), "--gap-seconds", "30", "--poll-seconds", "5") as server:
        yield server
