"""Checks a bill of materials against the schema of CycloneDX."""

import pathlib
import sys

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

(path,) = map(pathlib.Path, sys.argv[1:])
error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(path.read_text())
if error:
    sys.exit(f"{path}: {error}")
