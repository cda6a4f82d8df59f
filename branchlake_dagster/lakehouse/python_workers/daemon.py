"""The former module of `embedded.worker_daemon`.

An embedded Spark server that was started before an upgrade of this package still starts its Python daemons by
this name. Without the module every Python function on that server would fail until `branchlake down`.
"""

from __future__ import annotations

import sys

from branchlake_dagster.embedded.worker_daemon import main

if __name__ == "__main__":
    sys.exit(main())
