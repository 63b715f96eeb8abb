"""Reports for those who do not ask: the log at INFO (TORCH_LOGS=ltx_inductor), and the file LTX_INDUCTOR_REPORT names.

The file gets one line of JSON per report, as `RewriteReport.to_dict` gives it, with "pid" added: JSON Lines. Any number
of processes may write to it: each opens it for appending and writes a whole line at once, which POSIX systems put at
the end of a local file without mixing it with another's.
"""

from __future__ import annotations

import json
import logging
import os

from ltx_inductor.rewrite.report import RewriteReport

log = logging.getLogger("ltx_inductor")


def publish(report: RewriteReport) -> None:
    """Never raises: a file that cannot be written is a warning in the log."""
    log.info("%s", report)
    path = os.environ.get("LTX_INDUCTOR_REPORT")
    if not path:
        return
    line = json.dumps({"pid": os.getpid(), **report.to_dict()}) + "\n"
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)
    except OSError as error:
        log.warning("LTX_INDUCTOR_REPORT=%s: the report could not be written: %s", path, error.strerror)
