"""What the embedded Spark server logs: as Spark does by default, but no bearer token.

Spark's Nessie client puts the text of an error answer into its exceptions, and some gateways echo the
header that they did not like.
"""

from __future__ import annotations

from pathlib import Path

_CONFIGURATION = r"""# Written by branchlake at each start of the server.
rootLogger.level = info
rootLogger.appenderRef.stdout.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
# Otherwise each stack trace is added a second time, outside the replacement.
appender.console.layout.alwaysWriteExceptions = false
appender.console.layout.pattern = \
  %replace{%d{yy/MM/dd HH:mm:ss} %p %c{1}: %m%n%ex}{(?i)bearer(\\s|%20|\\+)+[^\\s'"),;]+}{Bearer ***}
"""


def configure(folder: Path) -> Path:
    """Write the log configuration into `folder`, and return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    found = folder / "log4j2.properties"
    found.write_text(_CONFIGURATION)
    return found
