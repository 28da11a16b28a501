"""Import this before nbformat, which then takes a tenth of its three seconds.

jsonschema, which it imports, builds a grammar with an optional package in every process, for a
check that notebooks do not need. pytest takes this module as a plugin, which it imports first.
"""

import sys

sys.modules.setdefault("rfc3987_syntax", None)
