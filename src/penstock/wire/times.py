"""Points in time on the wire: RFC 3339 with an offset, never without one."""

from datetime import datetime
from typing import Annotated

from msgspec import Meta

Time = Annotated[datetime, Meta(tz=True)]
