import re

import pytest

from maxmars.host_log import HostLog


def test_lines_have_the_time_and_errors_are_written(tmp_path):
    with HostLog(tmp_path, 3) as log:
        log.write("step 1")
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d step 1\n", log.path.read_text())
    with pytest.raises(ValueError, match="no data"), HostLog(tmp_path, 3):
        raise ValueError("no data")
    text = (tmp_path / "logs" / "host_003.log").read_text()
    assert text.count("step 1") == 1  # of the run before
    assert "Traceback" in text
    assert text.endswith("ValueError: no data\n")
